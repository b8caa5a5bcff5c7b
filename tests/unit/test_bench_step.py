"""Timing of the draft step, and the command line of `bench`."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from small_drafters import write_small_checkpoint
from typer.testing import CliRunner

import vllm_domino.bench.step as step_module
from vllm_domino.bench.step import Peaks, StepResult, cost_bound, measure_session, open_drafters
from vllm_domino.cli.bench import app
from vllm_domino.model.drafter import HeadOptions

CPU = torch.device("cpu")
PEAKS = Peaks(flops=1e9, bandwidth=1e9, cache=0)


def test_parts_make_up_the_step(tmp_path, monkeypatch):
    # a clock that moves by one second whenever it is read: what is measured depends on no machine
    monkeypatch.setattr(step_module, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    drafter = write_small_checkpoint(tmp_path / "small")
    sessions = open_drafters([drafter], (0, 8), CPU)
    assert [s.options.candidate_pool for _, s, _ in sessions] == [None, 8]
    name, session, window = sessions[0]
    assert window == 2048
    steps = measure_session(
        name,
        session,
        PEAKS,
        batches=(1, 3),
        contexts=(20, 40),
        window=32,
        rows_per_request=4,
        iterations=5,
        device=CPU,
    )
    assert [(s.batch, s.context, s.rows) for s in steps] == [(1, 20, 4), (1, 40, 4), (3, 20, 12), (3, 40, 12)]
    for step in steps:
        # each part reads the clock twice, a second apart; of the seven seconds between, four are nobody's
        assert (step.context_graph, step.gather, step.block_graph) == (1e3, 1e3, 1e3)
        assert (step.rest, step.total) == (4e3, 7e3)
        assert step.bound > 0


def test_the_bound_follows_the_slower_of_bytes_and_flops(tmp_path):
    _, session, _ = open_drafters([write_small_checkpoint(tmp_path / "small")], (0,), CPU)[0]
    what = {"batch": 1, "context": 32, "rows": 4, "element": 4}
    slow, fast = (cost_bound(session.config, HeadOptions(), p, **what) for p in (PEAKS, Peaks(1e9, 1e18, 0)))
    assert slow >= fast > 0
    assert cost_bound(session.config, HeadOptions(), Peaks(2e9, 2e9, 0), **what) == pytest.approx(slow / 2)


def test_bench_step_writes_json_and_a_table(tmp_path):
    drafter = write_small_checkpoint(tmp_path / "small")
    out = tmp_path / "step.json"
    command = [
        "step",
        str(drafter),
        "--batch",
        "1",
        "--context",
        "20",
        "--iterations",
        "3",
        "--output",
        str(out),
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    result = StepResult.model_validate(json.loads(out.read_text()))
    assert result.steps[0].session == "pytorch"
    assert "| small | pytorch | all | 1 | 20 | 2048 |" in out.with_suffix(".md").read_text()
    assert "1.00 |" in done.output  # PyTorch over itself


def test_a_suite_needs_no_word_before_it(tmp_path):
    missing = tmp_path / "no.toml"
    for command in ([str(missing)], ["run", str(missing)]):
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, ValueError)
        assert "cannot be read" in str(done.exception)
    assert "compare" in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize("sizes", ["", "a", "0", "1,,2"])
def test_wrong_sizes_are_refused(tmp_path, sizes):
    drafter = write_small_checkpoint(tmp_path / "small")
    done = CliRunner().invoke(app, ["step", str(drafter), "--batch", sizes])
    assert "--batch" in str(done.exception)
