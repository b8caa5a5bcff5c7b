"""vLLM drafting through the TensorRT session, on the stand-in module that runs plans with ONNX Runtime on a CPU.

The session binds addresses, keeps a context per bucket and pads to buckets as on a GPU; the drafts must be those of the
ONNX Runtime session on the same graphs.
"""

import shutil
import sys
from pathlib import Path

import pytest
from harness import BLOCK, Counters, Trace, generate, open_llm, speculative, tokens
from vllm import SamplingParams

from vllm_domino.engine.manifest import read_manifest

sys.path.append(str(Path(__file__).parents[1] / "tensorrt"))
from fake_trt.stand_in import engine_on_stand_in, on_path

pytestmark = pytest.mark.v2
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def trt():
    with on_path() as module:
        yield module


@pytest.fixture(scope="module")
def stand_in(trt, engine, tmp_path_factory):
    """Its batches end at 4, below what is served, so that larger ones are drafted in slices."""
    folder = tmp_path_factory.mktemp("stand-in") / "engine"
    return engine_on_stand_in(trt, engine, folder, batch_buckets=(1, 4))


@pytest.fixture(scope="module")
def stand_in_trace(tmp_path_factory):
    return Trace(tmp_path_factory.mktemp("stand-in-trace") / "drafts.jsonl")


@pytest.fixture(scope="module")
def served_on_stand_in(stand_in, stand_in_trace):
    with open_llm(speculative(stand_in, BLOCK), trace=stand_in_trace.path) as llm:
        yield llm


def test_drafts_equal_the_onnx_runtime_session(served_on_stand_in, stand_in_trace, domino, trace, chats):
    prompts = chats[:5]
    expected = tokens(generate(domino, prompts, GREEDY))
    drafts = trace.take()
    stand_in_trace.take()
    before = Counters.of(served_on_stand_in)
    assert tokens(generate(served_on_stand_in, prompts, GREEDY)) == expected
    assert sorted(stand_in_trace.take()) == sorted(drafts)
    assert Counters.of(served_on_stand_in).since(before).failures == 0
    assert len(drafts) > 20


def test_a_failed_enqueue_costs_one_step(served_on_stand_in, trt, domino, chats):
    expected = tokens(generate(domino, chats[:2], GREEDY))
    before = Counters.of(served_on_stand_in)
    first = trt.enqueues
    trt.fail_at = {first + 7}
    try:
        assert tokens(generate(served_on_stand_in, chats[:2], GREEDY)) == expected
    finally:
        trt.fail_at = set()
    counted = Counters.of(served_on_stand_in).since(before)
    assert counted.failures == 1
    assert counted.drafts > 5
    assert trt.enqueues > first + 8


def test_refused_before_memory_is_profiled(stand_in, trt, tmp_path, monkeypatch):
    short = shutil.copytree(stand_in, tmp_path / "short")
    manifest = read_manifest(short).model_copy(update={"context_buckets": (64,)})
    (short / "engine.json").write_text(manifest.model_dump_json())
    too_short = "the longest context bucket is 64, a draft step reads up to 512 tokens .*; add that bucket to"
    with pytest.raises(ValueError, match=too_short), open_llm(speculative(short)):
        pass
    monkeypatch.setitem(trt.STANDS_IN_FOR, "compute_capability", "8.9")
    refusal = pytest.raises(ValueError, match=r"built for SM90, this GPU is stand-in GPU \(SM89\)")
    with refusal, open_llm(speculative(stand_in)):
        pass
