"""What a candidate pool saves: the head of a full-size drafter with and without it, one thread of this CPU.

    python benchmarks/candidate_pool.py        # benchmarks/results/candidate-pool.json, a minute on an idle machine

The head alone (`Drafter.choose`: GRU, correction, choice of every draft in turn, and finding the pool), at the shapes
of Qwen3-8B's drafter in fp32: 151,936 tokens, rank 256, GRU 1024, 16 drafts. Base logits and hidden states are given;
the backbone and the LM head before it cost the same either way. In PyTorch as the session runs it, and in ONNX Runtime
as the exported graph has it. Both heads take turns, and their one thread's CPU time counts: what else runs on the
machine takes less of that than of the clock.

The bound is for batch 1. What a batch shares (the GRU's weights, read for every draft) is in both heads, and every
request has a pool of its own, so the pool saves less of a larger batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import Tensor, nn

from vllm_domino.bench import provenance
from vllm_domino.bench.cost_model import full_size
from vllm_domino.config.draft import DraftConfig
from vllm_domino.export.contract import BATCH, FLOAT, GraphSpec, TensorSpec
from vllm_domino.export.graphs import ExportDrafter
from vllm_domino.export.tracing import trace
from vllm_domino.model.drafter import Drafter, HeadOptions
from vllm_domino.runtime.onnx_session import _session_options

RESULT = Path(__file__).parent / "results/candidate-pool.json"
POOL, BOUND = 2048, 0.5
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class HeadGraph(nn.Module):
    """The end of the block graph, from base logits on."""

    def __init__(self, drafter: Drafter):
        super().__init__()
        self.drafter = ExportDrafter(drafter, "plain")
        self.drafter.backbone = nn.Identity()

    def forward(self, anchor_ids: Tensor, hidden: Tensor, base: Tensor, embedding: Tensor) -> Tensor:
        return self.drafter.choose(anchor_ids, hidden, base, embedding)[0]


def head_spec(config: DraftConfig) -> GraphSpec:
    drafts, hidden, vocab = config.num_draft_tokens, config.hidden_size, config.vocab_size
    inputs = (
        TensorSpec("anchor_ids", (BATCH,), "int64"),
        TensorSpec("hidden", (BATCH, drafts, hidden), FLOAT),
        TensorSpec("base", (BATCH, drafts, vocab), FLOAT),
        TensorSpec("embedding", (vocab, hidden), FLOAT),
    )
    return GraphSpec("head", inputs, (TensorSpec("draft_ids", (BATCH, drafts), "int64"),))


def small_backbone(config: DraftConfig, pool: int | None, seed: int = 0) -> Drafter:
    """A drafter with a full-size head; its backbone is never run and hardly there."""
    torch.manual_seed(seed)
    drafter = Drafter(config, HeadOptions(candidate_pool=pool)).requires_grad_(False).eval()
    assert drafter.head is not None
    for parameter in drafter.head.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return drafter


def torch_run(drafter: Drafter, embedding: Tensor) -> Run:
    def run(anchors: Tensor, hidden: Tensor, base: Tensor) -> Tensor:
        with torch.inference_mode():
            return drafter.choose(anchors, hidden, base, embedding)[0]

    return run


def onnx_run(drafter: Drafter, embedding: Tensor, folder: Path) -> Run:
    spec = head_spec(drafter.config)
    model = trace(HeadGraph(drafter), spec, torch.float32)
    path = folder / f"head-{drafter.options.candidate_pool}.onnx"
    ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=1024)
    session = ort.InferenceSession(path, _session_options(), providers=["CPUExecutionProvider"])
    table = ort.OrtValue.ortvalue_from_numpy(embedding.numpy())

    def run(anchors: Tensor, hidden: Tensor, base: Tensor) -> Tensor:
        feeds = {"anchor_ids": anchors, "hidden": hidden, "base": base}
        values = {name: ort.OrtValue.ortvalue_from_numpy(t.numpy()) for name, t in feeds.items()}
        (out,) = session.run_with_ort_values(None, values | {"embedding": table})
        return torch.from_numpy(np.asarray(out.numpy()))

    return run


def alternate(runs: dict[str, Run], inputs: tuple[Tensor, Tensor, Tensor], rounds: int) -> dict[str, float]:
    """Median milliseconds of CPU time of each, measured in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name, run in runs.items():
            start = time.thread_time()
            run(*inputs)
            if index:  # the first round warms up
                times[name].append(1e3 * (time.thread_time() - start))
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def measure(batches: list[int], rounds: int) -> list[dict]:
    # the backbone is never run
    config = replace(full_size()[0], num_hidden_layers=1, intermediate_size=64, target_layer_ids=(1,))
    # zeros that nobody wrote take no memory; a step reads 16 rows of the 151,936, so what they hold makes no difference
    embedding = torch.zeros(config.vocab_size, config.hidden_size)
    drafters = {"full": small_backbone(config, None), "pool": small_backbone(config, POOL)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sessions: dict[str, dict[str, Run]] = {
            "onnxruntime": {n: onnx_run(d, embedding, Path(folder)) for n, d in drafters.items()},
            "pytorch": {n: torch_run(d, embedding) for n, d in drafters.items()},
        }
        for batch in batches:
            generator = torch.Generator().manual_seed(batch)
            shape = batch, config.num_draft_tokens
            inputs = (
                torch.randint(config.vocab_size, (batch,), generator=generator),
                torch.randn(*shape, config.hidden_size, generator=generator),
                torch.randn(*shape, config.vocab_size, generator=generator) * 3,
            )
            for name, runs in sessions.items():
                times = alternate(runs, inputs, rounds)
                rows.append(
                    {
                        "session": name,
                        "batch": batch,
                        "rounds": rounds,
                        "full_ms": times["full"],
                        "pool_ms": times["pool"],
                        "ratio": round(times["pool"] / times["full"], 3),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--note", default="", help="what else ran on the machine")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["VLLM_DOMINO_ORT_THREADS"] = "1"
    before = os.getloadavg()
    rows = measure([int(b) for b in arguments.batches.split(",")], arguments.rounds)
    result = {
        "schema_version": 1,
        "what": f"the head with a candidate pool of {POOL} and the full head, V = 151,936, CPU time of one thread",
        "command": "python benchmarks/candidate_pool.py",
        "bound_at_batch_1": BOUND,
        "within_bound": all(row["ratio"] <= BOUND for row in rows if row["batch"] == 1),
        "rows": rows,
        "note": arguments.note,
        "load_average": {"before": before, "after": os.getloadavg()},
        "threads": 1,
        "machine": provenance.machine().model_dump(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"{RESULT}: " + ("within" if result["within_bound"] else "NOT within") + f" {BOUND} of the full head"
    )


if __name__ == "__main__":
    main()
