"""A checkpoint with the exact shapes of Huang2020/Qwen3-8B-Domino-b16 and random weights: builds without a download.

    python benchmarks/make_full_size.py DIR            # 2.21 GB: DIR/checkpoint, DIR/qwen3-8b-full-size.toml
    python benchmarks/make_full_size.py DIR --measure  # then export and build it, and write what that took

`--measure` exports in bf16 and builds for SM80, SM89 and SM120 with tensorrt_rtx (no GPU needed), one after the other,
each in a process of its own whose peak memory the kernel counts; the export is checked against PyTorch as always. It
writes benchmarks/results/full-size-build.json and ends with that JSON on one line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from vllm_domino.bench.cost_model import full_size
from vllm_domino.config.checkpoint import write_checkpoint
from vllm_domino.model.drafter import Drafter

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/full-size-build.json"
ENGINES = ("a100", "l40s", "rtx5090")  # SM80, SM89, SM120
BOUNDS = {"export_seconds": 180, "export_gb": 8, "build_seconds": 120, "build_gb": 10, "plan_ratio": 1.02}
CONFIG = full_size()[0]


def write(folder: Path) -> Path:
    """The checkpoint and its export recipe; returns the recipe."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Drafter(CONFIG).public_parameters().items()}
    for name, shape in shapes.items():
        value = torch.ones(shape)
        if len(shape) > 1:  # keeps activations near one from layer to layer
            value = torch.empty(shape).normal_(std=shape[-1] ** -0.5, generator=generator)
        weights[name] = value.bfloat16()
    write_checkpoint(folder / "checkpoint", CONFIG, weights, shard_bytes=1 << 30)
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
            "b(x(sys.argv[1]), e(sys.argv[2]), Path(sys.argv[3]), progress=print)"
        )
        run = _run([sys.executable, "-c", code, str(recipe), engine, str(out)], folder)
        builds[name] = run | _plan_facts(out)
    return {"export": export, "builds": builds}


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
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    recipe = folder / "qwen3-8b-full-size.toml"
    if not recipe.is_file():
        recipe = write(folder)
    if not arguments.measure:
        return
    result = {
        "schema_version": 1,
        "what": "export and build of a drafter with the shapes of Qwen3-8B-Domino-b16, bf16, candidate pool 2048",
        "command": "python benchmarks/make_full_size.py DIR --measure",
        "bounds": BOUNDS,
        **measure(recipe, folder),
        "machine": {
            "cpus": os.cpu_count(),
            "load_average_at_end": os.getloadavg(),
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
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
