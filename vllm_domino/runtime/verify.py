"""A session beside the PyTorch reference: the same random contexts, draft by draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_domino.runtime.session import DraftSession

# Of all draft ids. In fp32 only a tie of two logits may fall the other way; in low precision rounding decides more.
REQUIRED_AGREEMENT = {torch.float32: 0.999, torch.float16: 0.97, torch.bfloat16: 0.9}


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionCheck:
    """What came out. equal: draft ids that agree; None without a reference. context_error: relative to the largest."""

    drafts: int
    equal: int | None
    context_error: float | None
    cases: tuple[tuple[int, int], ...]

    @property
    def agreement(self) -> float | None:
        return None if self.equal is None else self.equal / self.drafts


def check_session(
    session: DraftSession,
    reference: DraftSession | None,
    device: torch.device,
    progress: Callable[[str], None],
) -> SessionCheck:
    """Draft from random contexts, and compare with `reference` (in the same dtype) where there is one.

    Raises:
        ValueError: a draft id is outside the vocabulary, or too few drafts agree (the message has the figures).
    """
    config, generator = session.config, torch.Generator().manual_seed(0)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator).to(device, session.dtype)
    sessions = [session] if reference is None else [session, reference]
    for each in sessions:
        each.bind_target(table, table)
    drafts = equal = 0
    context_error = 0.0
    cases = _cases(session)
    for batch, context in cases:
        progress(f"batch {batch}, context {context}")
        inputs = _inputs(session, batch, context, device, generator)
        found = [_draft(each, *inputs) for each in sessions]
        ids = found[0][1]
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
            raise ValueError(
                f"draft ids {int(ids.min())}…{int(ids.max())} are outside the vocabulary of {config.vocab_size}; "
                "build the engine again"
            )
        drafts += ids.numel()
        if reference is not None:
            equal += int((ids == found[1][1]).sum())
            difference = (found[0][0] - found[1][0]).abs().max() / found[1][0].abs().max().clamp_min(1e-9)
            context_error = max(context_error, float(difference))
    checked = SessionCheck(
        drafts=drafts,
        equal=None if reference is None else equal,
        context_error=None if reference is None else context_error,
        cases=tuple(cases),
    )
    needed = REQUIRED_AGREEMENT[session.dtype]
    if checked.agreement is not None and checked.agreement < needed:
        raise ValueError(
            f"{equal} of {drafts} drafts equal PyTorch's ({checked.agreement:.1%}), at least {needed:.1%} must; "
            f"context rows differ by {context_error:.1e} of the largest value: build the engine again, and report "
            "this if it stays"
        )
    return checked


def _cases(session: DraftSession) -> list[tuple[int, int]]:
    """(batch, context) pairs: the smallest and the largest sizes that are not slow, within the session's buckets."""
    batches = session.batch_buckets or (1, 3, 8)
    contexts = session.context_buckets or (16, 512, 2048)
    return [(batches[0], size) for size in contexts] + [(size, contexts[0]) for size in batches[1:]]


def _inputs(
    session: DraftSession, batch: int, context: int, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features of B*S tokens [B*S, F*H], lengths [B], anchors [B] and their positions [B]."""
    config = session.config
    features = torch.randn(batch * context, config.feature_size, generator=generator)
    lengths = torch.randint(1, context + 1, (batch,), generator=generator)
    anchors = torch.randint(config.vocab_size, (batch,), generator=generator)
    return features.to(device, session.dtype), lengths.to(device), anchors.to(device), lengths.to(device)


def _draft(
    session: DraftSession, features: Tensor, lengths: Tensor, anchors: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Context rows [B, S, L, 2, Hkv, D] in fp32 and draft ids [B, K]."""
    batch = anchors.shape[0]
    context = features.shape[0] // batch
    places = torch.arange(context, device=anchors.device).repeat(batch)
    rows = features.new_empty(batch * context, *session.config.context_row_shape)
    session.context_rows(features, places, rows)
    rows = rows.view(batch, context, *session.config.context_row_shape)
    out = anchors.new_empty(batch, session.draft_sizes[-1])
    session.draft(anchors, positions, rows, lengths, out)
    return rows.float(), out.cpu()
