"""The architecture of a draft checkpoint, read from any public layout of its `config.json`.

Layouts: DFlash (`DFlashDraftModel`), Domino under either architecture name, `emb_dim` beside or inside
`dflash_config`, the older projector name `causal_v5`, and the speculators format (fields at the top level,
decoder fields under `transformer_layer_config`). Source: arXiv 2605.29707 §3 and the public checkpoints'
configs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

DOMINO_PROJECTORS = ("domino", "causal_v5")
ARCHITECTURES = ("DominoDraftModel", "DFlashDraftModel", "DFlashDominoDraftModel")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """One drafter. Sizes are in elements, ids 0-based; `target_layer_ids` name layers by their output.

    Raises:
        ValueError: a field is missing, or has a value that no Domino or DFlash drafter can have.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    target_hidden_size: int | None = None  # None: the drafter's own hidden size
    draft_vocab_size: int | None = None  # None: the target's whole vocabulary
    emb_dim: int = 0  # rank of the logit correction; 0 without a Domino head
    gru_hidden_dim: int = 0
    shift_label: bool = False
    pure_draft_prefix_len: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"draft config: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"draft config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.block_size < 2:
            raise ValueError(f"draft config: block_size is {self.block_size}; a block has at least 2 tokens")
        if not self.target_layer_ids or min(self.target_layer_ids) < 0:
            raise ValueError(
                f"draft config: target_layer_ids {list(self.target_layer_ids)} must name layers 0 and up"
            )
        if self.num_target_layers is not None and max(self.target_layer_ids) >= self.num_target_layers - 1:
            # Transformers hands out the last layer's output after the final norm, vLLM before it.
            raise ValueError(
                f"draft config: target_layer_ids {list(self.target_layer_ids)} must lie below the last of "
                f"the target's "
                f"{self.num_target_layers} layers, at most {self.num_target_layers - 2}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"draft config: mask_token_id {self.mask_token_id} is outside the vocabulary of "
                f"{self.vocab_size}"
            )
        if not 0 <= self.pure_draft_prefix_len <= self.num_draft_tokens:
            raise ValueError(
                f"draft config: pure_draft_prefix_len {self.pure_draft_prefix_len} must be between 0 and the "
                f"{self.num_draft_tokens} draft tokens of a block"
            )
        if self.has_head and self.gru_hidden_dim < 1:
            raise ValueError(
                f"draft config: gru_hidden_dim is {self.gru_hidden_dim}; a Domino head needs at least 1"
            )

    @property
    def has_head(self) -> bool:
        """Whether the checkpoint carries the Domino head (GRU + low-rank correction); False: plain DFlash."""
        return self.emb_dim > 0

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens of a block: every slot predicts under `shift_label`, else all but the anchor's."""
        return self.block_size if self.shift_label else self.block_size - 1

    @property
    def head_vocab_size(self) -> int:
        """Rows of the LM head and of the correction: the draft vocabulary where there is one."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def feature_size(self) -> int:
        """Width of one context row's input: every target layer's hidden state side by side."""
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)

    @property
    def context_row_shape(self) -> tuple[int, int, int, int]:
        """[L, 2, Hkv, D]: the keys and values that all draft layers keep for one context token."""
        return (self.num_hidden_layers, 2, self.num_key_value_heads, self.head_dim)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DraftConfig:
        """Read a parsed `config.json` of any public layout.

        Raises:
            ValueError: not a DFlash or Domino drafter, a required key is missing, or a feature this project
                does not implement (sliding window, attention bias, RoPE scaling, another projector) is
                switched on.
        """
        flat = _flatten(raw)
        _refuse_unsupported(flat)
        values = {f.name: flat[f.name] for f in fields(cls) if flat.get(f.name) is not None}
        missing = [f.name for f in fields(cls) if f.name not in values and _is_required(f)]
        if missing:
            raise ValueError(
                f"draft config: missing {', '.join(missing)}; add it to the checkpoint's config.json"
            )
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
        if flat["projector_type"] is None:
            values |= {"emb_dim": 0, "gru_hidden_dim": 0, "shift_label": False, "pure_draft_prefix_len": 0}
        elif "emb_dim" not in values or "gru_hidden_dim" not in values:
            raise ValueError("draft config: a Domino head needs emb_dim and gru_hidden_dim in config.json")
        if values.get("draft_vocab_size") == values["vocab_size"]:
            del values["draft_vocab_size"]
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The public layout (keys as in the released Domino checkpoints), which vLLM and SGLang read too."""
        dflash: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if self.has_head:
            dflash |= {
                "projector_type": "domino",
                "pure_draft_prefix_len": self.pure_draft_prefix_len,
                "emb_dim": self.emb_dim,
                "gru_hidden_dim": self.gru_hidden_dim,
                "shift_label": self.shift_label,
            }
        out: dict[str, Any] = {
            "architectures": ["DominoDraftModel" if self.has_head else "DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": dflash,
            "num_target_layers": self.num_target_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
        }
        for name in ("target_hidden_size", "draft_vocab_size"):
            if getattr(self, name) is not None:
                out[name] = getattr(self, name)
        return out


def _is_required(f: Any) -> bool:
    from dataclasses import MISSING

    return f.default is MISSING and f.default_factory is MISSING


def _flatten(raw: dict[str, Any]) -> dict[str, Any]:
    """Bring every layout's keys to one level; what is nested in `dflash_config` wins over the top level."""
    layer = raw.get("transformer_layer_config") or {}
    dflash = raw.get("dflash_config") or {}
    flat = {**layer, **{k: v for k, v in raw.items() if v is not None}, **dflash}
    if "target_layer_ids" not in flat and raw.get("aux_hidden_state_layer_ids"):
        # speculators count the embedding output as layer 0, so its ids are one higher (vLLM #40727)
        flat["target_layer_ids"] = [i - 1 for i in raw["aux_hidden_state_layer_ids"]]
    rope = flat.get("rope_parameters") or {}
    flat.setdefault("rope_theta", rope.get("rope_theta"))
    flat["rope_scaling"] = flat.get("rope_scaling") or (
        rope if rope.get("rope_type", "default") != "default" else None
    )
    if flat.get("head_dim") is None and flat.get("hidden_size") and flat.get("num_attention_heads"):
        flat["head_dim"] = flat["hidden_size"] // flat["num_attention_heads"]
    flat["projector_type"] = flat.get("projector_type")
    return flat


def _refuse_unsupported(flat: dict[str, Any]) -> None:
    names = flat.get("architectures") or []
    is_speculators = flat.get("speculators_model_type") in ("dflash", "domino")
    if not is_speculators and not any(name in ARCHITECTURES for name in names):
        raise ValueError(
            f"draft config: architectures {names} is no drafter; expected one of {list(ARCHITECTURES)}"
        )
    projector = flat["projector_type"]
    if projector is not None and projector not in DOMINO_PROJECTORS:
        raise ValueError(
            f"draft config: projector_type {projector!r}; expected one of {list(DOMINO_PROJECTORS)} or none"
        )
    if flat.get("attention_bias"):
        raise ValueError(
            "draft config: attention_bias is true; only drafters without biases are supported (set false)"
        )
    sliding = [t for t in flat.get("layer_types") or [] if t != "full_attention"]
    if sliding:
        raise ValueError(f"draft config: layer_types holds {sliding[0]!r}; only full_attention is supported")
    scaling = flat.get("rope_scaling")
    if scaling and scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise ValueError(
            f"draft config: rope_scaling {scaling} is not supported; use a checkpoint without it"
        )


def is_domino(raw: dict[str, Any]) -> bool:
    """Whether a parsed `config.json` has a Domino head: decided by its keys, never by a path's name."""
    nested = raw.get("dflash_config") or {}
    projector = nested.get("projector_type", raw.get("projector_type"))
    return projector in DOMINO_PROJECTORS or "DominoDraftModel" in (raw.get("architectures") or [])
