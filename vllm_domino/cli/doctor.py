"""`vllm-domino doctor`: what a bug report needs, and what would keep Domino from being served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_domino.cli.diagnosis import Diagnosis


def doctor(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders to look for engines in, beside engines/built.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one line of JSON.")] = False,
) -> None:
    """Print versions, plugin state, devices and engines, and what is wrong with them.

    The exit code is 1 when something would keep `vllm serve` from drafting with Domino. An engine that is for another
    machine is listed with the reason, and is no error.
    """
    from vllm_domino.cli.console import print_json
    from vllm_domino.cli.diagnosis import diagnose

    found = diagnose([Path("engines/built"), *(folders or [])])
    if as_json:
        print_json(found.to_dict())
    else:
        _show(found)
    if found.problems:
        raise typer.Exit(1)


def _show(found: Diagnosis) -> None:
    from rich.markup import escape

    from vllm_domino.cli.console import out

    for title, section in (
        ("versions", found.versions),
        ("plugin", found.plugin),
        ("devices", found.devices),
    ):
        out.print(f"[bold]{title}[/bold]")
        for name, value in section.items():
            text = escape(str(value)) if value is not None else "[dim]not installed[/dim]"
            out.print(f"  {name:<16} {text}")
    out.print("[bold]engines[/bold]")
    if not found.engines:
        out.print(
            "  none found in engines/built or the folders given; build one: vllm-domino build RECIPE ENGINE"
        )
    for engine in found.engines:
        mark = "[green]fits[/green]" if engine["fits"] else "[yellow]does not fit[/yellow]"
        out.print(f"  {escape(engine['folder'])}: {mark} {escape(engine['what'])}")
        if engine["reason"]:
            out.print(f"    {escape(engine['reason'])}")
    for problem in found.problems:
        out.print(f"[bold red]problem:[/bold red] {escape(problem)}")
    if not found.problems:
        out.print("[green]no problem found[/green]")
