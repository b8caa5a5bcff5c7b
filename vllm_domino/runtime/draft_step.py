"""One draft step, the same on both of vLLM's runners: write context rows, gather them, draft (DESIGN C5, C6).

Takes and gives plain tensors. The context K/V live in a paged cache that somebody else allocates and pages; a slot is
a row number in it, and a block table turns positions into slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_domino.runtime.session import DraftSession

# Context rows gathered at once. A batch that needs more is drafted in slices, so that the gather buffer stays at
# this many rows whatever the batch and the window (Qwen3-8B in bf16: 20 KiB a row).
GATHER_ROWS = 16_384
# Context rows projected at once; a longer prefill goes through in pieces.
PROJECT_ROWS = 2_048
# On a CPU a batch shares little, and what a graph run allocates grows with its rows: a drafter of 0.4 GB drafts 16
# requests at 512 tokens in 0.76 GB instead of 1.7 GB, a fifth slower (benchmarks/results/step-memory.json).
CPU_GATHER_BYTES = 64 << 20
CPU_PROJECT_ROWS = 256


class DraftStep:
    """Static buffers around a session, and the two halves of a step.

    Every buffer is allocated in the constructor, so a step allocates nothing on the device and never waits for it.
    """

    def __init__(
        self,
        session: DraftSession,
        *,
        max_requests: int,
        max_rows: int,
        draft_window: int,
        device: torch.device,
    ):
        """Args:
        session: with the target already bound.
        max_requests: largest batch; above the session's largest bucket it is drafted in slices.
        max_rows: largest number of context rows per step.
        draft_window: newest context tokens that a draft reads.
        """
        config = session.config
        self.session, self.draft_window, self.device = session, draft_window, device
        self.vocab_size = config.vocab_size
        self.row_shape = config.context_row_shape
        self.row_size = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
        self._context_sizes = _context_sizes(session, draft_window)
        batch = _padded(max_requests, session.batch_buckets)
        project, gather = PROJECT_ROWS, GATHER_ROWS
        if device.type == "cpu":
            row_bytes = self.row_size * session.dtype.itemsize
            project, gather = CPU_PROJECT_ROWS, min(gather, CPU_GATHER_BYTES // row_bytes)
        project = max(1, min(max_rows, project))
        self._gather_rows = min(max(gather, self._context_sizes[-1]), batch * self._context_sizes[-1])
        floats = {"dtype": session.dtype, "device": device}
        ints = {"dtype": torch.int64, "device": device}
        self._features = torch.zeros(project, config.feature_size, **floats)
        self._positions = torch.zeros(project, **ints)
        self._rows = torch.zeros(project, *self.row_shape, **floats)
        self._gathered = torch.zeros(self._gather_rows, self.row_size, **floats)
        self._wanted, self._pages = (
            torch.zeros(self._gather_rows, **ints),
            torch.zeros(self._gather_rows, **ints),
        )
        self._slots = torch.zeros(
            self._gather_rows, dtype=torch.int32, device=device
        )  # as vLLM's block tables
        self._anchor_ids = torch.zeros(batch, **ints)
        self._anchor_positions = torch.zeros(batch, **ints)
        self._lengths, self._first = torch.zeros(batch, **ints), torch.zeros(batch, **ints)
        # by K: what the session writes, and the same of a whole batch that was drafted in slices
        self._drafts = {
            size: (torch.zeros(batch, size, **ints), torch.zeros(max(batch, max_requests), size, **ints))
            for size in session.draft_sizes
        }
        self._offsets = torch.arange(self._context_sizes[-1], **ints)
        self._cache: Tensor | None = None  # [slots, row_size]
        self._page_size = 0

    def attach_cache(self, pages: Tensor) -> None:
        """Take the paged cache, [num_pages, page size, row_size] in the session's dtype, by reference."""
        assert pages.shape[2] == self.row_size, pages.shape
        assert pages.dtype == self.session.dtype, pages.dtype
        self._page_size = pages.shape[1]
        self._cache = pages.view(-1, self.row_size)

    def store_context(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Project newly verified tokens and write their rows.

        Args:
            features: [N, F*H_target], any floating dtype.
            positions: [N] int64, absolute.
            slots: [N] int64; -1 marks a rejected or padded row, which is not written.
        """
        if self.device.type == "cpu":
            kept = torch.nonzero(slots >= 0).squeeze(
                1
            )  # on a CPU looking costs less than projecting for nothing
            if kept.numel() < slots.numel():
                features, positions, slots = features[kept], positions[kept], slots[kept]
        for start in range(0, features.shape[0], self._rows.shape[0]):
            piece = slice(start, start + self._rows.shape[0])
            self._store_piece(features[piece], positions[piece], slots[piece])

    def piece_sizes(self, count: int) -> set[int]:
        """The numbers of rows that `store_context` projects at once for `count` rows, none of them rejected."""
        largest = self._rows.shape[0]
        return {min(largest, count - start) for start in range(0, count, largest)}

    def _store_piece(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        count = features.shape[0]
        rows = self._rows[:count]
        self.session.context_rows(
            self._features[:count].copy_(features), self._positions[:count].copy_(positions), rows
        )
        if self._cache is None:  # memory profiling runs before there is a cache
            return
        # rows that must not be written go to page 0, which vLLM never hands out: no branch, no wait
        self._cache.index_copy_(0, slots.clamp_min(0), rows.view(count, self.row_size))

    def draft(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        block_table: Tensor,
        max_context: int,
        num_tokens: int | None = None,
    ) -> Tensor:
        """Draft one block per request.

        Args:
            anchor_ids, anchor_positions: [B], any integer dtype; the context is every position below the anchor.
            block_table: [B, pages] int32, page numbers.
            max_context: an upper bound of `anchor_positions`, known on the host.
            num_tokens: draft tokens wanted; None is as many as there are.

        Returns:
            [B, K] int64, K the session's smallest size with `num_tokens`; a view of a static buffer, good until
            the next call.
        """
        batch = anchor_ids.shape[0]
        size = _padded(num_tokens or self.session.draft_sizes[-1], self.session.draft_sizes)
        drafts = self._drafts[size][1]
        context = _padded(min(max_context, self.draft_window), self._context_sizes)
        step = _slice_size(max(1, self._gather_rows // context), self.session.batch_buckets)
        for start in range(0, batch, step):
            piece = slice(start, min(start + step, batch))
            found = self._draft_piece(
                anchor_ids[piece], anchor_positions[piece], block_table[piece], context, size
            )
            drafts[piece].copy_(found)
        return drafts[:batch]

    def _draft_piece(
        self, ids: Tensor, positions: Tensor, block_table: Tensor, context: int, size: int
    ) -> Tensor:
        count = ids.shape[0]
        batch = _padded(count, self.session.batch_buckets)
        self._anchor_ids[:count].copy_(ids)
        self._anchor_positions[:count].copy_(positions)
        torch.clamp(
            self._anchor_positions[:count], max=min(context, self.draft_window), out=self._lengths[:count]
        )
        self._lengths[count:batch].zero_()
        if context and self._cache is not None:
            self._gather(block_table, count, context)
        out = self._drafts[size][0][:batch]
        out.fill_(-1)  # a session that fills too little is caught by the caller's range check
        self.session.draft(
            self._anchor_ids[:batch],
            self._anchor_positions[:batch],
            self._gathered[: batch * context].view(batch, context, *self.row_shape),
            self._lengths[:batch],
            out,
        )
        return out[:count]

    def _gather(self, block_table: Tensor, count: int, context: int) -> None:
        """Bring the newest `lengths` context rows of every request to the front of its part of the buffer."""
        wanted = self._wanted[: count * context].view(count, context)
        pages = self._pages[: count * context].view(count, context)
        slots = self._slots[: count * context].view(count, context)
        first = self._first[:count]
        torch.sub(self._anchor_positions[:count], self._lengths[:count], out=first)
        torch.add(first.unsqueeze(1), self._offsets[:context], out=wanted)
        torch.div(wanted, self._page_size, rounding_mode="floor", out=pages)
        pages.clamp_(max=block_table.shape[1] - 1)  # rows past the context are read from anywhere and masked
        torch.gather(block_table, 1, pages, out=slots)
        slots.mul_(self._page_size).add_(wanted.remainder_(self._page_size))
        torch.index_select(self._cache, 0, slots.view(-1), out=self._gathered[: count * context])


def _context_sizes(session: DraftSession, draft_window: int) -> tuple[int, ...]:
    """Context lengths that a draft may be run with: the session's own buckets, or steps that bound the padding."""
    if session.context_buckets:
        return session.context_buckets
    fine = range(64, min(draft_window, 1024), 64)
    coarse = range(1024, draft_window, 256)
    return (*fine, *coarse, draft_window)


def _slice_size(most: int, buckets: tuple[int, ...]) -> int:
    """Requests drafted at once: `most`, or the largest bucket up to it, so that padding stays inside the buffers."""
    return max((bucket for bucket in buckets if bucket <= most), default=buckets[0] if buckets else most)


def _padded(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`; `size` itself without buckets."""
    for bucket in buckets:
        if bucket >= size:
            return bucket
    return buckets[-1] if buckets else size
