"""How many threads a graph run takes on a CPU, and on which cores."""

from __future__ import annotations

import os
import re

import torch

THREADS_VARIABLE = "VLLM_DOMINO_ORT_THREADS"
# Where OpenMP runtimes are told their cores; vLLM's CPU worker sets one of them for its own threads.
_CORE_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")


def thread_count() -> int:
    """Threads of one graph run: `VLLM_DOMINO_ORT_THREADS`, or as many as PyTorch uses.

    Raises:
        ValueError: the variable is not a positive number.
    """
    text = os.environ.get(THREADS_VARIABLE)
    if text is None:
        return torch.get_num_threads()
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"{THREADS_VARIABLE} is {text!r}; it must be a number from 1 (or unset: PyTorch's threads)"
        )
    return int(text)


def thread_affinities(threads: int) -> str | None:
    """Cores of all threads but the calling one, as ONNX Runtime takes them ("2;3", counted from 1); None leaves them.

    OpenMP pins vLLM's worker to one core, and a thread started there would inherit that: all threads of a graph run
    would share the core. They are given the cores that OpenMP was told to use.
    """
    own = os.sched_getaffinity(0)
    others = [core for core in _openmp_cores() if core not in own][: threads - 1]
    if len(own) > 1 or threads < 2 or len(others) < threads - 1:
        return None
    return ";".join(str(core + 1) for core in others)


def _openmp_cores() -> list[int]:
    """Core numbers of the first variable that is set: "0 1", "0-3", "{0,1}" or "…proclist=[0,1]"."""
    text = next((os.environ[name] for name in _CORE_VARIABLES if os.environ.get(name)), "")
    cores: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores += range(int(first), int(last or first) + 1)
    return cores
