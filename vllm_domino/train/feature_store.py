"""The frozen target's features on disk: what one epoch has computed, later ones and other drafters of the target read.

A store is a folder named by everything that its features depend on, so that two trainings share it just if they may.
It is filled the first time a sample is met. Processes of one host may fill it together: they write rows of the same
meaning, and a sample counts as done after its rows are on the disk.

The target rounds differently in another batch (there, up to a tenth of the tiny pair's bf16 features differ).
A sample keeps the features of the batch in which it was first met; until the next epoch, and wherever that batch comes
again, the loss is bit for bit the one without a store.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import weakref
from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from vllm_domino.config.checkpoint import resolve_checkpoint
from vllm_domino.files import sha256_file
from vllm_domino.train.data import Sample
from vllm_domino.train.target_features import FrozenTarget


class FeatureStore:
    """Features of one target's layers for one list of samples.

    Files: `identity.json`, `features` (all samples' rows one after the other) and `done` (one byte per sample). They
    are read and written by system calls and not through a memory map, where a full disk would kill the process.

    Args:
        root: directory of stores; this one is the sub-folder `self.path`.
        autocast: run the target under bf16 autocast. Features are then kept in bf16, which loses nothing: the first
            thing that a drafter does with them is a linear layer, for which autocast casts them so. Otherwise fp32.

    Raises:
        ValueError: the disk has too little room for all samples, or the target's weights cannot be identified.
    """

    def __init__(self, root: Path, target: FrozenTarget, samples: Sequence[Sample], autocast: bool):
        self.target, self.autocast = target, autocast
        self.dtype = torch.bfloat16 if autocast else torch.float32
        self.width = len(target.layer_ids) * target.embedding.shape[1]
        self.lengths = [len(sample.ids) for sample in samples]
        self.starts = [0, *accumulate(self.lengths)]
        identity = self._identity(samples)
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self.path = root / name
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "identity.json").write_text(json.dumps(identity, indent=2) + "\n")
        self._rows, self._done = self._open()
        for descriptor in (self._rows, self._done):
            weakref.finalize(self, os.close, descriptor)

    def _identity(self, samples: Sequence[Sample]) -> dict:
        texts = hashlib.sha256()
        for sample in samples:
            texts.update(array("q", [len(sample.ids), *sample.ids]).tobytes())
        return {
            "target_sha256": target_digest(self.target.source),
            "layer_ids": list(self.target.layer_ids),
            "samples_sha256": texts.hexdigest(),
            "target_dtype": str(self.target.dtype),
            "dtype": str(self.dtype),
        }

    def _open(self) -> tuple[int, int]:
        """File descriptors of `features`, sparse and of full size, and `done`."""
        size = self.starts[-1] * self._row_bytes
        rows = os.open(self.path / "features", os.O_RDWR | os.O_CREAT, 0o644)
        found = os.fstat(rows)
        needed, free = size - found.st_blocks * 512, shutil.disk_usage(self.path).free
        if needed > free:
            raise ValueError(
                f"{self.path}: {free / 1e9:.1f} GB free on this disk, the target's features need {needed / 1e9:.1f} GB "
                "more; free some, point --features to another disk, or drop --features"
            )
        done = os.open(self.path / "done", os.O_RDWR | os.O_CREAT, 0o644)
        if found.st_size != size:  # new, or someone removed the rows: nothing is done
            os.ftruncate(done, 0)
        os.ftruncate(done, len(self.lengths))
        os.ftruncate(rows, size)
        return rows, done

    @property
    def _row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def features(self, indices: Sequence[int], token_ids: Tensor) -> Tensor:
        """Features of a batch; samples without any run through the target, all in one batch.

        Args:
            indices: [B], which samples. token_ids: [B, T] int64, their ids padded at the end.

        Returns:
            [B, T, F*H] in the store's dtype, on the ids' device, 0 on padding (which no loss depends on).

        Raises:
            ValueError: the disk is full.
        """
        missing = [row for row, index in enumerate(indices) if os.pread(self._done, 1, index) != b"\1"]
        if missing:
            self._fill([indices[row] for row in missing], token_ids[missing])
        out = torch.zeros(*token_ids.shape, self.width, dtype=self.dtype)
        for row, index in enumerate(indices):
            self._read(index, out[row, : self.lengths[index]])
        return out.to(token_ids.device)

    def _fill(self, indices: list[int], token_ids: Tensor) -> None:
        longest = max(self.lengths[index] for index in indices)
        features = self.target.features(token_ids[:, :longest], self.autocast).to("cpu", self.dtype)
        try:
            for index, rows in zip(indices, features, strict=True):
                content, written = _bytes(rows[: self.lengths[index]]), 0
                while written < len(content):
                    place = self.starts[index] * self._row_bytes + written
                    written += os.pwrite(self._rows, content[written:], place)
            # a machine that loses power must not find samples done without their rows
            os.fdatasync(self._rows)
            for index in indices:
                os.pwrite(self._done, b"\1", index)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(
                f"{self.path}: the disk is full; free some and go on with --resume, or drop --features"
            ) from error

    def _read(self, index: int, out: Tensor) -> None:
        content, have = _bytes(out), 0
        while have < len(content):
            place = self.starts[index] * self._row_bytes + have
            got = os.preadv(self._rows, [content[have:]], place)
            if not got:
                raise ValueError(f"{self.path}: features is cut short; remove this folder and run again")
            have += got


def batch_features(
    target: FrozenTarget,
    store: FeatureStore | None,
    indices: Sequence[int],
    token_ids: Tensor,
    autocast: bool,
) -> Tensor:
    """Features [B, T, F*H] of these samples (ids [B, T] int64), through the store if there is one."""
    return target.features(token_ids, autocast) if store is None else store.features(indices, token_ids)


def target_digest(source: str) -> str:
    """SHA-256 over config and weights of a target, a directory or a Hugging Face id.

    Raises:
        ValueError: no safetensors to tell it by.
    """
    folder = resolve_checkpoint(source)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(
            f"{source}: no *.safetensors, so its features cannot be told from another target's; "
            "convert it, or drop --features"
        )
    digest = hashlib.sha256()
    for file in [folder / "config.json", *weights]:
        digest.update(f"{file.name}\0{sha256_file(file)}\0".encode())
    return digest.hexdigest()


def _bytes(rows: Tensor) -> memoryview:
    """The memory of contiguous rows. numpy has no bf16, so they are seen as bytes."""
    return rows.contiguous().view(torch.uint8).numpy().reshape(-1).data
