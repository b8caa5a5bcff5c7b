"""Inputs and outputs of the context graph and the block graph, written once (DESIGN C4).

Export names its tensors from here, builders take shapes and profiles from here, sessions bind by these
names, and tests compare files against it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_domino.config.draft import DraftConfig
from vllm_domino.model.drafter import HeadOptions

ROWS, BATCH, CONTEXT = "rows", "batch", "context"  # the dynamic axes N, B and S
FLOAT = "float"  # the graph's own floating type; ids, positions and lengths are int64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One graph input or output. `shape` mixes fixed sizes and names of dynamic axes."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str  # FLOAT, "float32" or "int64"

    def at(self, **axes: int) -> tuple[int, ...]:
        """The shape with dynamic axes filled in: `spec.at(batch=4, context=512)`."""
        return tuple(axes[size] if isinstance(size, str) else size for size in self.shape)


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One graph's name and tensors, in the order of the arguments of the `Drafter` method it comes from."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def context_graph(config: DraftConfig) -> GraphSpec:
    """features, positions -> context_kv; traced from `Drafter.context_kv`."""
    return GraphSpec(
        "context",
        (
            TensorSpec("features", (ROWS, config.feature_size), FLOAT),
            TensorSpec("positions", (ROWS,), "int64"),
        ),
        (TensorSpec("context_rows", (ROWS, *config.context_row_shape), FLOAT),),
    )


def block_graph(config: DraftConfig, options: HeadOptions) -> GraphSpec:
    """anchors, context K/V, the target's embedding and LM head -> draft ids; traced from `Drafter.draft`."""
    drafts = options.drafts_of(config)
    outputs = [TensorSpec("draft_ids", (BATCH, drafts), "int64")]
    if options.scores:
        outputs.append(TensorSpec("draft_probs", (BATCH, drafts), "float32"))
        if options.candidate_pool is not None and config.has_head:
            pool = min(options.candidate_pool, config.head_vocab_size)
            outputs.append(TensorSpec("candidate_ids", (BATCH, pool), "int64"))
            outputs.append(TensorSpec("candidate_logits", (BATCH, drafts, pool), FLOAT))
    return GraphSpec(
        "block",
        (
            TensorSpec("anchor_ids", (BATCH,), "int64"),
            TensorSpec("anchor_positions", (BATCH,), "int64"),
            TensorSpec("context_kv", (BATCH, CONTEXT, *config.context_row_shape), FLOAT),
            TensorSpec("context_lengths", (BATCH,), "int64"),
            TensorSpec("embedding", (config.vocab_size, config.hidden_size), FLOAT),
            TensorSpec("lm_head", (config.head_vocab_size, config.hidden_size), FLOAT),
        ),
        tuple(outputs),
    )
