"""Lower bounds of one draft step, per GPU type: what its bytes and operations cost at the GPU's own peak rates.

Bytes count once per step what has to come from device memory (weights, context K/V, LM head, the rows that the head
gathers). What the head reads for every draft in turn comes from memory again, unless it fits the GPU's L2 cache.
Operations count multiply-adds as two. A part takes at least the larger of bytes over bandwidth and operations over
dense tensor throughput; parts run one after another. No kernel launch, no imbalance: a real step takes longer, and
how much longer is what `benchmarks/gpu_check` measures.

    python -m vllm_domino.bench.cost_model           # benchmarks/cost_model.json, .md and .png
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_domino.bench.gpus import GPUS, Gpu
from vllm_domino.config.draft import DraftConfig
from vllm_domino.engine.manifest import read_manifest
from vllm_domino.model.drafter import HeadOptions

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Work:
    """Device memory traffic in bytes and operations, of one step."""

    num_bytes: float
    operations: float

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.operations + other.operations)

    def microseconds(self, gpu: Gpu) -> float:
        """The lower bound on `gpu`."""
        memory = self.num_bytes / (gpu.gigabytes_per_second * 1e3)
        return max(memory, self.operations / (gpu.teraflops * 1e6))


@dataclass(frozen=True, slots=True)
class Target:
    """A dense Qwen3-style target, as far as its verify step costs. Defaults: Qwen3-8B."""

    name: str = "Qwen/Qwen3-8B"
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_layers: int = 36
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936


def draft_step(
    config: DraftConfig,
    options: HeadOptions,
    batch: int,
    context: int,
    *,
    l2_bytes: float = 0,
    accepted: float = 3.0,
    size: int = 2,
) -> dict[str, Work]:
    """Parts of one draft step: `context_rows`, `backbone`, `attention`, `lm_head`, `head`.

    Args:
        context: rows that the draft reads per request (at most the draft window).
        l2_bytes: of the GPU's cache; what the head reads for every draft is read once where it fits.
        accepted: new context rows per request and step: accepted drafts and the bonus token.
        size: bytes of one weight or activation.
    """
    H, V, T = config.hidden_size, config.head_vocab_size, config.block_size
    drafts, layers = options.drafts_of(config), config.num_hidden_layers
    kv, q = config.num_key_value_heads * config.head_dim, config.num_attention_heads * config.head_dim
    rows, slots = batch * accepted, batch * T
    row_values = layers * 2 * kv
    context_weights = config.feature_size * H + H * row_values
    layer_weights = layers * (H * (q + 2 * kv) + q * H + 3 * H * config.intermediate_size)
    parts = {
        "context_rows": Work(
            size * (context_weights + rows * (config.feature_size + 2 * row_values)),
            2 * rows * context_weights,
        ),
        "backbone": Work(size * (layer_weights + slots * H), 2 * slots * layer_weights),
        # read from the page pool, written to the static buffer, read by the attention
        "attention": Work(
            3 * size * batch * context * row_values, 4 * batch * T * q * layers * (context + T)
        ),
        "lm_head": Work(size * (V * H + batch * drafts * V), 2 * batch * drafts * V * H),
    }
    if config.has_head:
        parts["head"] = _head(config, options, batch, l2_bytes, size)
    return parts


def _head(config: DraftConfig, options: HeadOptions, batch: int, l2_bytes: float, size: int) -> Work:
    """GRU and correction of every draft in turn."""
    H, G, R, V = config.hidden_size, config.gru_hidden_dim, config.emb_dim, config.head_vocab_size
    drafts = options.drafts_of(config)
    corrected = drafts - config.pure_draft_prefix_len
    pool = None if options.candidate_pool is None else min(options.candidate_pool, V)
    gru, code = 3 * G * (H + G), (H + G) * R
    codebook = V * R if pool is None else batch * pool * R  # a request's own rows, gathered, with a pool
    held = size * (gru + code + codebook)
    traffic = held * (1 if held <= l2_bytes else corrected)
    # base logits: with a pool read once more to find it, without one for every draft
    traffic += size * batch * V * (drafts if pool is not None else corrected)
    if pool is not None:
        traffic += size * codebook  # written by the gather
    scored = V if pool is None else pool
    return Work(traffic, 2 * batch * (drafts * gru + corrected * (code + scored * R)))


def verify_step(target: Target, tokens: int, batch: int, context: int, size: int = 2) -> Work:
    """The target's own step over `tokens` per request: what a draft step is added to."""
    kv, q = target.num_kv_heads * target.head_dim, target.num_heads * target.head_dim
    H, layers = target.hidden_size, target.num_layers
    layer_weights = layers * (H * (q + 2 * kv) + q * H + 3 * H * target.intermediate_size)
    head = target.vocab_size * H
    rows = batch * tokens
    return Work(
        size * (layer_weights + head + batch * context * layers * 2 * kv + rows * target.vocab_size),
        2 * rows * (layer_weights + head) + 4 * rows * q * layers * context,
    )


def table(config: DraftConfig, options: HeadOptions, target: Target, window: int) -> list[dict[str, Any]]:
    """One entry per GPU, batch and context: microseconds of the draft's parts, of the draft and of the verify step."""
    entries = []
    for gpu in GPUS:
        for batch in BATCHES:
            for context in CONTEXTS:
                cache = gpu.l2_megabytes * 1e6
                parts = draft_step(config, options, batch, min(context, window), l2_bytes=cache)
                verify = verify_step(target, options.drafts_of(config) + 1, batch, context).microseconds(gpu)
                bounds = {name: work.microseconds(gpu) for name, work in parts.items()}
                draft = sum(bounds.values())  # the parts run one after another
                entries.append(
                    {
                        "gpu": gpu.recipe,
                        "batch": batch,
                        "context": context,
                        "parts_us": {name: round(value, 1) for name, value in bounds.items()},
                        "draft_us": round(draft, 1),
                        "verify_us": round(verify, 1),
                        "draft_share": round(draft / (draft + verify), 4),
                    }
                )
    return entries


def full_size() -> tuple[DraftConfig, HeadOptions, int, str]:
    """The drafter of Qwen3-8B with the head options of the GPU recipes."""
    config = DraftConfig(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        vocab_size=151936,
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        emb_dim=256,
        gru_hidden_dim=1024,
        shift_label=True,
        pure_draft_prefix_len=1,
    )
    return config, HeadOptions(candidate_pool=2048), 2048, "Huang2020/Qwen3-8B-Domino-b16"


def markdown(result: dict[str, Any]) -> str:
    """The table that people read: batch 1, 8 and 64 at two contexts, per GPU."""
    lines = [
        f"# What one draft step of {result['drafter']} costs at least",
        "",
        "Lower bounds in microseconds from data-sheet rates (`vllm_domino/bench/cost_model.py`); not measured.",
        f"Draft window {result['draft_window']}, verify step of {result['target']['name']}, head options: "
        + ", ".join(f"{k} {v}" for k, v in result["head"].items() if v)
        + ".",
        "Every batch from 1 to 64 and context from 512 to 8192 is in `cost_model.json`.",
        "",
        "| GPU | batch | context | rows | backbone | attention | LM head | head | draft | verify | share |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    names = {gpu.recipe: gpu.name for gpu in GPUS}
    for e in result["entries"]:
        if e["batch"] in (1, 8, 64) and e["context"] in (512, 8192):
            parts = [
                e["parts_us"].get(k, 0) for k in ("context_rows", "backbone", "attention", "lm_head", "head")
            ]
            cells = " | ".join(f"{value:,.0f}" for value in (*parts, e["draft_us"], e["verify_us"]))
            row = f"| {names[e['gpu']]} | {e['batch']} | {e['context']} | {cells} | {e['draft_share']:.0%} |"
            lines.append(row)
    lines += [
        "",
        "Rates that the bounds are computed with (data sheets), and what they were checked against:",
        "",
    ]
    lines += ["| GPU | memory GB/s | dense bf16 TFLOP/s | L2 MB | checked against |", "|---|---|---|---|---|"]
    lines += [
        f"| {g.name} | {g.gigabytes_per_second:,} | {g.teraflops:,} | {g.l2_megabytes} | {g.checked_against} |"
        for g in GPUS
    ]
    return "\n".join([*lines, "", "![bounds per GPU](cost_model.png)", ""])


def plot(result: dict[str, Any], path: Path) -> None:
    """Draft and verify bounds over the batch, context 2048, one panel per GPU."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 4, figsize=(14, 9), sharex=True)
    for gpu, axis in zip(GPUS, axes.flat, strict=False):
        rows = [e for e in result["entries"] if e["gpu"] == gpu.recipe and e["context"] == 2048]
        axis.plot([e["batch"] for e in rows], [e["draft_us"] / 1e3 for e in rows], "o-", label="draft step")
        axis.plot(
            [e["batch"] for e in rows], [e["verify_us"] / 1e3 for e in rows], "s--", label="verify step"
        )
        axis.set(title=f"{gpu.name} (SM{gpu.sm.replace('.', '')})", xscale="log", yscale="log")
        axis.set_xticks(BATCHES, [str(b) for b in BATCHES])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("at least, ms")
    for axis in list(axes.flat)[len(GPUS) :]:
        axis.axis("off")
    axes.flat[0].legend()
    figure.suptitle(f"{result['drafter']}: lower bounds at context 2048, by batch")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, help="an engine directory; default: the drafter of Qwen3-8B")
    parser.add_argument("--output", type=Path, default=Path("benchmarks"))
    arguments = parser.parse_args()
    if arguments.engine:
        manifest = read_manifest(arguments.engine)
        config, options = manifest.config, manifest.head.options()
        window, name = manifest.draft_window, manifest.source
    else:
        config, options, window, name = full_size()
    target = Target()
    result: dict[str, Any] = {
        "schema_version": 1,
        "command": "python -m vllm_domino.bench.cost_model",
        "drafter": name,
        "head": asdict(options),
        "draft_window": window,
        "target": asdict(target),
        "gpus": [asdict(gpu) for gpu in GPUS],
        "entries": table(config, options, target, window),
    }
    (arguments.output / "cost_model.json").write_text(json.dumps(result) + "\n")
    (arguments.output / "cost_model.md").write_text(markdown(result))
    plot(result, arguments.output / "cost_model.png")


if __name__ == "__main__":
    main()
