"""Optimizers and the learning-rate schedule, as pure functions of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from vllm_domino.train.recipe import DrafterRecipe


def learning_rate_factor(step: int, total: int, warmup_ratio: float) -> float:
    """Linear warm-up over the first `warmup_ratio` of `total` steps, then a cosine down to zero."""
    warmup = max(1, round(total * warmup_ratio))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def build_optimizers(module: nn.Module, recipe: DrafterRecipe) -> list[torch.optim.Optimizer]:
    """AdamW for everything (the paper's), or Muon for the layers' matrices and AdamW for the rest.

    Vocabulary-wide matrices stay with AdamW: their rows are looked up one by one, which Muon is not made for.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    adam = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay, "betas": (0.9, 0.95)}
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW([p for _, p in named], **adam | {"betas": (0.9, 0.999)})]
    vocabulary_wide = ("embed_proj.2", "lm_head", "embed_tokens")
    is_matrix = {name: p.ndim == 2 and not any(part in name for part in vocabulary_wide) for name, p in named}
    muon = torch.optim.Muon(
        [p for name, p in named if is_matrix[name]],
        lr=recipe.matrix_learning_rate,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, torch.optim.AdamW([p for name, p in named if not is_matrix[name]], **adam)]
