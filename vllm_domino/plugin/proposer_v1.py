"""The V1 runner's proposer (CPU, and GPUs with VLLM_USE_V2_MODEL_RUNNER=0)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.spec_decode.dflash import DFlashProposer

from vllm_domino.plugin.drafting import Drafting
from vllm_domino.plugin.metrics import serve_metrics


class DominoProposer(DFlashProposer):
    """vLLM's DFlash proposer with the draft itself replaced.

    Its inputs cover every scheduled token, rejected drafts included: row j of a request counts only when it lies
    before the request's rejected tail.
    """

    model: Drafting

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any):
        super().__init__(vllm_config, device, runner)
        self._runner = runner

    def load_model(self, target_model: nn.Module) -> None:
        self.model = Drafting(self.vllm_config, target_model, self.device)
        self._draft_attn_layer_names = {self.model.layer.layer_name}
        # Without async scheduling a request may have no drafts at all; with it, every row must have K ids.
        self._ragged = not self.vllm_config.scheduler_config.async_scheduling
        serve_metrics()

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Memory profiling and warm-up: one projection of `num_tokens` rows and one draft at the largest size."""
        if self.device.type == "cpu":
            return
        rows = torch.zeros(
            num_tokens, self.model.session.config.feature_size, dtype=self.dtype, device=self.device
        )
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        self.model.store_context(rows, positions, torch.full_like(positions, -1))
        batch = torch.zeros(self.max_batch_size, dtype=torch.int64, device=self.device)
        table = torch.zeros(self.max_batch_size, 1, dtype=torch.int32, device=self.device)
        self.model.draft(batch, batch, table, self.model.draft_window)

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: Any = None,
    ) -> Tensor | list[list[int]]:
        """Store the verified tokens' context, then draft: [B, K] int64, or ragged lists (see `DFlashProposer`)."""
        meta = common_attn_metadata
        slots = meta.slot_mapping[: target_positions.shape[0]]
        anchors = meta.seq_lens  # a request's next position is its length
        if num_rejected_tokens_gpu is not None:
            anchors = anchors - num_rejected_tokens_gpu
            slots = _without_rejected(slots, meta, num_rejected_tokens_gpu)
        stored = self.model.store_context(target_hidden_states, target_positions, slots)
        drafts = None
        if stored and num_speculative_tokens and not self._all_prefilling(anchors.shape[0]):
            drafts = self.model.draft(
                next_token_ids, anchors, meta.block_table_tensor, meta.max_seq_len, num_speculative_tokens
            )
        return self._result(drafts, anchors, num_speculative_tokens)

    def _all_prefilling(self, batch: int) -> bool:
        """Whether no request of this step has sampled yet: vLLM would throw the drafts of prefill chunks away."""
        return self._ragged and bool(self._runner.discard_request_mask.np[:batch].all())

    def _result(self, drafts: Tensor | None, anchors: Tensor, count: int) -> Tensor | list[list[int]]:
        """Drop the drafts of requests past the drafter's length, and all of them when the step failed."""
        room = self.model.max_positions - self.model.session.config.block_size
        if self._ragged:
            if drafts is None:
                return [[] for _ in range(anchors.shape[0])]
            rows = drafts.tolist()
            if int(anchors.max()) <= room:
                return rows
            return [row if anchor <= room else [] for row, anchor in zip(rows, anchors.tolist(), strict=True)]
        if drafts is None:
            return torch.zeros(anchors.shape[0], count, dtype=torch.int64, device=anchors.device)
        return torch.where((anchors <= room).unsqueeze(1), drafts, 0)


def _without_rejected(slots: Tensor, meta: Any, num_rejected: Tensor) -> Tensor:
    """Slots [N] with -1 in every request's rejected tail."""
    starts = meta.query_start_loc
    lengths = starts[1:] - starts[:-1]
    ends = torch.repeat_interleave(starts[1:] - num_rejected, lengths, output_size=slots.shape[0])
    rows = torch.arange(slots.shape[0], device=slots.device)
    return torch.where(rows < ends, slots, -1)
