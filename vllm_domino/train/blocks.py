"""Anchors, block inputs, labels and attention masks of one training batch (paper §4; the DFlash block
scheme).

Letters: B sequences, T tokens, A anchors per sequence, S block slots, K = drafts of a block, Q = A*S.

Draft i (0-based) is the token at anchor + 1 + i, under either alignment:
    shift_label        slot i predicts it, so slot 0 (the anchor's own) predicts the first draft and K = S
    not shift_label    slot i + 1 predicts it, slot 0 predicts nothing and K = S - 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_domino.config.draft import DraftConfig


@dataclass(kw_only=True, slots=True)
class Blocks:
    """What the drafter sees and has to say for A blocks of each of B sequences."""

    ids: Tensor  # [B, A, S] int64: anchor, then masks
    positions: Tensor  # [B, A, S] int64, absolute
    attend: Tensor  # [B, 1, Q, T+Q] bool, True where a slot may look
    previous: Tensor  # [B, A, K] int64: the token before every draft (anchor first), the GRU's teacher
    labels: Tensor  # [B, A, K] int64
    weights: Tensor  # [B, A, K] fp32: exp(-i/gamma), 0 where nothing is supervised


def sample_anchors(
    loss_mask: Tensor, num_anchors: int, generators: list[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Draw anchors without repetition from positions whose token and next token are both supervised.

    Args:
        loss_mask: [B, T] bool, True on response tokens.
        generators: one per sequence, so that a sequence's anchors do not depend on the batch it is in.

    Returns:
        anchors [B, A] int64 and used [B, A] bool; a sequence with fewer candidates leaves anchors unused.
    """
    batch = loss_mask.shape[0]
    anchors = torch.zeros(batch, num_anchors, dtype=torch.int64)
    used = torch.zeros(batch, num_anchors, dtype=torch.bool)
    candidates = loss_mask[:, :-1] & loss_mask[:, 1:]
    for row, generator in enumerate(generators):
        places = candidates[row].nonzero().squeeze(1).cpu()
        chosen = places[torch.randperm(len(places), generator=generator)[:num_anchors]].sort().values
        anchors[row, : len(chosen)] = chosen
        used[row, : len(chosen)] = True
    return anchors, used


def position_weights(num_drafts: int, gamma: float) -> Tensor:
    """exp(-i / gamma) for draft i, [K] fp32: an early draft is worth more, as later ones count only after
    it.
    """
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32) / gamma)


def attention_mask(
    anchors: Tensor, used: Tensor, num_tokens: int, block_size: int, lengths: Tensor
) -> Tensor:
    """[B, 1, Q, T+Q] bool: context strictly below the anchor, and the whole own block in both directions.

    Slots of unused blocks see only themselves: a row without any True makes attention undefined.
    """
    batch, blocks = anchors.shape
    place = torch.arange(num_tokens, device=anchors.device)
    context = (
        (place < anchors.unsqueeze(-1)) & (place < lengths[:, None, None]) & used.unsqueeze(-1)
    )  # [B, A, T]
    context = context.repeat_interleave(block_size, dim=1)  # [B, Q, T]
    owner = torch.arange(blocks, device=anchors.device).repeat_interleave(block_size)
    same = (owner.unsqueeze(0) == owner.unsqueeze(1)).expand(batch, -1, -1)  # [B, Q, Q]
    return torch.cat((context, same), dim=-1).unsqueeze(1)


def build_blocks(
    config: DraftConfig, token_ids: Tensor, loss_mask: Tensor, anchors: Tensor, used: Tensor, gamma: float
) -> Blocks:
    """Everything that follows from the choice of anchors.

    Args:
        token_ids: [B, T] int64, prompt and response, padded at the end.
        loss_mask: [B, T] bool, True on response tokens (False on padding).
        anchors, used: as from `sample_anchors`.
    """
    batch, num_tokens = token_ids.shape
    size, drafts = config.block_size, config.num_draft_tokens
    device = token_ids.device
    flat = anchors.flatten(1)
    ids = torch.full((*anchors.shape, size), config.mask_token_id, device=device)
    ids[..., 0] = token_ids.gather(1, flat)
    positions = anchors.unsqueeze(-1) + torch.arange(size, device=device)
    label_places = anchors.unsqueeze(-1) + 1 + torch.arange(drafts, device=device)  # [B, A, K]
    inside = label_places < num_tokens
    clipped = label_places.clamp(max=num_tokens - 1).flatten(1)
    labels = token_ids.gather(1, clipped).view_as(label_places)
    supervised = loss_mask.gather(1, clipped).view_as(label_places) & inside & used.unsqueeze(-1)
    previous = token_ids.gather(1, (label_places - 1).clamp(max=num_tokens - 1).flatten(1)).view_as(
        label_places
    )
    weights = position_weights(drafts, gamma).to(device) * supervised
    # Padding stands at the end, above every anchor, so context below an anchor needs no further mask.
    lengths = torch.full((batch,), num_tokens, device=device)
    attend = attention_mask(anchors, used, num_tokens, size, lengths)
    return Blocks(
        ids=ids, positions=positions, attend=attend, previous=previous, labels=labels, weights=weights
    )
