"""A checkpoint with the exact shapes of Huang2020/Qwen3-8B-Domino-b16 and random weights: builds without a download.

    python benchmarks/make_full_size.py DIR            # 2.21 GB: DIR/checkpoint, DIR/qwen3-8b-full-size.toml
    python benchmarks/make_full_size.py DIR --measure  # then export and build it, and write what that took
    python benchmarks/make_full_size.py DIR --measure --rehearse  # all of it on a far smaller drafter, in two minutes

`--measure` exports in bf16 and builds for SM80, SM89 and SM120 with tensorrt_rtx (no GPU needed), one after the other,
each in a process of its own whose peak memory the kernel counts; the export is checked against PyTorch as always. It
writes benchmarks/results/full-size-build.json (a rehearsal: DIR/result.json) and ends with that JSON on one line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from vllm_domino.bench.cost_model import full_size
from vllm_domino.config.checkpoint import write_checkpoint
from vllm_domino.config.draft import DraftConfig
from vllm_domino.model.drafter import Drafter

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/full-size-build.json"
ENGINES = ("a100", "l40s", "rtx5090")  # SM80, SM89, SM120
BOUNDS = {"export_seconds": 180, "export_gb": 8, "build_seconds": 120, "build_gb": 10, "plan_ratio": 1.02}
CONFIG = full_size()[0]
SMALL = replace(
    CONFIG,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=16384,
    mask_token_id=16383,
    gru_hidden_dim=256,
)


def write(folder: Path, config: DraftConfig) -> Path:
    """The checkpoint and its export recipe; returns the recipe."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Drafter(config).public_parameters().items()}
    for name, shape in shapes.items():
        value = torch.ones(shape)
        if len(shape) > 1:  # keeps activations near one from layer to layer
            value = torch.empty(shape).normal_(std=shape[-1] ** -0.5, generator=generator)
        weights[name] = value.bfloat16()
    write_checkpoint(folder / "checkpoint", config, weights, shard_bytes=1 << 30)
    recipe = folder / "qwen3-8b-full-size.toml"
    recipe.write_text('name = "qwen3-8b-full-size"\ncheckpoint = "./checkpoint"\ndtype = "bfloat16"\n')
    return recipe


def measure(recipe: Path, folder: Path) -> dict:
    """Export once per head option (the GPU recipes' candidate pool), then build every engine."""
    engines = [str(ROOT / f"engines/{name}.toml") for name in ENGINES]
    code = (
        "import sys; from vllm_domino.config.recipes import load_engine_recipe as e, load_export_recipe as x; "
        "from vllm_domino.export.onnx_export import run_export_recipe as r; "
        "r(x(sys.argv[1]).with_overrides(e(sys.argv[2])), progress=print)"
    )
    export = _run([sys.executable, "-c", code, str(recipe), engines[0]], folder)
    builds = {}
    for name, engine in zip(ENGINES, engines, strict=True):
        out = folder / f"built-{name}"
        code = (
            "import sys; from pathlib import Path; "
            "from vllm_domino.config.recipes import load_engine_recipe as e, load_export_recipe as x; "
            "from vllm_domino.engine.build import build_engine as b; "
            "b(x(sys.argv[1]), e(sys.argv[2]), Path(sys.argv[3]))"
        )
        run = _run([sys.executable, "-c", code, str(recipe), engine, str(out)], folder)
        builds[name] = run | _plan_facts(out)
    return {"export": export, "builds": builds}


def within_bounds(measured: dict) -> dict[str, bool]:
    """Each bound against the worst figure. A plan's bound is for each of the two plans of an engine."""
    export, builds = measured["export"], measured["builds"].values()
    return {
        "export_seconds": export["seconds"] <= BOUNDS["export_seconds"],
        "export_gb": export["peak_memory_bytes"] <= BOUNDS["export_gb"] * 1e9,
        "build_seconds": max(b["seconds"] for b in builds) <= BOUNDS["build_seconds"],
        "build_gb": max(b["builder_peak_memory_bytes"] for b in builds) <= BOUNDS["build_gb"] * 1e9,
        "plan_ratio": max(b["block_plan_ratio"] for b in builds) <= BOUNDS["plan_ratio"],
    }


def _run(command: list[str], folder: Path) -> dict:
    """Seconds and peak memory of a command, children not counted (a builder reports its own)."""
    start = time.monotonic()
    print(f"running {command[-1]}", flush=True)
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command[-3:])} failed")
    return {
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_memory_bytes": usage.ru_maxrss << 10,
    }


def _plan_facts(out: Path) -> dict:
    manifest = json.loads((out / "engine.json").read_text())
    plans, weights = manifest["plans"], manifest["weight_bytes"]
    return {
        "compute_capability": manifest["compute_capability"],
        "backend": f"{manifest['backend']} {manifest['backend_version']}",
        "plan_seconds": round(sum(p["seconds"] for p in plans.values()), 1),
        "builder_peak_memory_bytes": max(p["peak_memory_bytes"] for p in plans.values()),
        "plan_bytes": {name: p["plan_bytes"] for name, p in plans.items()},
        "weight_bytes": weights,
        "block_plan_ratio": round(plans["block"]["plan_bytes"] / weights, 4),
        "all_plans_ratio": round(sum(p["plan_bytes"] for p in plans.values()) / weights, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument(
        "--rehearse", action="store_true", help="a far smaller drafter; no committed result is written"
    )
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    recipe = folder / "qwen3-8b-full-size.toml"
    if not arguments.measure:
        write(folder, SMALL if arguments.rehearse else CONFIG)
        return
    if not recipe.is_file():
        # in a process of its own: the kernel counts what a process holds when it starts another as that one's too
        subprocess.run([sys.executable, *(a for a in sys.argv if a != "--measure")], check=True)
    shapes = "far smaller shapes (a rehearsal)" if arguments.rehearse else "the shapes of Qwen3-8B-Domino-b16"
    load_before = os.getloadavg()
    measured = measure(recipe, folder)
    result = {
        "schema_version": 1,
        "what": f"export, with its check, and build of a drafter with {shapes}, bf16, candidate pool 2048",
        "command": "python benchmarks/make_full_size.py DIR --measure",
        "bounds": BOUNDS,
        "within_bounds": within_bounds(measured),
        **measured,
        "machine": {
            "cpus": os.cpu_count(),
            "load_average": {"before": load_before, "after": os.getloadavg()},
            "cpu": _cpu_name(),
            "gpu": None,
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "git": subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    target = folder / "result.json" if arguments.rehearse else RESULT
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
