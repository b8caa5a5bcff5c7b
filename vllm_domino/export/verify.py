"""The check that ends every export: the written files on ONNX Runtime against PyTorch, draft by draft.

Both sides compute in fp32 whatever the graphs' dtype is, from the same stored weights: ONNX Runtime's CPU
kernels know no bf16, and in fp32 a wrong graph cannot hide behind rounding. Low-precision graphs are run
through a copy whose weights are cast up where they are read.

Memory of a full-size check is that of the weights once, as stored, plus the target's tables in fp32: PyTorch's drafts
come first, then its weights are let go (they are read again should a draft differ), then the graphs run, and on both
sides a weight is raised to fp32 just before it is used and given back after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import Tensor
from torch.nn import functional as fn
from torch.overrides import TorchFunctionMode

from vllm_domino.config.checkpoint import DraftCheckpoint
from vllm_domino.config.draft import DraftConfig
from vllm_domino.export.contract import GraphSpec, block_graph, context_graph
from vllm_domino.export.report import Verification
from vllm_domino.model.drafter import Drafter, HeadOptions

TABLE_STD = 0.1  # small beside the layers' outputs, so that drafts depend on the context
LARGE = 400_000_000  # bytes of weights above which fewer and larger cases are run: raising the weights costs per case
CONTEXT_TOLERANCE = 1e-4
TIE_TOLERANCE = 1e-4  # of the spread of the logits; fp32 rounding of two orders of summation stays below
_LOW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

Case = tuple[Tensor, Tensor, Tensor, Tensor]  # anchors, positions, context K/V, lengths


@dataclass(frozen=True, slots=True)
class TargetTables:
    """Stand-ins for the target's embedding [V, H] and LM head [V_head, H]."""

    embedding: Tensor
    lm_head: Tensor
    buffer: Tensor  # of both

    @classmethod
    def random(cls, config: DraftConfig, generator: torch.Generator, dtype: torch.dtype) -> TargetTables:
        size = config.vocab_size * config.hidden_size + config.hidden_size // 2
        return cls._of(torch.empty(size, dtype=dtype).normal_(std=TABLE_STD, generator=generator), config)

    @classmethod
    def _of(cls, buffer: Tensor, config: DraftConfig) -> TargetTables:
        # one buffer for both saves gigabytes at real sizes; the shift by half a row makes a token's two rows
        # unrelated
        rows, size = config.vocab_size, config.hidden_size
        embedding, lm_head = buffer[: rows * size].view(rows, size), buffer[size // 2 :].view(rows, size)
        return cls(embedding, lm_head[: config.head_vocab_size], buffer)

    def to(self, dtype: torch.dtype, config: DraftConfig) -> TargetTables:
        return self if dtype == self.buffer.dtype else self._of(self.buffer.to(dtype), config)


def verify_graphs(
    checkpoint: DraftCheckpoint,
    options: HeadOptions,
    dtype: torch.dtype,
    folder: Path,
    *,
    verify_context: int,
    progress: Callable[[str], None],
    seed: int = 0,
    block: str = "block",
) -> Verification:
    """Run `folder`'s context graph and the graph named `block` beside the checkpoint in PyTorch (in the graphs' dtype).

    Raises:
        ValueError: a draft id differs by more than rounding, or a context row is off.
    """
    config, spec = checkpoint.config, block_graph(checkpoint.config, options)
    drafter = Drafter.from_checkpoint(checkpoint, options, dtype).eval()
    large = sum(p.numel() * p.element_size() for p in drafter.parameters()) > LARGE
    batches, contexts = ((1, 4), (0, verify_context)) if large else ((1, 3, 8), (0, 1, 17, verify_context))
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        progress("checking the context graph")
        error = _check_context(drafter, folder, generator)
        progress(f"drafting in PyTorch (batch {batches}, context {contexts})")
        cases = list(_cases(config, batches, contexts, generator))
        tables, references, agreeing = _references(checkpoint, drafter, cases, generator)
        del drafter
        checkpoint.page_out()
        progress(f"checking the {block} graph")
        graph = CpuGraph(folder / f"{block}.onnx", spec)
        found = [graph.run(*case, tables.embedding, tables.lm_head)[0] for case in cases]
        del graph
        ties = 0
        if not all(map(torch.equal, found, references)):
            reference = Drafter.from_checkpoint(checkpoint, options, dtype).eval()
            with FullPrecision():
                for case, expected, drafts in zip(cases, references, found, strict=True):
                    ties += _ties(reference, case, expected, drafts, tables)
    return Verification(
        batch_sizes=batches,
        context_lengths=contexts,
        drafts=sum(expected.numel() for expected in references),
        equal=sum(int((a == b).sum()) for a, b in zip(found, references, strict=True)),
        ties=ties,
        context_max_error=error,
        dtype_agreement=round(agreeing / sum(expected.numel() for expected in references), 4),
    )


def _references(
    checkpoint: DraftCheckpoint, drafter: Drafter, cases: list[Case], generator: torch.Generator
) -> tuple[TargetTables, list[Tensor], int]:
    """fp32 tables, PyTorch's drafts of every case in fp32 arithmetic, and how many of them its own dtype keeps."""
    dtype = next(drafter.parameters()).dtype
    tables = TargetTables.random(drafter.config, generator, dtype)
    own = [
        drafter.draft(*case[:2], case[2].to(dtype), case[3], tables.embedding, tables.lm_head)[0]
        for case in cases
    ]
    checkpoint.page_out()  # the tables are here twice for a moment
    tables = tables.to(torch.float32, drafter.config)
    if dtype == torch.float32:
        return tables, own, sum(drafts.numel() for drafts in own)
    with FullPrecision():
        references = [drafter.draft(*case, tables.embedding, tables.lm_head)[0] for case in cases]
    return tables, references, sum(int((a == b).sum()) for a, b in zip(own, references, strict=True))


class FullPrecision(TorchFunctionMode):
    """Arithmetic in fp32 over low-precision weights.

    A weight is raised where it meets an fp32 tensor, so a large drafter never lies in memory a second time.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if any(t.dtype == torch.float32 for t in tensors):
            args = tuple(_raised(a) for a in args)
            kwargs = {name: _raised(a) for name, a in kwargs.items()}
        return func(*args, **kwargs)


def _raised(value: Any) -> Any:
    is_low = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_low else value


class CpuGraph:
    """A graph file on ONNX Runtime's CPU provider, low-precision weights cast up to fp32."""

    def __init__(self, path: Path, spec: GraphSpec, threads: int | None = None):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        options.enable_cpu_mem_arena = False  # raised weights are given back after use
        self.spec = spec
        raised = path.with_name(f"{path.stem}.fp32-check.onnx")
        is_low = _cast_up(path, raised)
        if is_low:
            # in the order of the file, so that a weight is raised right before its use: ONNX Runtime's own order raises
            # all of them first, and so does this one once fused operators stand at the end of the list
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            self.session = ort.InferenceSession(
                raised if is_low else path, options, providers=["CPUExecutionProvider"]
            )
        finally:
            raised.unlink(missing_ok=True)

    def run(self, *inputs: Tensor) -> list[Tensor]:
        feeds = {spec.name: tensor.numpy() for spec, tensor in zip(self.spec.inputs, inputs, strict=True)}
        return [torch.from_numpy(np.asarray(out)) for out in self.session.run(None, feeds)]


def _cases(
    config: DraftConfig, batches: tuple[int, ...], contexts: tuple[int, ...], generator: torch.Generator
) -> Iterator[Case]:
    """Anchors, positions, context K/V and lengths: full, partly filled and empty contexts, near and far."""
    for batch in batches:
        for context in contexts:
            anchors = torch.randint(config.vocab_size, (batch,), generator=generator)
            lengths = torch.randint(context + 1, (batch,), generator=generator)
            lengths[0] = context
            far = max(1, config.max_position_embeddings - config.block_size - context)
            positions = lengths + torch.randint(far, (batch,), generator=generator)
            yield (
                anchors,
                positions,
                torch.randn(batch, context, *config.context_row_shape, generator=generator),
                lengths,
            )


def _check_context(reference: Drafter, folder: Path, generator: torch.Generator) -> float:
    config = reference.config
    graph = CpuGraph(folder / "context.onnx", context_graph(config))
    worst = 0.0
    for rows in (1, 7, 64):
        features = torch.randn(rows, config.feature_size, generator=generator)
        positions = torch.randint(config.max_position_embeddings, (rows,), generator=generator)
        with FullPrecision():
            expected = reference.context_kv(features, positions)
        found = graph.run(features, positions)[0]
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    if not worst <= CONTEXT_TOLERANCE:
        raise ValueError(
            f"context graph: rows differ from PyTorch's by {worst:.1e} of the largest value, "
            f"{CONTEXT_TOLERANCE:.0e} is allowed; "
            "report this checkpoint's config.json and the versions that `vllm-domino doctor` prints"
        )
    return worst


def _ties(reference: Drafter, case: Case, expected: Tensor, found: Tensor, tables: TargetTables) -> int:
    """Drafts that differ after a tie of the reference's logits.

    Raises:
        ValueError: a difference that rounding does not explain.
    """
    total = 0
    for row in torch.nonzero((expected != found).any(1)).flatten().tolist():
        different = expected[row] != found[row]
        index = int(different.nonzero()[0])
        anchors, positions, context, lengths = (tensor[row : row + 1] for tensor in case)
        one = anchors, positions, context, lengths
        logits = draft_logits(reference, one, expected[row : row + 1], tables)[0, index]
        values, spread = logits, float(logits.std())
        if reference.vocab_ids is not None:
            values = logits.new_full((reference.config.vocab_size,), -math.inf).scatter(
                0, reference.vocab_ids, logits
            )
        gap = float(values[expected[row, index]] - values[found[row, index]])
        if not gap <= TIE_TOLERANCE * spread:
            raise ValueError(
                f"block graph: draft {index} is {int(found[row, index])}, PyTorch drafts "
                f"{int(expected[row, index])} "
                f"(batch {expected.shape[0]}, context {case[2].shape[1]}, logits {gap:.1e} apart); "
                "report this checkpoint's config.json and the versions that `vllm-domino doctor` prints"
            )
        total += int(different.sum())
    return total


def draft_logits(drafter: Drafter, case: Case, drafts: Tensor, tables: TargetTables) -> Tensor:
    """Logits [B, K, V_head] that each draft was chosen from, given the drafts [B, K] before it."""
    anchors = case[0]
    hidden = drafter.block_hidden(*case, tables.embedding)
    logits = fn.linear(hidden, tables.lm_head)
    if drafter.head is None:
        return logits
    before = torch.cat((anchors[:, None], drafts[:, :-1]), dim=1)
    correction = drafter.head(hidden, fn.embedding(before, tables.embedding))
    correction[:, : drafter.config.pure_draft_prefix_len] = 0
    return logits + correction


def _cast_up(path: Path, raised: Path) -> bool:
    """Write `raised`, the graph with fp32 arithmetic over the same weight file; False when already fp32."""
    model = ir.load(path)
    graph = model.graph
    low = [v for v in (*graph.initializers.values(), *graph.inputs, *graph.outputs) if v.dtype in _LOW]
    if not low:
        return False
    for value in low:
        if value.name in graph.initializers:
            for number, (node, index) in enumerate(list(value.uses())):
                cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
                cast.outputs[0].name = f"{value.name}_fp32_{number}"
                node.replace_input_with(index, cast.outputs[0])
                graph.insert_before(node, cast)
        else:
            value.dtype = ir.DataType.FLOAT
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.dtype in _LOW:
                value.dtype = ir.DataType.FLOAT
        to = node.attributes.get("to")
        if node.op_type == "Cast" and to is not None and ir.DataType(to.as_int()) in _LOW:
            node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        constant = node.attributes.get("value")
        if (
            constant is not None
            and constant.type == ir.AttributeType.TENSOR
            and constant.as_tensor().dtype in _LOW
        ):
            array = constant.as_tensor().numpy().astype(np.float32)
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(array))
    ir.save(model, raised)
    return True
