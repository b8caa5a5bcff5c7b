"""The draft step alone: how long it takes by session, batch, context and head option, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from vllm_domino.bench.cost_model import draft_step
from vllm_domino.bench.provenance import Machine
from vllm_domino.bench.statistics import percentile
from vllm_domino.config.checkpoint import read_checkpoint
from vllm_domino.config.draft import DraftConfig
from vllm_domino.engine.manifest import DEFAULT_WINDOW, is_engine_dir, read_manifest
from vllm_domino.model.drafter import Drafter, HeadOptions
from vllm_domino.runtime.draft_step import DraftStep
from vllm_domino.runtime.factory import open_session
from vllm_domino.runtime.session import DraftSession
from vllm_domino.runtime.torch_session import TorchSession

PAGE = 16  # vLLM's usual page of the K/V cache, in tokens
WARM_UP = 3


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StepTime(_Record):
    """One measurement; milliseconds, medians over `iterations`.

    head: whether the Domino head drafts. window: newest context rows that the step reads at most.
    context_graph: rows of newly verified tokens (`rows` of them). gather: bringing context rows together.
    block_graph: the drafts themselves. rest: everything else of a step. outside: gather + rest.
    bound: what the arithmetic and the bytes of the step need at least on this machine (see `cost_bound`).
    """

    drafter: str
    session: str
    head: bool
    candidate_pool: int
    draft_tokens: int
    batch: int
    context: int
    window: int
    rows: int
    iterations: int
    total: float
    total_p90: float
    context_graph: float
    gather: float
    block_graph: float
    rest: float
    outside: float
    bound: float


class StepResult(_Record):
    """What `bench step` writes. peak_gflops, bandwidth: measured here, what `bound` is computed with."""

    schema_version: Literal[1] = 1
    kind: Literal["step"] = "step"
    started_at: str
    commit: str | None
    command: str
    versions: dict[str, str]
    machine: Machine
    threads: int
    device: str
    peak_gflops: float
    bandwidth_gb_per_s: float
    steps: list[StepTime]


@dataclass(frozen=True, slots=True)
class Peaks:
    """What this device reaches on a large product (flop/s) and a large copy (bytes/s); cache: bytes that stay near."""

    flops: float
    bandwidth: float
    cache: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Peaks:
        size = 1024 if device.type == "cpu" else 8192
        left = torch.randn(size, size, device=device, dtype=dtype)
        flops = 2 * size**3 / _best_seconds(lambda: left @ left, device)
        source = torch.zeros((64 if device.type == "cpu" else 512) << 20, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        bandwidth = 2 * source.numel() / _best_seconds(lambda: target.copy_(source), device)
        cache = (
            float("inf") if device.type == "cpu" else torch.cuda.get_device_properties(device).L2_cache_size
        )
        return cls(flops, bandwidth, cache)


def cost_bound(
    config: DraftConfig,
    options: HeadOptions,
    peaks: Peaks,
    *,
    batch: int,
    context: int,
    rows: int,
    element: int,
) -> float:
    """Milliseconds that a step needs at least: `cost_model.draft_step` at the rates that this device reaches."""
    parts = draft_step(config, options, batch, context, l2_bytes=peaks.cache, accepted=rows, size=element)
    return 1e3 * sum(max(p.operations / peaks.flops, p.num_bytes / peaks.bandwidth) for p in parts.values())


def open_drafters(
    paths: Sequence[Path], pools: Sequence[int], device: torch.device
) -> list[tuple[str, DraftSession, int]]:
    """Name, session and draft window: an engine with the head it was built for, a checkpoint once per pool.

    Raises:
        ValueError: not a drafter, or not for this machine.
    """
    found: list[tuple[str, DraftSession, int]] = []
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for path in paths:
        if is_engine_dir(path):
            manifest = read_manifest(path)
            found.append((manifest.name, open_session(path, device, dtype), manifest.draft_window))
            continue
        checkpoint = read_checkpoint(path)
        for pool in pools if checkpoint.config.has_head else (0,):
            drafter = Drafter.from_checkpoint(checkpoint, HeadOptions(candidate_pool=pool or None))
            session = TorchSession(drafter, device, dtype, own_lm_head=checkpoint.lm_head)
            found.append((path.name, session, DEFAULT_WINDOW))
    return found


def measure_session(
    name: str,
    session: DraftSession,
    peaks: Peaks,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    window: int,
    rows_per_request: int,
    iterations: int,
    device: torch.device,
) -> list[StepTime]:
    """Every batch and context of one session, with random weights in place of the target's tables."""
    config, generator = session.config, torch.Generator().manual_seed(0)
    tables = [
        torch.randn(config.vocab_size, config.hidden_size, generator=generator) * 0.02 for _ in range(2)
    ]
    session.bind_target(*(table.to(device, session.dtype) for table in tables))
    step = DraftStep(
        session,
        max_requests=max(batches),
        max_rows=max(batches) * rows_per_request,
        draft_window=window,
        device=device,
    )
    clock = _Clock(step, session, device)
    pages = -(-(max(contexts) + config.block_size) // PAGE)
    cache = torch.randn(1 + max(batches) * pages, PAGE, step.row_size, generator=generator) * 0.1
    step.attach_cache(cache.to(device, session.dtype))
    options = session.options
    measured = []
    for batch in batches:
        for context in contexts:
            inputs = _Inputs.random(config, batch, context, rows_per_request, pages, device)
            times = clock.time(inputs, context, iterations)
            bound = cost_bound(
                config,
                options,
                peaks,
                batch=batch,
                context=min(context, window),
                rows=rows_per_request,
                element=session.dtype.itemsize,
            )
            measured.append(
                StepTime(
                    drafter=name,
                    session=session.backend,
                    head=config.has_head,
                    candidate_pool=options.candidate_pool or 0,
                    draft_tokens=options.drafts_of(config),
                    batch=batch,
                    context=context,
                    window=window,
                    rows=batch * rows_per_request,
                    iterations=iterations,
                    bound=round(bound, 4),
                    **{part: round(value, 4) for part, value in times.items()},
                )
            )
    return measured


@dataclass(frozen=True, slots=True)
class _Inputs:
    features: Tensor
    positions: Tensor
    slots: Tensor
    anchor_ids: Tensor
    anchor_positions: Tensor
    block_table: Tensor

    @classmethod
    def random(
        cls, config: DraftConfig, batch: int, context: int, rows: int, pages: int, device: torch.device
    ) -> _Inputs:
        """`rows` newly verified tokens before each anchor, which stands at `context`; pages in scattered order."""
        generator = torch.Generator().manual_seed(1)
        table = 1 + torch.randperm(batch * pages, generator=generator).view(batch, pages)
        positions = context - rows + torch.arange(rows).expand(batch, -1)  # [B, rows]
        slots = table.gather(1, positions // PAGE) * PAGE + positions % PAGE
        return cls(
            torch.randn(batch * rows, config.feature_size, generator=generator).to(device),
            positions.reshape(-1).to(device),
            slots.reshape(-1).to(device),
            torch.randint(0, config.vocab_size, (batch,), generator=generator).to(device),
            torch.full((batch,), context).to(device),
            table.to(torch.int32).to(device),
        )


class _Clock:
    """Times a step and its parts, by standing between it and its session."""

    def __init__(self, step: DraftStep, session: Any, device: torch.device):
        self.step, self.device = step, device
        self._spent: dict[str, float] = {}
        session.context_rows = self._timed("context_graph", session.context_rows)
        session.draft = self._timed("block_graph", session.draft)
        step._gather = self._timed("gather", step._gather)  # type: ignore[method-assign]

    def time(self, inputs: _Inputs, context: int, iterations: int) -> dict[str, float]:
        """Medians in milliseconds over `iterations` steps, each a context write and a draft."""
        samples: dict[str, list[float]] = {}
        for index in range(WARM_UP + iterations):
            self._spent = dict.fromkeys(("context_graph", "gather", "block_graph"), 0.0)
            _wait(self.device)
            start = time.perf_counter()
            self.step.store_context(inputs.features, inputs.positions, inputs.slots)
            self.step.draft(inputs.anchor_ids, inputs.anchor_positions, inputs.block_table, context)
            _wait(self.device)
            total = time.perf_counter() - start
            if index < WARM_UP:
                continue
            graphs = self._spent["context_graph"] + self._spent["block_graph"]
            one = {
                **self._spent,
                "total": total,
                "rest": total - graphs - self._spent["gather"],
                "outside": total - graphs,
            }
            for part, seconds in one.items():
                samples.setdefault(part, []).append(1e3 * seconds)
        times = {part: percentile(values, 50) for part, values in samples.items()}
        return times | {"total_p90": percentile(samples["total"], 90)}

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            _wait(self.device)
            start = time.perf_counter()
            out = call(*args)
            _wait(self.device)
            self._spent[part] += time.perf_counter() - start
            return out

        return timed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _best_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The quickest of several runs: a peak is what the machine can do, not what it did while disturbed."""
    best = float("inf")
    for _ in range(8):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best
