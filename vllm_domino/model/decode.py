"""Reference decoding on a Transformers target: batch 1, one block per round (paper §3.3).

The oracle of the other tests: slow, plain, and independent of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vllm_domino.model.drafter import Drafter


@dataclass
class DecodeResult:
    """One generation.

    token_ids: the response, stop token included.
    accepted: draft tokens accepted in every round that drafted.
    drafts: the draft tokens of every round, only with `keep_drafts`.
    """

    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verification, the bonus token included, as vLLM's counters define it."""
        return 1.0 + sum(self.accepted) / max(1, len(self.accepted))


def target_features(hidden_states: Sequence[Tensor], layer_ids: Sequence[int]) -> Tensor:
    """Features [N, F*H] from `output_hidden_states` of one sequence ([1, N, H] each).

    Entry 0 is the embedding output, so the output of decoder layer i stands at i + 1.
    """
    return torch.cat([hidden_states[i + 1][0] for i in layer_ids], dim=-1)


@torch.inference_mode()
def speculative_decode(
    target: nn.Module,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    num_draft_tokens: int | None = None,
    draft_window: int | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    keep_drafts: bool = False,
) -> DecodeResult:
    """Generate with greedy drafts; verification is exact at temperature 0, rejection sampling above.

    With one-hot proposals, rejection sampling accepts draft d with probability p(d) and otherwise draws from
    p without d; drawing x from p and accepting when x equals d is the same thing, and is what is done here.

    Args:
        target: a Transformers causal LM; its embedding and output embedding are the drafter's too.
        num_draft_tokens: drafts to verify per round, at most the block's.
        draft_window: newest context tokens that the drafter reads; None reads all.
    """
    from transformers import DynamicCache

    embedding = target.get_input_embeddings().weight
    lm_head = target.get_output_embeddings().weight
    if drafter.vocab_ids is not None:
        lm_head = lm_head[drafter.vocab_ids]
    limit = num_draft_tokens or drafter.num_draft_tokens
    cache, result = DynamicCache(), DecodeResult()
    layer_ids = drafter.config.target_layer_ids

    def run(ids: list[int], start: int) -> tuple[Tensor, Tensor]:
        """Logits [N, V] and context rows [N, L, 2, Hkv, D] of `ids` at positions from `start`."""
        positions = torch.arange(start, start + len(ids), device=embedding.device)
        out = target(
            input_ids=torch.tensor([ids], device=embedding.device),
            position_ids=positions.unsqueeze(0),
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
        )
        return out.logits[0], drafter.context_kv(target_features(out.hidden_states, layer_ids), positions)

    logits, context = run(list(prompt_ids), 0)
    result.token_ids.append(_pick(logits[-1], temperature, generator))
    while result.token_ids[-1] not in stop_ids and len(result.token_ids) < max_new_tokens:
        anchor, position = result.token_ids[-1], context.shape[0]
        room = min(limit, max_new_tokens - len(result.token_ids) - 1)
        drafts = _draft(drafter, anchor, position, context, draft_window, embedding, lm_head)[:room]
        logits, rows = run([anchor, *drafts], position)
        accepted = 0
        while True:
            token = _pick(logits[accepted], temperature, generator)
            result.token_ids.append(token)
            if accepted == len(drafts) or token != drafts[accepted] or token in stop_ids:
                break
            accepted += 1
        # a stop token that was drafted was accepted too, as vLLM's counters have it
        result.accepted.append(accepted + (accepted < len(drafts) and token == drafts[accepted]))
        if keep_drafts:
            result.drafts.append(drafts)
        context = torch.cat((context, rows[: accepted + 1]))
        cache.crop(position + accepted + 1)
    return result


def _draft(
    drafter: Drafter,
    anchor: int,
    position: int,
    context: Tensor,
    window: int | None,
    embedding: Tensor,
    lm_head: Tensor,
) -> list[int]:
    rows = context if window is None else context[-window:]
    return drafter.draft(
        torch.tensor([anchor], device=rows.device),
        torch.tensor([position], device=rows.device),
        rows.unsqueeze(0),
        torch.tensor([rows.shape[0]], device=rows.device),
        embedding,
        lm_head,
    )[0][0].tolist()


def _pick(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=generator))
