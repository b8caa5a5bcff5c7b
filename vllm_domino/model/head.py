"""The Domino head: a GRU over the drafted tokens and a low-rank correction of the logits (paper §3.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from vllm_domino.config.draft import DraftConfig


class DominoHead(nn.Module):
    """Final logits of draft i = base logits + `embed_proj`([z_i ; s_i]).

    z_i is the backbone's hidden state of the slot that predicts draft i; s_i the state of a bias-free GRU
    that has read the target's embeddings of every token before draft i, from the anchor on, and starts at
    zero in every block. Parameter names are the public checkpoints'.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self.prefix_gru = nn.GRU(config.hidden_size, config.gru_hidden_dim, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.head_vocab_size, bias=False),
        )

    def gru_cell(self, x: Tensor, state: Tensor) -> Tensor:
        """One step: x [B, H], state [B, G] -> [B, G]; `torch.nn.GRU`'s gate order r, z, n.

        Plain products, because exporters and TensorRT's parser mishandle the fused operator (bf16 fails,
        older onnxscript is wrong).
        """
        gates_x = fn.linear(x, self.prefix_gru.weight_ih_l0)  # [B, 3G]
        gates_h = fn.linear(state, self.prefix_gru.weight_hh_l0)
        rx, zx, nx = gates_x.chunk(3, dim=-1)
        rh, zh, nh = gates_h.chunk(3, dim=-1)
        reset, update = torch.sigmoid(rx + rh), torch.sigmoid(zx + zh)
        candidate = torch.tanh(nx + reset * nh)
        return candidate + update * (state - candidate)

    def first_gru_step(self, x: Tensor) -> Tensor:
        """The same from the zero state, without its product: x [B, H] -> [B, G]."""
        _, zx, nx = fn.linear(x, self.prefix_gru.weight_ih_l0).chunk(3, dim=-1)
        candidate = torch.tanh(nx)
        return candidate - torch.sigmoid(zx) * candidate

    def slots(self, hidden: Tensor) -> Tensor:
        """What `correction_code` takes of a slot, [B, K, H] -> [B, K, …]; export forms compute here."""
        return hidden

    def correction_code(self, hidden: Tensor, state: Tensor) -> Tensor:
        """The correction before its last, vocabulary-wide product: [..., H] and [..., G] -> [..., R].

        The concatenation stays whole: split into two products it changes about 12 % of bf16 draft tokens.
        """
        return fn.silu(self.embed_proj[0](torch.cat((hidden, state), dim=-1)))

    def correct(self, base: Tensor, code: Tensor) -> Tensor:
        """Final logits: base [B, V_head] plus the code's [B, R] product with the whole vocabulary."""
        return base + self.embed_proj[2](code)

    def forward(self, hidden: Tensor, token_embeds: Tensor) -> Tensor:
        """Teacher-forced corrections, for training.

        Args:
            hidden: [B, K, H], slot i predicts draft i.
            token_embeds: [B, K, H], embedding of the token before draft i (the anchor first).

        Returns:
            [B, K, V_head] to add to the base logits, for every draft (the caller leaves out the pure prefix).
        """
        states, _ = self.prefix_gru(token_embeds)
        return self.embed_proj[2](self.correction_code(hidden, states))
