"""What must hold before a drafter serves: its directory is whole, and it fits target, options and device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_domino.config.checkpoint import read_config
from vllm_domino.config.draft import DraftConfig
from vllm_domino.engine.manifest import (
    DEFAULT_WINDOW,
    EngineManifest,
    build_command,
    is_engine_dir,
    read_manifest,
)
from vllm_domino.engine.target import tokenizer_hash
from vllm_domino.export.report import check_files
from vllm_domino.model.drafter import HeadOptions

__all__ = ["PlainCheckpoint", "ServingFacts", "check_fit", "load_engine_dir", "tokenizer_hash"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingFacts:
    """The target and the way it is served, without any vLLM type.

    dtype: of the target's embedding and LM head, "bfloat16".
    tokenizer_hash: see `vocabulary_hash`; None where not known, then not compared.
    capability: of the GPU, (8, 9); None on a CPU.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    dtype: str
    tokenizer_hash: str | None
    num_speculative_tokens: int
    max_model_len: int
    capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PlainCheckpoint:
    """A draft checkpoint served as it is, by PyTorch; the part of a manifest that serving asks for."""

    config: DraftConfig
    draft_window: int = DEFAULT_WINDOW
    backend: str = "pytorch"


def load_engine_dir(folder: Path) -> EngineManifest:
    """Read an engine directory and compare every file with its digest.

    Raises:
        ValueError: missing, empty or truncated directory, a changed byte, a manifest of another version;
            each names what was found, what is needed, and the command that mends it.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest.files, manifest.build_command)
    return manifest


def check_fit(
    drafter: Path | EngineManifest | PlainCheckpoint, facts: ServingFacts
) -> EngineManifest | PlainCheckpoint:
    """Compare a drafter with how it is about to be served, before memory is profiled.

    Args:
        drafter: an engine directory or a plain draft checkpoint (a folder), or either already read.

    Returns:
        What was read. Digests are not compared here (`load_engine_dir` and opening a session do).

    Raises:
        ValueError: the first thing that does not fit.
    """
    found = _read(drafter) if isinstance(drafter, Path) else drafter
    problem = misfit(found, facts, where=str(drafter) if isinstance(drafter, Path) else None)
    if problem is not None:
        raise ValueError(problem + (_alternatives(drafter, facts) if isinstance(drafter, Path) else ""))
    return found


def misfit(
    found: EngineManifest | PlainCheckpoint, facts: ServingFacts, where: str | None = None
) -> str | None:
    """The first thing that does not fit, in a user's words; None when everything does."""
    name = where or (found.name if isinstance(found, EngineManifest) else "drafter")
    try:
        _check_target(name, found, facts)
        _check_serving(name, found, facts)
        if isinstance(found, EngineManifest):
            _check_device(name, found, facts)
    except ValueError as error:
        return str(error)
    return None


def _read(folder: Path) -> EngineManifest | PlainCheckpoint:
    if is_engine_dir(folder) or not (folder / "config.json").is_file():
        return read_manifest(folder)
    if any(folder.glob("*.onnx")) or any(folder.glob("*.plan")):
        return read_manifest(folder)  # an engine that lost its manifest: says so
    return PlainCheckpoint(read_config(folder)[0])


def _check_target(where: str, found: EngineManifest | PlainCheckpoint, facts: ServingFacts) -> None:
    config = found.config
    target = found.target if isinstance(found, EngineManifest) else None
    name = f" ({target.source})" if target is not None and target.source else ""
    other = "serve that target, or a drafter that was trained for this one"
    for label, needs, has in (
        ("hidden size", config.target_hidden_size or config.hidden_size, facts.hidden_size),
        ("vocabulary", config.vocab_size, facts.vocab_size),
        (
            "number of layers",
            (target.num_layers if target else None) or config.num_target_layers,
            facts.num_layers,
        ),
    ):
        if needs is not None and needs != has:
            raise ValueError(
                f"{where}: the target's {label} is {has}, this drafter is for {needs}{name}; {other}"
            )
    if max(config.target_layer_ids) >= facts.num_layers - 1:
        # the last layer's output is not to be had alike everywhere, see DraftConfig
        raise ValueError(
            f"{where}: target_layer_ids {list(config.target_layer_ids)} are out of range, the target has "
            f"{facts.num_layers} layers, so at most {facts.num_layers - 2}; {other}"
        )
    known = target.tokenizer_sha256 if target is not None else None
    if known and facts.tokenizer_hash and known != facts.tokenizer_hash:
        raise ValueError(
            f"{where}: the target's tokenizer is {facts.tokenizer_hash[:12]}…, this drafter is for "
            f"{known[:12]}…{name} (hash of the vocabulary); {other}"
        )


def _check_serving(where: str, found: EngineManifest | PlainCheckpoint, facts: ServingFacts) -> None:
    head = found.head.options() if isinstance(found, EngineManifest) else HeadOptions()
    most = head.drafts_of(found.config)
    if not 1 <= facts.num_speculative_tokens <= most:
        raise ValueError(
            f"{where}: num_speculative_tokens is {facts.num_speculative_tokens}, this drafter drafts 1 to "
            f"{most} tokens "
            f'(block size {found.config.block_size}); set "num_speculative_tokens": {most} or less in '
            f"--speculative-config"
        )


def _check_device(where: str, manifest: EngineManifest, facts: ServingFacts) -> None:
    if manifest.backend == "onnxruntime":
        _check_onnxruntime_device(where, manifest, facts)
        return
    if manifest.dtype != facts.dtype:
        raise ValueError(
            f"{where}: built for {manifest.dtype}, the target is {facts.dtype}, and its embedding and LM "
            f"head are "
            f"read in place; serve with --dtype {manifest.dtype}, or set dtype in the engine recipe and run "
            f"`{manifest.build_command}`"
        )
    reach = min(manifest.draft_window, facts.max_model_len)
    if manifest.context_buckets[-1] < reach:
        raise ValueError(
            f"{where}: the longest context bucket is {manifest.context_buckets[-1]}, a draft step reads up "
            f"to "
            f"{reach} tokens (draft window, --max-model-len); add that bucket to "
            f"engines/{manifest.engine_recipe}.toml and run `{manifest.build_command}`"
        )
    from vllm_domino.engine.tensorrt_check import check_tensorrt

    check_tensorrt(where, manifest)


def _check_onnxruntime_device(where: str, manifest: EngineManifest, facts: ServingFacts) -> None:
    """An engine with a GPU provider serves on a GPU, one with the CPU provider alone on a CPU."""
    for_gpu = _has_gpu_provider(manifest)
    on_gpu = facts.capability is not None
    if for_gpu != on_gpu:
        here = (
            f"a GPU of compute capability {'.'.join(map(str, facts.capability))}"
            if facts.capability
            else "a CPU"
        )
        recipe = "engines/cpu.toml" if not on_gpu else "the recipe of this GPU"
        raise ValueError(
            f"{where}: built for {'a GPU' if for_gpu else 'CPUs'} "
            f"({', '.join(manifest.providers) or 'CPU'}), this "
            f"device is {here}; build one for it with `{build_command(manifest.export_recipe)}` ({recipe})"
        )


def _has_gpu_provider(manifest: EngineManifest) -> bool:
    return any(not provider.startswith("CPU") for provider in manifest.providers)


def _alternatives(drafter: Path, facts: ServingFacts) -> str:
    """The engines beside a refused one that would fit, for the end of the message."""
    from vllm_domino.engine.catalog import find_engines

    names = [
        str(e.folder)
        for e in find_engines(drafter.parent)
        if e.folder != drafter and e.problem(facts) is None
    ]
    return f"; engines here that fit: {', '.join(names)}" if names else ""
