"""Threads of a graph run are spread over the cores that OpenMP was given, never piled on the caller's."""

import os

import pytest

from vllm_domino.runtime import cpu_threads


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("GOMP_CPU_AFFINITY", "4 5 6"),
        ("GOMP_CPU_AFFINITY", "4-6"),
        ("OMP_PLACES", "{4,5,6}"),
        ("KMP_AFFINITY", "granularity=fine,explicit,proclist=[4,5,6]"),
    ],
)
def test_every_other_core_gets_one_thread(monkeypatch, variable, text):
    for name in cpu_threads._CORE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4})
    assert cpu_threads.thread_affinities(3) == "6;7"  # ONNX Runtime counts processors from 1
    assert cpu_threads.thread_affinities(1) is None
    assert cpu_threads.thread_affinities(4) is None  # more threads than cores: left to the scheduler


def test_a_process_that_is_not_pinned_stays_so(monkeypatch):
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0 1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert cpu_threads.thread_affinities(2) is None


@pytest.mark.parametrize("text", ["0", "two", "-1"])
def test_a_wrong_thread_count_is_refused(monkeypatch, text):
    monkeypatch.setenv(cpu_threads.THREADS_VARIABLE, text)
    with pytest.raises(ValueError, match=f"{cpu_threads.THREADS_VARIABLE} is '{text}'"):
        cpu_threads.thread_count()
