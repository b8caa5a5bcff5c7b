"""`bench step` as a table, with the ratio of every session to PyTorch."""

from __future__ import annotations

from vllm_domino.bench.step import StepResult, StepTime

_HEAD = (
    "drafter", "session", "pool", "batch", "context", "window", "total ms", "p90", "block graph", "context graph",
    "gather", "rest", "outside graphs", "bound", "× bound", "PyTorch ÷ this",
)  # fmt: skip


def to_markdown(result: StepResult, name: str) -> str:
    """One line per measurement; parts with their share of the total."""
    machine = result.machine
    where = f"{'; '.join(machine.gpus) or machine.cpu}, {result.threads} thread(s), device {result.device}"
    peaks = f"{result.peak_gflops:.1f} GFLOP/s and {result.bandwidth_gb_per_s:.1f} GB/s"
    lines = [
        f"# Draft step, {result.started_at[:10]}",
        "",
        f"From `{name}`: {where}; peak {peaks}, measured in the same process.",
        "Medians in milliseconds with the share of the step; `bound` is `cost_model.draft_step` at that peak.",
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|---" * len(_HEAD) + "|",
    ]
    for step in result.steps:
        reference = _pytorch(step, result.steps)
        parts = [_part(step, key) for key in ("block_graph", "context_graph", "gather", "rest", "outside")]
        row = [
            step.drafter, step.session, step.candidate_pool or "all", step.batch, step.context, step.window,
            f"{step.total:.2f}", f"{step.total_p90:.2f}", *parts, f"{step.bound:.2f}", f"{step.total / step.bound:.1f}",
            "–" if reference is None else f"{reference.total / step.total:.2f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


def _part(step: StepTime, key: str) -> str:
    value = getattr(step, key)
    return f"{value:.2f} ({100 * value / step.total:.0f} %)"


def _pytorch(step: StepTime, steps: list[StepTime]) -> StepTime | None:
    """The same head and batch in PyTorch, reading as many context rows."""

    def key(s: StepTime) -> tuple[int, ...]:
        return (s.head, s.candidate_pool, s.draft_tokens, s.batch, min(s.context, s.window))

    return next((s for s in steps if s.session == "pytorch" and key(s) == key(step)), None)
