"""Fixtures of every test folder. Helpers are in `small_drafters`, since each folder has a conftest of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_drafters import random_weights, small_config, write_small_checkpoint

__all__ = ["random_weights", "small_config", "write_small_checkpoint"]


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> Iterator[None]:
    """A shell starts background jobs deaf to SIGINT, and they pass that on: tests that interrupt need it heard."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def checkpoint_dir(tmp_path: Path) -> Path:
    """A random Domino checkpoint in the public layout."""
    return write_small_checkpoint(tmp_path / "checkpoint")
