"""The engine drafts what the checkpoint drafts in PyTorch: every id, on contexts as they come up while serving."""

import torch
from harness import DOMINO, Reference

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
