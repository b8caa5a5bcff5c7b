"""EAGLE-3, the baseline that vLLM has built in: one Llama-style layer, trained with test-time training.

At position t the drafter reads the embedding of token t+1 and a state of position t, and predicts token t+2.
The state is the fused target feature in the first step; in step j it is the drafter's own output of step
j-1, so that training sees what drafting will see (arXiv 2503.01840 §3). Names and config keys are those that
vLLM's `LlamaForCausalLMEagle3` loads.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from vllm_domino.model.backbone import RMSNorm, apply_rope, rope_tables
from vllm_domino.train.data import Sample, pad_batch
from vllm_domino.train.feature_store import FeatureStore, batch_features
from vllm_domino.train.objective import Terms
from vllm_domino.train.recipe import DrafterRecipe
from vllm_domino.train.target_features import FrozenTarget

STEP_DECAY = 0.8  # weight of step j is 0.8^j, as in EAGLE-3's own training


class EagleAttention(nn.Module):
    """Llama attention over [embedding ; state] of width 2H, without biases and head norms."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(2 * hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, history: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One test-time step for all positions at once.

        Args:
            x: [B, T, 2H]; query t stands at position t + j in step j.
            history: keys and values [B, Hq, T, D] of earlier steps; this step's are appended. A query sees
                step 0 up to its own index (the verified text) and, of later steps, its own index alone (its
                own chain).
        """
        q = apply_rope(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)), cos, sin).transpose(1, 2)
        k = apply_rope(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)), cos, sin).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        groups = self.heads // self.kv_heads
        history.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        first_k, first_v = history[0]
        if len(history) == 1:
            mixed = functional.scaled_dot_product_attention(q, first_k, first_v, is_causal=True)
        else:
            scale = self.head_dim**-0.5
            text = (q @ first_k.transpose(2, 3)) * scale  # [B, Hq, T, T]
            later = torch.ones(text.shape[-2:], dtype=torch.bool, device=text.device).triu(1)
            text = text.masked_fill(later, float("-inf"))
            chain = torch.stack(
                [(q * key).sum(-1) * scale for key, _ in history[1:]], dim=-1
            )  # [B, Hq, T, j]
            shares = torch.cat((text, chain.to(text.dtype)), dim=-1).softmax(-1).to(v.dtype)
            mixed = shares[..., : text.shape[-1]] @ first_v
            for place, (_, value) in enumerate(history[1:]):
                mixed = mixed + shares[..., text.shape[-1] + place, None] * value
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class EagleMLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """The single decoder layer; its residual is the state as it came, before `hidden_norm`."""

    def __init__(self, config: Any):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = EagleAttention(
            hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self.mlp = EagleMLP(hidden, config.intermediate_size)

    def forward(self, embeds: Tensor, state: Tensor, cos: Tensor, sin: Tensor, history: list) -> Tensor:
        """Embeddings and state [B, T, H] -> state of the next step [B, T, H] (before the final norm)."""
        both = torch.cat((self.input_layernorm(embeds), self.hidden_norm(state)), dim=-1)
        state = state + self.self_attn(both, cos, sin, history)
        return state + self.mlp(self.post_attention_layernorm(state))


class EagleDrafter(nn.Module):
    """`fc`, `midlayer`, `norm` and `lm_head`; the embedding is the target's."""

    def __init__(self, config: Any, features: int, lm_head: Tensor):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, lm_head.shape[0], bias=False)
        self.lm_head.weight.data.copy_(lm_head.detach())

    def step(self, embeds: Tensor, state: Tensor, positions: Tensor, history: list) -> Tensor:
        """One test-time step at absolute `positions` [T]."""
        theta = rope_theta(self.config)
        cos, sin = rope_tables(positions.unsqueeze(-1), self.config.head_dim, theta)  # [T, 1, D]
        return self.midlayer(embeds, state, cos, sin, history)


def rope_theta(config: Any) -> float:
    """RoPE base of a Transformers config, wherever its version keeps it."""
    return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta") or config.rope_theta)


@dataclass(kw_only=True, slots=True)
class EaglePrepared:
    """One micro-batch: samples [B], ids [B, T] int64 and weights [B, T, J] fp32 (step j at index t predicts
    token t + 2 + j).
    """

    indices: list[int]
    ids: Tensor
    weights: Tensor
    weight_sum: float
    slots: int
    tokens: int

    def to(self, device: torch.device) -> EaglePrepared:
        """The same on a device."""
        return dataclasses.replace(self, ids=self.ids.to(device), weights=self.weights.to(device))


def step_weights(mask: Tensor, steps: int) -> Tensor:
    """[B, T, J] fp32: 0.8^j where the token that step j predicts is supervised and its input token is a
    response's.
    """
    batch, width = mask.shape
    weights = torch.zeros(batch, width, steps)
    for step in range(steps):
        reach = width - 2 - step
        if reach > 0:
            weights[:, :reach, step] = (mask[:, 1 : 1 + reach] & mask[:, 2 + step :]) * STEP_DECAY**step
    return weights


class EagleObjective(nn.Module):
    """Test-time training over all positions of a batch."""

    def __init__(self, drafter: EagleDrafter, steps: int, embedding: Tensor):
        super().__init__()
        self.drafter, self.steps = drafter, steps
        self._embedding = (embedding.detach(),)

    def forward(self, features: Tensor, ids: Tensor, weights: Tensor, weight_sum: float) -> Terms:
        """Features [B, T, F*H], ids [B, T], weights [B, T, J] -> the loss over all steps."""
        width = ids.shape[1]
        state = self.drafter.fc(features)
        history: list[Tensor] = []
        losses, hits = [], torch.zeros(weights.shape, dtype=torch.bool, device=ids.device)
        for step in range(self.steps):
            shifted = functional.pad(ids, (0, 2 + step))
            embeds = functional.embedding(shifted[:, 1 + step : 1 + step + width], self._embedding[0])
            positions = torch.arange(width, device=ids.device) + step
            state = self.drafter.step(embeds, state, positions, history)
            rows = weights[..., step] > 0
            labels = shifted[:, 2 + step : 2 + step + width][rows]
            share = weights[..., step][rows] / weight_sum
            logits = self.drafter.lm_head(self.drafter.norm(state)[rows]).float()  # [n, V]
            losses.append((functional.cross_entropy(logits, labels, reduction="none") * share).sum())
            hits[..., step][rows] = logits.argmax(dim=-1) == labels
        total = torch.stack(losses).sum()
        return Terms(loss=total, base=total.detach(), final=total.detach(), hits=hits)


class EagleTask:
    """What the loop needs to know of EAGLE-3."""

    def __init__(
        self,
        recipe: DrafterRecipe,
        target: FrozenTarget,
        samples: list[Sample],
        pad: int,
        store: FeatureStore | None = None,
    ):
        self.recipe, self.target, self.samples, self.pad = recipe, target, samples, pad
        self.store = store
        config = target.model.config
        features = len(target.layer_ids) * config.hidden_size
        drafter = EagleDrafter(config, features, target.lm_head)
        self.module = EagleObjective(drafter, recipe.eagle_steps, target.embedding)

    def prepare(self, indices: list[int], epoch: int) -> EaglePrepared:  # noqa: ARG002  every position trains
        """Pad and weigh; nothing is drawn."""
        ids, mask = pad_batch([self.samples[index] for index in indices], self.pad)
        weights = step_weights(mask, self.recipe.eagle_steps)
        return EaglePrepared(
            indices=indices,
            ids=ids,
            weights=weights,
            weight_sum=float(weights.sum()),
            slots=int((weights > 0).sum()),
            tokens=sum(len(self.samples[i].ids) for i in indices),
        )

    def loss(
        self,
        module: nn.Module,
        prepared: EaglePrepared,
        lambda_base: float,  # noqa: ARG002  EAGLE-3 has one loss
        weight_sum: float,
    ) -> Terms:
        """Features of the frozen target, then all steps."""
        autocast = self.recipe.precision == "bf16"
        features = batch_features(self.target, self.store, prepared.indices, prepared.ids, autocast)
        return module(features, prepared.ids, prepared.weights, weight_sum)

    def rebuild(self, weights: dict[str, Tensor]) -> EagleDrafter:
        """A drafter with these weights."""
        config, target = self.target.model.config, self.target
        drafter = EagleDrafter(config, len(target.layer_ids) * config.hidden_size, target.lm_head)
        drafter.load_state_dict({name.removeprefix("drafter."): tensor for name, tensor in weights.items()})
        return drafter.eval()

    def write(self, weights: dict[str, Tensor], directory: Path) -> None:
        """bf16 safetensors and the config that vLLM's `eagle3` method reads."""
        directory.mkdir(parents=True, exist_ok=True)
        public = {
            name.removeprefix("drafter."): t.to(torch.bfloat16).contiguous() for name, t in weights.items()
        }
        save_file(public, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.config_json(), indent=2) + "\n")

    def config_json(self) -> dict:
        """Llama keys, and the layers to read counted as vLLM counts them: before layer i, one more than
        ours.
        """
        config = self.target.model.config
        names = (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "max_position_embeddings",
            "vocab_size",
        )
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **{name: getattr(config, name) for name in names},
            "draft_vocab_size": config.vocab_size,
            "rope_theta": rope_theta(config),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.target.layer_ids],
                "use_aux_hidden_state": True,
            },
            "dtype": "bfloat16",
        }


def is_eagle3(source: str) -> bool:
    """Whether a local checkpoint is an EAGLE-3 drafter, by its `config.json`."""
    path = Path(source) / "config.json"
    return path.exists() and "LlamaForCausalLMEagle3" in json.loads(path.read_text()).get("architectures", [])


def read_eagle3(source: str, target_source: str) -> tuple[EagleDrafter, tuple[int, ...]]:
    """A drafter that `EagleTask.write` wrote, in fp32, and the layer ids it reads (ours: the layer's output)."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    settings = json.loads((Path(source) / "config.json").read_text())
    weights = {name: tensor.float() for name, tensor in load_file(Path(source) / "model.safetensors").items()}
    layer_ids = tuple(layer - 1 for layer in settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    config = AutoConfig.from_pretrained(target_source)
    drafter = EagleDrafter(config, weights["fc.weight"].shape[1], weights["lm_head.weight"])
    drafter.load_state_dict(weights)
    return drafter.eval(), layer_ids
