"""What the loop needs to know of a kind of drafter: how to prepare a batch, its loss, and how to write it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vllm_domino.config.checkpoint import read_checkpoint, write_checkpoint
from vllm_domino.config.draft import DraftConfig
from vllm_domino.model.drafter import Drafter
from vllm_domino.train.blocks import Blocks, build_blocks, sample_anchors
from vllm_domino.train.data import Sample, anchor_generator, pad_batch
from vllm_domino.train.feature_store import FeatureStore, batch_features
from vllm_domino.train.objective import DraftObjective, Terms
from vllm_domino.train.recipe import DrafterRecipe, draft_config
from vllm_domino.train.target_features import FrozenTarget


@dataclass(kw_only=True, slots=True)
class Prepared:
    """One micro-batch before the target has seen it."""

    indices: list[int]  # which samples, [B]
    ids: Tensor  # [B, T] int64
    blocks: Blocks
    weight_sum: float
    slots: int
    tokens: int

    @property
    def weights(self) -> Tensor:
        """[B, A, K] fp32, 0 where nothing is supervised."""
        return self.blocks.weights

    def to(self, device: torch.device) -> Prepared:
        """The same on a device."""
        moved = {f.name: getattr(self.blocks, f.name).to(device) for f in dataclasses.fields(Blocks)}
        return dataclasses.replace(self, ids=self.ids.to(device), blocks=Blocks(**moved))


class Task(Protocol):
    """A kind of drafter in training."""

    module: nn.Module
    target: FrozenTarget

    def prepare(self, indices: list[int], epoch: int) -> Any:
        """Collate samples; draws what is random from (seed, epoch, sample) alone."""

    def loss(self, module: nn.Module, prepared: Any, lambda_base: float, weight_sum: float) -> Terms:
        """Run the frozen target and the (wrapped) module."""

    def rebuild(self, weights: dict[str, Tensor]) -> nn.Module:
        """A plain drafter for evaluation from the module's gathered state dict."""

    def write(self, weights: dict[str, Tensor], directory: Path) -> None:
        """The public checkpoint."""


class BlockTask:
    """Domino and DFlash."""

    def __init__(
        self,
        recipe: DrafterRecipe,
        target: FrozenTarget,
        config: DraftConfig,
        samples: list[Sample],
        pad: int,
        store: FeatureStore | None = None,
    ):
        self.recipe, self.target, self.config, self.samples, self.pad = recipe, target, config, samples, pad
        self.store = store
        drafter = Drafter(config)
        if recipe.init_from_target:
            copy_target_layers(drafter, target.model)
        if recipe.start_from:
            copy_checkpoint(drafter, recipe.start_from)
        self.module = DraftObjective(drafter, recipe, target.embedding, target.lm_head)

    def prepare(self, indices: list[int], epoch: int) -> Prepared:
        """Pad, draw anchors, build blocks."""
        ids, mask = pad_batch([self.samples[index] for index in indices], self.pad)
        generators = [anchor_generator(self.recipe.seed, epoch, index) for index in indices]
        anchors, used = sample_anchors(mask, self.recipe.num_anchors, generators)
        anchors, used = (
            anchors[:, : max(1, int(used.sum(1).max()))],
            used[:, : max(1, int(used.sum(1).max()))],
        )
        blocks = build_blocks(self.config, ids, mask, anchors, used, self.recipe.gamma)
        return Prepared(
            indices=indices,
            ids=ids,
            blocks=blocks,
            weight_sum=float(blocks.weights.sum()),
            slots=int((blocks.weights > 0).sum()),
            tokens=sum(len(self.samples[i].ids) for i in indices),
        )

    def loss(self, module: nn.Module, prepared: Prepared, lambda_base: float, weight_sum: float) -> Terms:
        """Features of the frozen target, then the drafter's loss."""
        autocast = self.recipe.precision == "bf16"
        features = batch_features(self.target, self.store, prepared.indices, prepared.ids, autocast)
        return module(features, prepared.blocks, lambda_base, weight_sum)

    def rebuild(self, weights: dict[str, Tensor]) -> Drafter:
        """A drafter with these weights, on the target's device."""
        drafter = Drafter(self.config).to(self.target.device)
        drafter.load_state_dict(_own(weights))
        return drafter.eval()

    def write(self, weights: dict[str, Tensor], directory: Path) -> None:
        """bf16, in the public layout: names without the `backbone.` and `head.` of our modules."""
        public = {name.split(".", 1)[1]: tensor.to(torch.bfloat16) for name, tensor in _own(weights).items()}
        write_checkpoint(directory, self.config, public)


def copy_checkpoint(drafter: Drafter, source: str) -> None:
    """Start from the weights of a checkpoint of the same shape."""
    trained = Drafter.from_checkpoint(read_checkpoint(source), dtype=torch.float32)
    if trained.config != drafter.config:
        raise ValueError(
            f"recipe: start_from {source} is another drafter ({trained.config}), the recipe makes {drafter.config}; "
            "give the run the recipe of that checkpoint"
        )
    drafter.load_state_dict(trained.state_dict())


def _own(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix("drafter."): tensor
        for name, tensor in weights.items()
        if name.startswith("drafter.")
    }


_QUERY_KEY_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


@torch.no_grad()
def copy_target_layers(drafter: Drafter, target: nn.Module) -> None:
    """Start the draft layers from the target's last layers, where all their shapes agree.

    Those layers expect the residual stream as context: `fc` starts as the mean of the features, which is close to it.
    Where the target does not normalise its queries and keys, the drafter's norms keep their ones.
    """
    backbone, layers = drafter.backbone, target.base_model.layers
    chosen = layers[-len(backbone.layers) :]
    for mine, theirs in zip(backbone.layers, chosen, strict=True):
        state = dict(theirs.named_parameters())
        for name, parameter in mine.named_parameters():
            if name not in state and name in _QUERY_KEY_NORMS:  # a Llama has none
                continue
            if name not in state or state[name].shape != parameter.shape:
                raise ValueError(
                    f"recipe: init_from_target needs draft layers shaped like the target's, {name} differs; "
                    "drop intermediate_size or use `--set init_from_target=false`"
                )
            parameter.copy_(state[name])
    backbone.norm.weight.copy_(target.base_model.norm.weight)
    backbone.hidden_norm.weight.copy_(chosen[len(chosen) // 2].input_layernorm.weight)
    features = len(drafter.config.target_layer_ids)
    backbone.fc.weight.copy_(torch.eye(drafter.config.hidden_size).repeat(1, features) / features)


def build_task(
    recipe: DrafterRecipe,
    target: FrozenTarget,
    mask_id: int | None,
    samples: list[Sample],
    pad: int,
    store: FeatureStore | None = None,
) -> Task:
    """The task of a recipe's method; with a store, features come from there."""
    if recipe.method == "eagle3":
        from vllm_domino.train.eagle3 import EagleTask

        return EagleTask(recipe, target, samples, pad, store)
    assert mask_id is not None  # check_target refused the recipe otherwise
    config = draft_config(recipe, target.model.config, mask_id)
    return BlockTask(recipe, target, config, samples, pad, store)
