"""`vllm-domino inspect`: what an engine directory holds and fits, without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_domino.engine.manifest import EngineManifest, TargetFacts
    from vllm_domino.export.report import TensorEntry


def inspect(
    folder: Annotated[Path, typer.Argument(help="Engine directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as one line of JSON.")] = False,
) -> None:
    """Show an engine directory: source, device, inputs and outputs, profiles, sizes, versions."""
    from vllm_domino.cli.console import print_json
    from vllm_domino.engine.manifest import read_manifest

    manifest = read_manifest(folder)
    if as_json:
        print_json({"folder": str(folder), **manifest.model_dump(mode="json")})
        return
    _show(folder, manifest)


def _show(folder: Path, manifest: EngineManifest) -> None:
    from rich.table import Table

    from vllm_domino.cli.console import human_bytes, out

    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(folder, manifest):
        facts.add_row(f"[bold]{name}[/bold]", value)
    out.print(facts)
    for name, graph in manifest.graphs.items():
        table = Table(
            "tensor",
            "direction",
            "shape",
            "dtype",
            title=f"{name} graph ({graph.file})",
            title_justify="left",
        )
        for direction, tensors in (("in", graph.inputs), ("out", graph.outputs)):
            for tensor in tensors:
                table.add_row(tensor.name, direction, _shape(tensor), tensor.dtype)
        out.print(table)
        for number, profile in enumerate(manifest.profiles.get(name, ())):
            sizes = ", ".join(
                f"{tensor} {' … '.join(map(str, shapes))}" for tensor, shapes in profile.items()
            )
            out.print(f"  profile {number}: {sizes}", markup=False)
    files = Table("file", "size", "SHA-256", title="files", title_justify="left")
    for name, entry in manifest.files.items():
        files.add_row(name, human_bytes(entry.num_bytes), entry.sha256[:16] + "…")
    out.print(files)


def _facts(folder: Path, manifest: EngineManifest) -> list[tuple[str, str]]:
    from vllm_domino.cli.console import human_bytes

    config, target = manifest.config, manifest.target
    device = f"compute capability {manifest.compute_capability}" if manifest.compute_capability else "any CPU"
    buckets = "any" if not manifest.batch_buckets else f"{list(manifest.batch_buckets)}"
    contexts = "any" if not manifest.context_buckets else f"{list(manifest.context_buckets)}"
    head = (
        "none (DFlash)"
        if not config.has_head
        else f"Domino, rank {config.emb_dim}, GRU {config.gru_hidden_dim}"
    )
    if manifest.head.candidate_pool:
        head += f", candidate pool {manifest.head.candidate_pool}"
    if manifest.head.draft_vocab_size:
        chosen = manifest.head.token_frequencies
        head += f", draft vocabulary {manifest.head.draft_vocab_size} of {config.vocab_size} tokens"
        head += f" (token frequencies {chosen[:16]}…)" if chosen else ""
    return [
        ("engine", f"{folder} (manifest {manifest.schema_version})"),
        ("drafter", f"{manifest.source} {manifest.revision or ''} ({manifest.fingerprint[:16]}…)"),
        ("target", " ".join(_target(target))),
        ("runs on", f"{device}, {manifest.backend} {manifest.backend_version}, {manifest.dtype}"),
        ("drafts", f"{config.num_draft_tokens} tokens a step at most (block {manifest.block_size})"),
        ("head", head),
        ("batches", buckets),
        ("context", f"{contexts}, window {manifest.draft_window}"),
        ("weights", human_bytes(manifest.weight_bytes)),
        ("built", f"{manifest.built_at} by {manifest.built_by} in {manifest.build_seconds:.0f} s"),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("build again", manifest.build_command),
    ]


def _target(target: TargetFacts) -> tuple[str, ...]:
    return (
        f"{target.source or 'not named'}:",
        f"hidden {target.hidden_size}, vocabulary {target.vocab_size}, layers {target.num_layers or 'not known'},",
        f"features of layers {list(target.layer_ids)}",
    )


def _shape(tensor: TensorEntry) -> str:
    return "[" + ", ".join(str(size) for size in tensor.shape) + "]"
