"""From raw runs to the table: one cell per data set, temperature, variant and concurrency."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_domino.bench.result import BenchResult, Cell, Latency, Lengths, Run
from vllm_domino.bench.statistics import crossover, half_width, mean, percentile, ratio
from vllm_domino.bench.suite import BASELINE

_Key = tuple[str, float, str, int]


def summarize(result: BenchResult) -> list[Cell]:
    """Cells in the order of data sets, temperatures, variants and concurrencies of the suite."""
    groups: dict[_Key, list[Run]] = {}
    for run in sorted(result.runs, key=lambda r: r.repeat):
        groups.setdefault((run.data, run.temperature, run.variant, run.concurrency), []).append(run)
    order = {name: index for index, name in enumerate(result.variants)}
    data = list(dict.fromkeys(run.data for run in result.runs))
    keys = sorted(groups, key=lambda k: (data.index(k[0]), k[1], order.get(k[2], len(order)), k[3]))
    return [_cell(key, groups[key], groups.get((key[0], key[1], BASELINE, key[3]))) for key in keys]


def pooled_acceptance(runs: Iterable[Run]) -> tuple[float | None, list[float]]:
    """Acceptance length (bonus included) and share of steps by position, from counters of several runs together."""
    counters = [run.counters for run in runs]
    drafts = sum(c.drafts for c in counters)
    if not drafts:
        return None, []
    width = max(len(c.accepted_per_position) for c in counters)
    positions = [
        sum(c.accepted_per_position[k] for c in counters if k < len(c.accepted_per_position)) / drafts
        for k in range(width)
    ]
    return 1.0 + sum(c.accepted for c in counters) / drafts, positions


def equal_share(runs: Iterable[Run], reference: Run) -> float:
    """Share of requests whose output has the reference's text and length."""
    equal = total = 0
    expected = list(zip(reference.requests.text_sha, reference.requests.output_tokens, strict=True))
    for run in runs:
        found = zip(run.requests.text_sha, run.requests.output_tokens, strict=True)
        pairs = list(zip(found, expected, strict=False))
        equal += sum(a == b for a, b in pairs)
        total += len(pairs)
    return equal / total


def crossovers(cells: Iterable[Cell]) -> dict[str, float | None]:
    """Per variant, the concurrency from which it no longer pays (see `statistics.crossover`)."""
    ladders: dict[str, dict[int, float]] = {}
    for cell in cells:
        if cell.variant != BASELINE and cell.speedup is not None:
            ladders.setdefault(cell.variant, {})[cell.concurrency] = cell.speedup
    return {variant: crossover(ladder) for variant, ladder in ladders.items()}


def _cell(key: _Key, runs: list[Run], baseline: list[Run] | None) -> Cell:
    data, temperature, variant, concurrency = key
    samples = [run.output_tokens_per_s for run in runs]
    gain = (
        ratio(samples, [run.output_tokens_per_s for run in baseline])
        if baseline and variant != BASELINE
        else None
    )
    length, positions = pooled_acceptance(runs)
    outputs = [n for run in runs for n in run.requests.output_tokens]
    judged = [right for run in runs for right in run.requests.right or ()]
    draft_steps = sum(run.counters.draft_steps or 0 for run in runs)
    steps = sum(run.counters.steps for run in runs)
    failures = [run.counters.draft_failures for run in runs if run.counters.draft_failures is not None]
    return Cell(
        data=data,
        temperature=temperature,
        variant=variant,
        concurrency=concurrency,
        repeats=len(runs),
        output_tokens_per_s=mean(samples),
        samples=[round(sample, 3) for sample in samples],
        half_width=half_width(samples),
        speedup=gain.value if gain else None,
        speedup_low=gain.low if gain else None,
        speedup_high=gain.high if gain else None,
        ttft_ms=_latency(t for run in runs for t in run.requests.ttft),
        tpot_ms=_latency(t for run in runs for t in _per_token(run)),
        e2e_ms=_latency(t for run in runs for t in run.requests.e2e),
        acceptance_length=length,
        per_position=[round(share, 5) for share in positions],
        step_ms=1e3 * sum(run.duration for run in runs) / steps if steps else None,
        draft_ms=1e3 * sum(run.counters.draft_seconds or 0 for run in runs) / draft_steps
        if draft_steps
        else None,
        draft_failures=sum(failures) if failures else None,
        output_lengths=Lengths(mean=mean(outputs), min=min(outputs), max=max(outputs)),
        equal_outputs=equal_share(runs, baseline[0]) if baseline and temperature == 0 else None,
        accuracy=mean(judged) if judged else None,
        requests=len(outputs),
        failed_requests=sum(run.requests.failed for run in runs),
        tokens_match=all(run.counters.generated == run.client_output_tokens for run in runs),
        rss_bytes=max(sum(process.rss for process in run.memory) for run in runs),
        peak_rss_bytes=max(sum(process.peak for process in run.memory) for run in runs),
    )


def _per_token(run: Run) -> list[float]:
    """Seconds per output token after the first, of every request with more than one."""
    r = run.requests
    return [
        (e2e - ttft) / (n - 1) for e2e, ttft, n in zip(r.e2e, r.ttft, r.output_tokens, strict=True) if n > 1
    ] or [0.0]


def _latency(seconds: Iterable[float]) -> Latency:
    values = [1e3 * s for s in seconds]
    return Latency(median=percentile(values, 50), p90=percentile(values, 90), p99=percentile(values, 99))
