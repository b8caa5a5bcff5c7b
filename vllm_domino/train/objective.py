"""Features in, loss out: the module that is trained, wrapped by DDP or FSDP as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vllm_domino.model.drafter import Drafter
from vllm_domino.train.blocks import Blocks
from vllm_domino.train.losses import block_losses
from vllm_domino.train.recipe import DrafterRecipe


@dataclass(kw_only=True, slots=True)
class Terms:
    """What one micro-batch gives. `weighted` sums are already divided by the step's sum of weights."""

    loss: Tensor  # scalar, may be differentiated
    base: Tensor  # scalar fp32, weighted mean cross-entropy of the base logits
    final: Tensor  # scalar fp32, of base + correction
    hits: Tensor  # [B, A, K] bool, argmax of the final logits is the label (teacher-forced)


class DraftObjective(nn.Module):
    """A drafter with its loss. The target's embedding and LM head are read, never registered: nothing trains
    them.
    """

    def __init__(self, drafter: Drafter, recipe: DrafterRecipe, embedding: Tensor, lm_head: Tensor):
        super().__init__()
        self.drafter, self.recipe = drafter, recipe
        self._frozen = (embedding.detach(), lm_head.detach())
        if recipe.gradient_checkpointing:
            for layer in drafter.backbone.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def forward(self, features: Tensor, blocks: Blocks, lambda_base: float, weight_sum: float) -> Terms:
        """One micro-batch.

        Args:
            features: [B, T, F*H_target] of the frozen target.
            blocks: the batch's anchors, labels and masks.
            lambda_base: share of the base loss, 1 to 0.
            weight_sum: sum of `blocks.weights` over all micro-batches and processes of the step.
        """
        embedding, lm_head = self._frozen
        hidden = self.backbone_pass(features, blocks, embedding)  # [B, A, K, H]
        rows = blocks.weights > 0
        weights = blocks.weights[rows] / weight_sum
        labels, kept = blocks.labels[rows], hidden[rows]
        if self.drafter.head is None:
            code = codebook = None
            base_weights, final_weights = weights, torch.zeros_like(weights)
        else:
            corrected = self.corrected(blocks)[rows]
            # Drafts of the pure prefix have no correction: their final logits are their base logits.
            base_weights = torch.where(corrected, weights * lambda_base, weights)
            final_weights = torch.where(corrected, weights * (1.0 - lambda_base), torch.zeros_like(weights))
            code = self.head_code(hidden, blocks, embedding)[rows]
            codebook = self.drafter.head.embed_proj[2].weight
        loss, sums, hits = block_losses(kept, code, lm_head, codebook, labels, base_weights, final_weights)
        return self.terms(loss, sums, hits, rows, blocks)

    def terms(self, loss, sums, hits, rows, blocks) -> Terms:
        """The two parts of the loss for the log, and the hits back in their places."""
        found = torch.zeros_like(rows)
        if self.drafter.head is None:
            found[rows] = hits[0]
            return Terms(loss=loss, base=sums[0], final=sums[0], hits=found)
        corrected = self.corrected(blocks)[rows]
        found[rows] = torch.where(corrected, hits[1], hits[0])
        return Terms(loss=loss, base=sums[0], final=sums[1], hits=found)

    def corrected(self, blocks: Blocks) -> Tensor:
        """[B, A, K] bool: drafts that get the correction, from `pure_draft_prefix_len` on."""
        config = self.drafter.config
        place = torch.arange(config.num_draft_tokens, device=blocks.labels.device)
        return (place >= config.pure_draft_prefix_len).expand_as(blocks.labels)

    def backbone_pass(self, features: Tensor, blocks: Blocks, embedding: Tensor) -> Tensor:
        """Hidden states [B, A, K, H] of the slots that predict, all blocks of the batch in one pass."""
        config, backbone = self.drafter.config, self.drafter.backbone
        batch, tokens = features.shape[:2]
        positions = torch.arange(tokens, device=features.device).repeat(batch)
        context = backbone.context_kv(features.flatten(0, 1), positions).unflatten(0, (batch, tokens))
        hidden = backbone(
            functional.embedding(blocks.ids.flatten(1), embedding),
            blocks.positions.flatten(1),
            context,
            blocks.attend,
        )
        hidden = hidden.unflatten(1, blocks.ids.shape[1:])
        return hidden if config.shift_label else hidden[:, :, 1:]

    def head_code(self, hidden: Tensor, blocks: Blocks, embedding: Tensor) -> Tensor:
        """[B, A, K, R]: the correction before its vocabulary-wide product."""
        head = self.drafter.head
        assert head is not None
        previous = blocks.previous.flatten(0, 1)  # [B*A, K]
        flat = hidden.flatten(0, 1)
        if self.recipe.prefixes == "self":
            previous = self.own_prefixes(flat.detach(), previous[:, 0], embedding)
        states, _ = head.prefix_gru(functional.embedding(previous, embedding))  # [B*A, K, G]
        return head.correction_code(flat, states).unflatten(0, hidden.shape[:2])

    @torch.no_grad()
    def own_prefixes(self, hidden: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
        """What the drafter itself would have drafted, [N, K] int64, anchor first (test-time training)."""
        head, config, lm_head = self.drafter.head, self.drafter.config, self._frozen[1]
        assert head is not None
        tokens = [anchors]
        state = head.first_gru_step(functional.embedding(anchors, embedding))
        for draft in range(config.num_draft_tokens - 1):
            logits = hidden[:, draft].to(lm_head.dtype) @ lm_head.T
            if draft >= config.pure_draft_prefix_len:
                logits = logits + head.embed_proj[2](head.correction_code(hidden[:, draft], state))
            tokens.append(logits.argmax(dim=-1))
            state = head.gru_cell(functional.embedding(tokens[-1], embedding), state)
        return torch.stack(tokens, dim=1)


def accepted_lengths(hits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Teacher-forced acceptance, bonus included: sum over blocks (scalar) and number of blocks (scalar).

    A block's accepted drafts are its hits before the first miss; blocks without any supervised draft do not
    count.
    """
    lengths = hits.to(torch.int64).cumprod(dim=-1).sum(dim=-1)  # [B, A]
    used = (weights > 0).any(dim=-1)
    return (lengths[used] + 1).sum(), used.sum()
