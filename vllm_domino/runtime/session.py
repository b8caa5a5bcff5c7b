"""What every session does, whatever runs the graphs (DESIGN C7)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vllm_domino.config.draft import DraftConfig
from vllm_domino.model.drafter import HeadOptions


class DraftSession(Protocol):
    """Runs the context graph and the block graph on tensors that the caller owns.

    Attributes:
        config, options: the drafter and how its head chooses.
        dtype: floating type of features, context rows, embedding and LM head in this session.
        backend: name for logs and metrics ("pytorch", "onnxruntime", "tensorrt", "tensorrt_rtx").
        context_buckets: context lengths S that `draft` may be called with, ascending; empty means any S.
        batch_buckets: batch sizes B that `draft` may be called with, ascending; empty means any B.
        draft_sizes: numbers of draft tokens K that `draft` may be asked for, ascending; the last is the options' own.

    `context_rows` and `draft` read and write the tensors they are given, in place, on the caller's stream:
    on a GPU they neither allocate nor wait. A failed run raises `RuntimeError` and leaves `out` undefined.
    """

    config: DraftConfig
    options: HeadOptions
    dtype: torch.dtype
    backend: str
    context_buckets: tuple[int, ...]
    batch_buckets: tuple[int, ...]
    draft_sizes: tuple[int, ...]

    def bind_target(self, embedding: Tensor, lm_head: Tensor) -> None:
        """Take the target's embedding [V, H] and LM head [V, H] by reference.

        Two exceptions copy once, here, and say so in the log: a reduced draft vocabulary (its rows of the LM
        head, or the checkpoint's own), and a target whose dtype this session cannot read.
        """

    def context_rows(self, features: Tensor, positions: Tensor, out: Tensor) -> None:
        """Features [N, F*H_target], positions [N] int64 -> out [N, L, 2, Hkv, D]; all contiguous."""

    def draft(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context_kv: Tensor,
        context_lengths: Tensor,
        out: Tensor,
    ) -> None:
        """From anchors, positions, lengths [B] and context [B, S, L, 2, Hkv, D] to out [B, K]; contiguous.

        K is one of `draft_sizes`.
        """

    def close(self) -> None:
        """Free what the session holds. Idempotent."""
