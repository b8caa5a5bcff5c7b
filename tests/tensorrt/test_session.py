"""The TensorRT session on the stand-in module: the same drafts as PyTorch, and TensorRT's rules kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from trt_helpers import CPU, Export, aligned, block_case, open_session, recipe, write_plans

from vllm_domino.model.drafter import HeadOptions
from vllm_domino.runtime import factory

GRID = {"name": "standin", "backend": "tensorrt", "compute_capability": "9.0"}


@pytest.fixture(params=["grid", "batch", "single"])
def wanted(request):
    return recipe(**GRID, options={"profiles": request.param})


@pytest.fixture
def session(fake_trt, fp32_export, tmp_path):
    wanted = recipe(**GRID)
    write_plans(fake_trt, fp32_export, tmp_path, wanted)
    session = open_session(fp32_export, tmp_path, wanted)
    session.bind_target(aligned(fp32_export.embedding), aligned(fp32_export.lm_head))
    yield session
    session.close()


def reference(export, case, **targets):
    ids, positions, rows, lengths, _ = case
    tables = targets.get("embedding", export.embedding), targets.get("lm_head", export.lm_head)
    with torch.inference_mode():
        return export.drafter.draft(ids, positions, rows, lengths, *tables)


def test_drafts_and_scores_equal_pytorch(fake_trt, fp32_export, tmp_path, wanted):
    write_plans(fake_trt, fp32_export, tmp_path, wanted)
    session = open_session(fp32_export, tmp_path, wanted)
    session.bind_target(aligned(fp32_export.embedding), aligned(fp32_export.lm_head))
    for seed, (batch, context) in enumerate([(1, 16), (4, 64), (1, 64), (4, 16), (4, 16)]):
        case = block_case(fp32_export, batch, context, seed)
        session.draft(*case)
        ids, probs, candidates, logits = reference(fp32_export, case)
        assert torch.equal(case[-1], ids)
        scores = {name: rows[:batch] for name, rows in session.scores.items()}
        torch.testing.assert_close(scores["draft_probs"], probs, rtol=1e-4, atol=1e-6)
        assert torch.equal(scores["candidate_ids"].sort()[0], candidates.sort()[0])
        torch.testing.assert_close(
            scores["candidate_logits"].sort()[0], logits.sort()[0], rtol=1e-4, atol=1e-4
        )
    session.close()
    session.close()


def test_pruned_vocabulary(fake_trt, tmp_path):
    """The session gathers the kept rows of the target's LM head; drafts are PyTorch's, and kept tokens only."""
    kept, wanted = torch.arange(0, 210, 3), recipe(**GRID)
    export = Export(tmp_path, torch.float32, HeadOptions(candidate_pool=12), head_dim=16, kept=kept)
    write_plans(fake_trt, export, tmp_path / "plans", wanted)
    session = open_session(export, tmp_path / "plans", wanted, vocab_ids=export.checkpoint.vocab_ids)
    session.bind_target(aligned(export.embedding), aligned(export.lm_head))
    session._lm_head = aligned(
        session._lm_head
    )  # torch's CPU allocator aligns the gathered rows to 64 bytes only
    case = block_case(export, 4, 64)
    session.draft(*case)
    assert torch.equal(case[-1], reference(export, case, lm_head=export.lm_head[kept])[0])
    assert set(case[-1].flatten().tolist()) <= set(kept.tolist())
    session.close()


def test_context_rows_of_any_number_in_pieces(session, fp32_export, monkeypatch):
    config = fp32_export.config
    monkeypatch.setattr(session, "_max_rows", 64)  # pieces start at aligned rows, as 2048 does
    for rows in (1, 3, 64, 150):
        features, positions = torch.randn(rows, config.feature_size), torch.arange(rows) + 5
        out = aligned(torch.zeros(rows, *config.context_row_shape))
        session.context_rows(aligned(features), aligned(positions), out)
        with torch.inference_mode():
            expected = fp32_export.drafter.context_kv(features, positions)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_failed_enqueue_costs_one_step(session, fake_trt, fp32_export):
    case = block_case(fp32_export, 4, 16)
    fake_trt.fail_at = {fake_trt.enqueues}
    with pytest.raises(RuntimeError, match=r"block plan: .*because a test asked for it"):
        session.draft(*case)
    session.draft(*case)
    assert torch.equal(case[-1], reference(fp32_export, case)[0])


def test_no_new_context_and_no_new_shape_in_a_step(session, fake_trt, fp32_export, monkeypatch):
    calls = []
    for cls, name in (
        (fake_trt.ICudaEngine, "create_execution_context"),
        (fake_trt.IExecutionContext, "set_input_shape"),
        (fake_trt.IExecutionContext, "set_optimization_profile_async"),
    ):
        monkeypatch.setattr(cls, name, lambda *a, n=name: calls.append(n))
    for batch, context in [(1, 16), (4, 64), (1, 16), (4, 16)]:
        session.draft(*block_case(fp32_export, batch, context))
    assert calls == []


def test_tables_and_buffers_are_bound_not_copied(session, fp32_export):
    embedding, lm_head = aligned(fp32_export.embedding), aligned(fp32_export.lm_head)
    session.bind_target(embedding, lm_head)
    case = block_case(fp32_export, 1, 16)
    session.draft(*case)
    lm_head.copy_(lm_head.flip(0))  # the target's memory changes, and with it the drafts
    session.draft(*case)
    assert torch.equal(case[-1], reference(fp32_export, case, lm_head=lm_head)[0])


def test_capture_and_replay_of_several_buckets(session, fake_trt, fp32_export, monkeypatch):
    monkeypatch.setattr(session, "_is_capturing", fake_trt.is_capturing)
    graphs = {}
    for batch, context in [(4, 64), (1, 16)]:
        case = block_case(fp32_export, batch, context)
        with (
            pytest.raises(RuntimeError, match="captured into a CUDA graph before it ran once"),
            fake_trt.capture([]),
        ):
            session.draft(*case)
        session.draft(*case)
        with fake_trt.capture([]) as graph:
            session.draft(*case)
        graphs[batch, context] = case, graph
    for (batch, context), (case, graph) in graphs.items():
        fresh = block_case(fp32_export, batch, context, seed=9)
        session.draft(*block_case(fp32_export, 4, 16))  # other buckets run in between
        for static, new in zip(case, fresh, strict=True):
            static.copy_(new)
        fake_trt.replay(graph)
        assert torch.equal(case[-1], reference(fp32_export, fresh)[0])


def test_captured_rows_need_a_reservation(session, fake_trt, fp32_export, monkeypatch):
    monkeypatch.setattr(session, "_is_capturing", fake_trt.is_capturing)
    config = fp32_export.config
    case = [
        aligned(t)
        for t in (
            torch.randn(8, config.feature_size),
            torch.arange(8),
            torch.zeros(8, *config.context_row_shape),
        )
    ]
    session.context_rows(*case)
    with fake_trt.capture([]), pytest.raises(RuntimeError, match="reserve"):
        session.context_rows(*case)
    session.reserve_rows([8])
    session.context_rows(*case)
    with fake_trt.capture([]) as graph:
        session.context_rows(*case)
    session.context_rows(*[t[:3] for t in case])  # another number of rows, another context
    fake_trt.replay(graph)


def test_misaligned_address(session, fp32_export):
    case = block_case(fp32_export, 1, 16)
    case[0] = aligned(case[0], offset=64)
    with pytest.raises(RuntimeError, match=r"anchor_ids.*not aligned to 256"):
        session.draft(*case)


def test_buckets_above_the_batch_are_left_out(fake_trt, fp32_export, tmp_path):
    wanted = recipe(**GRID, batch_buckets=(1, 2, 4))
    write_plans(fake_trt, fp32_export, tmp_path, wanted)
    assert open_session(fp32_export, tmp_path, wanted, max_batch=2).batch_buckets == (1, 2)
    assert open_session(fp32_export, tmp_path, wanted, max_batch=3).batch_buckets == (1, 2, 4)


def test_a_batch_above_the_buckets_is_announced(fake_trt, fp32_export, tmp_path, caplog):
    wanted = recipe(**GRID)
    write_plans(fake_trt, fp32_export, tmp_path, wanted)
    manifest = SimpleNamespace(
        backend="tensorrt",
        config=fp32_export.config,
        head=SimpleNamespace(options=lambda: fp32_export.options),
        dtype="float32",
        batch_buckets=wanted.batch_buckets,
        context_buckets=wanted.context_buckets,
        engine_recipe="h100",
        build_command="vllm-domino build export/a.toml engines/h100.toml",
    )
    factory._tensorrt(tmp_path, manifest, CPU, 4).close()
    assert not caplog.records
    factory._tensorrt(tmp_path, manifest, CPU, 9).close()
    (record,) = caplog.records
    assert (
        "--max-num-seqs is 9 and the engine's largest batch 4, so a full batch takes 3 engine calls or more; for "
        "fewer, add 9 to batch_buckets in engines/h100.toml and run `vllm-domino build export/a.toml"
    ) in record.getMessage()


def test_profile_that_the_manifest_promises_but_the_plan_lacks(fake_trt, fp32_export, tmp_path):
    write_plans(fake_trt, fp32_export, tmp_path, recipe(**GRID))
    with pytest.raises(ValueError, match=r"no profile of the block plan takes batch 8, context 16"):
        open_session(fp32_export, tmp_path, recipe(**GRID, batch_buckets=(1, 8)))


def test_plan_of_another_gpu_version_or_drafter(fake_trt, fp32_export, tmp_path, monkeypatch):
    wanted = recipe(**GRID)
    monkeypatch.setitem(fake_trt.STANDS_IN_FOR, "compute_capability", "10.0")
    write_plans(fake_trt, fp32_export, tmp_path, wanted)
    monkeypatch.setitem(fake_trt.STANDS_IN_FOR, "compute_capability", "9.0")
    with pytest.raises(ValueError, match=r"incompatible device, expecting compute 9.0 got compute 10.0"):
        open_session(fp32_export, tmp_path, wanted)
    write_plans(fake_trt, fp32_export, tmp_path, wanted)
    monkeypatch.setattr(fake_trt, "__version__", "11.5.0.1")
    with pytest.raises(ValueError, match=r"expecting library version 11.5.0.1 got 11.4.0.106"):
        open_session(fp32_export, tmp_path, wanted)
    monkeypatch.setattr(fake_trt, "__version__", "11.4.0.106")
    with pytest.raises(ValueError, match=r"tensor .* is .*, the manifest says"):
        open_session(fp32_export, tmp_path, wanted, dtype=torch.bfloat16)


def test_low_precision_session_on_the_stand_in(fake_trt, bf16_export, tmp_path):
    """Addresses of bf16 tensors: K/V, tables and logits are two bytes wide."""
    wanted = recipe(**GRID)
    write_plans(fake_trt, bf16_export, tmp_path, wanted)
    session = open_session(bf16_export, tmp_path, wanted)
    embedding, lm_head = bf16_export.embedding.bfloat16(), bf16_export.lm_head.bfloat16()
    session.bind_target(aligned(embedding), aligned(lm_head))
    case = block_case(bf16_export, 4, 64)
    session.draft(*case)
    expected = reference(bf16_export, case, embedding=embedding, lm_head=lm_head)[0]
    assert (case[-1] == expected).float().mean() > 0.7  # the stand-in computes in fp32


def test_target_tables(session, fp32_export, caplog):
    with pytest.raises(ValueError, match=r"embedding is \[7, 64\], the drafter needs \[211, 64\]"):
        session.bind_target(torch.zeros(7, 64), torch.zeros(211, 64))
    padded = aligned(torch.cat((fp32_export.embedding, torch.zeros(13, 64))))
    session.bind_target(padded, padded)  # vLLM pads the vocabulary
    assert session._embedding.data_ptr() == session._lm_head.data_ptr() == padded.data_ptr()
    assert not caplog.records
    session.bind_target(padded.half(), padded.half())
    assert "a copy takes" in caplog.text
