"""Draft checkpoints: every public safetensors layout, read strictly, and the public layout written back."""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_domino.config.draft import DraftConfig

_PREFIXES = ("model.", "logit_head.")
# Copies of the frozen target that the speculators format ships beside the drafter; the target's own are used.
_TARGET_COPIES = ("t2d", "embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_MADV_PAGEOUT = 21  # linux/mman.h


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCheckpoint:
    """A drafter read into memory.

    weights: public name -> tensor, as stored.
    vocab_ids: [V_head] int64, target id of every head row; None for the full vocabulary.
    lm_head: [V_head, H], only where a reduced vocabulary ships its own rows.
    fingerprint: SHA-256 over config.json and every weight file; the same bytes give the same value anywhere.
    token_frequencies: SHA-256 of the file that a pruned vocabulary was chosen by (see `vocabulary`).
    """

    source: str
    revision: str | None
    config: DraftConfig
    weights: dict[str, Tensor]
    fingerprint: str
    vocab_ids: Tensor | None = None
    lm_head: Tensor | None = None
    token_frequencies: str | None = None
    raw_config: dict = field(default_factory=dict, repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the drafter's own weights."""
        return sum(t.numel() * t.element_size() for t in self.weights.values())

    def page_out(self) -> None:
        """Give the weights' memory back to the system. They are mapped from the files, and come back when read."""
        if sys.platform != "linux":
            return
        libc = ctypes.CDLL(None)
        for tensor in self.weights.values():
            start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            length = tensor.data_ptr() + tensor.nbytes - start
            # a hint: it never changes what the memory holds, and whether it is followed does not matter
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_PAGEOUT)


def resolve_checkpoint(source: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint: a path as it is, a Hugging Face id downloaded (safetensors and JSON only).

    Raises:
        ValueError: neither a folder nor a repository that can be reached.
    """
    if Path(source).is_dir():
        return Path(source)
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise ValueError(f"checkpoint {source!r}: no such folder, and not a Hugging Face id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub raises many unrelated types; each means the same to the user
        raise ValueError(
            f"checkpoint {source!r} (revision {revision or 'main'}) cannot be downloaded: {error}"
        ) from error


def read_config(folder: Path) -> tuple[DraftConfig, dict]:
    """`config.json` of a folder, parsed and raw.

    Raises:
        ValueError: missing, not JSON, or not a drafter's.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder}: no config.json; a draft checkpoint is a folder with config.json and *.safetensors"
        )
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    return DraftConfig.from_dict(raw), raw


def read_checkpoint(source: str | Path, revision: str | None = None) -> DraftCheckpoint:
    """Read a drafter of any public layout. Only safetensors is opened; nothing is unpickled.

    Raises:
        ValueError: no such checkpoint, a broken file, two names for one tensor, or a vocabulary map that is
            missing or points outside the target's vocabulary.
    """
    folder = resolve_checkpoint(str(source), revision)
    config, raw = read_config(folder)
    files = _weight_files(folder)
    weights: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in _read_file(path):
            public = _public_name(name)
            if public in weights:
                raise ValueError(f"{path}: tensor {name} appears twice (as {public})")
            weights[public] = tensor
    for name in _TARGET_COPIES:
        weights.pop(name, None)
    vocab_ids, lm_head = _reduced_vocabulary(config, weights, folder)
    return DraftCheckpoint(
        source=str(source),
        revision=revision,
        config=config,
        weights=weights,
        fingerprint=_fingerprint([folder / "config.json", *files]),
        vocab_ids=vocab_ids,
        lm_head=lm_head,
        raw_config=raw,
    )


def write_checkpoint(
    folder: Path, config: DraftConfig, weights: dict[str, Tensor], shard_bytes: int = 4 << 20
) -> None:
    """Write the public layout: `config.json` and safetensors, sharded above `shard_bytes` with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().contiguous().cpu()
        size += nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
    else:
        where: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            where |= dict.fromkeys(shard, file)
        total = sum(t.numel() * t.element_size() for t in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "dtype": dtype}, indent=2) + "\n")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise ValueError(
                f"{folder}: weight file {missing[0]} of the index is missing; download the checkpoint again"
            )
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
        hint = f" ({others[0]} is a pickle, which is never read; convert it to safetensors)" if others else ""
        raise ValueError(f"{folder}: no *.safetensors file{hint}")
    return files


def _read_file(path: Path) -> list[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as handle:
            return [(name, handle.get_tensor(name)) for name in handle.keys()]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: not a readable safetensors file ({error}); download the checkpoint again"
        ) from error


def _public_name(name: str) -> str:
    changed = True
    while changed:
        changed = False
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name, changed = name.removeprefix(prefix), True
    return name


def _reduced_vocabulary(
    config: DraftConfig, weights: dict[str, Tensor], folder: Path
) -> tuple[Tensor | None, Tensor | None]:
    """Take `d2t` (offset of every draft id to its target id) and the reduced LM head out of the weights."""
    offsets, lm_head = weights.pop("d2t", None), weights.pop("lm_head.weight", None)
    if config.draft_vocab_size is None:
        return None, None
    if offsets is None or offsets.shape != (config.draft_vocab_size,):
        found = "missing" if offsets is None else f"of shape {list(offsets.shape)}"
        raise ValueError(
            f"{folder}: draft_vocab_size {config.draft_vocab_size} needs a tensor d2t of that length; it "
            f"is {found}"
        )
    ids = torch.arange(config.draft_vocab_size) + offsets.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(
            f"{folder}: d2t maps to ids {int(ids.min())}…{int(ids.max())}, outside the vocabulary of "
            f"{config.vocab_size}"
        )
    return ids, lm_head


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()
