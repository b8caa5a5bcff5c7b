"""A suite from the first server to the last: every variant in turn on one machine, cell by cell, resumable."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from vllm_domino.bench.client import Load, run_client, served_name, warm_up
from vllm_domino.bench.datasets import grade_of
from vllm_domino.bench.grading import is_right
from vllm_domino.bench.memory import tree_memory
from vllm_domino.bench.preflight import Plan
from vllm_domino.bench.provenance import Provenance, collect
from vllm_domino.bench.result import BenchResult, Counters, Failure, Requests, Run, load_result, save_result
from vllm_domino.bench.server import Metrics, ServerError, ServerSpec, VllmServer, free_port
from vllm_domino.bench.suite import DataSettings, Suite
from vllm_domino.bench.summary import summarize

Progress = Callable[[str], None]
PLUGIN_PORT = "VLLM_DOMINO_METRICS_PORT"
COUNTER_SECONDS = 3.0  # how long the server's counters may lag behind its last answer


class SuiteRun:
    """One result file on its way. `execute` can be stopped at any time and started again."""

    def __init__(self, plan: Plan, path: Path, result: BenchResult, work: Path, repeats: int, say: Progress):
        self.plan, self.path, self.result, self.work, self.say = plan, path, result, work, say
        self.repeats = repeats

    @classmethod
    def open(
        cls,
        plan: Plan,
        results: Path,
        work: Path,
        repeats: int | None = None,
        fresh: bool = False,
        say: Progress = print,
    ) -> SuiteRun:
        """Continue the newest result of this very suite that lacks variants or repeats, or start a new one.

        Only what the same code, versions, recipes and weights measured is continued: one file, one provenance.
        """
        suite = plan.suite
        repeats = repeats or suite.repeats
        provenance = collect(suite, plan.path, plan.digests)
        path = None if fresh else _unfinished(results, plan, repeats, provenance)
        if path is not None:
            result = load_result(path)
            result.failures = []
            say(f"continuing {path} ({len(result.runs)} cells are there)")
        else:
            path = _new_path(results, suite.name)
            result = BenchResult(
                suite=suite.model_dump(mode="json", exclude_none=True),
                fingerprint=_fingerprint(plan),
                started_at=now(),
                provenance=provenance,
            )
        return cls(plan, path, result, work / path.stem, repeats, say)

    def execute(self) -> BenchResult:
        """Measure what is missing. A variant that does not start or dies is recorded, and the others go on."""
        for repeat in range(self.repeats):
            for variant in rotated(list(self.plan.servers), repeat):
                missing = [cell for cell in self._cells() if self._run_of(variant, repeat, *cell) is None]
                if not missing or self._gave_up(variant):
                    continue
                self.say(f"repeat {repeat + 1} of {self.repeats}, {variant}: starting the server")
                self._measure(variant, repeat, missing)
                self._save()
        self.result.finished = set(self.plan.servers) == set(self.result.variants)
        self.result.finished_at = now()
        self._save()
        return self.result

    def _cells(self) -> Iterator[tuple[DataSettings, float, int]]:
        suite = self.plan.suite
        for data in suite.data:
            for temperature in suite.temperature:
                for concurrency in suite.concurrency:
                    yield data, temperature, concurrency

    def _run_of(
        self, variant: str, repeat: int, data: DataSettings, temperature: float, concurrency: int
    ) -> Run | None:
        return self.result.run_of((data.label, temperature, variant, repeat, concurrency))

    def _gave_up(self, variant: str) -> bool:
        """A server that did not start once will not start in the next repeat either."""
        return any(
            failure.variant == variant and failure.phase == "start" for failure in self.result.failures
        )

    def _save(self) -> None:
        self.result.cells = summarize(self.result)
        save_result(self.result, self.path)

    def _measure(self, variant: str, repeat: int, missing: list[tuple[DataSettings, float, int]]) -> None:
        """One server: start, all its missing cells, stop."""
        plugin_port = free_port()
        spec = _with_environment(self.plan.servers[variant], {PLUGIN_PORT: str(plugin_port)})
        server = VllmServer(spec, self.work / f"r{repeat}-{variant}.log", _port(self.plan.suite, self.say))
        phase = "start"
        try:
            server.start()
            server.wait_ready(self.plan.suite.server.ready_seconds)
            model = served_name(server)
            assert server.ready_seconds is not None
            self.result.ready_seconds.setdefault(variant, []).append(round(server.ready_seconds, 1))
            phase = "measure"
            for data, temperature, concurrency in missing:
                run = _measure_cell(
                    self, server, model, plugin_port, variant, repeat, data, temperature, concurrency
                )
                self.result.runs.append(run)
                self._save()
                self.say(f"  {_describe(run)}")
        except (ServerError, ValueError, httpx.HTTPError) as error:
            failure = Failure(variant=variant, repeat=repeat, phase=phase, message=_without_paths(str(error)))  # type: ignore[arg-type]
            self.result.failures.append(failure)
            self.say(f"  {variant} {'did not start' if phase == 'start' else 'failed'}: {failure.message}")
        finally:
            server.stop()


def _measure_cell(
    suite_run: SuiteRun,
    server: VllmServer,
    model: str,
    plugin_port: int,
    variant: str,
    repeat: int,
    data: DataSettings,
    temperature: float,
    concurrency: int,
) -> Run:
    plan = suite_run.plan
    prompts = plan.prompts[data.label]
    count = plan.suite.prompts_at(data, concurrency)
    load = Load(prompts[:count], concurrency, temperature, plan.suite.seed + repeat, plan.tokenizer)
    # Prompts that no cell sends, where the set has some: nothing measured is then answered from a prefix cache.
    spare = prompts[-plan.suite.warmup :] if plan.suite.warmup else []
    warm_up(server, model, spare, load)
    before, plugin_before = server.metrics(), _plugin_metrics(plugin_port)
    started, busy = now(), os.getloadavg()[0]
    name = f"r{repeat}-{variant}-{data.label}-t{temperature:g}-c{concurrency}"
    out = run_client(server, model, load, suite_run.work, name)
    after = _settled(server, before, out["total_output_tokens"])
    plugin = _plugin_metrics(plugin_port)
    return Run(
        data=data.label,
        temperature=temperature,
        variant=variant,
        repeat=repeat,
        concurrency=concurrency,
        started_at=started,
        duration=out["duration"],
        load_average=round(busy, 2),
        requests=_requests(out, [p.answer for p in load.prompts], grade_of(data)),
        counters=Counters.of(
            after.since(before), plugin.since(plugin_before) if plugin and plugin_before else None
        ),
        client_output_tokens=out["total_output_tokens"],
        memory=tree_memory(server.pid),
    )


def _requests(out: dict[str, Any], answers: list[str | None], grade: str | None) -> Requests:
    failed = [bool(error) for error in out["errors"]]
    if all(failed):
        raise ValueError(f"every request failed; the first: {out['errors'][0].strip().splitlines()[-1]}")
    texts, first = out["generated_texts"], min(out["start_times"])
    right = None
    if grade and all(answer is not None for answer in answers):
        right = [is_right(grade, text, str(answer)) for text, answer in zip(texts, answers, strict=True)]
    return Requests(
        input_tokens=out["input_lens"],
        output_tokens=out["output_lens"],
        start=[round(t - first, 4) for t in out["start_times"]],
        ttft=[round(t, 5) for t in out["ttfts"]],
        e2e=[round(t, 5) for t in out["latencies"]],
        text_sha=[hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts],
        right=right,
        failed=sum(failed),
    )


def _settled(server: VllmServer, before: Metrics, expected: int) -> Metrics:
    """Counters once they have caught up with what the client received."""
    deadline = time.monotonic() + COUNTER_SECONDS
    while True:
        after = server.metrics()
        if after.since(before)["vllm:generation_tokens_total"] >= expected or time.monotonic() > deadline:
            return after
        time.sleep(0.1)


def _plugin_metrics(port: int) -> Metrics | None:
    """The drafting process's own counters; None for a drafter that is not ours."""
    with contextlib.suppress(httpx.HTTPError):
        return Metrics.parse(
            httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10.0).raise_for_status().text
        )
    return None


def rotated(names: list[str], repeat: int) -> list[str]:
    """The order of a repeat: each begins one variant later, so that none is always the first on a cold machine."""
    start = repeat % len(names) if names else 0
    return names[start:] + names[:start]


def _with_environment(spec: ServerSpec, env: dict[str, str]) -> ServerSpec:
    return replace(spec, env={**spec.env, **env})


def _port(suite: Suite, say: Progress) -> int:
    """The suite's port, or a free one where it has none or something listens on it."""
    wanted = suite.server.port
    if wanted is None:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            found = free_port()
            say(f"  port {wanted} is taken, using {found}")
            return found
    return wanted


def _fingerprint(plan: Plan) -> str:
    """Suite and prompts: what an unfinished result must agree in to be continued."""
    parts = [plan.suite.fingerprint, *(f"{name}={digest}" for name, digest in sorted(plan.digests.items()))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _unfinished(results: Path, plan: Plan, repeats: int, now_there: Provenance) -> Path | None:
    wanted = _fingerprint(plan)
    for path in sorted(
        results.glob(f"{plan.suite.name}-*.json"), key=lambda p: p.stat().st_mtime, reverse=True
    ):
        with contextlib.suppress(ValueError):
            found = load_result(path)
            lacking = not found.finished or max((run.repeat for run in found.runs), default=0) + 1 < repeats
            if lacking and found.fingerprint == wanted and now_there.same_source(found.provenance):
                return path
    return None


def _new_path(results: Path, name: str) -> Path:
    stem = f"{name}-{datetime.now(UTC).date().isoformat()}"
    path, number = results / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = results / f"{stem}-{number}.json"
    return path


def _describe(run: Run) -> str:
    length = run.counters.acceptance_length
    drafted = "" if length is None else f", acceptance length {length:.2f}"
    where = f"{run.data}, T={run.temperature:g}, concurrency {run.concurrency}"
    return f"{where}: {run.output_tokens_per_s:.1f} tokens/s{drafted}"


def _without_paths(message: str) -> str:
    """A message for a file that others read: this machine's folders shortened."""
    return message.replace(f"{Path.cwd()}/", "").replace(str(Path.home()), "~")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
