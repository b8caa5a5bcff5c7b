"""Where a serving step's time goes, by drafter: the engine core in one process, without a front end.

    vllm-domino build export/tiny-pruned.toml engines/cpu-by-load.toml
    python benchmarks/serving_profile.py       # benchmarks/results/serving-profile.json, eight minutes

Each variant of `suites/tiny-cpu.toml` runs in a process of its own, in an order that rotates; the median of the rounds
counts. OpenMP is set as vLLM sets it for a server's worker: Intel's library, a core per thread, five milliseconds of
spinning. Times are milliseconds per engine step, nested parts subtracted:

    verify    the target's forward pass over every request's bonus token and drafts
    sample    the rest of the runner's step: rejection sampling, bookkeeping
    block, context    the runs of the two graphs (an engine of ours only)
    draft     everything else of the drafter
    engine    scheduler and output handling
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_domino.assets_path import TINY
from vllm_domino.bench import provenance
from vllm_domino.bench.server import preloads
from vllm_domino.bench.suite import load_suite, resolve_path

ROOT = Path(__file__).parent.parent
SUITE = ROOT / "benchmarks/suites/tiny-cpu.toml"
RESULT = ROOT / "benchmarks/results/serving-profile.json"
QUESTIONS = ROOT / "benchmarks/data/gsm8k-80.jsonl"
VARIANTS = ("none", "eagle3", "dflash", "domino-engine")
REQUESTS = {1: 6, 16: 48}  # by concurrency
MAX_TOKENS = 256
ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # vllm/utils/ompmultiprocessing.py, which an engine in one process does not go through
    "OMP_NUM_THREADS": "2",
    "KMP_AFFINITY": "granularity=fine,explicit,proclist=[0,1]",
    "KMP_BLOCKTIME": "5",
    "KMP_TPAUSE": "0",
}


class Clock:
    """Seconds by part, of functions that it wraps on their objects; a part's own time excludes the parts inside it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner = [0.0]  # per open call, the time of the calls inside it

    def wrap(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[part] += took - self._inner.pop()
                self._inner[-1] += took
                self.calls[part] += 1

        setattr(owner, name, timed)


def measure(speculative: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """By concurrency: tokens/s, tokens and milliseconds per step, milliseconds by part. In this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(TINY / "target"),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        speculative_config=speculative,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    clock = Clock()
    _wrap_parts(clock, core)
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    chats = [
        [{"role": "user", "content": json.loads(line)["question"]}]
        for line in QUESTIONS.read_text().splitlines()
    ]
    llm.chat(chats[:16], sampling, use_tqdm=False)
    found = {}
    for concurrency, count in REQUESTS.items():
        clock.seconds.clear()
        clock.calls.clear()
        asked = chats[16 : 16 + count]
        waves = [asked] if concurrency > 1 else [[chat] for chat in asked]
        start = time.perf_counter()
        tokens = sum(
            len(answer.outputs[0].token_ids)
            for wave in waves
            for answer in llm.chat(wave, sampling, use_tqdm=False)
        )
        seconds, steps = time.perf_counter() - start, clock.calls["engine"]
        parts = {part: round(1e3 * took / steps, 3) for part, took in clock.seconds.items()}
        found[str(concurrency)] = {
            "tokens_per_s": round(tokens / seconds, 1),
            "tokens_per_step": round(tokens / steps, 2),
            "ms_per_step": round(1e3 * seconds / steps, 2),
            "parts_ms": parts,
        }
    return found


def _wrap_parts(clock: Clock, core: Any) -> None:
    worker = core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    clock.wrap(core, "step_fn", "engine")
    clock.wrap(runner, "execute_model", "verify")
    clock.wrap(runner, "sample_tokens", "sample")
    drafter = getattr(runner, "drafter", None)
    if drafter is None:
        return
    clock.wrap(drafter, "propose", "draft")
    session = getattr(getattr(drafter, "model", None), "session", None)
    if session is not None:
        clock.wrap(session, "draft", "block")
        clock.wrap(session, "context_rows", "context")


def run_variant(name: str, suite: Any) -> dict[str, Any]:
    """One variant in a fresh process with the suite's environment."""
    speculative = {v.name: v.speculative for v in suite.variant}[name]
    if speculative and "model" in speculative:
        speculative = speculative | {"model": resolve_path(speculative["model"], SUITE.parent)}
    env = os.environ | preloads() | dict(suite.server.env) | ENV
    command = [sys.executable, __file__, "--one", json.dumps(speculative)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure, the median of several measurements of one variant at one concurrency."""
    merged: dict[str, Any] = {
        key: statistics.median(one[key] for one in rounds) for key in rounds[0] if key != "parts_ms"
    }
    parts = rounds[0]["parts_ms"]
    merged["parts_ms"] = {
        part: round(statistics.median(one["parts_ms"][part] for one in rounds), 2) for part in parts
    }
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(json.loads(arguments.one))))
        return
    suite = load_suite(SUITE)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for turn in range(arguments.rounds):
        for name in VARIANTS[turn % len(VARIANTS) :] + VARIANTS[: turn % len(VARIANTS)]:
            runs[name].append(run_variant(name, suite))
            print(name, {c: one["tokens_per_s"] for c, one in runs[name][-1].items()}, flush=True)
    variants = {
        name: {c: median([one[c] for one in rounds]) for c in map(str, REQUESTS)}
        for name, rounds in runs.items()
    }
    result = {
        "schema_version": 1,
        "what": "milliseconds of an engine step by part, by variant and concurrency, without a front end",
        "command": "python benchmarks/serving_profile.py",
        "rounds": arguments.rounds,
        "variants": variants,
        "machine": provenance.machine().model_dump(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    arguments.result.write_text(json.dumps(result, indent=2) + "\n")
    print(arguments.result)


if __name__ == "__main__":
    main()
