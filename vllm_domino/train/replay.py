"""Acceptance of greedy decoding without decoding.

Greedy output does not depend on the drafter. So the target's answer is made once, the drafts of every possible anchor
are made in one batch, and the rounds are replayed: hundreds of times faster than the reference loop, and the same
rounds (a test compares the two). This is how drafters of every kind, EAGLE-3 too, are compared on equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm_domino.model.drafter import Drafter
from vllm_domino.train.data import Sample
from vllm_domino.train.eagle3 import EagleDrafter, is_eagle3, read_eagle3
from vllm_domino.train.evaluate import read_drafter, summarize
from vllm_domino.train.target_features import FrozenTarget

DEFAULT_EAGLE_DRAFTS = 5

# (target, ids [1, T], anchors [A]) -> drafts [A, K]
Drafts = Callable[[FrozenTarget, Tensor, Tensor], Tensor]


def replay_rounds(
    drafts: Tensor, tokens: Sequence[int], prompt_length: int, stop_ids: Sequence[int]
) -> list[int]:
    """Accepted drafts of every round.

    Args:
        drafts: [A, K] int64, row a drafted at anchor prompt_length + a.
        tokens: prompt and greedy answer. If it ends for its length and not in a stop token, its last token is a
            bonus: no draft is made for it, as in the reference loop.
    """
    accepted, anchor = [], prompt_length
    end = len(tokens) if tokens[-1] in stop_ids else len(tokens) - 1
    while anchor < len(tokens) - 1:
        row = drafts[anchor - prompt_length].tolist()
        right = 0
        while right < len(row) and anchor + 1 + right < end and row[right] == tokens[anchor + 1 + right]:
            right += 1
        accepted.append(right)
        anchor += right + 1
    return accepted


@torch.inference_mode()
def replay(
    target: FrozenTarget, drafts: Drafts, samples: Sequence[Sample], num_drafts: int, stop_ids: Sequence[int]
) -> dict:
    """Acceptance length and acceptance by position over greedy answers (`Sample` of prompt and answer)."""
    accepted: list[int] = []
    for sample in samples:
        if len(sample.ids) - sample.prompt_length < 2:
            continue
        anchors = torch.arange(sample.prompt_length, len(sample.ids) - 1, device=target.device)
        ids = torch.tensor([sample.ids], device=target.device)
        accepted += replay_rounds(drafts(target, ids, anchors), sample.ids, sample.prompt_length, stop_ids)
    return summarize(accepted, num_drafts)


def block_drafts(drafter: Drafter) -> Drafts:
    """Drafts of a Domino or DFlash drafter at every anchor of one sequence."""

    def run(target: FrozenTarget, ids: Tensor, anchors: Tensor) -> Tensor:
        features = target.features(ids)[0]
        context = drafter.context_kv(features, torch.arange(len(features), device=ids.device))
        context = context.expand(len(anchors), *context.shape)
        return drafter.draft(ids[0, anchors], anchors, context, anchors, target.embedding, target.lm_head)[0]

    return run


def eagle_drafts(drafter: EagleDrafter, num_drafts: int) -> Drafts:
    """Chains of an EAGLE-3 drafter: index t reads token t + 1, so anchor a is index a - 1."""

    def run(target: FrozenTarget, ids: Tensor, anchors: Tensor) -> Tensor:
        state = drafter.fc(target.features(ids))
        history: list[Tensor] = []
        chain = []
        tokens = torch.cat(
            (ids[:, 1:], ids[:, :1]), dim=1
        )  # the last index has no next token and is not used
        for step in range(num_drafts):
            positions = torch.arange(ids.shape[1], device=ids.device) + step
            embeds = torch.nn.functional.embedding(tokens, target.embedding)
            state = drafter.step(embeds, state, positions, history)
            tokens = drafter.lm_head(drafter.norm(state)).argmax(dim=-1)  # [1, T]
            chain.append(tokens[0])
        return torch.stack(chain, dim=1)[anchors - 1]

    return run


def replay_checkpoint(
    target_source: str,
    draft_source: str,
    answers: Sequence[Sample],
    *,
    num_drafts: int | None = None,
    without_head: bool = False,
) -> dict:
    """Replay greedy answers of a target with a checkpoint of any kind, fp32 on the CPU.

    `num_drafts` cuts what a block drafts, and is the length of EAGLE-3's chain (5 if not given).
    """
    device = torch.device("cpu")
    if is_eagle3(draft_source):
        count = num_drafts or DEFAULT_EAGLE_DRAFTS
        eagle, layer_ids = read_eagle3(draft_source, target_source)
        target = FrozenTarget(target_source, layer_ids, torch.float32, device)
        return replay(target, eagle_drafts(eagle, count), answers, count, target.stop_ids)
    drafter = read_drafter(draft_source, without_head=without_head)
    target = FrozenTarget(target_source, drafter.config.target_layer_ids, torch.float32, device)
    count = min(num_drafts or drafter.config.num_draft_tokens, drafter.config.num_draft_tokens)
    whole = block_drafts(drafter)
    return replay(target, lambda *inputs: whole(*inputs)[:, :count], answers, count, target.stop_ids)
