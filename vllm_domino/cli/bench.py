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

    settings = load_suite(suite)
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
