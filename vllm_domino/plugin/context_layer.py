"""The draft context as a layer of vLLM's own K/V cache (DESIGN C5).

vLLM allocates it, pages it with the target's blocks, accounts for it and frees it. It has no attention of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionBackend
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec


class _PassThroughBuilder(AttentionMetadataBuilder):
    """Hands the common metadata on: the draft step reads the block table from it and nothing else."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return common_attn_metadata


class ContextBackend(CacheOnlyAttentionBackend):
    """A cache without attention, whatever the causality that metadata asks for."""

    @staticmethod
    def get_name() -> str:
        return "DOMINO_CONTEXT"

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return _PassThroughBuilder


class ContextLayer(nn.Module, AttentionLayerBase):
    """One row of `row_size` elements per token, in the session's dtype.

    Declared as one head of half that size, so that keys and values of all draft layers lie side by side and a
    token's row is one contiguous copy.
    """

    def __init__(self, vllm_config: Any, row_size: int, dtype: torch.dtype):
        super().__init__()
        self.row_size, self.dtype = row_size, dtype
        self.is_draft_layer = True  # V2 sets it by itself, V1 of vLLM 0.33 expects it
        # vLLM finds a layer's index as the one integer in its name; ours follows the target's last
        index = vllm_config.model_config.get_total_num_hidden_layers()
        self.layer_name = f"domino.layers.{index}.context"
        self.impl, self.kv_cache = None, torch.empty(0)
        vllm_config.compilation_config.static_forward_context[self.layer_name] = self

    def get_attn_backend(self) -> type[ContextBackend]:
        return ContextBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.row_size // 2,
            dtype=self.dtype,
        )

    def pages(self) -> Tensor | None:
        """The bound cache as [num_pages, page size, row_size]; None before vLLM has allocated it."""
        cache = self.kv_cache
        if cache.numel() == 0:
            return None
        heads_axis = 1  # [pages, 1 head, page size, 2 * head size]
        assert cache.dim() == 4, cache.shape
        assert (cache.shape[heads_axis], cache.shape[3]) == (1, self.row_size), cache.shape
        return cache.squeeze(heads_axis)
