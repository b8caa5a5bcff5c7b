"""The result file: raw samples of every run, and the table (`cells`) that is computed from them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_domino.bench.memory import ProcessMemory
from vllm_domino.bench.provenance import Provenance
from vllm_domino.bench.server import Metrics

RESULT_SCHEMA = 1


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Requests(_Record):
    """Raw samples, one entry per request in the order they were sent. Times in seconds.

    text_sha: start of SHA-256 of the output. right: against the reference answer, where there is one.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    start: list[float]
    ttft: list[float]
    e2e: list[float]
    text_sha: list[str]
    right: list[bool] | None = None
    failed: int = 0


class Counters(_Record):
    """Differences of the server's counters over one run; None where it has none.

    generated: output tokens as the server counts them. steps: engine steps.
    drafts: verified draft steps of single requests; accepted: draft tokens accepted in them, by position too.
    draft_seconds, draft_steps, draft_failures: the plugin's own, of its session.
    """

    generated: float
    steps: float
    preemptions: float = 0.0
    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted: float = 0.0
    accepted_per_position: list[float] = Field(default_factory=list)
    draft_seconds: float | None = None
    draft_steps: float | None = None
    draft_failures: float | None = None

    @classmethod
    def of(cls, server: Metrics, plugin: Metrics | None) -> Self:
        """From the differences of vLLM's metrics and, where they are served, the plugin's."""
        own = {}
        if plugin is not None:
            own = {
                "draft_seconds": plugin["vllm_domino:draft_seconds_sum"],
                "draft_steps": plugin["vllm_domino:draft_seconds_count"],
                "draft_failures": plugin["vllm_domino:draft_failures_total"],
            }
        positions = server.accepted_per_position
        return cls(
            generated=server["vllm:generation_tokens_total"],
            steps=server["vllm:iteration_tokens_total_count"],
            preemptions=server["vllm:num_preemptions_total"],
            drafts=server.drafts,
            draft_tokens=server["vllm:spec_decode_num_draft_tokens_total"],
            accepted=server.accepted,
            accepted_per_position=[positions[k] for k in sorted(positions)] if server.drafts else [],
            **own,
        )

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per verified step, the bonus token included."""
        return 1.0 + self.accepted / self.drafts if self.drafts else None


class Run(_Record):
    """One cell, measured once."""

    data: str
    temperature: float
    variant: str
    repeat: int
    concurrency: int
    started_at: str
    duration: float
    load_average: float
    requests: Requests
    counters: Counters
    client_output_tokens: int
    memory: list[ProcessMemory]

    @property
    def key(self) -> tuple[str, float, str, int, int]:
        return (self.data, self.temperature, self.variant, self.repeat, self.concurrency)

    @property
    def output_tokens_per_s(self) -> float:
        return sum(self.requests.output_tokens) / self.duration


class Failure(_Record):
    """A variant that did not start, or died: what it said, and whether before or while it was measured."""

    variant: str
    repeat: int
    phase: Literal["start", "measure"]
    message: str


class Latency(_Record):
    """Milliseconds over all requests of all repeats."""

    median: float
    p90: float
    p99: float


class Lengths(_Record):
    """Output tokens per request."""

    mean: float
    min: int
    max: int


class Cell(_Record):
    """One entry of the table: a variant at one load, over all repeats.

    output_tokens_per_s: mean of `samples`, one per repeat; half_width: of its 95 % interval.
    speedup: over the plain variant at the same concurrency, with its 95 % interval.
    acceptance_length: tokens per verified step, bonus included, pooled over requests and repeats.
    per_position: share of steps in which draft i was accepted (not conditional on the one before it).
    step_ms: engine step; draft_ms: of it, the drafter (host time; only where the plugin drafts).
    equal_outputs: share of requests whose greedy output is the plain variant's; None at temperature above 0.
    tokens_match: whether client and server counted the same output tokens.
    """

    data: str
    temperature: float
    variant: str
    concurrency: int
    repeats: int
    output_tokens_per_s: float
    samples: list[float]
    half_width: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    ttft_ms: Latency
    tpot_ms: Latency
    e2e_ms: Latency
    acceptance_length: float | None
    per_position: list[float]
    step_ms: float | None
    draft_ms: float | None
    draft_failures: float | None
    output_lengths: Lengths
    equal_outputs: float | None
    accuracy: float | None
    requests: int
    failed_requests: int
    tokens_match: bool
    rss_bytes: int
    peak_rss_bytes: int


class BenchResult(_Record):
    """One run of a suite. `finished` is False while it runs, and after it was stopped."""

    schema_version: Literal[1] = 1
    kind: Literal["suite"] = "suite"
    suite: dict[str, Any]
    fingerprint: str
    started_at: str
    finished_at: str | None = None
    finished: bool = False
    provenance: Provenance
    ready_seconds: dict[str, list[float]] = Field(default_factory=dict)
    failures: list[Failure] = Field(default_factory=list)
    cells: list[Cell] = Field(default_factory=list)
    runs: list[Run] = Field(default_factory=list)

    @property
    def variants(self) -> list[str]:
        """Names in the suite's order."""
        return [variant["name"] for variant in self.suite["variant"]]

    def run_of(self, key: tuple[str, float, str, int, int]) -> Run | None:
        return next((run for run in self.runs if run.key == key), None)


def save_result(result: BenchResult, path: Path) -> None:
    """Write in one rename, so that a stopped run leaves a whole file. Lists of numbers stay on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(_compact(json.loads(result.model_dump_json()), 0) + "\n")
    partial.replace(path)


def load_result(path: str | Path) -> BenchResult:
    """Read a result file.

    Raises:
        ValueError: not there, not JSON, of another schema version, or not a suite's result.
    """
    path = Path(path)
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"result {path}: cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"result {path}: not valid JSON ({error})") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != RESULT_SCHEMA:
        raise ValueError(
            f"result {path}: schema version {version!r}, this version reads {RESULT_SCHEMA}; "
            "run the suite again, or install the vllm-domino that wrote it"
        )
    if raw.get("kind") != "suite":
        raise ValueError(
            f"result {path}: kind {raw.get('kind')!r}, needed is 'suite' (what `vllm-domino bench SUITE` writes)"
        )
    try:
        return BenchResult.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"result {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _compact(value: Any, depth: int) -> str:
    """JSON with one line per object field, and plain lists on one line."""
    pad, inner = "  " * depth, "  " * (depth + 1)
    if isinstance(value, dict) and value:
        fields = [f"{inner}{json.dumps(k)}: {_compact(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(fields) + f"\n{pad}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(inner + _compact(item, depth + 1) for item in value) + f"\n{pad}]"
    return json.dumps(value, ensure_ascii=False)
