"""Engines of a pruned vocabulary: PyTorch's drafts, only kept tokens, and a record of how they were chosen."""

from __future__ import annotations

import json

import pytest
import torch
from small_drafters import write_small_checkpoint
from typer.testing import CliRunner

from vllm_domino.cli.main import app
from vllm_domino.config.recipes import EngineRecipe, ExportRecipe
from vllm_domino.config.vocabulary import read_recipe_checkpoint
from vllm_domino.engine.build import build_engine
from vllm_domino.export.onnx_export import head_options
from vllm_domino.model.drafter import Drafter
from vllm_domino.runtime.factory import open_session
from vllm_domino.runtime.torch_session import TorchSession

CPU = torch.device("cpu")
ENGINE = EngineRecipe(name="cpu", backend="onnxruntime", dtype="float32")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pruned")
    write_small_checkpoint(folder / "draft", block_size=4, num_hidden_layers=1)
    (folder / "frequencies.json").write_text(json.dumps({str(i): 200 - i for i in range(0, 97, 2)}))
    return folder


def recipe_of(root, **changes):
    values = {
        "draft_vocab_size": 30,
        "token_frequencies": str(root / "frequencies.json"),
        "verify_context": 16,
    }
    return ExportRecipe(name="pruned", checkpoint=str(root / "draft"), **(values | changes))


@pytest.mark.parametrize("pool", [0, 6])
def test_drafts_equal_pytorch_and_are_kept_tokens(root, pool):
    recipe = recipe_of(root, candidate_pool=pool)
    folder = root / f"engine-{pool}"
    manifest = build_engine(recipe, ENGINE, folder, export_root=root / "export")
    assert manifest.head.draft_vocab_size == manifest.config.draft_vocab_size == 30
    assert manifest.verification.equal + manifest.verification.ties == manifest.verification.drafts
    session, checkpoint = open_session(folder, CPU, torch.float32), read_recipe_checkpoint(recipe)
    drafter = Drafter.from_checkpoint(checkpoint, head_options(recipe))
    plain = TorchSession(drafter, CPU, torch.float32)
    torch.manual_seed(1)
    embedding, lm_head = torch.randn(97, 32), torch.randn(97, 32) * 0.3
    outs = []
    for each in (session, plain):
        torch.manual_seed(2)
        each.bind_target(embedding, lm_head)
        case = (
            torch.randint(97, (200,)),
            torch.arange(200),
            torch.randn(200, 9, *session.config.context_row_shape),
            torch.randint(10, (200,)),
        )
        outs.append(torch.full((200, session.config.num_draft_tokens), -1))
        each.draft(*case, outs[-1])
    assert torch.equal(*outs)
    assert set(outs[0].flatten().tolist()) <= set(range(0, 60, 2))
    assert len(outs[0].unique()) > 15


def test_other_frequencies_are_another_export(root):
    """The graphs of one recipe are used again as long as checkpoint, options and the file's bytes are the same."""
    said: list[str] = []
    again = build_engine(
        recipe_of(root), ENGINE, root / "again", export_root=root / "export", progress=said.append
    )
    assert any("using the graphs" in line for line in said)
    (root / "other.json").write_text(json.dumps({str(i): 1 + i for i in range(97)}))
    said.clear()
    recipe = recipe_of(root, token_frequencies=str(root / "other.json"))
    other = build_engine(recipe, ENGINE, root / "other", export_root=root / "export", progress=said.append)
    assert not any("using the graphs" in line for line in said)
    assert other.head.token_frequencies != again.head.token_frequencies
    assert other.fingerprint == again.fingerprint


def test_verify_and_inspect(root):
    """`verify` prunes the checkpoint by the engine's own list of tokens: the frequency file need not be there."""
    build_engine(recipe_of(root), ENGINE, root / "checked", export_root=root / "export2")
    shown = CliRunner().invoke(app, ["inspect", str(root / "checked")], env={"COLUMNS": "200"})
    assert "draft vocabulary 30 of 97 tokens (token frequencies " in " ".join(shown.output.split())
    arguments = ["verify", str(root / "checked"), "--checkpoint", str(root / "draft"), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["equal"] == outcome["drafts"] > 0
