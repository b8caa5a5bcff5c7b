"""Hand-made results: runs whose figures can be worked out on paper."""

from __future__ import annotations

from vllm_domino.bench.memory import ProcessMemory
from vllm_domino.bench.provenance import Machine, Provenance
from vllm_domino.bench.result import BenchResult, Counters, Requests, Run
from vllm_domino.bench.summary import summarize


def make_run(variant: str, concurrency: int, rate: float, repeat: int = 0, drafts: int = 0, **changes) -> Run:
    """Two requests of 10 and 30 tokens at `rate` tokens/s together; every draft has its first two tokens accepted."""
    duration = 40 / rate
    values = {
        "data": "gsm8k",
        "temperature": 0.0,
        "variant": variant,
        "repeat": repeat,
        "concurrency": concurrency,
        "started_at": "2026-12-01T10:00:00+00:00",
        "duration": duration,
        "load_average": 0.5,
        "requests": Requests(
            input_tokens=[5, 6],
            output_tokens=[10, 30],
            start=[0.0, duration / 4],
            ttft=[0.01, 0.02],
            e2e=[duration / 4, 3 * duration / 4],
            text_sha=["aa", "bb"],
            right=[True, False],
        ),
        "counters": Counters(
            generated=40,
            steps=40 - 2 * drafts,
            drafts=drafts,
            draft_tokens=4 * drafts,
            accepted=2 * drafts,
            accepted_per_position=[drafts, drafts, 0, 0] if drafts else [],
            draft_seconds=0.001 * drafts if variant.startswith("domino") else None,
            draft_steps=drafts if variant.startswith("domino") else None,
            draft_failures=0 if variant.startswith("domino") else None,
        ),
        "client_output_tokens": 40,
        "memory": [ProcessMemory(name="vllm", rss=100_000_000, peak=150_000_000, pss=90_000_000)],
    }
    return Run(**(values | changes))


def make_result(rates: dict[str, dict[int, list[float]]], **changes) -> BenchResult:
    """rates: variant -> concurrency -> tokens/s by repeat."""
    runs = [
        make_run(variant, concurrency, rate, repeat, drafts=0 if variant == "none" else 8)
        for variant, ladder in rates.items()
        for concurrency, samples in ladder.items()
        for repeat, rate in enumerate(samples)
    ]
    result = BenchResult(
        suite={
            "name": "toy",
            "server": {"model": "m", "args": []},
            "variant": [{"name": name} for name in rates],
        },
        fingerprint="f",
        started_at="2026-12-01T10:00:00+00:00",
        finished=True,
        provenance=Provenance(
            commit="c0ffee",
            command="vllm-domino bench toy.toml",
            versions={"vllm": "0.32.0"},
            machine=Machine(cpu="CPU", cores=2, memory_bytes=8 << 30, system="Linux"),
            environment={},
            hashes={"toy.toml": "ab" * 32},
            data={"gsm8k": "cd" * 32},
        ),
        runs=runs,
        **changes,
    )
    result.cells = summarize(result)
    return result


TOY = {
    "none": {1: [100.0, 102.0], 4: [300.0, 306.0], 16: [800.0, 810.0]},
    "dflash": {1: [150.0, 155.0], 4: [330.0, 340.0], 16: [500.0, 505.0]},
    "domino-engine": {1: [250.0, 251.0], 4: [600.0, 610.0], 16: [700.0, 702.0]},
}
