"""Directories appear whole or not at all: failures, SIGTERM, SIGKILL, a full disk, two writers at once."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from vllm_domino.files import require_space, sha256_file, staged_directory

WRITER = """
import sys, time
from pathlib import Path
from vllm_domino.files import staged_directory
with staged_directory(Path(sys.argv[1])) as stage:
    (stage / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(60)
"""


def _names(folder):
    return sorted(p.name for p in folder.iterdir())


def _start_writer(target):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    return process


def test_success_replaces_the_old_directory_as_a_whole(tmp_path):
    target = tmp_path / "out"
    for content in ("one", "two"):
        with staged_directory(target) as stage:
            (stage / content).write_text(content)
            assert not (target / content).exists()
        assert _names(target) == [content]
    assert _names(tmp_path) == ["out"]


def test_an_exception_leaves_the_old_directory(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")

    def fail():
        with staged_directory(target) as stage:
            (stage / "new").write_text("new")
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert _names(target) == ["old"]
    assert _names(tmp_path) == ["out"]


def test_disk_full_is_said_and_leaves_nothing(tmp_path):
    def fill():
        with staged_directory(tmp_path / "out"):
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError as error:
                raise RuntimeError("wrapped by a library") from error

    with pytest.raises(ValueError, match=r"the disk is full .* nothing was written"):
        fill()
    assert _names(tmp_path) == []


def test_not_enough_space_is_refused_before_work(tmp_path):
    with pytest.raises(ValueError, match=r"free on this disk, 1,000,000,000,000 MB needed"):
        require_space(tmp_path / "not/there/yet", 10**18)


def test_second_writer_is_refused_by_the_first_ones_process_id(tmp_path):
    first = _start_writer(tmp_path / "out")
    try:
        with (
            pytest.raises(ValueError, match=f"process {first.pid} is writing it; wait for that one to end"),
            staged_directory(tmp_path / "out"),
        ):
            pass
    finally:
        first.terminate()
        first.wait()
    assert _names(tmp_path) == []
    with staged_directory(tmp_path / "out"):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupt_leaves_nothing(tmp_path, number):
    writer = _start_writer(tmp_path / "out")
    writer.send_signal(number)
    assert writer.wait(20) != 0
    assert _names(tmp_path) == []


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    writer = _start_writer(tmp_path / "out")
    writer.kill()
    writer.wait()
    assert any(name.startswith(".out.partial-") for name in _names(tmp_path))
    with staged_directory(tmp_path / "out"):
        pass
    assert _names(tmp_path) == ["out"]


def test_sha256_of_known_bytes(tmp_path):
    path = tmp_path / "abc"
    path.write_bytes(b"abc")  # FIPS 180-2, appendix B.1
    assert sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_lock_goes_away_under_contention(tmp_path):
    """Many writers in turn: exactly one at a time, nobody keeps a stale lock."""
    start = time.monotonic()
    for _ in range(50):
        with staged_directory(tmp_path / "out") as stage:
            (stage / "pid").write_text(str(os.getpid()))
    assert time.monotonic() - start < 20
    assert _names(tmp_path) == ["out"]
