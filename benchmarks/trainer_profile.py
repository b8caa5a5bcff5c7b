"""Where a training step's time goes: matrix products, attention, everything else, of the tiny pair's three drafters.

    python benchmarks/trainer_profile.py --data DATA.jsonl    # benchmarks/results/trainer-profile.json, a few minutes

DATA is what `vllm-domino train data` wrote (`train tiny` leaves it in `regenerated-*.jsonl` in OUT's `work`). Each
method trains with its shipped recipe in a process of its own with one thread: steps that warm up, then steps that are
timed, then as many under PyTorch's profiler. Shares are of the profiler's self CPU time: an operator without those
that it calls. It goes by the clock, so the machine must be idle. What a step does outside of operators (Python,
drawing anchors) is no operator's time; `outside_operators` is its share of the profiled steps. A step includes the
target's forward, unless `--features` names a store that an earlier run has filled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from vllm_domino.bench import provenance
from vllm_domino.files import sha256_file
from vllm_domino.train.tiny import METHODS, one_thread, recipe_of

RESULT = Path(__file__).parent / "results/trainer-profile.json"
TARGET = Path(__file__).parent.parent / "vllm_domino/assets/tiny/target"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_addmm_activation", "mkldnn_linear")
ATTENTION = "scaled_dot_product"  # part of the names of its forward and backward, in every form
MOST = 12  # operators that are named in the result


def category(operator: str) -> str:
    """Of a profiler's event such as `aten::addmm`. Attention that is written out counts by its operators."""
    name = operator.rpartition("::")[2]
    if ATTENTION in name or name == "_fused_sdp_choice":
        return "attention"
    return "matrix_products" if name in PRODUCTS or "mkldnn_linear" in name else "other"


def shares(events: Iterable[tuple[str, float]]) -> dict:
    """Share of the self CPU time by category, and of the costliest operators, from (operator, microseconds)."""
    times = Counter[str]()
    for operator, time_us in events:
        times[operator] += time_us
    total = sum(times.values())
    by_category = Counter({"matrix_products": 0.0, "attention": 0.0, "other": 0.0})
    for operator, time_us in times.items():
        by_category[category(operator)] += time_us
    return {
        "shares": {name: round(time_us / total, 4) for name, time_us in by_category.items()},
        "operators": [
            {"name": name, "category": category(name), "share": round(time_us / total, 4)}
            for name, time_us in times.most_common(MOST)
        ],
    }


def measure(
    method: str, target: Path, data: list[Path], features: Path | None, warm: int, steps: int
) -> dict:
    """One method in this process."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from vllm_domino.train.loop import LoopOptions, prepare_training

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out:
        options = LoopOptions(features=features)
        trainer, _ = prepare_training(str(target), data, Path(out) / "run", recipe_of(method), options)

        def run(count: int) -> tuple[float, float]:
            """Wall and CPU seconds."""
            clock, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                trainer.step()()
                trainer.done += 1
            return time.perf_counter() - clock, time.process_time() - cpu

        run(warm)
        tokens = trainer.tokens
        seconds, cpu_seconds = run(steps)
        tokens = trainer.tokens - tokens
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            profiled, _ = run(steps)
    events = [(e.key, e.self_cpu_time_total) for e in profiler.key_averages()]
    in_operators = sum(time_us for _, time_us in events) / 1e6
    return {
        "method": method,
        "tokens_per_s": round(tokens / seconds, 1),
        "tokens_per_cpu_s": round(tokens / cpu_seconds, 1),
        "seconds_per_step": round(seconds / steps, 4),
        "tokens_per_step": round(tokens / steps, 1),
        **shares(events),
        "outside_operators": round(1 - in_operators / profiled, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="JSONL; may be repeated")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--steps", type=int, default=6, help="timed, and as many again under the profiler")
    parser.add_argument("--warm", type=int, default=3, help="steps before those")
    parser.add_argument(
        "--features", type=Path, help="read the target's features from here; the first run fills it"
    )
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--one", choices=tuple(METHODS), help=argparse.SUPPRESS)  # a child: prints its row
    arguments = parser.parse_args()
    if arguments.one:
        row = measure(
            arguments.one,
            arguments.target,
            arguments.data,
            arguments.features,
            arguments.warm,
            arguments.steps,
        )
        print(json.dumps(row))
        return
    before, rows = os.getloadavg(), []
    for method in arguments.methods.split(","):
        # the allocator's settings are read when a process starts
        command = [sys.executable, __file__, *sys.argv[1:], "--one", method]
        child = subprocess.run(command, env=one_thread(), stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(child.stdout.splitlines()[-1]))
        print(rows[-1]["method"], rows[-1]["tokens_per_s"], rows[-1]["shares"], flush=True)
    result = {
        "schema_version": 1,
        "what": "self CPU time of a training step by kind of operator, tiny recipes, one thread",
        "command": "python benchmarks/trainer_profile.py --data DATA.jsonl",
        "steps": arguments.steps,
        "warm_steps": arguments.warm,
        "feature_store": arguments.features is not None,
        "rows": rows,
        "note": arguments.note,
        "load_average": {"before": before, "after": os.getloadavg()},
        "threads": 1,
        "data_sha256": [sha256_file(path) for path in arguments.data],
        "machine": provenance.machine().model_dump(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    arguments.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
