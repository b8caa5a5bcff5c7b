"""Benchmark suites: TOML files that say what is served, with which drafters, on which prompts and at what load."""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

BASELINE = "none"  # the variant that every speedup is measured against
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(_Strict):
    """What every variant serves alike.

    model: folder (relative to the suite) or Hugging Face id; revision: of the latter.
    args: further arguments of `vllm serve`, as typed. env: variables of its process.
    port: wished for; a free one is taken where it is occupied. ready_seconds: longest start.
    """

    model: str
    revision: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    port: int | None = Field(default=None, ge=1, le=65535)
    ready_seconds: float = Field(default=900, gt=0)


class DataSettings(_Strict):
    """One set of prompts.

    source: a name of `vllm_domino.bench.datasets.KNOWN`, or a JSONL file (relative to the suite). A line is an OpenAI
        request (`messages`, `tools`, `max_tokens`), or has `prompt` or `question`; `answer` is optional.
    prompts: how many are sent, one number or one per concurrency; fewer where the set has fewer.
    instruction: put after every question; None takes what the known set is usually asked with.
    max_tokens: longest answer, where a request does not say its own.
    thinking: whether the chat template opens a thinking block; public Domino drafters were trained without.
    grade: "gsm8k" or "boxed" compares the final number with `answer`; None takes what the known set has.
    """

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    source: str
    prompts: int | tuple[int, ...] = 128
    instruction: str | None = None
    max_tokens: int = Field(default=2048, ge=1)
    thinking: bool = False
    grade: Literal["gsm8k", "boxed"] | None = None

    @field_validator("prompts")
    @classmethod
    def _some(cls, value: int | tuple[int, ...]) -> int | tuple[int, ...]:
        counts = (value,) if isinstance(value, int) else value
        if not counts or min(counts) < 1:
            raise ValueError(f"a cell needs at least 1 prompt, found {value}")
        return value

    @property
    def label(self) -> str:
        """Name in results: the given one, or the source's."""
        return self.name or Path(self.source).stem


class VariantSettings(_Strict):
    """One way of serving.

    speculative: vLLM's `--speculative-config`; `model` in it is a folder (relative to the suite) or an id.
    build: export recipe and engine recipe (relative to the suite) of an engine that this variant serves; named in the
        message when it is not there, built by `--build`, hashed into the results.
    args, env: on top of the server's.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    speculative: dict[str, Any] | None = None
    build: tuple[str, str] | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.name == BASELINE and self.speculative is not None:
            raise ValueError(
                f"variant {BASELINE!r} is the plain server, which speedups refer to; it takes no 'speculative'"
            )
        if self.name != BASELINE and self.speculative is None:
            raise ValueError(
                f"variant {self.name!r}: missing key 'speculative' (only {BASELINE!r} is served without)"
            )
        if self.build is not None and (self.speculative or {}).get("model") is None:
            raise ValueError(
                f"variant {self.name!r}: 'build' needs 'speculative.model', the folder that it builds"
            )
        return self

    @property
    def drafter(self) -> str | None:
        """What `speculative` points at; None for drafters without weights."""
        return (self.speculative or {}).get("model")


class Suite(_Strict):
    """One benchmark.

    needs: what a machine must have, in words; shown before anything starts.
    device: engine recipe's name, put in the place of `{device}` in variants; `--device` overrides it.
    concurrency: the ladder, ascending. temperature: one or several; greedy outputs are compared with the baseline's.
    repeats: fresh servers per variant; the order of variants rotates from one to the next.
    seed: of every request at temperature above 0. warmup: prompts sent before each cell, not counted.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    needs: str = ""
    device: str | None = None
    concurrency: tuple[int, ...] = Field(min_length=1)
    temperature: tuple[float, ...] = (0.0,)
    repeats: int = Field(default=3, ge=1)
    seed: int = 0
    warmup: int = Field(default=4, ge=0)
    server: ServerSettings
    data: tuple[DataSettings, ...] = Field(min_length=1)
    variant: tuple[VariantSettings, ...] = Field(min_length=1)

    @field_validator("concurrency")
    @classmethod
    def _ladder(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)) or value[0] < 1:
            raise ValueError(f"must be ascending numbers from 1, found {list(value)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what, names in (
            ("variant", [v.name for v in self.variant]),
            ("data", [d.label for d in self.data]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what} name {twice[0]!r} is there twice; every {what} needs its own")
        for data in self.data:
            if not isinstance(data.prompts, int) and len(data.prompts) != len(self.concurrency):
                raise ValueError(
                    f"data {data.label!r}: prompts has {len(data.prompts)} numbers, concurrency has "
                    f"{len(self.concurrency)}; give one number, or one for each"
                )
        return self

    def prompts_at(self, data: DataSettings, concurrency: int) -> int:
        """How many prompts a cell of this concurrency sends."""
        if isinstance(data.prompts, int):
            return data.prompts
        return data.prompts[self.concurrency.index(concurrency)]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what decides a cell's figures; `repeats` is left out, so that more can be added later."""
        return hashlib.sha256(self.model_dump_json(exclude={"repeats", "needs"}).encode()).hexdigest()


def load_suite(path: str | Path, device: str | None = None) -> Suite:
    """Read a suite; `device` takes the place of its own.

    Raises:
        ValueError: no such file, not TOML, or a key that is unknown, missing or has a value that cannot be.
    """
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        near = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = f"; there are {', '.join(near)}" if near else ""
        raise ValueError(f"suite {path}: cannot be read ({error.strerror}){hint}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"suite {path}: not valid TOML ({error})") from error
    raw.setdefault("name", path.stem)
    for key in ("temperature", "concurrency"):
        if isinstance(raw.get(key), int | float):
            raw[key] = [raw[key]]
    if device is not None:
        raw["device"] = device
    if isinstance(raw.get("device"), str):
        raw["variant"] = _filled(raw.get("variant"), raw["device"])
    try:
        return Suite.model_validate(raw)
    except ValidationError as error:
        raise ValueError(
            f"suite {path}: {'; '.join(_explain(problem) for problem in error.errors())}"
        ) from error


def _filled(value: Any, device: str) -> Any:
    """`{device}` replaced in every string of a piece of TOML."""
    if isinstance(value, str):
        return value.replace("{device}", device)
    if isinstance(value, list):
        return [_filled(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _filled(item, device) for key, item in value.items()}
    return value


def resolve_path(value: str, folder: Path) -> str:
    """A folder or file of the suite as an absolute path; a Hugging Face id as it is."""
    if value.startswith((".", "/", "~")) or (folder / value).exists():
        return str((folder / Path(value).expanduser()).resolve())
    return value


def require_model(where: str, value: str, folder: Path, mend: str) -> str:
    """The resolved model.

    Raises:
        ValueError: a path that is not there or has no config.json, or neither a path nor a Hugging Face id.
    """
    found = resolve_path(value, folder)
    if Path(found).is_absolute():
        if not (Path(found) / "config.json").is_file():
            what = "no such folder" if not Path(found).is_dir() else "no config.json in it"
            raise ValueError(f"{where}: {value} ({what}, looked in {found}); {mend}")
    elif not _HUB_ID.match(found):
        raise ValueError(f"{where}: {value!r} is neither a folder nor an id like Qwen/Qwen3-8B; {mend}")
    return found


def _explain(problem: Any) -> str:
    """One validation problem in a user's words, with the nearest known key where a key is wrong."""
    parts = [part for part in problem["loc"] if part not in ("int", "tuple[int, ...]")]
    location = ".".join(str(part) for part in parts)
    if problem["type"] == "extra_forbidden":
        tables: dict[str, type[_Strict]] = {
            "server": ServerSettings,
            "data": DataSettings,
            "variant": VariantSettings,
        }
        model = tables.get(str(parts[0]), Suite)
        known = list((model if len(parts) > 1 else Suite).model_fields)
        near = difflib.get_close_matches(str(parts[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {location!r}; {hint}"
    if problem["type"] == "missing":
        return f"missing key {location!r}"
    message = problem["msg"].removeprefix("Value error, ")
    if "found" in message or not location or problem["type"] == "value_error":
        return f"{location}: {message}" if location and "variant" not in message else message
    return f"{location}: {message} (found {problem['input']!r})"
