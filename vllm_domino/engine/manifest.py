"""`engine.json`: what decides whether an engine directory can serve, written by the build (DESIGN C3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from vllm_domino.config.draft import DraftConfig
from vllm_domino.config.recipes import Dtype
from vllm_domino.export.report import FileEntry, GraphEntry, HeadEntry, Record, Verification

MANIFEST_FILE = "engine.json"
MANIFEST_SCHEMA = 1
DEFAULT_WINDOW = 2048


class TargetFacts(Record):
    """The model that the drafter was trained for. None: not known at build time, so not compared."""

    source: str | None = None
    hidden_size: int
    vocab_size: int
    num_layers: int | None = None
    layer_ids: tuple[int, ...]
    tokenizer_sha256: str | None = None


class EngineManifest(Record):
    """One engine directory.

    compute_capability: "8.9"; None for a CPU.
    profiles: per graph, the shape profiles of its plan (input -> smallest, usual and largest shape); GPU
        plans only.
    plans: per graph, what its build cost (seconds, peak memory, bytes, layers); GPU plans only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    name: str
    export_recipe: str
    engine_recipe: str
    source: str
    revision: str | None
    fingerprint: str
    draft: dict[str, Any]
    target: TargetFacts
    backend: Literal["tensorrt", "tensorrt_rtx", "onnxruntime"]
    backend_version: str
    dtype: Dtype
    compute_capability: str | None
    providers: tuple[str, ...] = ()
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    head: HeadEntry
    block_size: int
    draft_window: int
    batch_buckets: tuple[int, ...]
    context_buckets: tuple[int, ...]
    graphs: dict[str, GraphEntry]
    profiles: dict[str, list[dict[str, list[list[int]]]]] = Field(default_factory=dict)
    plans: dict[str, dict[str, int | float]] = Field(default_factory=dict)
    weight_bytes: int
    files: dict[str, FileEntry]
    verification: Verification | None
    versions: dict[str, str]
    built_by: str
    built_at: str
    build_seconds: float

    @property
    def config(self) -> DraftConfig:
        return DraftConfig.from_dict(self.draft)

    @property
    def build_command(self) -> str:
        return build_command(self.export_recipe, self.engine_recipe)


def build_command(export_recipe: str = "RECIPE", engine_recipe: str = "DEVICE") -> str:
    """What a user types to build an engine."""
    return f"vllm-domino build export/{export_recipe}.toml engines/{engine_recipe}.toml"


def is_engine_dir(folder: Path) -> bool:
    """Whether a directory claims to be an engine."""
    return (folder / MANIFEST_FILE).is_file()


def read_manifest(folder: Path) -> EngineManifest:
    """The manifest alone, without looking at the other files.

    Raises:
        ValueError: missing, not JSON, of an unknown schema version, or with fields that do not fit it.
    """
    path = folder / MANIFEST_FILE
    if not folder.is_dir():
        raise ValueError(f"engine {folder}: no such directory; build it with `{build_command()}`")
    if not path.is_file():
        found = sorted(p.name for p in folder.iterdir())[:4]
        raise ValueError(
            f"engine {folder}: no {MANIFEST_FILE} in it (found {', '.join(found) or 'an empty directory'}); "
            f"build it with `{build_command()}`"
        )
    try:
        raw = json.loads(path.read_text())
        version = raw.get("schema_version")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ValueError(
            f"engine {path}: not valid JSON ({error}); build it again with `{build_command()}`"
        ) from error
    command = build_command(raw.get("export_recipe", "RECIPE"), raw.get("engine_recipe", "DEVICE"))
    if version != MANIFEST_SCHEMA:
        raise ValueError(
            f"engine {path}: manifest version {version!r}, this version reads {MANIFEST_SCHEMA}; "
            f"build it again with `{command}`, or install the vllm-domino that built it"
        )
    try:
        return EngineManifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"engine {path}: field {where}: {first['msg']}; build it again with `{command}`"
        ) from error
