"""Drafts inside vLLM are the reference's: every id, and so the mean acceptance length.

A context row in the wrong place changes no output and fails no assertion of vLLM's; here it changes drafts. Each way
that rows can come to their place is tested: prefill at once and in chunks, from the prefix cache, again after a
preemption, in a window.
"""

import json
import shutil
from pathlib import Path

import pytest
from harness import (
    DFLASH,
    V2,
    Counters,
    Trace,
    build_test_engine,
    generate,
    open_llm,
    proposer_of,
    speculative,
    tokens,
)
from reference import Reference, check_drafts, mean_acceptance
from vllm import SamplingParams

pytestmark = pytest.mark.v2
TOLERANCE = 0.02


def _params(runs):
    return SamplingParams(temperature=0, max_tokens=runs[0].num_tokens, ignore_eos=True)


def _check(llm, trace, reference, runs, *, concurrency=None, tolerance=TOLERANCE):
    """Serve the prompts of `runs`; output, acceptance and every draft must be theirs. Returns the counters."""
    trace.take()
    before = Counters.of(llm)
    found = tokens(generate(llm, [run.prompt for run in runs], _params(runs), concurrency=concurrency))
    counted = Counters.of(llm).since(before)
    assert found == [run.output for run in runs]
    assert counted.failures == 0
    assert counted.acceptance_length == pytest.approx(mean_acceptance(runs), rel=tolerance)
    entries = trace.take()
    assert check_drafts(entries, reference, runs) >= counted.drafts
    return counted


@pytest.fixture(scope="module")
def short(runs):
    """Enough for the ways of scheduling, which cost an engine start each."""
    return runs[:8] if V2 else runs[:16]


def test_first_time_and_from_the_prefix_cache(domino, trace, reference, runs):
    first = _check(domino, trace, reference, runs)
    again = _check(domino, trace, reference, runs)
    assert again.cached_tokens > first.cached_tokens


def test_with_prefill_in_chunks_of_64(engine, tmp_path, reference, short):
    trace = Trace(tmp_path / "trace")
    options = {"long_prefill_token_threshold": 64, "enable_prefix_caching": False}
    with open_llm(speculative(engine), trace=trace.path, **options) as llm:
        assert max(len(run.prompt) for run in short) > 64
        _check(llm, trace, reference, short)


def test_with_preemption(engine, tmp_path, reference, short):
    """A K/V cache that holds a part of the load: requests are thrown out and computed again.

    A request that comes back starts its next round at another token than the reference does. Over the few prompts of
    the slow runner that alone moves the mean by some percent; that every draft is right is asserted all the same.
    """
    trace = Trace(tmp_path / "trace")
    sizes = [len(run.prompt) + run.num_tokens + 16 for run in short]
    options = {
        "enable_prefix_caching": False,
        "max_model_len": max(sizes),
        "num_gpu_blocks_override": max(sum(sizes) // 64, max(sizes) // 32 + 2),
    }
    with open_llm(speculative(engine), trace=trace.path, **options) as llm:
        counted = _check(llm, trace, reference, short, tolerance=0.05 if V2 else TOLERANCE)
        assert counted.preemptions > 0


@pytest.mark.skipif(V2, reason="V2 always drafts rows of one length")
def test_with_rows_of_one_length(domino, trace, reference, short, monkeypatch):
    """What the V1 proposer hands on where vLLM schedules ahead. vLLM does not do that on a CPU."""
    monkeypatch.setattr(proposer_of(domino), "_ragged", False)
    _check(domino, trace, reference, short, concurrency=3)


def test_with_a_window_shorter_than_the_context(engine, tmp_path, reference, runs):
    folder = tmp_path / "engine"
    shutil.copytree(engine, folder)
    manifest = json.loads((folder / "engine.json").read_text())
    (folder / "engine.json").write_text(json.dumps(manifest | {"draft_window": 32}))
    windowed = [reference.decode(run.prompt, 16, draft_window=32) for run in runs[:4]]
    with open_llm(speculative(folder)) as llm:
        before = Counters.of(llm)
        found = tokens(generate(llm, [run.prompt for run in windowed], _params(windowed)))
        counted = Counters.of(llm).since(before)
    assert found == [run.output for run in windowed]
    assert counted.drafts == sum(len(run.rounds) for run in windowed)
    assert counted.acceptance_length == pytest.approx(mean_acceptance(windowed), rel=TOLERANCE)


def test_an_engine_from_a_dflash_checkpoint(tmp_path, chats, request):
    """Its checkpoint is left to vLLM; an engine of it is ours, and drafts without a head what the reference does."""
    engine = build_test_engine(Path(request.config.cache.mkdir("vllm-domino-engines")), DFLASH)
    reference, trace = Reference.load(DFLASH), Trace(tmp_path / "trace")
    runs = [reference.decode(chat, 24) for chat in chats[: 4 if V2 else 12]]
    with open_llm(speculative(engine), trace=trace.path) as llm:
        assert not proposer_of(llm).model.session.config.has_head
        _check(llm, trace, reference, runs)
