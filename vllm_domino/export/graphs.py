"""The drafter rewritten for export: the same results as the reference, in the form that engines run fastest.

Weights that share an input are joined into one product (q, k and v; gate and up; the keys and values of all
layers for a context row). Two forms of the rest:

- `fused`: attention as the one ONNX operator that TensorRT has kernels for (fp16 and bf16), everything else
  as in the reference, operation by operation, because low precision shows every change of order.
- `plain`: attention as two products over the context and the block, so that the context is never
  concatenated, and the Domino head with its products over the GRU state joined. ONNX Runtime's CPU kernels
  are fastest this way, and TensorRT has no fused attention in fp32.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from vllm_domino.model.backbone import DraftBackbone, DraftLayer, apply_rope, rope_tables
from vllm_domino.model.drafter import Drafter
from vllm_domino.model.head import DominoHead

GraphForm = Literal["plain", "fused"]


class ExportDrafter(Drafter):
    """A `Drafter` whose backbone and head are the export forms; weights are joined copies or its own."""

    def __init__(self, drafter: Drafter, form: GraphForm):
        nn.Module.__init__(self)
        self.config, self.options = drafter.config, drafter.options
        self.backbone = (
            PlainBackbone(drafter.backbone) if form == "plain" else FusedBackbone(drafter.backbone)
        )
        self.head = drafter.head
        if form == "plain" and drafter.head is not None:
            self.head = FoldedHead(drafter.head)
        self.register_buffer("vocab_ids", drafter.vocab_ids, persistent=False)
        self.eval().requires_grad_(False)


class ContextGraph(nn.Module):
    """Inputs and outputs as `contract.context_graph` has them. Holds only what context rows need."""

    def __init__(self, drafter: Drafter):
        super().__init__()
        backbone, self.config = drafter.backbone, drafter.config
        self.fc, self.hidden_norm = backbone.fc, backbone.hidden_norm
        attention = [layer.self_attn for layer in backbone.layers]
        self.kv_weight = _join([w for a in attention for w in (a.k_proj.weight, a.v_proj.weight)])
        self.k_norms = nn.ModuleList(a.k_norm for a in attention)
        self.eval().requires_grad_(False)

    def forward(self, features: Tensor, positions: Tensor) -> Tensor:
        """Features [N, F*H_target], positions [N] int64 -> [N, L, 2, Hkv, D]."""
        config = self.config
        x = self.hidden_norm(self.fc(features))
        kv = fn.linear(x, self.kv_weight).unflatten(-1, config.context_row_shape)
        k, v = kv.unbind(2)  # [N, L, Hkv, D] each
        # every layer has its own weight: normalised apart, since low precision shows a second rounding
        k = torch.stack([norm(part) for norm, part in zip(self.k_norms, k.unbind(1), strict=True)], dim=1)
        cos, sin = rope_tables(positions[:, None, None], config.head_dim, config.rope_theta)
        return torch.stack((apply_rope(k, cos, sin), v), dim=2)


class BlockGraph(nn.Module):
    """Inputs and outputs as `contract.block_graph` has them."""

    def __init__(self, drafter: ExportDrafter):
        super().__init__()
        self.drafter = drafter

    def forward(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context_kv: Tensor,
        context_lengths: Tensor,
        embedding: Tensor,
        lm_head: Tensor,
    ) -> tuple[Tensor, ...]:
        return self.drafter.draft(
            anchor_ids, anchor_positions, context_kv, context_lengths, embedding, lm_head
        )


class _JoinedLayer(nn.Module):
    """One decoder layer's weights, joined where they share an input."""

    def __init__(self, layer: DraftLayer):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv_weight = _join([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        self.o_proj, self.down_proj = attention.o_proj, mlp.down_proj
        self.gate_up_weight = _join([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.input_layernorm, self.post_attention_layernorm = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, up = fn.linear(x, self.gate_up_weight).chunk(2, dim=-1)
        return self.down_proj(fn.silu(gate) * up)


class FusedBackbone(nn.Module):
    """Reference arithmetic around one attention operator per layer."""

    def __init__(self, backbone: DraftBackbone):
        super().__init__()
        self.config, self.norm = backbone.config, backbone.norm
        self.layers = nn.ModuleList(_JoinedLayer(layer) for layer in backbone.layers)

    def forward(
        self, block_embeds: Tensor, block_positions: Tensor, context_kv: Tensor, mask: Tensor
    ) -> Tensor:
        """See `DraftBackbone.forward`."""
        cos, sin = rope_tables(block_positions.unsqueeze(-1), self.config.head_dim, self.config.rope_theta)
        # the operator wants a mask row for every query
        mask = mask.expand(-1, -1, block_embeds.shape[1], -1)
        x = block_embeds
        for index, layer in enumerate(self.layers):
            x = x + self._attend(layer, layer.input_layernorm(x), cos, sin, context_kv[:, :, index], mask)
            x = x + layer.feed_forward(layer.post_attention_layernorm(x))
        return self.norm(x)

    def _attend(
        self, layer: _JoinedLayer, x: Tensor, cos: Tensor, sin: Tensor, context: Tensor, mask: Tensor
    ) -> Tensor:
        heads = fn.linear(x, layer.qkv_weight).unflatten(
            -1, (-1, self.config.head_dim)
        )  # [B, Q, Hq+2*Hkv, D]
        kv_heads = self.config.num_key_value_heads
        q, k, v = heads.split((self.config.num_attention_heads, kv_heads, kv_heads), dim=2)
        q, k = apply_rope(layer.q_norm(q), cos, sin), apply_rope(layer.k_norm(k), cos, sin)
        k = torch.cat((context[:, :, 0], k), dim=1)
        v = torch.cat((context[:, :, 1], v), dim=1)
        out = fn.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
        )
        return layer.o_proj(out.transpose(1, 2).flatten(2))


class PlainBackbone(nn.Module):
    """Attention as products per K/V head, context and block apart under one softmax: no transposition at all.

    The context is taken apart into its (layer, key or value, head) parts in one pass, the only copy made of it.
    """

    def __init__(self, backbone: DraftBackbone):
        super().__init__()
        self.config, self.norm = backbone.config, backbone.norm
        self.layers = nn.ModuleList(_PlainLayer(layer) for layer in backbone.layers)

    def forward(
        self, block_embeds: Tensor, block_positions: Tensor, context_kv: Tensor, mask: Tensor
    ) -> Tensor:
        """See `DraftBackbone.forward`."""
        cos, sin = rope_tables(block_positions, self.config.head_dim, self.config.rope_theta)
        half, kv_heads = self.config.head_dim // 2, self.config.num_key_value_heads
        tables = cos[..., :half], sin[..., :half]  # [B, Q, D/2]
        bias = torch.zeros_like(mask[:, 0], dtype=block_embeds.dtype).masked_fill(~mask[:, 0], float("-inf"))
        parts = context_kv.flatten(2, 4).unbind(2)  # 2 * L * Hkv of [B, S, D]
        x = block_embeds
        for index, layer in enumerate(self.layers):
            start = 2 * kv_heads * index
            keys, values = parts[start : start + kv_heads], parts[start + kv_heads : start + 2 * kv_heads]
            x = x + layer.attend(layer.input_layernorm(x), tables, keys, values, bias)
            x = x + layer.feed_forward(layer.post_attention_layernorm(x))
        return self.norm(x)


class _PlainLayer(nn.Module):
    """One decoder layer; only q and k are joined, since taking a joined result apart costs a copy."""

    def __init__(self, layer: DraftLayer):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.config_heads = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self.eps = attention.q_norm.eps
        self.qk_weight = _join([attention.q_proj.weight, attention.k_proj.weight])
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        heads, kv_heads, size = self.config_heads
        q, k = attention.q_norm.weight / math.sqrt(size), attention.k_norm.weight
        # [Hq+Hkv, D]; the softmax scale is in it
        self.qk_scale = nn.Parameter(torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1))))
        self.unit = nn.Parameter(torch.ones(size))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down_proj(fn.silu(self.gate_proj(x)) * self.up_proj(x))

    def attend(
        self,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        bias: Tensor,
    ) -> Tensor:
        """From x [B, Q, H], keys and values of every K/V head [B, S, D], bias [B, 1, S+Q] to [B, Q, H]."""
        heads, kv_heads, size = self.config_heads
        group, rows, length = heads // kv_heads, x.shape[1], keys[0].shape[1]
        qk = fn.linear(x, self.qk_weight).unflatten(-1, (heads + kv_heads, size))
        qk = fn.rms_norm(qk, (size,), self.unit, self.eps) * self.qk_scale
        qk = torch.onnx.ops.rotary_embedding(qk.flatten(2), *tables, num_heads=heads + kv_heads)
        joined = [group * size] * kv_heads + [size] * kv_heads
        pieces = qk.split(joined, dim=-1)
        own_values = self.v_proj(x).split(size, dim=-1)
        outputs = []
        for head in range(kv_heads):
            q, own_keys = pieces[head].reshape(-1, rows * group, size), pieces[kv_heads + head]
            scores = torch.cat((q @ keys[head].transpose(1, 2), q @ own_keys.transpose(1, 2)), dim=-1)
            seen, own = torch.softmax(scores + bias, dim=-1).split((length, rows), dim=-1)
            out = seen @ values[head] + own @ own_values[head]  # [B, Q*G, D]
            outputs.append(out.reshape(-1, rows, group * size))
        return self.o_proj(torch.cat(outputs, dim=-1))


class FoldedHead(nn.Module):
    """`DominoHead` with the products that share the GRU state joined, and those over the slots done at once.

    The state is (h [B, G], W_state h [B, 3G+R]): gates of the next step and the state's part of the
    correction. Splitting the product over [z ; s] changes low-precision drafts, so this form is for fp32
    only.
    """

    def __init__(self, head: DominoHead):
        super().__init__()
        hidden, self.gru_dim = head.config.hidden_size, head.config.gru_hidden_dim
        self.input_weight = head.prefix_gru.weight_ih_l0
        self.state_weight = _join([head.prefix_gru.weight_hh_l0, head.embed_proj[0].weight[:, hidden:]])
        self.slot_weight = nn.Parameter(head.embed_proj[0].weight[:, :hidden].contiguous())
        self.embed_proj = nn.ModuleList((nn.Identity(), nn.Identity(), head.embed_proj[2]))
        self.rank = head.config.emb_dim

    def slots(self, hidden: Tensor) -> Tensor:
        """[B, K, H] -> [B, K, R]: the hidden states' part of every correction."""
        return fn.linear(hidden, self.slot_weight)

    def correction_code(self, slot: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return fn.silu(slot + state[1][:, 3 * self.gru_dim :])

    def correct(self, base: Tensor, code: Tensor) -> Tensor:
        return torch.addmm(base, code, self.embed_proj[2].weight.t())

    def first_gru_step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates, new = fn.linear(x, self.input_weight).split((2 * self.gru_dim, self.gru_dim), dim=-1)
        candidate = torch.tanh(new)
        return self._state(candidate - torch.sigmoid(gates[:, self.gru_dim :]) * candidate)

    def gru_cell(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        sizes = (2 * self.gru_dim, self.gru_dim)
        gates_x, new_x = fn.linear(x, self.input_weight).split(sizes, dim=-1)
        gates_h, new_h, _ = state[1].split((*sizes, self.rank), dim=-1)
        reset, update = torch.sigmoid(gates_x + gates_h).chunk(2, dim=-1)
        candidate = torch.tanh(new_x + reset * new_h)
        return self._state(candidate + update * (state[0] - candidate))

    def _state(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, fn.linear(h, self.state_weight)


def _join(weights: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat(weights))


def graph_form(dtype: torch.dtype) -> GraphForm:
    """The form that suits a dtype: TensorRT has fused attention for fp16 and bf16 only."""
    return "plain" if dtype == torch.float32 else "fused"
