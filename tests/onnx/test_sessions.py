"""ONNX Runtime's drafts against PyTorch's, id by id."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_drafters import random_weights, small_config

from vllm_domino.config.checkpoint import read_checkpoint
from vllm_domino.config.recipes import EngineRecipe, ExportRecipe
from vllm_domino.engine.build import build_engine
from vllm_domino.model.drafter import Drafter, HeadOptions
from vllm_domino.runtime.factory import open_session

CPU = torch.device("cpu")
CPU_RECIPE = EngineRecipe(
    name="cpu", backend="onnxruntime", dtype="float32", providers=("CPUExecutionProvider",)
)


def _open(folder, embedding, lm_head, dtype=torch.float32):
    session = open_session(folder, CPU, dtype)
    session.bind_target(embedding, lm_head)
    return session


def _case(config, batch, context, generator):
    lengths = torch.randint(context + 1, (batch,), generator=generator)
    return (
        torch.randint(config.vocab_size, (batch,), generator=generator),
        lengths + torch.randint(300, (batch,), generator=generator),
        torch.randn(batch, context, *config.context_row_shape, generator=generator),
        lengths,
    )


def _run(session, case):
    out = torch.full((case[0].shape[0], session.config.num_draft_tokens), -1)
    session.draft(*case, out)
    return out


def _tables(seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(97, 32, generator=g), torch.randn(97, 32, generator=g) * 0.3


@pytest.mark.parametrize("name", ["shift", "no-shift", "dflash", "pool"])
def test_every_id_of_over_a_thousand_contexts(engines, name):
    """Batches 1 to 33, contexts of 0, 1, a window and between; 1,100 contexts per variant."""
    checkpoint, engine = engines(name)
    tables = _tables()
    session, config = _open(engine, *tables), read_checkpoint(checkpoint).config
    options = HeadOptions(candidate_pool=9, scores=True) if name == "pool" else None
    drafter = Drafter.from_checkpoint(read_checkpoint(checkpoint), options).eval()
    generator, seen, distinct = torch.Generator().manual_seed(7), 0, set()
    while seen < 1100:
        for batch, context in ((1, 0), (1, 1), (2, 64), (33, 17), (16, 2), (7, 40), (3, 200)):
            case = _case(config, batch, context, generator)
            expected = drafter.draft(*case, *tables)
            assert torch.equal(_run(session, case), expected[0]), (batch, context)
            seen += batch
            distinct |= set(expected[0].flatten().tolist())
    assert len(distinct) > 30  # the drafts are not all one token


@pytest.mark.parametrize(("name", "sizes"), [("no-shift", {1: 2, 2: 3, 3: 4}), ("pool", {3: 3, 4: 4})])
def test_short_blocks_draft_what_pytorch_drafts_in_a_short_block(engines, name, sizes):
    """`sizes`: K that the session offers -> block that it comes from."""
    checkpoint, engine = engines(name)
    tables = _tables()
    session, found = _open(engine, *tables), read_checkpoint(checkpoint)
    assert session.draft_sizes == tuple(sizes)
    for count, block in sizes.items():
        short = dataclasses.replace(found, config=dataclasses.replace(found.config, block_size=block))
        drafter = Drafter.from_checkpoint(short, session.options).eval()
        for batch, context in ((1, 0), (5, 17), (33, 40)):
            case = _case(session.config, batch, context, torch.Generator().manual_seed(batch))
            out = torch.full((batch, count), -1)
            session.draft(*case, out)
            assert torch.equal(out, drafter.draft(*case, *tables)[0]), (count, batch)


def test_short_blocks_that_are_not_shorter_are_refused(engines, tmp_path):
    checkpoint, _ = engines("shift")  # blocks of 4
    for size, drafts in ((4, 0), (3, 3)):
        recipe = ExportRecipe(name="x", checkpoint=str(checkpoint), draft_tokens=drafts, short_blocks=(size,))
        with pytest.raises(ValueError, match=f"short_blocks contains {size}.* leave {size} out"):
            build_engine(recipe, CPU_RECIPE, tmp_path / "x", export_root=tmp_path / "export")
    gpu = EngineRecipe(
        name="gpu",
        backend="tensorrt_rtx",
        compute_capability="8.9",
        dtype="bfloat16",
        batch_buckets=(1,),
        context_buckets=(2048,),
    )
    recipe = ExportRecipe(name="x", checkpoint=str(checkpoint), short_blocks=(3,))
    with pytest.raises(ValueError, match="short_blocks are for backend 'onnxruntime' only"):
        build_engine(recipe, gpu, tmp_path / "x", export_root=tmp_path / "export")
    assert not (tmp_path / "x").exists()


def test_scores_equal_the_references(engines):
    checkpoint, engine = engines("pool")
    tables = _tables()
    session = _open(engine, *tables)
    drafter = Drafter.from_checkpoint(
        read_checkpoint(checkpoint), HeadOptions(candidate_pool=9, scores=True)
    ).eval()
    case = _case(session.config, 5, 12, torch.Generator().manual_seed(0))
    _run(session, case)
    _, probs, ids, logits = drafter.draft(*case, *tables)
    torch.testing.assert_close(session.scores["draft_probs"], probs, atol=1e-5, rtol=1e-4)
    assert torch.equal(session.scores["candidate_ids"], ids)
    torch.testing.assert_close(session.scores["candidate_logits"], logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["shift", "no-shift"])
def test_context_rows_are_written_into_the_callers_memory(engines, name):
    checkpoint, engine = engines(name)
    session = _open(engine, *_tables())
    drafter = Drafter.from_checkpoint(read_checkpoint(checkpoint)).eval()
    for rows in (1, 5, 300):
        features, positions = torch.randn(rows, session.config.feature_size), torch.randint(500, (rows,))
        out = torch.full((rows, *session.config.context_row_shape), float("nan"))
        address = out.data_ptr()
        session.context_rows(features, positions, out)
        assert out.data_ptr() == address
        torch.testing.assert_close(out, drafter.context_kv(features, positions), atol=1e-5, rtol=1e-5)


def test_target_tables_are_read_in_place(engines):
    """A change of the target's memory shows in the next draft: nothing was copied."""
    _, engine = engines("shift")
    embedding, lm_head = _tables()
    session = _open(engine, embedding, lm_head)
    case = _case(session.config, 8, 20, torch.Generator().manual_seed(2))
    before = _run(session, case)
    lm_head.copy_(lm_head.flip(0))
    after = _run(session, case)
    assert torch.equal(after, _run(_open(engine, embedding, lm_head.clone()), case))
    assert not torch.equal(before, after)


def test_a_bf16_target_is_cast_once(engines, caplog):
    _, engine = engines("shift")
    embedding, lm_head = (t.bfloat16() for t in _tables())
    with caplog.at_level("WARNING"):
        session = _open(engine, embedding, lm_head, torch.bfloat16)
    assert caplog.text.count("a copy takes") == 2
    assert session.dtype == torch.float32
    case = _case(session.config, 4, 9, torch.Generator().manual_seed(2))
    assert torch.equal(_run(session, case), _run(_open(engine, embedding.float(), lm_head.float()), case))


def test_failures_are_runtime_errors_and_the_next_step_works(engines):
    _, engine = engines("shift")
    session = _open(engine, *_tables())
    anchors, positions, context, lengths = _case(session.config, 4, 9, torch.Generator().manual_seed(2))
    good = _run(session, (anchors, positions, context, lengths))
    with pytest.raises(RuntimeError, match="could not run"):
        _run(session, (torch.tensor([0, 1, 2, 97_000]), positions, context, lengths))
    with pytest.raises(RuntimeError, match=r"room for 3 draft tokens, this session drafts \(4,\)"):
        session.draft(anchors, positions, context, lengths, torch.full((4, 3), -1))
    assert torch.equal(_run(session, (anchors, positions, context, lengths)), good)
    session.close()
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        _run(session, (anchors, positions, context, lengths))


def test_threads_from_the_environment(engines, monkeypatch):
    _, engine = engines("shift")
    monkeypatch.setenv("VLLM_DOMINO_ORT_THREADS", "many")
    with pytest.raises(ValueError, match="VLLM_DOMINO_ORT_THREADS is 'many'; it must be a number from 1"):
        open_session(engine, CPU, torch.float32)


def test_plain_checkpoint_runs_in_pytorch_and_says_how_to_build(engines, caplog):
    checkpoint, engine = engines("shift")
    with caplog.at_level("INFO"):
        session = _open(checkpoint, *_tables())
    assert session.backend == "pytorch"
    assert "vllm-domino build export/RECIPE.toml engines/DEVICE.toml" in caplog.text
    case = _case(session.config, 6, 30, torch.Generator().manual_seed(4))
    assert torch.equal(_run(session, case), _run(_open(engine, *_tables()), case))


def test_reduced_vocabulary_with_its_own_lm_head(reduced_checkpoint, tmp_path):
    recipe = ExportRecipe(name="reduced", checkpoint=str(reduced_checkpoint), verify_context=16)
    engine = EngineRecipe(name="cpu", backend="onnxruntime", dtype="float32")
    build_engine(recipe, engine, tmp_path / "engine", export_root=tmp_path / "export")
    tables = _tables()
    session, plain = _open(tmp_path / "engine", *tables), _open(reduced_checkpoint, *tables)
    read = read_checkpoint(reduced_checkpoint)
    drafter = Drafter.from_checkpoint(read).eval()
    case = _case(session.config, 30, 12, torch.Generator().manual_seed(4))
    expected = drafter.draft(*case, tables[0], read.lm_head)[0]
    assert set(expected.flatten().tolist()) <= set(read.vocab_ids.tolist())
    assert torch.equal(_run(session, case), expected)
    assert torch.equal(_run(plain, case), expected)


def test_small_config_fixture_is_a_real_drafter():
    assert sum(t.numel() for t in random_weights(small_config()).values()) < 40_000
