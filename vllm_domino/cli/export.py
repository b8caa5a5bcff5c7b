"""`vllm-domino export`: a draft checkpoint becomes two ONNX graphs, checked against PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    recipe: Annotated[Path, typer.Argument(help="Export recipe, for example export/qwen3-8b.toml.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; default export/built/NAME.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the export record as one line of JSON.")
    ] = False,
) -> None:
    """Export a draft checkpoint to ONNX and check it against PyTorch.

    Writes context.onnx, block.onnx, their weights and export.json, all or nothing: a failed or interrupted export
    leaves no file behind. The same checkpoint gives the same bytes.
    """
    from vllm_domino.cli.console import human_bytes, out, print_json, step
    from vllm_domino.config.recipes import load_export_recipe
    from vllm_domino.export.onnx_export import run_export_recipe

    loaded = load_export_recipe(recipe)
    folder = output or Path("export/built") / loaded.build_name
    with step(f"Exporting {loaded.name} to {folder}") as progress:
        report = run_export_recipe(loaded, folder, progress.say)
    if as_json:
        print_json({"folder": str(folder), **report.model_dump(mode="json")})
        return
    size = sum(entry.num_bytes for entry in report.files.values())
    out.print(
        f"{folder}: {human_bytes(size)} in {len(report.files)} files, {report.dtype}, opset {report.opset}"
    )
    if report.verification:
        seen = report.verification
        out.print(
            f"checked against PyTorch: {seen.equal} of {seen.drafts} drafts equal, {seen.ties} ties; batches "
            f"{list(seen.batch_sizes)}, contexts {list(seen.context_lengths)}"
        )
    out.print(f"next: vllm-domino build {recipe} engines/DEVICE.toml")
