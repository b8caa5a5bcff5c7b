"""Training data: what the target itself said, read strictly, and batches that depend on nothing but seed and
step.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True, frozen=True)
class Sample:
    """One conversation: ids of prompt and response, and where the response begins."""

    ids: tuple[int, ...]
    prompt_length: int


@dataclass(kw_only=True, slots=True)
class DataCounts:
    """What reading did to a file."""

    read: int = 0
    cut: int = 0
    broken: list[str] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.broken = self.broken or []


def read_samples(
    paths: Sequence[Path], max_length: int, strict: bool = False
) -> tuple[list[Sample], DataCounts]:
    """Read regenerated data (`prompt_token_ids`, `response_token_ids` per JSONL line).

    Sequences longer than `max_length` are cut and counted. A line that cannot be read is named in the counts
    and skipped, or raises ValueError if `strict`.
    """
    samples, counts = [], DataCounts()
    for path in paths:
        if not path.exists():
            raise ValueError(f"data: {path} does not exist; make it with `vllm-domino train data`")
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                row = json.loads(line)
                prompt, response = list(row["prompt_token_ids"]), list(row["response_token_ids"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                problem = f"{path}:{number}: {type(error).__name__}: {error}"
                if strict:
                    raise ValueError(f"data: {problem}; mend the line or drop --strict") from error
                counts.broken.append(problem)
                continue
            ids = prompt + response
            counts.cut += len(ids) > max_length
            samples.append(Sample(ids=tuple(ids[:max_length]), prompt_length=min(len(prompt), max_length)))
            counts.read += 1
    if not samples:
        raise ValueError(
            f"data: no sample in {', '.join(map(str, paths))}; make some with `vllm-domino train data`"
        )
    return samples, counts


def count_tokens(paths: Sequence[Path], strict: bool = False) -> tuple[dict[int, int], DataCounts]:
    """How often the target wrote each token: id -> count over all responses, most frequent first.

    Prompts do not count, since a drafter never drafts one; the end of a turn does.

    Raises:
        ValueError: as `read_samples`.
    """
    samples, counts = read_samples(paths, max_length=1 << 62, strict=strict)
    found: Counter[int] = Counter()
    for sample in samples:
        found.update(sample.ids[sample.prompt_length :])
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0]))), counts


def check_samples(
    samples: Sequence[Sample], block_size: int, mask_token_id: int | None, vocab_size: int
) -> None:
    """Refuse data that cannot train this drafter: no long response, the mask in the text, ids the target
    lacks.
    """
    longest = max(len(sample.ids) - sample.prompt_length for sample in samples)
    if longest < block_size:
        raise ValueError(
            f"data: the longest response has {longest} tokens, a block has {block_size}; "
            "use `--set block_size=…` or regenerate with a larger --max-tokens"
        )
    largest = max(max(sample.ids) for sample in samples)
    if largest >= vocab_size:
        raise ValueError(
            f"data: token id {largest} is outside the target's vocabulary of {vocab_size}; "
            "this file was made with another target, regenerate it with `vllm-domino train data`"
        )
    if mask_token_id is not None and any(mask_token_id in sample.ids for sample in samples):
        raise ValueError(
            f"data: mask token id {mask_token_id} occurs in the text, a block cannot tell it from a mask; "
            "pass `--set mask_token=…` with an unused token"
        )


def epoch_groups(lengths: Sequence[int], group: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of one epoch in groups of `group`, samples of like length together, in an order of the seed
    alone.

    The last incomplete group is dropped; other samples fall into it in the next epoch.
    """
    rng = random.Random(f"{seed}-{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    window = group * 32
    groups = []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window], key=lambda index: lengths[index])
        groups += [part[at : at + group] for at in range(0, len(part) - group + 1, group)]
    rng.shuffle(groups)
    return groups


class StepBatches:
    """The sample indices of every optimizer step, known from (seed, step): resuming needs no state.

    A step's group is dealt to micro-batches of `batch_size`; micro-batch m belongs to accumulation m //
    world and process m % world, so that 2 processes and 1 process with twice the accumulation see the same
    micro-batches.
    """

    def __init__(self, samples: Sequence[Sample], batch_size: int, micro_batches: int, seed: int):
        self.lengths = [len(sample.ids) for sample in samples]
        self.batch_size, self.seed = batch_size, seed
        self.group = batch_size * micro_batches
        self.epoch, self.groups = 0, epoch_groups(self.lengths, self.group, seed, 0)
        if not self.groups:
            raise ValueError(
                f"data: {len(samples)} samples do not fill one step of {self.group}; "
                "use a smaller `--set batch_size=…` or more data"
            )
        self.steps_per_epoch = len(self.groups)

    def step(self, step: int) -> tuple[int, list[list[int]]]:
        """Epoch number and micro-batches (lists of sample indices) of an optimizer step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            self.epoch, self.groups = epoch, epoch_groups(self.lengths, self.group, self.seed, epoch)
        group = self.groups[place]
        return epoch, [group[at : at + self.batch_size] for at in range(0, len(group), self.batch_size)]


def pad_batch(samples: Sequence[Sample], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] int64 and loss mask [B, T] bool (True on response tokens), padded at the end."""
    width = max(len(sample.ids) for sample in samples)
    ids = torch.full((len(samples), width), pad)
    mask = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        mask[row, sample.prompt_length : len(sample.ids)] = True
    return ids, mask


def anchor_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """The generator that draws sample `index`'s anchors in an epoch, whatever batch or process it is in."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) * 10_000_019 + index)
