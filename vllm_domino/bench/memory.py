"""Memory of a process and all its children, from Linux's /proc."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class ProcessMemory(BaseModel):
    """Bytes. rss: resident now; peak: the most that was resident; pss: resident, shared pages divided among sharers."""

    model_config = ConfigDict(extra="forbid")

    name: str
    rss: int
    peak: int
    pss: int


def tree_memory(pid: int, proc: Path = Path("/proc")) -> list[ProcessMemory]:
    """One entry per living process of the tree, the root first; empty where there is no /proc."""
    parents: dict[int, int] = {}
    for folder in proc.glob("[0-9]*"):
        fields = _status(folder)
        if "PPid" in fields:
            parents[int(folder.name)] = int(fields["PPid"])
    tree, queue = [], [pid]
    while queue:
        current = queue.pop(0)
        memory = _memory(proc / str(current))
        if memory is not None:
            tree.append(memory)
        queue += sorted(child for child, parent in parents.items() if parent == current)
    return tree


def _memory(folder: Path) -> ProcessMemory | None:
    status = _status(folder)
    if "VmRSS" not in status:
        return None
    rss, peak = _kilobytes(status["VmRSS"]), _kilobytes(status.get("VmHWM", status["VmRSS"]))
    rollup = _fields(folder / "smaps_rollup")
    return ProcessMemory(
        name=status["Name"], rss=rss, peak=peak, pss=_kilobytes(rollup.get("Pss", status["VmRSS"]))
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
