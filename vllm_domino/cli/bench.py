"""`vllm-domino bench`: a suite, its report, the comparison of two runs, and the draft step alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

RESULTS = Path("benchmarks/results")
WORK = Path("runs/bench")


class _RunByDefault(TyperGroup):
    """`bench SUITE.toml` means `bench run SUITE.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not (args[0].startswith("-") and "--help" in args):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    help="Measure drafters side by side in real vLLM servers: `bench SUITE.toml`, then `bench report RESULT.json`.",
)


@app.command()
def run(
    suite: Annotated[Path, typer.Argument(help="benchmarks/suites/NAME.toml")],
    only: Annotated[str, typer.Option(help="Variants to measure, comma-separated; default all.")] = "",
    device: Annotated[
        str | None, typer.Option(help="Engine recipe's name (l40s, h200, …) for suites that leave it open.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Instead of the suite's own number.")] = None,
    build: Annotated[
        bool, typer.Option("--build", help="Build engines that the suite names and that are missing.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew, even where an unfinished result is there.")
    ] = False,
    results: Annotated[Path, typer.Option(help="Folder of result files.", file_okay=False)] = RESULTS,
    work: Annotated[
        Path, typer.Option(help="Folder of logs and of the client's own files.", file_okay=False)
    ] = WORK,
) -> None:
    """Measure every variant of a suite; started again, it goes on where it was stopped."""
    from vllm_domino.bench.preflight import prepare
    from vllm_domino.bench.run import SuiteRun
    from vllm_domino.bench.server import exit_on_signals
    from vllm_domino.bench.suite import load_suite
    from vllm_domino.cli.console import err, print_json

    def say(line: str) -> None:
        err.print(line, markup=False)

    settings = load_suite(suite, device)
    if settings.needs:
        say(f"{settings.name} needs: {settings.needs}")
    chosen = [name.strip() for name in only.split(",") if name.strip()]
    plan = prepare(settings, suite, chosen, build, say)
    suite_run = SuiteRun.open(plan, results, work, repeats, fresh, say)
    with exit_on_signals():
        try:
            result = suite_run.execute()
        except KeyboardInterrupt:
            say(f"stopped; finished cells are in {suite_run.path}, and the same command goes on from there")
            raise typer.Exit(130) from None
    print_json(
        {
            "result": str(suite_run.path),
            "finished": result.finished,
            "cells": len(result.cells),
            "failed": sorted({failure.variant for failure in result.failures}),
        }
    )


@app.command()
def report(
    result: Annotated[Path, typer.Argument(help="Result file of `bench SUITE`.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder to write to; default beside the result.")
    ] = None,
) -> None:
    """Render a result as Markdown, CSV and one HTML page with plots, named after it."""
    from vllm_domino.bench.report import to_csv, to_html, to_markdown
    from vllm_domino.bench.result import load_result
    from vllm_domino.cli.console import print_json

    found = load_result(result)
    if not found.cells:
        raise ValueError(f"result {result}: no finished cell to report; run the suite first")
    folder = output or result.parent
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for ending, text in (
        ("md", to_markdown(found, result.name)),
        ("csv", to_csv(found)),
        ("html", to_html(found, result.name)),
    ):
        path = folder / f"{result.stem}.{ending}"
        path.write_text(text)
        written[ending] = str(path)
    print_json(written)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Result file to compare with.")],
    second: Annotated[Path, typer.Argument(help="Result file that may be better or worse.")],
) -> None:
    """Compare two results cell by cell: changes with 95 % intervals, and which are within the noise."""
    from vllm_domino.bench.compare import caveats, compare_results, to_markdown
    from vllm_domino.bench.result import load_result

    a, b = load_result(first), load_result(second)
    typer.echo(to_markdown(compare_results(a, b), (first.name, second.name), caveats(a, b)), nl=False)


@app.command()
def step(
    drafters: Annotated[
        list[Path], typer.Argument(help="Engine directories and draft checkpoints.", exists=True)
    ],
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,4,16",
    context: Annotated[
        str, typer.Option(help="Context lengths in tokens, comma-separated.")
    ] = "200,1000,2000",
    pool: Annotated[
        str,
        typer.Option(
            help="Candidate pools of the head in PyTorch, comma-separated; 0 scores the whole vocabulary."
        ),
    ] = "0",
    window: Annotated[
        int | None, typer.Option(min=1, help="Context rows that a step reads at most; default as served.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Newly verified tokens per request and step.")] = 4,
    iterations: Annotated[int, typer.Option(min=3, help="Measured steps per entry.")] = 30,
    output: Annotated[Path | None, typer.Option(help="JSON file to write; Markdown goes beside it.")] = None,
) -> None:
    """Time the draft step alone, with the share of each part, against what its flops and bytes need at least."""
    import torch

    from vllm_domino.bench import provenance
    from vllm_domino.bench.run import now
    from vllm_domino.bench.step import Peaks, StepResult, measure_session, open_drafters
    from vllm_domino.bench.step_report import to_markdown
    from vllm_domino.cli.console import err

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peaks = Peaks.measure(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    started, steps = now(), []
    for name, session, served in open_drafters(drafters, _sizes(pool, "--pool", least=0), device):
        err.print(f"{name}, {session.backend}, pool {session.options.candidate_pool or 'all'}", markup=False)
        steps += measure_session(
            name,
            session,
            peaks,
            batches=_sizes(batch, "--batch"),
            contexts=_sizes(context, "--context", least=rows),
            window=window or served,
            rows_per_request=rows,
            iterations=iterations,
            device=device,
        )
        session.close()
    result = StepResult(
        started_at=started,
        commit=provenance.commit(),
        command=provenance.command_line(),
        versions=provenance.versions(),
        machine=provenance.machine(),
        threads=torch.get_num_threads(),
        device=str(device),
        peak_gflops=round(peaks.flops / 1e9, 1),
        bandwidth_gb_per_s=round(peaks.bandwidth / 1e9, 1),
        steps=steps,
    )
    table = to_markdown(result, output.name if output else "bench step")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(result.model_dump_json(indent=2) + "\n")
        output.with_suffix(".md").write_text(table)
    typer.echo(table, nl=False)


def _sizes(text: str, option: str, least: int = 1) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < least:
        raise ValueError(f"{option} {text!r}: needed are numbers from {least}, separated by commas")
    return sizes
