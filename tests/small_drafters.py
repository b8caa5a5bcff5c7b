"""Small random drafters that every test folder uses."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_domino.config.checkpoint import write_checkpoint
from vllm_domino.config.draft import DraftConfig
from vllm_domino.model.drafter import Drafter


def small_config(**changes) -> DraftConfig:
    """A Domino drafter of a few thousand parameters; keyword arguments replace fields."""
    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
        "vocab_size": 97,
        "block_size": 5,
        "mask_token_id": 96,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "emb_dim": 12,
        "gru_hidden_dim": 20,
        "shift_label": True,
        "pure_draft_prefix_len": 1,
    }
    return DraftConfig(**(values | changes))


def random_weights(
    config: DraftConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Public names -> normal weights, large enough that drafts depend on every part."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in Drafter(config).public_parameters().items():
        value = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            value = 1 + 0.1 * value
        else:
            value = value / parameter.shape[-1] ** 0.5
        if name == "embed_proj.2.weight":
            value = value * 4
        weights[name] = value.to(dtype)
    return weights


def write_small_checkpoint(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes
) -> Path:
    """A checkpoint folder in the public layout."""
    config = small_config(**changes)
    write_checkpoint(folder, config, random_weights(config, seed, dtype))
    return folder
