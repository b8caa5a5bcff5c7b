"""What a training run is: one frozen recipe, and the drafter's configuration that follows from it and the
target.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_domino.config.draft import DraftConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class DrafterRecipe:
    """Defaults are the paper's (arXiv 2605.29707, appendix) for Qwen3-8B; the tiny pair changes sizes and
    length.

    method: "domino", "dflash" (the same backbone without the head) or "eagle3" (vLLM's built-in drafter).
    prefixes: what the GRU reads while training: "teacher" (the data) or "self" (its own drafts, that
        is test-time training).
    curriculum: lambda from 1 to 0; off: lambda is 0 throughout.
    shift_label: slot k predicts the token after itself (Domino); DFlash drafters that stock vLLM serves need
        false.
    start_from: a checkpoint to go on from, with a fresh optimizer and schedule.
    target_layer_ids: empty spaces them evenly over the target's layers.
    """

    method: str = "domino"
    block_size: int = 16
    num_hidden_layers: int = 5
    intermediate_size: int | None = None
    gru_hidden_dim: int = 1024
    emb_dim: int = 256
    shift_label: bool = True
    pure_draft_prefix_len: int = 1
    target_layer_ids: tuple[int, ...] = ()
    mask_token: str | None = None
    prefixes: str = "teacher"
    curriculum: bool = True
    lambda_decay_ratio: float = 1.0
    gamma: float = 7.0
    num_anchors: int = 256
    max_length: int = 3072
    batch_size: int = 2
    accumulation: int = 1
    epochs: float = 3.0
    steps: int | None = None
    optimizer: str = "adamw"
    learning_rate: float = 6e-4
    matrix_learning_rate: float = 4e-3
    weight_decay: float = 0.0
    warmup_ratio: float = 0.04
    clip: float = 1.0
    precision: str = "bf16"
    gradient_checkpointing: bool = False
    init_from_target: bool = False
    start_from: str | None = None
    eagle_steps: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {
            "method": ("domino", "dflash", "eagle3"),
            "prefixes": ("teacher", "self"),
            "optimizer": ("adamw", "muon"),
            "precision": ("bf16", "fp32"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"recipe: {name} is {getattr(self, name)!r}, it must be one of {', '.join(allowed)}"
                )
        for name in (
            "block_size",
            "num_hidden_layers",
            "num_anchors",
            "batch_size",
            "accumulation",
            "max_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"recipe: {name} is {getattr(self, name)}, it must be at least 1")

    @property
    def has_head(self) -> bool:
        """Whether the GRU and the low-rank correction are trained."""
        return self.method == "domino"

    def fingerprint(self) -> str:
        """Twelve hex digits that two runs share only if they train the same thing."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @classmethod
    def read(cls, path: Path | None, overrides: dict[str, Any] | None = None) -> DrafterRecipe:
        """A recipe from a TOML file (or the defaults) with single fields replaced; unknown names are
        refused.
        """
        values = tomllib.loads(path.read_text()) if path else {}
        values |= overrides or {}
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise ValueError(f"recipe: unknown field {name!r}; fields are {', '.join(sorted(known))}")
        if "target_layer_ids" in values:
            values["target_layer_ids"] = tuple(values["target_layer_ids"])
        return cls(**values)


def parse_changes(changes: list[str]) -> dict[str, Any]:
    """`field=value` pairs as a recipe's overrides; values are TOML, and bare words are text."""
    values = {}
    for change in changes:
        name, found, text = change.partition("=")
        if not found:
            raise ValueError(f"recipe: --set {change!r} has no `=`; write `--set field=value`")
        try:
            values[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[name] = text
    return values


def spaced_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`count` layer ids from 1 to num_target_layers - 3, evenly spaced: [1, 9, 17, 25, 33] for 36 layers and
    5.
    """
    first, last = 1, max(1, num_target_layers - 3)
    if count == 1:
        return (last,)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


def check_target(recipe: DrafterRecipe, target_config, mask_token_id: int | None) -> tuple[int, ...]:
    """Refuse a recipe that does not fit the target; returns the layer ids to read."""
    layers = target_config.num_hidden_layers
    ids = recipe.target_layer_ids or spaced_layer_ids(layers, recipe.num_hidden_layers)
    for layer in ids:
        if not 0 <= layer < layers - 1:
            raise ValueError(
                f"recipe: target_layer_ids contains {layer}, the target has layers 0 to {layers - 1} "
                "and the last one cannot be read (Transformers gives it after the final norm, vLLM before); "
                f"use `--set target_layer_ids={list(spaced_layer_ids(layers, recipe.num_hidden_layers))}`"
            )
    if recipe.method == "eagle3":
        return tuple(ids)
    if mask_token_id is None:
        raise ValueError(
            "recipe: the tokenizer has no mask token and the recipe names none; "
            "pass `--set mask_token=…` with a token that never occurs in the text"
        )
    if not 0 <= mask_token_id < target_config.vocab_size:
        raise ValueError(
            f"recipe: mask token id {mask_token_id} is outside the target's vocabulary of "
            f"{target_config.vocab_size}; pass `--set mask_token=…` with a token the target embeds"
        )
    return tuple(ids)


def mask_token_id(recipe: DrafterRecipe, tokenizer) -> int | None:
    """Id of the recipe's mask token, or of the tokenizer's own."""
    if recipe.mask_token is None:
        return tokenizer.mask_token_id
    token_id = tokenizer.get_vocab().get(recipe.mask_token)
    if token_id is None:
        raise ValueError(
            f"recipe: mask_token {recipe.mask_token!r} is not in the tokenizer; name one of its tokens"
        )
    return token_id


def draft_config(recipe: DrafterRecipe, target_config, mask_id: int) -> DraftConfig:
    """The drafter for a target: the target's widths, the recipe's depth and head."""
    ids = check_target(recipe, target_config, mask_id)
    rope = getattr(target_config, "rope_parameters", None) or {}
    heads = target_config.num_attention_heads
    return DraftConfig(
        hidden_size=target_config.hidden_size,
        intermediate_size=recipe.intermediate_size or target_config.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=target_config.num_key_value_heads,
        head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        rms_norm_eps=target_config.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta") or getattr(target_config, "rope_theta", None) or 1e6),
        max_position_embeddings=target_config.max_position_embeddings,
        vocab_size=target_config.vocab_size,
        block_size=recipe.block_size,
        mask_token_id=mask_id,
        target_layer_ids=ids,
        num_target_layers=target_config.num_hidden_layers,
        emb_dim=recipe.emb_dim if recipe.has_head else 0,
        gru_hidden_dim=recipe.gru_hidden_dim if recipe.has_head else 0,
        # the public DFlash layout has no key for the alignment: without a head it is always DFlash's own
        shift_label=recipe.shift_label and recipe.has_head,
        pure_draft_prefix_len=recipe.pure_draft_prefix_len if recipe.has_head else 0,
    )
