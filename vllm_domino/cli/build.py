"""`vllm-domino build`: engine directories for one or many kinds of device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def build(
    recipe: Annotated[Path, typer.Argument(help="Export recipe, for example export/qwen3-8b.toml.")],
    engines: Annotated[
        list[Path], typer.Argument(help="Engine recipes, for example engines/l40s.toml engines/h100.toml.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Engine directory to write (one recipe only); default engines/built/NAME."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per engine: folder, manifest or error.")
    ] = False,
) -> None:
    """Build engine directories for one or more kinds of device.

    Exports first unless the same graphs are there already. An engine that cannot be built is reported and the others go
    on; the exit code is 1 then. An interrupted build leaves nothing behind.
    """
    from vllm_domino.cli.console import out, print_error, print_json, step
    from vllm_domino.config.recipes import load_engine_recipe, load_export_recipe
    from vllm_domino.engine.build import build_engine, default_engine_dir

    if output is not None and len(engines) > 1:
        raise ValueError(
            f"--output names one engine directory, {len(engines)} engine recipes were given; leave --output out, or "
            "build one recipe at a time"
        )
    source = load_export_recipe(recipe)
    devices = [
        load_engine_recipe(path) for path in engines
    ]  # a typo in the last one shows before the first is built
    failed = []
    for device in devices:
        folder = output or default_engine_dir(source, device)
        try:
            with step(f"Building {folder}") as progress:
                manifest = build_engine(source, device, folder, progress=progress.say)
        except ValueError as error:
            failed.append(device.name)
            print_error(str(error))
            if as_json:
                print_json({"folder": str(folder), "error": str(error)})
            continue
        if as_json:
            print_json({"folder": str(folder), **manifest.model_dump(mode="json")})
        else:
            out.print(
                f"{folder}: {manifest.backend} {manifest.backend_version}, {manifest.dtype}, "
                f"{manifest.build_seconds:.0f} s"
            )
            out.print(_serve_line(source.target, folder, manifest.config.num_draft_tokens))
    if failed:
        if len(devices) > 1:
            print_error(f"{len(failed)} of {len(devices)} engines were not built: {', '.join(failed)}")
        raise typer.Exit(1)


def _serve_line(target: str | None, folder: Path, drafts: int) -> str:
    """What to type next."""
    config = f'{{"method":"dflash","model":"{folder}","num_speculative_tokens":{drafts}}}'
    return f"next: vllm serve {target or 'TARGET'} --speculative-config '{config}'"
