"""The target's embedding and LM head as a session reads them: by reference wherever that is possible."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from vllm_domino.config.draft import DraftConfig

logger = logging.getLogger(__name__)


def target_tables(
    config: DraftConfig,
    embedding: Tensor,
    lm_head: Tensor,
    dtype: torch.dtype,
    *,
    vocab_ids: Tensor | None = None,
    own_lm_head: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Check the target's tables, and copy where there is no way around it (once, said in the log).

    Args:
        embedding: [V, H] or more rows (vLLM pads the vocabulary); lm_head: the same.
        dtype: what the session reads.
        vocab_ids: [V_head] int64, target id of every head row of a reduced vocabulary.
        own_lm_head: [V_head, H], the rows that a checkpoint with a reduced vocabulary ships; None takes the
            target's.

    Returns:
        embedding [V, H] and LM head [V_head, H], contiguous, in `dtype`.

    Raises:
        ValueError: a table has the wrong hidden size or too few rows.
    """
    for name, table in (("embedding", embedding), ("LM head", lm_head)):
        if table.dim() != 2 or table.shape[1] != config.hidden_size or table.shape[0] < config.vocab_size:
            raise ValueError(
                f"the target's {name} is {list(table.shape)}, the drafter needs "
                f"[{config.vocab_size}, {config.hidden_size}]; this drafter was trained for another target"
            )
    embedding, lm_head = embedding.detach()[: config.vocab_size], lm_head.detach()[: config.vocab_size]
    is_tied = embedding.data_ptr() == lm_head.data_ptr()
    embedding = _readable("embedding", embedding, dtype)
    if config.draft_vocab_size is None:
        return embedding, embedding if is_tied else _readable("LM head", lm_head, dtype)
    if own_lm_head is None:
        assert vocab_ids is not None, "a reduced vocabulary comes with its ids"
        own_lm_head = lm_head[vocab_ids.to(lm_head.device)]
    own_lm_head = own_lm_head.to(device=lm_head.device, dtype=dtype).contiguous()
    logger.info(
        "reduced draft vocabulary: %d LM head rows take %.0f MB",
        own_lm_head.shape[0],
        own_lm_head.nbytes / 1e6,
    )
    return embedding, own_lm_head


def _readable(name: str, table: Tensor, dtype: torch.dtype) -> Tensor:
    if table.dtype == dtype and table.is_contiguous():
        return table
    logger.warning(
        "the target's %s is %s, this engine reads %s: a copy takes %.0f MB",
        name,
        table.dtype,
        dtype,
        table.numel() * dtype.itemsize / 1e6,
    )
    return table.to(dtype).contiguous()
