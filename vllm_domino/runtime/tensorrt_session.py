"""Drafts with the two TensorRT plans of an engine directory (see `DraftSession`).

Addresses are torch's: features, context rows, anchors and drafts of the caller, embedding and LM head of
the target. Scratch is one torch tensor, so that vLLM's memory profiling sees it; weights are on the GPU
when the constructor returns, which is before that profiling.

CUDA graphs: every (batch, context) bucket has its own execution context, so graphs of several buckets live
side by side. The caller runs a bucket once, then captures it. Rows of the context plan may be any number; a
number that is captured has to be reserved first (`reserve_rows`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vllm_domino.config.draft import DraftConfig
from vllm_domino.engine.tensorrt import PLANS
from vllm_domino.engine.tensorrt_module import load_module
from vllm_domino.export.contract import BATCH, CONTEXT, FLOAT, ROWS, block_graph, context_graph
from vllm_domino.model.drafter import HeadOptions
from vllm_domino.runtime.target_tables import target_tables
from vllm_domino.runtime.tensorrt_plan import ALIGNMENT, Plan

logger = logging.getLogger(__name__)


class TensorRTSession:
    """A `DraftSession` on `tensorrt` or `tensorrt_rtx`.

    Args:
        folder: holds the plans; checked already (`engine.tensorrt_check`).
        batch_buckets, context_buckets: as the engine was built, ascending.
        max_batch: largest batch that will be drafted for; buckets above the one that holds it are left out.
        vocab_ids, lm_head: of a reduced draft vocabulary, see `target_tables`.

    Attribute `scores`: by the contract's names ("draft_probs", …), what the last draft returned beside ids,
    in the first rows of each tensor; empty without that head option.

    Raises:
        ValueError: the module is missing, TensorRT refuses a plan, or a plan is not what the manifest says.
    """

    def __init__(
        self,
        folder: Path,
        *,
        backend: str,
        config: DraftConfig,
        options: HeadOptions,
        dtype: torch.dtype,
        device: torch.device,
        batch_buckets: Sequence[int],
        context_buckets: Sequence[int],
        max_batch: int | None = None,
        vocab_ids: Tensor | None = None,
        lm_head: Tensor | None = None,
    ):
        self.backend, self.config, self.options = backend, config, options
        self.dtype, self.device = dtype, device
        self.draft_sizes: tuple[int, ...] = (options.drafts_of(config),)
        self.context_buckets = tuple(context_buckets)
        self.batch_buckets = _needed(tuple(batch_buckets), max_batch)
        self._vocab_ids, self._own_lm_head = vocab_ids, lm_head
        self._embedding: Tensor | None = None
        self._lm_head: Tensor | None = None
        trt = load_module(backend)
        self._cache_dir = folder / "cache"
        common = {"dtype": dtype, "device": device}
        specs = context_graph(config), block_graph(config, options)
        self._context, self._block = (
            Plan(trt, folder / PLANS[s.name], s, runtime_cache=self._cache_file(s.name), **common)
            for s in specs
        )
        self._scratch = _aligned_bytes(max(self._context.scratch_bytes, self._block.scratch_bytes), device)
        for plan in (self._context, self._block):
            plan.use_scratch(self._scratch)
        self._max_rows = self._context.largest(ROWS)
        self.scores = self._score_buffers()
        for batch in self.batch_buckets:
            for context in self.context_buckets:
                self._reserve_bucket(folder, {BATCH: batch, CONTEXT: context})
        logger.info(
            "%s engine %s: batch %s, context %s, %.0f MB of scratch",
            backend,
            folder.name,
            list(self.batch_buckets),
            list(self.context_buckets),
            self._scratch.numel() / 1e6,
        )

    def bind_target(self, embedding: Tensor, lm_head: Tensor) -> None:
        """See `DraftSession`. Raises ValueError when a table does not fit."""
        self._embedding, self._lm_head = target_tables(
            self.config,
            embedding,
            lm_head,
            self.dtype,
            vocab_ids=self._vocab_ids,
            own_lm_head=self._own_lm_head,
        )

    def reserve_rows(self, counts: Sequence[int]) -> None:
        """Give these numbers of context rows a context each, so that runs with them can be captured."""
        for count in counts:
            self._context.reserve({ROWS: count})

    def context_rows(self, features: Tensor, positions: Tensor, out: Tensor) -> None:
        """See `DraftSession`."""
        capturing = self._is_capturing()
        for start in range(0, features.shape[0], self._max_rows):
            piece = slice(start, start + self._max_rows)
            tensors = features[piece], positions[piece], out[piece]
            self._context.run({ROWS: tensors[0].shape[0]}, tensors, capturing=capturing)

    def draft(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context_kv: Tensor,
        context_lengths: Tensor,
        out: Tensor,
    ) -> None:
        """See `DraftSession`; batch and context must be buckets."""
        assert self._embedding is not None, "bind_target comes first"
        assert self._lm_head is not None
        batch, context = context_kv.shape[:2]
        assert batch in self.batch_buckets, (batch, self.batch_buckets)
        assert context in self.context_buckets, (context, self.context_buckets)
        tensors = (
            anchor_ids,
            anchor_positions,
            context_kv,
            context_lengths,
            self._embedding,
            self._lm_head,
            out,
        )
        axes = {BATCH: batch, CONTEXT: context}
        self._block.run(axes, (*tensors, *self.scores.values()), capturing=self._is_capturing())

    def close(self) -> None:
        """Free contexts, engines and scratch; keep what `tensorrt_rtx` compiled for the next start."""
        for plan in (self._context, self._block):
            if plan.is_open:
                plan.save_runtime_cache(self._cache_file(plan.spec.name))
            plan.close()
        self._embedding = self._lm_head = None
        self.scores, self._scratch = {}, torch.empty(0)

    def _reserve_bucket(self, folder: Path, axes: dict[str, int]) -> None:
        if not self._block.covers(axes):
            raise ValueError(
                f"{folder}: no profile of the block plan takes batch {axes[BATCH]}, context {axes[CONTEXT]}, which "
                "the manifest promises; build the engine again"
            )
        self._block.reserve(axes)

    def _cache_file(self, graph: str) -> Path:
        return self._cache_dir / f"{graph}.{self.backend}.bin"

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _score_buffers(self) -> dict[str, Tensor]:
        """One buffer [largest batch, …] per further output; a smaller batch fills its first rows."""
        buffers = {}
        for t in self._block.spec.outputs[1:]:
            shape = torch.Size(t.at(**{BATCH: self.batch_buckets[-1]}))
            kind = self.dtype if t.dtype == FLOAT else getattr(torch, t.dtype)
            buffers[t.name] = (
                _aligned_bytes(shape.numel() * kind.itemsize, self.device).view(kind).view(shape)
            )
        return buffers


def _needed(buckets: tuple[int, ...], max_batch: int | None) -> tuple[int, ...]:
    """Buckets up to the first that holds `max_batch`."""
    if max_batch is None:
        return buckets
    return tuple(b for i, b in enumerate(buckets) if i == 0 or buckets[i - 1] < max_batch)


def _aligned_bytes(count: int, device: torch.device) -> Tensor:
    """[count] uint8 (at least one), aligned for TensorRT; torch aligns CPU memory to 64 bytes only."""
    raw = torch.zeros(max(1, count) + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + max(1, count)]
