"""Exports and engines of small drafters, made once per test run (an export takes seconds)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_drafters import random_weights, small_config, write_small_checkpoint

from vllm_domino.config.checkpoint import read_checkpoint, write_checkpoint
from vllm_domino.config.recipes import EngineRecipe, ExportRecipe
from vllm_domino.engine.build import build_engine
from vllm_domino.model.drafter import Drafter

DFLASH = {"emb_dim": 0, "gru_hidden_dim": 0, "shift_label": False, "pure_draft_prefix_len": 0}
CPU = EngineRecipe(name="cpu", backend="onnxruntime", dtype="float32", providers=("CPUExecutionProvider",))
# name -> config changes, recipe changes; every one has another combination of label alignment, prefix and head
VARIANTS = {
    "shift": ({"block_size": 4}, {}),
    "no-shift": (
        {"block_size": 4, "shift_label": False, "pure_draft_prefix_len": 0, "num_hidden_layers": 1},
        {"short_blocks": (2, 3)},
    ),
    "dflash": ({"block_size": 4, "num_key_value_heads": 4, **DFLASH}, {}),
    "pool": (
        {"block_size": 4, "num_key_value_heads": 1, "pure_draft_prefix_len": 2},
        {"candidate_pool": 9, "scores": True, "short_blocks": (3,)},
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Name of a variant -> (checkpoint folder, engine folder), built on first use."""
    root: Path = tmp_path_factory.mktemp("engines")
    built: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in built:
            changes, options = VARIANTS[name]
            checkpoint = write_small_checkpoint(root / f"{name}-checkpoint", **changes)
            recipe = ExportRecipe(name=name, checkpoint=str(checkpoint), verify_context=64, **options)
            build_engine(recipe, CPU, root / name, export_root=root / "export")
            built[name] = checkpoint, root / name
        return built[name]

    return get


@pytest.fixture(scope="session")
def reduced_checkpoint(tmp_path_factory) -> Path:
    """A drafter with a draft vocabulary of 20 ids and LM head rows of its own."""
    folder = tmp_path_factory.mktemp("reduced")
    config = small_config(block_size=4, draft_vocab_size=20, num_hidden_layers=1)
    write_checkpoint(folder, config, random_weights(config))
    offsets = torch.sort(torch.randperm(97)[:20])[0] - torch.arange(20)
    save_file({"d2t": offsets, "lm_head.weight": torch.randn(20, 32)}, folder / "vocabulary.safetensors")
    return folder


def reference(checkpoint: Path, **options) -> Drafter:
    return Drafter.from_checkpoint(read_checkpoint(checkpoint), **options).eval()
