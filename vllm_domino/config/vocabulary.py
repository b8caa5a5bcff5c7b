"""A pruned draft vocabulary: base logits and head over the N most frequent of the target's tokens (FR-Spec).

Which tokens are frequent is counted on text that the target wrote (`vllm-domino train frequencies`). The file is JSON:
an object from token id to count, or a list of counts by token id.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_domino.config.checkpoint import DraftCheckpoint, read_checkpoint
from vllm_domino.config.recipes import ExportRecipe
from vllm_domino.files import sha256_file

_CODEBOOK = "embed_proj.2.weight"  # [V, R], the head's rows; a checkpoint without a head has none
_MAKE = "make it with `vllm-domino train frequencies DATA.jsonl --out FILE`"


def read_recipe_checkpoint(recipe: ExportRecipe) -> DraftCheckpoint:
    """The recipe's checkpoint, pruned to its draft vocabulary where it names one.

    Raises:
        ValueError: as `read_checkpoint`, `read_frequencies`, `most_frequent` and `prune`.
    """
    checkpoint = read_checkpoint(recipe.checkpoint, recipe.revision)
    if not recipe.draft_vocab_size:
        return checkpoint
    assert recipe.token_frequencies is not None, "ExportRecipe wants both or neither"
    path = Path(recipe.token_frequencies)
    config = checkpoint.config
    counts = read_frequencies(path, config.vocab_size)
    counts[config.mask_token_id] = 0  # it stands for a token that is not known yet, and is never one
    ids = most_frequent(counts, recipe.draft_vocab_size, str(path))
    return dataclasses.replace(prune(checkpoint, ids), token_frequencies=sha256_file(path))


def read_frequencies(path: Path, vocab_size: int) -> Tensor:
    """Counts by token id, [V] int64; a token that the file does not name counts zero.

    Raises:
        ValueError: missing, not JSON, or with an id or a count that cannot be.
    """
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"token_frequencies {path}: cannot be read ({error.strerror}); {_MAKE}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"token_frequencies {path}: not valid JSON ({error}); {_MAKE}") from error
    if not isinstance(raw, dict | list):
        raise ValueError(
            f"token_frequencies {path}: found {type(raw).__name__}; it must be an object from token id to count, or a "
            f"list of counts; {_MAKE}"
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for key, count in raw.items() if isinstance(raw, dict) else enumerate(raw):
        index = _token_id(key)
        if not 0 <= index < vocab_size:
            raise ValueError(
                f"token_frequencies {path}: token id {key!r}; ids of this target are 0 to {vocab_size - 1}: count "
                "text of the target that the drafter was trained for"
            )
        if type(count) is not int or count < 0:
            raise ValueError(
                f"token_frequencies {path}: token {key} has count {count!r}; a count is an integer from 0"
            )
        counts[index] = count
    return counts


def most_frequent(counts: Tensor, size: int, where: str = "token_frequencies") -> Tensor:
    """Ids [size] of the most frequent tokens, ascending; of equal counts the smaller id goes in.

    Raises:
        ValueError: not below the vocabulary, or more than were seen at all.
    """
    seen = int((counts > 0).sum())
    if size >= counts.numel():
        raise ValueError(
            f"draft_vocab_size is {size}, the target has {counts.numel()} tokens; set a smaller one, or leave "
            "draft_vocab_size and token_frequencies out for the whole vocabulary"
        )
    if size > seen:
        raise ValueError(
            f"draft_vocab_size is {size}, {where} counts {seen} different tokens; set draft_vocab_size = {seen} or "
            "less, or count more text"
        )
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def prune(checkpoint: DraftCheckpoint, ids: Tensor) -> DraftCheckpoint:
    """The same drafter over the target's tokens `ids` ([N] int64, ascending): the head's other rows are gone.

    Raises:
        ValueError: a checkpoint that has a reduced vocabulary of its own.
    """
    config = checkpoint.config
    if config.draft_vocab_size is not None:
        raise ValueError(
            f"checkpoint {checkpoint.source}: it was trained with a draft vocabulary of {config.draft_vocab_size}; "
            "leave draft_vocab_size and token_frequencies out of the export recipe"
        )
    changes: dict[str, Any] = {
        "config": dataclasses.replace(config, draft_vocab_size=len(ids)),
        "vocab_ids": ids,
    }
    if _CODEBOOK in checkpoint.weights:
        changes["weights"] = checkpoint.weights | {_CODEBOOK: checkpoint.weights[_CODEBOOK][ids]}
    return dataclasses.replace(checkpoint, **changes)


def _token_id(key: Any) -> int:
    try:
        return int(key)
    except ValueError:
        return -1
