"""Directories that appear whole or not at all, and the digests by which a changed byte is noticed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def require_space(folder: Path, needed: int) -> None:
    """Refuse before long work what cannot fit.

    Raises:
        ValueError: the file system of `folder` (which need not exist yet) has fewer than `needed` bytes free.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"{folder}: {_mb(free)} free on this disk, {_mb(needed)} needed; free some or choose another "
            f"--output"
        )


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory beside `target`; on success it takes the place of `target` in one rename.

    On any exception, SIGTERM included, it is removed and `target` is as it was. What a killed process left
    is removed by the next one.

    Raises:
        ValueError: another process is writing `target`, or the disk is full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target = target.resolve()
    with _exclusive(target), _sigterm_as_exit():
        for stale in target.parent.glob(f".{target.name}.partial-*"):
            shutil.rmtree(stale, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        stage.chmod(0o755)
        try:
            yield stage
            for path in stage.rglob("*"):
                _sync(path)
            _replace(stage, target)
        except Exception as error:
            if _is_disk_full(error):
                free = _mb(shutil.disk_usage(target.parent).free)
                raise ValueError(
                    f"{target}: the disk is full ({free} free); nothing was written, free some space or "
                    f"choose another --output"
                ) from error
            raise
        finally:
            shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold `.NAME.lock` beside the target; the file goes away with its last holder."""
    path = target.parent / f".{target.name}.lock"
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(handle, 32).decode() or "unknown"
            os.close(handle)
            raise ValueError(
                f"{target}: process {owner} is writing it; wait for that one to end, or choose another "
                f"--output"
            ) from error
        # the holder before us may have removed the file between our open and our lock
        if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
            break
        os.close(handle)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that clean-up runs; only the main thread may set handlers."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _replace(stage: Path, target: Path) -> None:
    if not target.exists():
        stage.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    target.rename(old / "old")
    try:
        stage.rename(target)
    except BaseException:
        (old / "old").rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
