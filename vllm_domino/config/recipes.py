"""Recipes: TOML files that say what to export (`export/*.toml`) and for what device (`engines/*.toml`)."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

Dtype = Literal["float32", "float16", "bfloat16"]
SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# TensorRT builds for these; tensorrt_rtx for all but 9.0 and 10.0.
COMPUTE_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "12.1")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _ascending_sizes(value: tuple[int, ...], least: int) -> tuple[int, ...]:
    if list(value) != sorted(set(value)) or (value and value[0] < least):
        raise ValueError(f"must be ascending sizes from {least}, found {list(value)}")
    return value


class ExportRecipe(_Strict):
    """One draft checkpoint and how its graphs are made.

    checkpoint: folder (relative to the recipe) or Hugging Face id.
    target: the model it drafts for, the same way; only its tokenizer and config are read, for the manifest.
    candidate_pool: tokens that the head scores, those that lead the base logits; 0 is the whole vocabulary.
    scores: graphs also return the probability of every draft token.
    draft_tokens: tokens drafted per block, for servers that verify fewer than a block; 0 is all of them.
    short_blocks: further block sizes below the drafter's own, ascending, each a graph of its own over the same
        weights. A step that is asked for few draft tokens takes the shortest block that gives them, which costs
        in proportion; its drafts differ a little from the whole block's first ones.
    draft_vocab_size: draft only the N most frequent of the target's tokens; 0 is all of them.
    token_frequencies: the file that says which those are (relative to the recipe, see `vocabulary`).
    verify_context: longest context of the check against PyTorch.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    checkpoint: str
    revision: str | None = None
    target: str | None = None
    target_revision: str | None = None
    dtype: Dtype = "float32"
    candidate_pool: int = Field(default=0, ge=0)
    scores: bool = False
    draft_tokens: int = Field(default=0, ge=0)
    short_blocks: tuple[int, ...] = ()
    draft_vocab_size: int = Field(default=0, ge=0)
    token_frequencies: str | None = None
    verify_context: int = Field(default=2048, ge=1)

    @field_validator("short_blocks")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return _ascending_sizes(value, 2)

    @model_validator(mode="after")
    def _vocabulary(self) -> Self:
        if self.draft_vocab_size and self.token_frequencies is None:
            raise ValueError(
                f"missing key 'token_frequencies': draft_vocab_size = {self.draft_vocab_size} needs the file that says "
                "which tokens are frequent; make it with `vllm-domino train frequencies DATA.jsonl --out FILE`"
            )
        if self.token_frequencies is not None and not self.draft_vocab_size:
            raise ValueError(
                "missing key 'draft_vocab_size': token_frequencies alone prunes nothing; say how many tokens to keep, "
                "for example draft_vocab_size = 32768"
            )
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def with_overrides(self, engine: EngineRecipe) -> ExportRecipe:
        """This recipe with what the engine decides: dtype, and the head options that it names."""
        updates: dict[str, Any] = {"dtype": engine.dtype}
        for key in ("candidate_pool", "scores", "draft_tokens", "short_blocks"):
            if getattr(engine, key) is not None:
                updates[key] = getattr(engine, key)
        return self.model_copy(update=updates)

    @property
    def build_name(self) -> str:
        """Folder name of the graphs, unique per checkpoint, dtype and head options."""
        parts = [self.name, SHORT_DTYPES[self.dtype]]
        parts += [f"pool{self.candidate_pool}"] if self.candidate_pool else []
        parts += ["scores"] if self.scores else []
        parts += [f"k{self.draft_tokens}"] if self.draft_tokens else []
        parts += [f"b{size}" for size in self.short_blocks]
        parts += [f"v{self.draft_vocab_size}"] if self.draft_vocab_size else []
        return "-".join(parts)


class EngineRecipe(_Strict):
    """One kind of device.

    compute_capability: of the GPU, "8.9"; only for a GPU backend.
    batch_buckets, context_buckets: sizes that the engine is built (and, on a GPU, captured) for, ascending.
    draft_window: newest context tokens that a draft step reads.
    candidate_pool, scores, draft_tokens, short_blocks: override the export recipe's; None leaves them.
    providers: ONNX Runtime execution providers in order of preference.
    options: passed to the backend's builder or session as they are.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    backend: Literal["tensorrt", "tensorrt_rtx", "onnxruntime"]
    compute_capability: str | None = None
    dtype: Dtype
    draft_window: int = Field(default=2048, ge=1)
    batch_buckets: tuple[int, ...] = ()
    context_buckets: tuple[int, ...] = ()
    candidate_pool: int | None = Field(default=None, ge=0)
    scores: bool | None = None
    draft_tokens: int | None = Field(default=None, ge=0)
    short_blocks: tuple[int, ...] | None = None
    providers: tuple[str, ...] = ()
    options: dict[str, bool | int | float | str] = {}

    @field_validator("batch_buckets", "context_buckets")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return _ascending_sizes(value, 1)

    @field_validator("short_blocks")
    @classmethod
    def _ascending_blocks(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if value is None else _ascending_sizes(value, 2)

    @field_validator("compute_capability")
    @classmethod
    def _known_capability(cls, value: str | None) -> str | None:
        if value is not None and value not in COMPUTE_CAPABILITIES:
            raise ValueError(f"{value!r} is not one of {', '.join(COMPUTE_CAPABILITIES)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        on_gpu = self.backend != "onnxruntime"
        if on_gpu:
            for key in ("compute_capability", "batch_buckets", "context_buckets"):
                if not getattr(self, key):
                    raise ValueError(
                        f"missing key {key!r}: backend {self.backend} builds for one GPU type and fixed "
                        f"shapes"
                    )
            if self.dtype == "float32":
                raise ValueError(
                    "dtype 'float32' has no fused attention on a GPU; use 'float16' or 'bfloat16'"
                )
            if self.providers:
                raise ValueError("providers are for backend 'onnxruntime' only")
        if self.context_buckets and self.context_buckets[-1] != self.draft_window:
            raise ValueError(
                f"context_buckets end at {self.context_buckets[-1]}, draft_window is {self.draft_window}; "
                "the last bucket must be the window"
            )
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


Recipe = TypeVar("Recipe", ExportRecipe, EngineRecipe)


def load_export_recipe(path: str | Path) -> ExportRecipe:
    """Read `export/NAME.toml`; paths in it are taken from the recipe's own folder.

    Raises:
        ValueError: no such file, not TOML, or a key that is unknown, missing or has a value that cannot be.
    """
    path = Path(path)
    recipe = _load(path, ExportRecipe)
    updates = {
        key: str((path.parent / value).resolve())
        for key in ("checkpoint", "target")
        if (value := getattr(recipe, key)) is not None
        and (value.startswith(".") or (path.parent / value).is_dir())
    }
    if recipe.token_frequencies is not None:
        updates["token_frequencies"] = str((path.parent / recipe.token_frequencies).resolve())
    return recipe.model_copy(update=updates)


def load_engine_recipe(path: str | Path) -> EngineRecipe:
    """Read `engines/NAME.toml`.

    Raises:
        ValueError: as `load_export_recipe`.
    """
    return _load(Path(path), EngineRecipe)


def _load(path: Path, model: type[Recipe]) -> Recipe:
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        near = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = f"; there are {', '.join(near)}" if near else ""
        raise ValueError(f"recipe {path}: cannot be read ({error.strerror}){hint}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path}: not valid TOML ({error})") from error
    raw.setdefault("name", path.stem)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        problems = [_explain(problem, model, raw) for problem in error.errors()]
        raise ValueError(f"recipe {path}: {'; '.join(problems)}") from error


def _explain(problem: Any, model: type[BaseModel], raw: dict[str, Any]) -> str:
    """One validation problem in a user's words, with the nearest known key where a key is wrong."""
    location = ".".join(str(part) for part in problem["loc"])
    known = list(model.model_fields)
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(location, known, n=1, cutoff=0.5)
        return f"unknown key {location!r}; " + (
            f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        )
    if problem["type"] == "missing":
        near = difflib.get_close_matches(location, [k for k in raw if k not in known], n=1, cutoff=0.5)
        return f"missing key {location!r}" + (f" (found {near[0]!r}, the nearest)" if near else "")
    message = problem["msg"].removeprefix("Value error, ")
    return (
        f"{location}: {message} (found {problem['input']!r})"
        if location and "found" not in message
        else message
    )
