"""The `vllm-domino` command: its sub-commands, and how errors reach the user."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Annotated

import typer

import vllm_domino

DEBUG_VARIABLE = "VLLM_DOMINO_DEBUG"  # 1: show the traceback of an error that is meant for users
# name -> (module, attribute). A function becomes a command, a Typer app a group of commands.
COMMANDS = {
    "export": ("vllm_domino.cli.export", "export"),
    "build": ("vllm_domino.cli.build", "build"),
    "verify": ("vllm_domino.cli.verify", "verify"),
    "inspect": ("vllm_domino.cli.inspect", "inspect"),
    "doctor": ("vllm_domino.cli.doctor", "doctor"),
    "demo": ("vllm_domino.cli.demo", "demo"),
    "train": ("vllm_domino.cli.train", "app"),
    "bench": ("vllm_domino.cli.bench", "app"),
}

app = typer.Typer(
    name="vllm-domino",
    help="Serve Domino speculative-decoding drafters in vLLM: checkpoint → ONNX → engine → `vllm serve`.",
    epilog="Errors are one paragraph; VLLM_DOMINO_DEBUG=1 shows the traceback.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-domino {vllm_domino.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def _mount() -> None:
    """Add every command whose module is there; each imports what it needs when it runs."""
    for name, (module_name, attribute) in COMMANDS.items():
        if importlib.util.find_spec(module_name) is None:
            continue
        command = getattr(importlib.import_module(module_name), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)


_mount()


def run() -> None:
    """Console script: a `ValueError` is the user's to mend, so it is shown as a message, not as a traceback."""
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get(DEBUG_VARIABLE) == "1" or not _is_for_users(error):
            raise
        from vllm_domino.cli.console import print_error

        print_error(str(error))
        sys.exit(1)


def _is_for_users(error: Exception) -> bool:
    """Our own messages, and what the operating system says about files; everything else is a defect of ours."""
    if isinstance(error, RuntimeError):
        from vllm_domino.bench.server import ServerError

        return isinstance(error, ServerError)
    return True


if __name__ == "__main__":
    run()
