"""`export.json`: what an export folder holds, where it is from, and what the check against PyTorch found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_domino.config.checkpoint import DraftCheckpoint
from vllm_domino.config.draft import DraftConfig
from vllm_domino.config.recipes import Dtype
from vllm_domino.export.contract import GraphSpec, TensorSpec
from vllm_domino.files import sha256_file
from vllm_domino.model.drafter import HeadOptions

EXPORT_FILE = "export.json"
EXPORT_SCHEMA = 1
VOCAB_FILE = (
    "vocab.safetensors"  # only for a reduced draft vocabulary: vocab_ids, and lm_head where it has its own
)


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(Record):
    """One file of a directory."""

    sha256: str
    num_bytes: int

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        return cls(sha256=sha256_file(path), num_bytes=path.stat().st_size)


class TensorEntry(Record):
    """One graph input or output; names in `shape` are dynamic axes."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


class GraphEntry(Record):
    """One graph: the file that a backend loads, and its tensors in order."""

    file: str
    inputs: tuple[TensorEntry, ...]
    outputs: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, spec: GraphSpec, file: str, dtype: str) -> GraphEntry:
        def entries(specs: tuple[TensorSpec, ...]) -> tuple[TensorEntry, ...]:
            return tuple(
                TensorEntry(name=s.name, shape=s.shape, dtype=dtype if s.dtype == "float" else s.dtype)
                for s in specs
            )

        return cls(file=file, inputs=entries(spec.inputs), outputs=entries(spec.outputs))


class HeadEntry(Record):
    """`HeadOptions` on disk, and which part of the target's vocabulary is drafted.

    draft_vocab_size: tokens that base logits and head cover; None is all of them.
    token_frequencies: SHA-256 of the file that they were chosen by; None where the checkpoint itself (`d2t`) says.
    """

    candidate_pool: int | None = None
    scores: bool = False
    draft_tokens: int | None = None
    draft_vocab_size: int | None = None
    token_frequencies: str | None = None

    @classmethod
    def of(cls, options: HeadOptions, checkpoint: DraftCheckpoint) -> HeadEntry:
        return cls(
            **dataclasses.asdict(options),
            draft_vocab_size=checkpoint.config.draft_vocab_size,
            token_frequencies=checkpoint.token_frequencies,
        )

    def options(self) -> HeadOptions:
        return HeadOptions(**self.model_dump(exclude={"draft_vocab_size", "token_frequencies"}))


class Verification(Record):
    """Graphs against the PyTorch reference on random target tables and contexts, in fp32 arithmetic.

    ties: drafts that differ where the reference's two logits are equal within rounding; anything else fails
        the export.
    context_max_error: largest difference of a context row, relative to the largest value.
    dtype_agreement: share of drafts that the reference keeps when it computes in the graphs' own dtype.
    """

    batch_sizes: tuple[int, ...]
    context_lengths: tuple[int, ...]
    drafts: int
    equal: int
    ties: int
    context_max_error: float
    dtype_agreement: float


class ExportReport(Record):
    """See the module."""

    schema_version: Literal[1] = 1
    source: str
    revision: str | None
    fingerprint: str
    draft: dict[str, Any]
    head: HeadEntry
    dtype: Dtype
    form: Literal["plain", "fused"]
    opset: int
    weight_bytes: int
    graphs: dict[str, GraphEntry]
    files: dict[str, FileEntry]
    verification: Verification | None
    versions: dict[str, str]
    seconds: float

    @property
    def config(self) -> DraftConfig:
        return DraftConfig.from_dict(self.draft)


def load_export(folder: Path, command: str = "vllm-domino export RECIPE") -> ExportReport:
    """Read an export folder and check every file's digest.

    Raises:
        ValueError: no export, written by another version, or a file that is missing or changed.
    """
    path = folder / EXPORT_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: no {EXPORT_FILE}, so no finished export; run `{command}`")
    try:
        raw = json.loads(path.read_text())
        if raw.get("schema_version") != EXPORT_SCHEMA:
            raise ValueError(
                f"{path}: schema version {raw.get('schema_version')}, this version reads {EXPORT_SCHEMA}; "
                f"run `{command}` again"
            )
        report = ExportReport.model_validate(raw)
    except (json.JSONDecodeError, ValidationError, AttributeError) as error:
        raise ValueError(f"{path}: not a readable export record; run `{command}` again ({error})") from error
    check_files(folder, report.files, command)
    return report


def check_files(folder: Path, files: dict[str, FileEntry], command: str) -> None:
    """Compare sizes first (cheap, catches truncation), then digests.

    Raises:
        ValueError: a file is missing, has another size, or a byte of it changed.
    """
    for name, entry in files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise ValueError(
                f"{folder}: file {name} is missing; copy the whole directory again or run `{command}`"
            )
        size = path.stat().st_size
        if size != entry.num_bytes:
            raise ValueError(
                f"{path}: {size} bytes, the record says {entry.num_bytes}; copy the directory again or run "
                f"`{command}`"
            )
    for name, entry in files.items():
        digest = sha256_file(folder / name)
        if digest != entry.sha256:
            raise ValueError(
                f"{folder / name}: SHA-256 {digest[:16]}…, the record says {entry.sha256[:16]}…: the file "
                f"was changed; "
                f"copy the directory again or run `{command}`"
            )
