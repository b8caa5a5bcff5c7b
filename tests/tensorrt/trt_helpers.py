"""Small random drafters, exported, and sessions on the stand-in TensorRT."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_domino.config.checkpoint import read_checkpoint, write_checkpoint
from vllm_domino.config.draft import DraftConfig
from vllm_domino.config.recipes import EngineRecipe
from vllm_domino.config.vocabulary import prune
from vllm_domino.engine.tensorrt import PLANS, plan_profiles
from vllm_domino.export.contract import block_graph, context_graph
from vllm_domino.export.onnx_export import export_graphs
from vllm_domino.model.drafter import Drafter, HeadOptions
from vllm_domino.runtime.tensorrt_session import TensorRTSession

CPU = torch.device("cpu")


class Export:
    """A random small drafter and the folder that its graphs were exported to.

    kept: ids of a pruned vocabulary.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        options: HeadOptions,
        head_dim: int = 64,
        kept: torch.Tensor | None = None,
    ):
        self.config, self.options, self.dtype = small_config(head_dim), options, dtype
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(p.shape, generator=generator) * (0.1 if p.dim() > 1 else 1.0)
            for name, p in Drafter(self.config).public_parameters().items()
        }
        weights["embed_proj.2.weight"] *= 20  # the head has to change drafts
        write_checkpoint(folder / "checkpoint", self.config, weights)
        self.checkpoint = read_checkpoint(str(folder / "checkpoint"))
        if kept is not None:
            self.checkpoint = prune(self.checkpoint, kept)
            self.config = self.checkpoint.config
        self.folder = folder / "graphs"
        export_graphs(self.checkpoint, options, dtype, self.folder, verify=False)
        self.drafter = Drafter.from_checkpoint(self.checkpoint, options, dtype).eval()
        self.embedding = torch.randn(self.config.vocab_size, self.config.hidden_size, generator=generator)
        self.lm_head = torch.randn(self.config.vocab_size, self.config.hidden_size, generator=generator)

    @property
    def specs(self):
        return context_graph(self.config), block_graph(self.config, self.options)


def small_config(head_dim: int) -> DraftConfig:
    return DraftConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=512,
        vocab_size=211,
        block_size=5,
        mask_token_id=210,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        emb_dim=16,
        gru_hidden_dim=24,
        shift_label=True,
        pure_draft_prefix_len=1,
    )


def recipe(**changes) -> EngineRecipe:
    """An engine recipe for an L40S; keyword arguments replace keys."""
    values = {
        "name": "l40s",
        "backend": "tensorrt_rtx",
        "compute_capability": "8.9",
        "dtype": "bfloat16",
        "draft_window": 64,
        "batch_buckets": (1, 4),
        "context_buckets": (16, 64),
    }
    return EngineRecipe(**(values | changes))


def write_plans(trt, export: Export, folder: Path, wanted: EngineRecipe) -> None:
    """Plans of the stand-in, whatever the dtype of the graphs."""
    folder.mkdir(exist_ok=True)
    for spec in export.specs:
        profiles = plan_profiles(spec, wanted)
        plan = trt.make_plan(export.folder / f"{spec.name}.onnx", profiles)
        (folder / PLANS[spec.name]).write_bytes(plan)


def open_session(export: Export, folder: Path, wanted: EngineRecipe, **changes) -> TensorRTSession:
    values = {
        "backend": "tensorrt",
        "config": export.config,
        "options": export.options,
        "dtype": export.dtype,
        "device": CPU,
        "batch_buckets": wanted.batch_buckets,
        "context_buckets": wanted.context_buckets,
    }
    return TensorRTSession(folder, **(values | changes))


def aligned(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A copy at an address that is `offset` bytes past a multiple of 256."""
    raw = torch.zeros(tensor.nbytes + 512, dtype=torch.uint8)
    start = -raw.data_ptr() % 256 + offset
    return raw[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def block_case(export: Export, batch: int, context: int, seed: int = 0) -> list[torch.Tensor]:
    """Anchors, positions, context K/V, lengths and an output, at aligned addresses."""
    generator = torch.Generator().manual_seed(seed)
    config = export.config
    lengths = torch.randint(0, context + 1, (batch,), generator=generator)
    rows = torch.randn(batch, context, *config.context_row_shape, generator=generator).to(export.dtype)
    tensors = [
        torch.randint(0, config.vocab_size, (batch,), generator=generator),
        lengths + 3,
        rows,
        lengths,
        torch.full((batch, config.num_draft_tokens), -1),
    ]
    return [aligned(t) for t in tensors]
