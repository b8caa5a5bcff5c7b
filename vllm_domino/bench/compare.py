"""Two results side by side: what changed, with intervals, and what is within the noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_domino.bench.result import BenchResult, Cell, Run
from vllm_domino.bench.statistics import Ratio, percentile, ratio

_Key = tuple[str, float, str, int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One cell that both results have. Ratios are second over first."""

    key: _Key
    first: Cell
    second: Cell
    throughput: Ratio
    time_per_token: Ratio
    acceptance: Ratio | None


def compare_results(first: BenchResult, second: BenchResult) -> list[Comparison]:
    """Every cell of both, in the first one's order.

    Raises:
        ValueError: no cell is in both.
    """
    others = {_key(cell): cell for cell in second.cells}
    found = [
        _compare(cell, others[_key(cell)], first, second) for cell in first.cells if _key(cell) in others
    ]
    if not found:
        raise ValueError(
            "the two results have no cell in common (same data, temperature, variant and concurrency): "
            f"{_names(first)} against {_names(second)}"
        )
    return found


def caveats(first: BenchResult, second: BenchResult) -> list[str]:
    """What differs beside the figures, and so may explain them."""
    a, b = first.provenance, second.provenance
    checks: list[tuple[str, Any, Any]] = [
        ("CPU", a.machine.cpu, b.machine.cpu),
        ("cores", a.machine.cores, b.machine.cores),
        ("GPU", a.machine.gpus, b.machine.gpus),
        ("commit", a.commit, b.commit),
        ("server arguments", first.suite["server"].get("args"), second.suite["server"].get("args")),
        *((f"version of {k}", a.versions.get(k), b.versions.get(k)) for k in sorted(a.versions | b.versions)),
        *((f"prompts {k}", a.data[k][:12], b.data[k][:12]) for k in sorted(a.data.keys() & b.data.keys())),
        *(
            (f"SHA-256 of {k}", a.hashes[k][:12], b.hashes[k][:12])
            for k in sorted(a.hashes.keys() & b.hashes.keys())
        ),
    ]
    return [f"{name} differs: {left} and {right}" for name, left, right in checks if left != right]


def verdict(change: Ratio) -> str:
    """A ratio in words: what it is, its interval, and whether it can be told from no change."""
    percent = f"{100 * (change.value - 1):+.1f} %"
    if change.within_noise is None:
        return f"{percent}, no interval from a single repeat: cannot say"
    bounds = f"({100 * (change.low - 1):+.1f} … {100 * (change.high - 1):+.1f} %)"  # type: ignore[operator]
    return f"{percent} {bounds}" + (", within the noise" if change.within_noise else "")


def to_markdown(found: list[Comparison], names: tuple[str, str], notes: list[str]) -> str:
    """A table, and the caveats above it."""
    lines = [f"# {names[1]} against {names[0]}", ""]
    lines += [f"- {note}" for note in notes] + ([""] if notes else [])
    lines += [
        "| data | T | variant | concurrency | tokens/s first | second | change | time per token | acceptance length |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for c in found:
        data, temperature, variant, concurrency = c.key
        accepted = "–"
        if c.acceptance is not None:
            accepted = (
                f"{c.first.acceptance_length:.2f} → {c.second.acceptance_length:.2f}: {verdict(c.acceptance)}"
            )
        lines.append(
            f"| {data} | {temperature:g} | {variant} | {concurrency} | {c.first.output_tokens_per_s:.1f} "
            f"| {c.second.output_tokens_per_s:.1f} | {verdict(c.throughput)} | {verdict(c.time_per_token)} "
            f"| {accepted} |"
        )
    noise = sum(c.throughput.within_noise is True for c in found)
    told = sum(c.throughput.within_noise is False for c in found)
    lines += [
        "",
        f"Tokens/s: {told} of {len(found)} cells differ, {noise} are within the noise (95 % intervals).",
    ]
    return "\n".join(lines) + "\n"


def _compare(a: Cell, b: Cell, first: BenchResult, second: BenchResult) -> Comparison:
    runs = [[run for run in side.runs if _run_key(run) == _key(a)] for side in (first, second)]

    def change(of: Callable[[Run], float]) -> Ratio:
        return ratio([of(run) for run in runs[1]], [of(run) for run in runs[0]])

    accepted = None
    if a.acceptance_length is not None and b.acceptance_length is not None:
        accepted = change(lambda run: run.counters.acceptance_length or 1.0)
    return Comparison(
        key=_key(a),
        first=a,
        second=b,
        throughput=change(lambda run: run.output_tokens_per_s),
        time_per_token=change(_time_per_token),
        acceptance=accepted,
    )


def _time_per_token(run: Run) -> float:
    """Median over requests of the time between output tokens, in seconds."""
    r = run.requests
    rows = zip(r.e2e, r.ttft, r.output_tokens, strict=True)
    return max(percentile([(e2e - ttft) / max(n - 1, 1) for e2e, ttft, n in rows], 50), 1e-9)


def _key(cell: Cell) -> _Key:
    return (cell.data, cell.temperature, cell.variant, cell.concurrency)


def _run_key(run: Run) -> _Key:
    return (run.data, run.temperature, run.variant, run.concurrency)


def _names(result: BenchResult) -> str:
    return f"{result.suite['name']} ({', '.join(dict.fromkeys(cell.variant for cell in result.cells)) or 'no cells'})"
