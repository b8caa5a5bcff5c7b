"""The DFlash backbone: one parallel pass over a block that reads the target's hidden states (paper §3.1).

Context tokens are never run through the layers. Their target features are projected once (`fc`,
`hidden_norm`), and that same vector is the input of every layer's key and value projection; queries come
from the block alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from vllm_domino.config.draft import DraftConfig


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., D] (fp32) of rotary embedding at absolute `positions` [...] (int64)."""
    # double: torch's and an exporter's fp32 powers differ in the last bit, which at position 40,000 turns by 1e-3
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float32).unsqueeze(-1) * (theta**-exponents).to(torch.float32)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [..., D], halves paired as in Qwen3; tables broadcast against it."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.to(x.dtype) + rotated * sin.to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return fn.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from the context and the whole block, not causal."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        size = config.hidden_size
        self.q_proj = nn.Linear(size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each [..., Hkv, D], of `x` [..., H] with tables [..., 1, D]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return apply_rope(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """[B, Q, H], tables [B, Q, 1, D], context [B, S, 2, Hkv, D], mask [B, 1, 1, S+Q] -> [B, Q, H]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)))
        q = apply_rope(q, cos, sin)
        k, v = self.keys_values(x, cos, sin)
        k = torch.cat((context[:, :, 0], k), dim=1)  # [B, S+Q, Hkv, D]
        v = torch.cat((context[:, :, 1], v), dim=1)
        out = fn.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftMLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(fn.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm decoder layer; the norm before attention touches the block only, never the context."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftBackbone(nn.Module):
    """All draft layers. Parameter names are the public checkpoints'."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def context_kv(self, features: Tensor, positions: Tensor) -> Tensor:
        """Keys and values that every layer reads for these context tokens.

        Args:
            features: [N, F*H_target], target hidden states after `target_layer_ids`, side by side.
            positions: [N] int64, absolute.

        Returns:
            [N, L, 2, Hkv, D]: keys already rotated.
        """
        x = self.hidden_norm(self.fc(features))
        cos, sin = rope_tables(positions.unsqueeze(-1), self.config.head_dim, self.config.rope_theta)
        return torch.stack(
            [torch.stack(layer.self_attn.keys_values(x, cos, sin), dim=1) for layer in self.layers], 1
        )

    def forward(
        self, block_embeds: Tensor, block_positions: Tensor, context_kv: Tensor, mask: Tensor
    ) -> Tensor:
        """One parallel pass.

        Args:
            block_embeds: [B, Q, H], target embeddings of the anchor and the masks.
            block_positions: [B, Q] int64, absolute.
            context_kv: [B, S, L, 2, Hkv, D], S may be 0.
            mask: bool [B, 1, Q or 1, S+Q], True where a query may look.

        Returns:
            [B, Q, H] after the final norm: the input of the LM head and of the Domino head alike.
        """
        cos, sin = rope_tables(block_positions.unsqueeze(-1), self.config.head_dim, self.config.rope_theta)
        x = block_embeds
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, context_kv[:, :, index], mask)
        return self.norm(x)
