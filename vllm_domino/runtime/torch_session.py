"""The reference model as a session: any device, no build step, the slowest of the three."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_domino.model.drafter import Drafter
from vllm_domino.runtime.target_tables import target_tables


class TorchSession:
    """Runs a `Drafter` eagerly (see `DraftSession`)."""

    backend = "pytorch"
    context_buckets: tuple[int, ...] = ()
    batch_buckets: tuple[int, ...] = ()

    def __init__(
        self, drafter: Drafter, device: torch.device, dtype: torch.dtype, own_lm_head: Tensor | None = None
    ):
        """own_lm_head: [V_head, H], where the checkpoint of a reduced vocabulary ships its own rows."""
        self.drafter = drafter.to(device=device, dtype=dtype).eval()
        self.config, self.options, self.dtype = drafter.config, drafter.options, dtype
        self.draft_sizes: tuple[int, ...] = (drafter.num_draft_tokens,)
        self._own_lm_head = own_lm_head
        self._embedding: Tensor | None = None
        self._lm_head: Tensor | None = None

    def bind_target(self, embedding: Tensor, lm_head: Tensor) -> None:
        self._embedding, self._lm_head = target_tables(
            self.config,
            embedding,
            lm_head,
            self.dtype,
            vocab_ids=self.drafter.vocab_ids,
            own_lm_head=self._own_lm_head,
        )

    @torch.inference_mode()
    def context_rows(self, features: Tensor, positions: Tensor, out: Tensor) -> None:
        out.copy_(self.drafter.context_kv(features, positions))

    @torch.inference_mode()
    def draft(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context_kv: Tensor,
        context_lengths: Tensor,
        out: Tensor,
    ) -> None:
        assert self._embedding is not None, "bind_target comes first"
        assert self._lm_head is not None
        drafts = self.drafter.draft(
            anchor_ids, anchor_positions, context_kv, context_lengths, self._embedding, self._lm_head
        )
        out.copy_(drafts[0])

    def close(self) -> None:
        self._embedding = self._lm_head = None
