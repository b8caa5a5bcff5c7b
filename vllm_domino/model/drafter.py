"""The whole drafter: the two functions that become the context graph and the block graph (DESIGN C4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from vllm_domino.config.checkpoint import DraftCheckpoint
from vllm_domino.config.draft import DraftConfig
from vllm_domino.model.backbone import DraftBackbone
from vllm_domino.model.head import DominoHead


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """How draft tokens are chosen from the logits; recorded in the engine's manifest.

    candidate_pool: the correction scores only the C tokens that lead the base logits anywhere in the block
        (per request); None scores the whole vocabulary. The pure prefix always takes the full argmax.
    scores: also return the probability of every draft token under the drafter (and, with a pool, the
        candidates with their logits).
    draft_tokens: how many tokens of a block are drafted; None drafts all. Fewer cost less and are the same.
    """

    candidate_pool: int | None = None
    scores: bool = False
    draft_tokens: int | None = None

    def drafts_of(self, config: DraftConfig) -> int:
        """K: draft tokens that come out of one block.

        Raises:
            ValueError: more than the block has.
        """
        drafts = self.draft_tokens or config.num_draft_tokens
        if drafts > config.num_draft_tokens:
            raise ValueError(
                f"draft_tokens is {drafts}, a block of this drafter has {config.num_draft_tokens}; "
                f"set draft_tokens = {config.num_draft_tokens} or less, or 0 for all"
            )
        return drafts


class Drafter(nn.Module):
    """Backbone, head and, for a reduced draft vocabulary, the map back to target ids.

    The target's embedding and LM head are arguments, never parameters: they stay in the target's own memory.
    """

    def __init__(self, config: DraftConfig, options: HeadOptions | None = None):
        super().__init__()
        self.config = config
        self.options = options or HeadOptions()
        self.options.drafts_of(config)  # refuses more than the block has
        self.backbone = DraftBackbone(config)
        self.head = DominoHead(config) if config.has_head else None
        vocab_ids = torch.arange(config.head_vocab_size) if config.draft_vocab_size else None
        self.register_buffer(
            "vocab_ids", vocab_ids, persistent=False
        )  # [V_head] int64: head row -> target id

    @classmethod
    def from_checkpoint(
        cls, checkpoint: DraftCheckpoint, options: HeadOptions | None = None, dtype: torch.dtype | None = None
    ) -> Drafter:
        """Load strictly.

        Raises:
            ValueError: a tensor is missing, not known, or has another shape; the message names it.
        """
        with torch.device("meta"):
            drafter = cls(checkpoint.config, options)
        named = drafter.public_parameters()
        problems = [f"missing tensor {name}" for name in sorted(named.keys() - checkpoint.weights.keys())]
        problems += [f"unknown tensor {name}" for name in sorted(checkpoint.weights.keys() - named.keys())]
        problems += [
            f"tensor {name} has shape {list(checkpoint.weights[name].shape)}, config.json asks for "
            f"{list(p.shape)}"
            for name, p in named.items()
            if name in checkpoint.weights and checkpoint.weights[name].shape != p.shape
        ]
        if problems:
            raise ValueError(f"checkpoint {checkpoint.source}: {'; '.join(problems)}")
        prefixed = {
            ("head." if name.startswith(("prefix_gru.", "embed_proj.")) else "backbone.") + name: tensor
            for name, tensor in checkpoint.weights.items()
        }
        drafter.load_state_dict(prefixed, strict=True, assign=True)
        if checkpoint.config.draft_vocab_size:
            assert checkpoint.vocab_ids is not None
            drafter.vocab_ids = checkpoint.vocab_ids
        drafter.requires_grad_(False)
        return drafter.to(dtype) if dtype is not None else drafter

    @property
    def num_draft_tokens(self) -> int:
        """K of this drafter's options."""
        return self.options.drafts_of(self.config)

    def public_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of the public checkpoints."""
        return {name.split(".", 1)[1]: p for name, p in self.named_parameters()}

    def context_kv(self, features: Tensor, positions: Tensor) -> Tensor:
        """The context graph: features [N, F*H_target], positions [N] int64 -> [N, L, 2, Hkv, D]."""
        return self.backbone.context_kv(features, positions)

    def block_hidden(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context_kv: Tensor,
        context_lengths: Tensor,
        embedding: Tensor,
    ) -> Tensor:
        """The parallel pass: hidden states [B, K, H] of the slots that predict, draft 0 first."""
        batch, context = context_kv.shape[:2]
        size = self.config.block_size
        masks = anchor_ids.new_full((1, size - 1), self.config.mask_token_id).expand(batch, -1)
        block_ids = torch.cat((anchor_ids.unsqueeze(1), masks), dim=1)  # [B, T]
        offsets = torch.arange(size, device=anchor_ids.device)
        seen = torch.arange(context, device=anchor_ids.device) < context_lengths.unsqueeze(1)  # [B, S]
        mask = torch.cat((seen, seen.new_ones((1, size)).expand(batch, -1)), dim=1)[:, None, None]
        hidden = self.backbone(
            fn.embedding(block_ids, embedding), anchor_positions.unsqueeze(1) + offsets, context_kv, mask
        )
        first = 0 if self.config.shift_label else 1
        return hidden[:, first : first + self.num_draft_tokens]

    def draft(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context_kv: Tensor,
        context_lengths: Tensor,
        embedding: Tensor,
        lm_head: Tensor,
    ) -> tuple[Tensor, ...]:
        """The block graph: greedy draft tokens of one block per request.

        Args:
            anchor_ids, anchor_positions: [B] int64; the last verified (bonus) token and its absolute
                position.
            context_kv: [B, S, L, 2, Hkv, D], rows of tokens strictly below the anchor, in any order.
            context_lengths: [B] int64; rows from there on are ignored.
            embedding: [V, H], the target's. lm_head: [V_head, H], the target's (or the drafter's reduced
                one).

        Returns:
            draft_ids [B, K] int64; with `scores` also probabilities [B, K] fp32, and with a pool on top of
            that candidate_ids [B, C] int64 and candidate_logits [B, K, C].
        """
        hidden = self.block_hidden(anchor_ids, anchor_positions, context_kv, context_lengths, embedding)
        # one product over all rows: exported in three dimensions, ONNX Runtime packs the LM head per request
        base = fn.linear(hidden.flatten(0, 1), lm_head).unflatten(0, hidden.shape[:2])  # [B, K, V_head]
        return self.choose(anchor_ids, hidden, base, embedding)

    def choose(
        self, anchor_ids: Tensor, hidden: Tensor, base: Tensor, embedding: Tensor
    ) -> tuple[Tensor, ...]:
        """Draft tokens from the parallel pass, one after another through the head.

        Args:
            anchor_ids: [B] int64. hidden: [B, K, H]. base: [B, K, V_head], the LM head's logits.
            embedding: [V, H], the target's.

        Returns:
            As `draft`.
        """
        if self.head is None:
            return self._plain(base)
        pool_ids, rows = self._candidates(base)
        slots = self.head.slots(hidden)
        state = self.head.first_gru_step(fn.embedding(anchor_ids, embedding))
        drafts, logits = [], []
        for i in range(self.num_draft_tokens):
            scores = base[:, i]
            if i >= self.config.pure_draft_prefix_len:
                code = self.head.correction_code(slots[:, i], state)  # [B, R]
                if pool_ids is None:
                    scores = self.head.correct(scores, code)
                    chosen = scores.argmax(dim=-1)
                else:
                    scores = scores.gather(1, pool_ids) + torch.matmul(rows, code.unsqueeze(-1)).squeeze(-1)
                    chosen = pool_ids.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)
            else:
                chosen = scores.argmax(dim=-1)
                scores = scores if pool_ids is None else scores.gather(1, pool_ids)
            drafts.append(self._target_ids(chosen))
            logits.append(scores)
            if i + 1 < self.num_draft_tokens:
                state = self.head.gru_cell(fn.embedding(drafts[-1], embedding), state)
        ids = torch.stack(drafts, dim=1)
        if not self.options.scores:
            return (ids,)
        return self._with_scores(ids, torch.stack(logits, dim=1), pool_ids)

    def _plain(self, base: Tensor) -> tuple[Tensor, ...]:
        ids = self._target_ids(base.argmax(dim=-1))
        return self._with_scores(ids, base, None) if self.options.scores else (ids,)

    def _candidates(self, base: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Per request, head rows [B, C] that lead the base logits anywhere, and their codes [B, C, R]."""
        if self.options.candidate_pool is None:
            return None, None
        assert self.head is not None
        _, ids = base.amax(dim=1).topk(min(self.options.candidate_pool, self.config.head_vocab_size), dim=-1)
        return ids, fn.embedding(ids, self.head.embed_proj[2].weight)

    def _target_ids(self, head_ids: Tensor) -> Tensor:
        return head_ids if self.vocab_ids is None else self.vocab_ids[head_ids]

    def _with_scores(self, ids: Tensor, logits: Tensor, pool_ids: Tensor | None) -> tuple[Tensor, ...]:
        """Append probabilities: the chosen logit is the largest, so its softmax is 1 / sum exp(x - max)."""
        wide = logits.float()
        probs = torch.exp(wide.amax(dim=-1) - torch.logsumexp(wide, dim=-1))
        if pool_ids is None:
            return ids, probs
        return ids, probs, self._target_ids(pool_ids), logits
