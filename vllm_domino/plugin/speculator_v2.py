"""The V2 runner's speculator (vLLM's default on GPUs)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_domino.plugin.drafting import Drafting
from vllm_domino.plugin.metrics import serve_metrics


class DominoSpeculator(DFlashSpeculator):
    """vLLM's DFlash speculator with the model and the draft replaced; its kernels still lay out anchors and slots."""

    _speculator_name = "Domino"
    model: Drafting
    _step_tokens: int | None = None  # what vLLM's schedule by load wants of this step; None is all of them

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        drafting = Drafting(self.vllm_config, target_model, self.device)
        # The stock buffer holds projected states; ours keeps the features of all target layers, which the context
        # graph projects itself.
        width = drafting.session.config.feature_size
        self.hidden_states = torch.zeros(self.max_num_tokens, width, dtype=self.dtype, device=self.device)
        serve_metrics()
        return drafting

    def capture(self) -> None:
        """Capture draft steps into CUDA graphs. Not yet run on a GPU."""
        # A graph has one context length for good, so it must be the longest.
        self.draft_max_seq_len = self.max_model_len
        self._step_tokens = None  # and the most draft tokens; vLLM drops those that a step does not want
        reserve_rows = getattr(self.model.session, "reserve_rows", None)
        if reserve_rows is not None:  # TensorRT: one execution context per captured number of rows
            assert self.query_cudagraph_manager is not None
            graphs = self.query_cudagraph_manager._capture_descs.get(CUDAGraphMode.FULL, [])
            counts = {self._num_graph_context_tokens(graph.num_reqs) for graph in graphs if graph.num_reqs}
            reserve_rows(sorted({size for count in counts for size in self.model.step.piece_sizes(count)}))
        super().capture()

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As vLLM's, which drafts the most tokens whatever its schedule by load says; ours drafts what a step wants."""
        self._step_tokens = kwargs.get("num_speculative_tokens")
        return super().propose(*args, **kwargs)

    @torch.inference_mode()
    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: Any = None,
    ) -> None:
        """Fill `draft_tokens[:num_reqs]`; zeros (vLLM's own dummy drafts) where a step failed or has no room."""
        out = self.draft_tokens[:num_reqs]
        count = self.num_speculative_steps if self._step_tokens is None else self._step_tokens
        if count == 0:
            out.zero_()
            return
        anchors = slice(0, num_reqs * self.num_query_per_req, self.num_query_per_req)
        positions = self.input_buffers.positions[anchors]
        if self.draft_kv_cache_group_id >= 0:
            table = self.block_tables.input_block_tables[self.draft_kv_cache_group_id][:num_reqs]
        else:  # memory profiling runs before there are block tables
            table = torch.zeros(num_reqs, 1, dtype=torch.int32, device=self.device)
        drafts = self.model.draft(
            self.input_buffers.input_ids[anchors], positions, table, self.draft_max_seq_len, count
        )
        if drafts is None:
            out.zero_()
            return
        room = self.model.max_positions - self.model.session.config.block_size
        torch.mul(drafts, (positions <= room).unsqueeze(1), out=out[:, :count])
        out[:, count:].zero_()
