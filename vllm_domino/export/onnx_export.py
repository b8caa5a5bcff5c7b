"""Write the context graph and the block graphs, and check them: one call, all or nothing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_ir as ir
import torch
from safetensors.torch import save_file
from torch import nn

import vllm_domino
from vllm_domino.config.checkpoint import DraftCheckpoint
from vllm_domino.config.draft import DraftConfig
from vllm_domino.config.recipes import SHORT_DTYPES, ExportRecipe
from vllm_domino.config.vocabulary import read_recipe_checkpoint
from vllm_domino.export.contract import GraphSpec, block_graph, context_graph
from vllm_domino.export.graphs import BlockGraph, ContextGraph, ExportDrafter, GraphForm, graph_form
from vllm_domino.export.report import EXPORT_FILE, VOCAB_FILE, ExportReport, FileEntry, GraphEntry, HeadEntry
from vllm_domino.export.tracing import OPSET, check_contract, trace
from vllm_domino.export.verify import verify_graphs
from vllm_domino.files import require_space, sha256_file, staged_directory
from vllm_domino.model.drafter import Drafter, HeadOptions

Progress = Callable[[str], None]


def run_export_recipe(
    recipe: ExportRecipe, out_dir: Path | None = None, progress: Progress | None = None
) -> ExportReport:
    """Read the recipe's checkpoint and export it to `out_dir` (default `export/built/BUILD_NAME`).

    Raises:
        ValueError: as `read_recipe_checkpoint` and `export_graphs`.
    """
    say = progress or (lambda _: None)
    say(f"reading {recipe.checkpoint}")
    folder = out_dir or Path("export/built") / recipe.build_name
    return export_as(recipe, read_recipe_checkpoint(recipe), folder, progress)


def export_as(
    recipe: ExportRecipe, checkpoint: DraftCheckpoint, folder: Path, progress: Progress | None = None
) -> ExportReport:
    """`export_graphs` with the recipe's settings, for who has read its checkpoint already."""
    return export_graphs(
        checkpoint,
        head_options(recipe),
        recipe.torch_dtype,
        folder,
        short_blocks=recipe.short_blocks,
        verify_context=recipe.verify_context,
        progress=progress,
    )


def head_options(recipe: ExportRecipe) -> HeadOptions:
    """The recipe's, where 0 stands for everything."""
    return HeadOptions(
        candidate_pool=recipe.candidate_pool or None,
        scores=recipe.scores,
        draft_tokens=recipe.draft_tokens or None,
    )


def export_graphs(
    checkpoint: DraftCheckpoint,
    options: HeadOptions,
    dtype: torch.dtype,
    out_dir: Path,
    *,
    short_blocks: tuple[int, ...] = (),
    verify_context: int = 2048,
    verify: bool = True,
    progress: Progress | None = None,
) -> ExportReport:
    """Write `context.onnx`, `block.onnx`, their weights and `export.json`, replacing `out_dir` as a whole.

    The same checkpoint, options, dtype and versions give the same bytes of the graphs and weights.

    Args:
        dtype: float32, float16 or bfloat16; it also decides the form of the graphs (see `graphs`).
        short_blocks: block sizes that get a graph of their own, `block-SIZE.onnx`, beside the whole block's.
        verify_context: longest context that is checked.
        verify: leave out the check only where another one follows.
        progress: called with one line per stage.

    Raises:
        ValueError: the checkpoint does not load, the disk is full, another process is writing `out_dir`, or
            a graph's drafts differ from PyTorch's.
    """
    say, start = progress or (lambda _: None), time.monotonic()
    drafter = Drafter.from_checkpoint(checkpoint, options, dtype).eval()
    form = graph_form(dtype)
    shorter = [_shortened(checkpoint, options, size) for size in short_blocks]
    specs = context_graph(checkpoint.config), block_graph(checkpoint.config, options)
    weight_bytes = sum(p.numel() * p.element_size() for p in drafter.parameters())
    require_space(out_dir.parent, int(weight_bytes * 1.1))
    with staged_directory(out_dir) as stage:
        modules: tuple[nn.Module, nn.Module] = ContextGraph(drafter), BlockGraph(ExportDrafter(drafter, form))
        for spec, module in zip(specs, modules, strict=True):
            say(f"tracing the {spec.name} graph ({SHORT_DTYPES[_name(dtype)]}, {form})")
            model = trace(module, spec, dtype)
            check_contract(model, spec, dtype, limit=int(weight_bytes * 1.02) + (1 << 16))
            say(f"writing {spec.name}.onnx")
            ir.save(
                model,
                stage / f"{spec.name}.onnx",
                external_data=f"{spec.name}.onnx.data",
                size_threshold_bytes=1024,
            )
            del model
        del modules, module
        short_specs = tuple(_write_short_block(*short, dtype, form, stage, say) for short in shorter)
        checkpoint.page_out()
        del drafter
        verification = None
        if verify:
            check = partial(
                verify_graphs, dtype=dtype, folder=stage, verify_context=verify_context, progress=say
            )
            verification = check(checkpoint, options)
            for short in shorter:
                check(*short, block=_short_name(short[0].config))
        _write_vocabulary(checkpoint, stage)
        say("computing digests")
        report = ExportReport(
            source=Path(checkpoint.source).name if Path(checkpoint.source).is_dir() else checkpoint.source,
            revision=checkpoint.revision,
            fingerprint=checkpoint.fingerprint,
            draft=checkpoint.config.to_dict(),
            head=HeadEntry.of(options, checkpoint),
            dtype=_name(dtype),  # type: ignore[arg-type]
            form=form,
            opset=OPSET,
            weight_bytes=weight_bytes,
            graphs={
                spec.name: GraphEntry.of(spec, f"{spec.name}.onnx", _name(dtype))
                for spec in (*specs, *short_specs)
            },
            files={path.name: FileEntry.of(path) for path in sorted(stage.iterdir())},
            verification=verification,
            versions=tool_versions("torch", "onnx", "onnxscript", "onnx-ir"),
            seconds=round(time.monotonic() - start, 1),
        )
        (stage / EXPORT_FILE).write_text(report.model_dump_json(indent=2) + "\n")
    say(f"wrote {out_dir} in {report.seconds:.0f} s")
    return report


def _short_name(config: DraftConfig) -> str:
    return f"block-{config.block_size}"


def _shortened(
    checkpoint: DraftCheckpoint, options: HeadOptions, size: int
) -> tuple[DraftCheckpoint, HeadOptions]:
    """The same drafter on blocks of `size` tokens.

    Raises:
        ValueError: it gives no fewer draft tokens than the whole block, or is too short for the pure prefix.
    """
    whole, drafts = checkpoint.config, options.drafts_of(checkpoint.config)
    config = dataclasses.replace(whole, block_size=size)
    if size >= whole.block_size or config.num_draft_tokens >= drafts:
        raise ValueError(
            f"short_blocks contains {size}, which gives {config.num_draft_tokens} draft tokens, and the whole block of "
            f"{whole.block_size} gives {drafts} here; leave {size} out"
        )
    return dataclasses.replace(checkpoint, config=config), dataclasses.replace(options, draft_tokens=None)


def _write_short_block(
    checkpoint: DraftCheckpoint,
    options: HeadOptions,
    dtype: torch.dtype,
    form: GraphForm,
    stage: Path,
    say: Progress,
) -> GraphSpec:
    """Write `block-SIZE.onnx`, which reads its weights from `block.onnx.data`.

    A block of one draft token has no use for the GRU's recurrent weights: it gets a weight file of its own.
    """
    name, drafter = _short_name(checkpoint.config), Drafter.from_checkpoint(checkpoint, options, dtype).eval()
    spec = dataclasses.replace(block_graph(drafter.config, drafter.options), name=name)
    say(f"tracing the {name} graph ({SHORT_DTYPES[_name(dtype)]}, {form})")
    model = trace(BlockGraph(ExportDrafter(drafter, form)), spec, dtype)
    shared = "block.onnx.data"
    with TemporaryDirectory(dir=stage) as apart:
        ir.save(model, Path(apart, f"{name}.onnx"), external_data=shared, size_threshold_bytes=1024)
        if sha256_file(Path(apart, shared)) == sha256_file(stage / shared):
            Path(apart, f"{name}.onnx").replace(stage / f"{name}.onnx")
            return spec
    ir.save(model, stage / f"{name}.onnx", external_data=f"{name}.onnx.data", size_threshold_bytes=1024)
    return spec


def _write_vocabulary(checkpoint: DraftCheckpoint, stage: Path) -> None:
    """What a session needs to bind a target to a reduced draft vocabulary."""
    if checkpoint.vocab_ids is None:
        return
    tensors = {"vocab_ids": checkpoint.vocab_ids}
    if checkpoint.lm_head is not None:
        tensors["lm_head"] = checkpoint.lm_head.contiguous()
    save_file(tensors, stage / VOCAB_FILE)


def tool_versions(*packages: str) -> dict[str, str]:
    """Versions of this package and of `packages`, for records."""
    return {"vllm-domino": vllm_domino.__version__} | {name: version(name) for name in packages}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
