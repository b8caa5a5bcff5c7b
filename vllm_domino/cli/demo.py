"""`vllm-domino demo`: the tiny pair served without and with Domino, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_domino.bench.demo import DemoRun


def demo(
    pair: Annotated[
        Path | None,
        typer.Option(
            help="Folder with target/ and domino/ to serve instead of the shipped tiny pair.", file_okay=False
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Where the tiny pair's engine is kept; default ~/.cache/vllm-domino.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    limit: Annotated[
        int, typer.Option(min=1, max=16, help="Ask only the first so many of the 16 questions.")
    ] = 16,
    logs: Annotated[
        Path | None, typer.Option(help="Where the servers' logs are kept; default a folder in the cache.")
    ] = None,
) -> None:
    """Serve the tiny pair twice, plain and with Domino, and compare.

    Builds the engine if it is not there yet, starts two real `vllm serve` processes one after the other, asks both the
    same GSM8K questions (none was in training) over the OpenAI API, and ends with one line of JSON. Needs no GPU.
    """
    from vllm_domino.bench.demo import compare, ensure_engine, questions, serve_and_ask, tiny_pair
    from vllm_domino.bench.server import exit_on_signals
    from vllm_domino.cli.console import print_json, step

    target, drafter = tiny_pair(pair)
    asked = questions(limit)
    with exit_on_signals():
        with step("Building the tiny pair's engine") as progress:
            engine = ensure_engine(drafter, target, cache, progress.say)
        folder = logs or engine.parent / "logs"
        runs = []
        for name, draft in (("plain", None), ("domino", engine)):
            with step(f"vllm serve, {name}") as progress:
                runs.append(
                    serve_and_ask(target, draft, asked, max_tokens, folder / f"{name}.log", progress.say)
                )
    _show(asked, *runs)
    print_json(compare(*runs))


def _show(asked: Sequence[str], plain: DemoRun, domino: DemoRun) -> None:
    """The texts and the figures side by side."""
    from rich.markup import escape
    from rich.table import Table

    from vllm_domino.cli.console import out

    table = Table(show_lines=True, expand=True)
    table.add_column("question", ratio=3, overflow="fold")
    table.add_column("answer (both servers alike)", ratio=5, overflow="fold")
    for heading in ("plain\ntokens/s", "Domino\ntokens/s", "accepted\nlength"):
        table.add_column(heading, justify="right", no_wrap=True)
    for question, before, after in zip(asked, plain.answers, domino.answers, strict=True):
        text = escape(before.text)
        if before.text != after.text:
            text = f"[red]differs[/red]\nplain: {text}\nDomino: {escape(after.text)}"
        length = "–" if after.acceptance_length is None else f"{after.acceptance_length:.2f}"
        table.add_row(
            escape(question),
            text,
            f"{before.tokens_per_second:.0f}",
            f"{after.tokens_per_second:.0f}",
            length,
        )
    out.print(table)
