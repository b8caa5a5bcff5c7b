"""Memory of a process and all its children, from Linux's /proc."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class ProcessMemory(BaseModel):
    """Bytes. rss: resident now; peak: the most that was resident; pss: resident, shared pages divided among sharers;
    anonymous: the part of pss that no file is behind, None where the kernel does not tell.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    rss: int
    peak: int
    pss: int
    anonymous: int | None = None


def tree_memory(pid: int, proc: Path = Path("/proc")) -> list[ProcessMemory]:
    """One entry per living process of the tree, the root first; empty where there is no /proc."""
    found = (_memory(proc / str(member)) for member in tree_pids(pid, proc))
    return [memory for memory in found if memory is not None]


def tree_pids(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """A process and all that it started, itself first, whether or not they still live."""
    parents: dict[int, int] = {}
    for folder in proc.glob("[0-9]*"):
        fields = _status(folder)
        if "PPid" in fields:
            parents[int(folder.name)] = int(fields["PPid"])
    tree: list[int] = []
    queue = [pid]
    while queue:
        current = queue.pop(0)
        tree.append(current)
        queue += sorted(child for child, parent in parents.items() if parent == current)
    return tree


def tree_file_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Resident pages of mapped files (libraries, weights) and of shared memory, each counted once for the whole tree.

    Unlike the same part of `pss`, this does not shrink when a process outside the tree maps the same files.
    """
    largest: dict[str, int] = {}
    for member in tree_pids(pid, proc):
        for place, num_bytes in _mapped_files(proc / str(member)).items():
            largest[place] = max(largest.get(place, 0), num_bytes)
    return sum(largest.values())


def _mapped_files(folder: Path) -> dict[str, int]:
    """By "offset device inode": resident bytes that are still the file's own."""
    try:
        lines = (folder / "smaps").read_text(errors="replace").splitlines()
    except OSError:  # the process ended meanwhile
        return {}
    found: dict[str, int] = {}
    place = ""
    for line in lines:
        mapping = re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ (\S+ \S+ \d+)", line)
        if mapping:
            place = "" if mapping[1].endswith(" 0") else mapping[1]  # inode 0: no file
        elif place and line.startswith(("Rss:", "Anonymous:")):
            key, value = line.split(":")
            found[place] = found.get(place, 0) + (1 if key == "Rss" else -1) * _kilobytes(value)
    return found


def _memory(folder: Path) -> ProcessMemory | None:
    status = _status(folder)
    if "VmRSS" not in status:
        return None
    rss, peak = _kilobytes(status["VmRSS"]), _kilobytes(status.get("VmHWM", status["VmRSS"]))
    rollup = _fields(folder / "smaps_rollup")
    anonymous = rollup.get("Pss_Anon")
    return ProcessMemory(
        name=status["Name"],
        rss=rss,
        peak=peak,
        pss=_kilobytes(rollup.get("Pss", status["VmRSS"])),
        anonymous=None if anonymous is None else _kilobytes(anonymous),
    )


def _status(folder: Path) -> dict[str, str]:
    return _fields(folder / "status")


def _fields(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:  # the process ended meanwhile, or belongs to somebody else
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) * 1024
