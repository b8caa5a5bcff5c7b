"""The Transformers reference beside vLLM, and what vLLM's drafts are compared with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from harness import BLOCK, DOMINO, TARGET

from vllm_domino.config.checkpoint import read_checkpoint
from vllm_domino.model.decode import DecodeResult, speculative_decode, target_features
from vllm_domino.model.drafter import Drafter


@dataclass(frozen=True)
class Reference:
    """The pair in Transformers and plain PyTorch, batch 1, sharing nothing with vLLM."""

    target: Any
    drafter: Drafter

    @classmethod
    def load(cls, drafter: Path = DOMINO) -> Reference:
        from transformers import AutoModelForCausalLM

        target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
        return cls(target, Drafter.from_checkpoint(read_checkpoint(drafter), dtype=torch.float32).eval())

    def decode(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> ReferenceRun:
        """Greedy, `num_tokens` and then some: enough that no round that starts before them is cut short."""
        extra = self.drafter.config.num_draft_tokens + 1
        options = {"num_draft_tokens": BLOCK} | options
        result = speculative_decode(
            self.target, self.drafter, prompt, max_new_tokens=num_tokens + extra, **options
        )
        return ReferenceRun(list(prompt), num_tokens, result)

    @torch.inference_mode()
    def drafts(
        self, ids: Sequence[int], positions: Sequence[int], *, anchor: int | None = None, noise: float = 0.0
    ) -> torch.Tensor:
        """Drafts [P, K] of anchors `ids[p]` whose context is everything before p, from one pass over `ids`.

        anchor: another token to stand in all these places.
        noise: relative disturbance of the context rows, another one for every position.
        """
        row = torch.tensor([ids])
        hidden = self.target(input_ids=row, output_hidden_states=True).hidden_states
        features = target_features(hidden, self.drafter.config.target_layer_ids)
        context = self.drafter.context_kv(features, torch.arange(len(ids)))
        embedding = self.target.get_input_embeddings().weight
        lm_head = self.target.get_output_embeddings().weight
        found = []
        for start in range(0, len(positions), 16):
            at = torch.tensor(positions[start : start + 16])
            anchors = row[0, at] if anchor is None else torch.full_like(at, anchor)
            rows = context[: int(at.max())].unsqueeze(0).expand(len(at), -1, *context.shape[1:])
            if noise:
                rows = rows * (
                    1 + noise * torch.randn(rows.shape, generator=torch.Generator().manual_seed(start))
                )
            found.append(self.drafter.draft(anchors, at, rows, at, embedding, lm_head)[0])
        return torch.cat(found)

    @torch.inference_mode()
    def probabilities(self, ids: Sequence[int]) -> torch.Tensor:
        """The target's distribution [V] of the token after `ids`, in fp64 from fp32 logits."""
        return torch.softmax(self.target(torch.tensor([ids])).logits[0, -1].double(), -1)


@dataclass(frozen=True)
class ReferenceRun:
    """One generation of the reference loop, cut at `num_tokens` as vLLM cuts it."""

    prompt: list[int]
    num_tokens: int
    result: DecodeResult

    @property
    def output(self) -> list[int]:
        return self.result.token_ids[: self.num_tokens]

    @property
    def ids(self) -> list[int]:
        """Prompt and all that was generated, the surplus included."""
        return self.prompt + self.result.token_ids

    @cached_property
    def rounds(self) -> list[tuple[int, int]]:
        """(position of the anchor, accepted drafts) of the rounds that vLLM runs: those before the last token."""
        found, length = [], 1
        for accepted in self.result.accepted:
            if length >= self.num_tokens:
                break
            found.append((len(self.prompt) + length - 1, accepted))
            length += accepted + 1
        return found


def mean_acceptance(runs: Sequence[ReferenceRun]) -> float:
    """Over all rounds of all runs, as vLLM's counters take it."""
    accepted = [accepted for run in runs for _, accepted in run.rounds]
    return 1 + sum(accepted) / len(accepted)


def check_drafts(
    entries: Sequence[tuple[int, int, tuple[int, ...]]], reference: Reference, runs: Sequence[ReferenceRun]
) -> int:
    """Assert that every recorded draft is the reference's for that token of that text; returns how many there were.

    An entry names no request, so it must be what the reference drafts at that position of one of the texts that have
    that token there. Two exceptions:

    - V1 drafts after a chunk of a prefill too, from whatever token is the request's last, and throws that away: these
      are not counted.
    - Two logits may be equal within the rounding of fp32, which depends on the shape of a batch: 1 draft in 200 may
      differ, and must be what the reference drafts when its context is disturbed by that much.
    """
    texts: dict[tuple[int, int], list[ReferenceRun]] = defaultdict(list)
    expected: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
    wanted = {(position, anchor) for position, anchor, _ in entries}
    for run in runs:
        at = [p for p, token in enumerate(run.ids) if p > 0 and (p, token) in wanted]
        for position, drafts in zip(at, reference.drafts(run.ids, at).tolist() if at else [], strict=True):
            expected[position, run.ids[position]].append(tuple(drafts))
            texts[position, run.ids[position]].append(run)
    equal = rounded = 0
    for position, anchor, drafts in entries:
        if any(known[: len(drafts)] == drafts for known in expected.get((position, anchor), ())):
            equal += 1
            continue
        prefill = [run.ids for run in runs if len(run.ids) > position + 1]
        made = (reference.drafts(ids, [position], anchor=anchor)[0].tolist() for ids in prefill)
        if any(tuple(row[: len(drafts)]) == drafts for row in made):
            continue
        disturbed = (
            reference.drafts(run.ids, [position] * 64, noise=1e-5)
            for run in texts.get((position, anchor), ())
        )
        near = {tuple(row[: len(drafts)]) for rows in disturbed for row in rows.tolist()}
        assert drafts in near, (
            f"{drafts} of token {anchor} at {position}, not {expected.get((position, anchor))}"
        )
        rounded += 1
    assert rounded <= len(entries) // 200, f"{rounded} of {len(entries)} drafts differ by rounding"
    return equal + rounded
