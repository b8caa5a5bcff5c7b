"""Talking to whoever runs a command: progress on stderr, results on stdout, errors as one paragraph."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

# soft_wrap: a path or a command in a message must survive being copied from a narrow terminal.
err = Console(stderr=True, soft_wrap=True, highlight=False)
# Where there is no terminal to ask, tables are made for a log, not for 80 columns.
out = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 120)


class Step:
    """One piece of long work. `say` tells the stage it has reached."""

    def __init__(self, title: str):
        self.title = title
        self._started = time.monotonic()
        self._status = err.status("") if err.is_terminal else None
        self._stage = ""
        if self._status is not None:
            self._status.start()
            self.say("")
        else:
            err.print(f"{title} …", markup=False)

    @property
    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._started

    def say(self, stage: str) -> None:
        """Show a stage beside the spinner, or as a line of its own where there is no terminal."""
        self._stage = stage
        if self._status is None:
            err.print(f"  {stage}", markup=False)
        else:
            self.tick()

    def tick(self, *_: object) -> None:
        """Refresh the elapsed time; costs nothing where there is no terminal."""
        if self._status is not None:
            detail = f": {self._stage}" if self._stage else ""
            self._status.update(_Elapsed(self, detail))

    def end(self, mark: str, colour: str) -> None:
        """Replace the spinner by a line that stays."""
        if self._status is not None:
            self._status.stop()
        err.print(f"[{colour}]{mark}[/{colour}] ", end="")
        err.print(f"{self.title} ({self.seconds:.1f} s)", markup=False)


class _Elapsed:
    """A status text that counts by itself while the work holds the interpreter elsewhere."""

    def __init__(self, step: Step, detail: str):
        self.step, self.detail = step, detail

    def __rich__(self) -> str:
        from rich.markup import escape

        return escape(f"{self.step.title}{self.detail}  {self.step.seconds:.0f} s")


@contextmanager
def step(title: str) -> Iterator[Step]:
    """Show `title` with a spinner and the elapsed time while the block runs, and how it ended."""
    running = Step(title)
    try:
        yield running
    except BaseException:
        running.end("✗", "red")
        raise
    running.end("✓", "green")


def print_json(value: Any) -> None:
    """One line of JSON on stdout, however wide the terminal is."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_error(message: str) -> None:
    """What went wrong and what mends it, on stderr."""
    err.print("[bold red]error:[/bold red] ", end="")
    err.print(message, markup=False)


def human_bytes(size: float) -> str:
    """A size as people write it: 512 B, 16.8 MB, 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
