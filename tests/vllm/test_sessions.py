"""The engine drafts what the checkpoint drafts in PyTorch: every id, on contexts as they come up while serving; and it
reads the target's tables where the target put them."""

import gc
import json

import pytest
import torch
from harness import DOMINO, TARGET, generate, open_llm, proposer_of, runner_of, speculative, untied_target
from reference import Reference
from torch._subclasses.fake_tensor import is_fake
from vllm import SamplingParams

from vllm_domino.model.decode import target_features
from vllm_domino.runtime.factory import open_session

CONTEXTS = 1024
BATCH = 16


def test_onnx_runtime_drafts_equal_pytorch_s_on_real_contexts(engine, reference: Reference, runs):
    """Contexts and anchors are those of generated answers, each session's rows its own."""
    sessions = [open_session(path, torch.device("cpu"), torch.float32) for path in (engine, DOMINO)]
    assert [session.backend for session in sessions] == ["onnxruntime", "pytorch"]
    embedding, lm_head = (
        table.weight.detach()
        for table in (reference.target.get_input_embeddings(), reference.target.get_output_embeddings())
    )
    for session in sessions:
        session.bind_target(embedding, lm_head)
    count = different = 0
    for run in runs:
        with torch.inference_mode():
            hidden = reference.target(torch.tensor([run.ids]), output_hidden_states=True).hidden_states
        features = target_features(hidden, reference.drafter.config.target_layer_ids).clone()
        rows = [_rows(session, features) for session in sessions]
        for start in range(len(run.prompt), len(run.ids) - BATCH, BATCH):
            at = torch.arange(start, start + BATCH)
            drafts = [
                _drafts(session, torch.tensor(run.ids)[at], at, own)
                for session, own in zip(sessions, rows, strict=True)
            ]
            different += int((drafts[0] != drafts[1]).sum())
            count += BATCH
        if count >= CONTEXTS:
            break
    assert count >= CONTEXTS
    assert different == 0, f"{different} ids differ on {count} contexts"


def _rows(session, features):
    out = torch.empty(len(features), *session.config.context_row_shape)
    session.context_rows(features, torch.arange(len(features)), out)
    return out


def _drafts(session, anchors, positions, rows):
    context = rows[: int(positions.max())].unsqueeze(0).repeat(len(anchors), 1, 1, 1, 1, 1)
    out = torch.full((len(anchors), session.config.num_draft_tokens), -1)
    session.draft(anchors, positions, context, positions, out)
    return out


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_lm_head_exist_once(engine, tmp_path, tied):
    target = (
        TARGET if tied else untied_target(tmp_path / "target", lambda tied: {"lm_head.weight": tied.clone()})
    )
    before = _tables()
    with open_llm(speculative(engine), target=target, max_num_seqs=2, max_num_batched_tokens=512) as llm:
        generate(llm, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        model, session = runner_of(llm).model, proposer_of(llm).model.session
        own = [model.model.embed_tokens.weight.data_ptr(), model.lm_head.weight.data_ptr()]
        assert [table.data_ptr() for table in session._tables] == own
        (bound,) = (block._bound for block in session._blocks.values() if block._bound)
        assert {address for address, _ in bound} >= set(own)
        assert _tables() - before == set(own)
    assert len(set(own)) == (1 if tied else 2)


def _tables() -> set[int]:
    """Addresses of all matrices in this process that are as large as the target's."""
    vocab, hidden = (
        json.loads((TARGET / "config.json").read_text())[k] for k in ("vocab_size", "hidden_size")
    )
    gc.unfreeze()  # vLLM hides from the collector what it has loaded
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    tensors = (
        each for each in tensors if not is_fake(each)
    )  # a compiler's: no memory, and sizes that are symbols
    size = vocab * hidden
    found = (each for each in tensors if each.numel() == size and hidden in each.shape)
    return {each.untyped_storage().data_ptr() for each in found} - {0}  # 0: no memory behind it
