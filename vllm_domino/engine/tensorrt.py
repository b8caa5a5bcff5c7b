"""TensorRT plans of the context graph and the block graph, for one GPU type.

`tensorrt_rtx` builds for a named GPU type on any machine; `tensorrt` for the GPU at hand. Attention is the
fused operator (a build that would take it apart fails), the GRU is plain cells unrolled over the block (the
parser's own GRU rejects bf16), embedding and LM head are inputs of the plan.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import vllm_domino
from vllm_domino.config.recipes import EngineRecipe
from vllm_domino.engine.tensorrt_module import (
    installed_version,
    load_module,
    present_device,
    sm_name,
    targets,
)
from vllm_domino.export.contract import BATCH, CONTEXT, ROWS, GraphSpec

PLANS = {"context": "context.plan", "block": "block.plan"}
MAX_ROWS = 2048  # rows of one run of the context plan; the session goes through longer prefills in pieces
MAX_CANDIDATES = 3840  # the K that TensorRT's TopK takes at most

Profile = dict[str, list[list[int]]]  # input -> smallest, usual and largest shape
Progress = Callable[[str, float], None]  # graph name, seconds since its build began

# option -> what it may be. Those of `tensorrt` only are refused for `tensorrt_rtx`, which ignores or lacks
# them.
_LAYOUTS = ("single", "batch", "grid")
_OPTIONS: dict[str, tuple[Any, ...] | type] = {
    "profiles": _LAYOUTS,
    "max_aux_streams": int,
    "workspace_mb": int,
}
_TENSORRT_OPTIONS: dict[str, tuple[Any, ...] | type] = {
    "optimization_level": (0, 1, 2, 3, 4, 5),
    "timing_cache": str,
    "version_compatible": bool,
    "hardware_compatibility": ("none", "ampere_plus", "same_compute_capability"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """What one plan cost. peak_memory_bytes is the builder process's."""

    graph: str
    seconds: float
    peak_memory_bytes: int
    plan_bytes: int
    layers: int
    profiles: tuple[Profile, ...]


def check_recipe(recipe: EngineRecipe, candidate_pool: int | None = None) -> ModuleType:
    """Refuse, before anything is exported, what this machine cannot build; return the module that builds it.

    Raises:
        ValueError: the GPU type, the dtype, an option or the candidate pool is out of reach; the message says
            what is in it.
    """
    assert recipe.compute_capability is not None, "EngineRecipe holds one for every GPU backend"
    where, sm = f"engine {recipe.name}", sm_name(recipe.compute_capability)
    if recipe.dtype == "float32":
        raise ValueError(
            f"{where}: TensorRT has no fused attention in float32; set dtype to float16 or bfloat16, "
            "or build engines/cpu.toml"
        )
    if recipe.dtype == "bfloat16" and sm == "SM75":
        raise ValueError(f'{where}: SM75 has no bfloat16; set dtype = "float16"')
    if candidate_pool is not None and candidate_pool > MAX_CANDIDATES:
        raise ValueError(
            f"{where}: candidate_pool is {candidate_pool}; TensorRT's TopK takes at most {MAX_CANDIDATES}"
        )
    _check_options(recipe)
    if recipe.backend == "tensorrt":
        return _require_gpu_at_hand(where, recipe.compute_capability)
    trt = load_module(recipe.backend)
    known = targets(trt) or ()
    if recipe.compute_capability not in known:
        raise ValueError(
            f"{where}: tensorrt_rtx {trt.__version__} builds for {', '.join(map(sm_name, known))}, "
            f'not for {sm}; set backend = "tensorrt" and run the build on a machine with a {sm} GPU '
            "and tensorrt (pip install 'vllm-domino[gpu]')"
        )
    return trt


def _require_gpu_at_hand(where: str, wanted: str) -> ModuleType:
    """`tensorrt` picks kernels by timing them, so it builds for the GPU that it runs on."""
    version = installed_version("tensorrt")
    device = present_device(load_module("tensorrt") if version else None)
    if version is None or device is None or device.compute_capability != wanted:
        gpu = "no GPU" if device is None else f"{device.name} ({sm_name(device.compute_capability)})"
        raise ValueError(
            f"{where}: {sm_name(wanted)} needs tensorrt and a build on such a GPU; found tensorrt "
            f"{version or 'not installed'} and {gpu}; run the same command on a machine with that GPU "
            "(pip install 'vllm-domino[gpu]')"
        )
    return load_module("tensorrt")


def _check_options(recipe: EngineRecipe) -> None:
    known = _OPTIONS | (_TENSORRT_OPTIONS if recipe.backend == "tensorrt" else {})
    for key, value in recipe.options.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(
                f"engine {recipe.name}: unknown option {key!r} for backend {recipe.backend}; {hint}"
            )
        allowed = known[key]
        fits = value in allowed if isinstance(allowed, tuple) else type(value) is allowed
        if not fits:
            needed = (
                f"one of {list(allowed)}" if isinstance(allowed, tuple) else f"of type {allowed.__name__}"
            )
            raise ValueError(f"engine {recipe.name}: option {key} is {value!r}; it must be {needed}")


def plan_profiles(spec: GraphSpec, recipe: EngineRecipe) -> list[Profile]:
    """The optimization profiles of one plan.

    Layouts of the block plan: `grid` has one profile per batch and context bucket, each for exactly that
        shape; `batch` one per batch bucket; `single` one for everything. A plan stores kernels per profile:
        measured with TensorRT-RTX 1.7.1, every further profile of a 2-layer drafter adds 6.3 MB and a
        second of build, and TensorRT-RTX compiles kernels for the shapes that it meets anyway, so its
        default is `single`. TensorRT picks its kernels at build time, so its default is `grid`.
    """
    layout = recipe.options.get("profiles", "single" if recipe.backend == "tensorrt_rtx" else "grid")
    batches, contexts = recipe.batch_buckets, recipe.context_buckets
    if spec.name == "context":
        ranges = [{ROWS: (1, 256, MAX_ROWS)}]
        if layout != "single":
            ranges.insert(
                0, {ROWS: (1, 16, 64)}
            )  # decoding, small batch: reading the weights is all there is to it
    elif layout == "grid":
        ranges = [{BATCH: (b, b, b), CONTEXT: (s, s, s)} for b in batches for s in contexts]
    elif layout == "batch":
        ranges = [{BATCH: (b, b, b), CONTEXT: _range(contexts)} for b in batches]
    else:
        ranges = [{BATCH: _range(batches), CONTEXT: _range(contexts)}]
    return [_profile(spec, axes) for axes in ranges]


def _range(buckets: Sequence[int]) -> tuple[int, int, int]:
    return buckets[0], buckets[len(buckets) // 2], buckets[-1]


def _profile(spec: GraphSpec, axes: Mapping[str, tuple[int, int, int]]) -> Profile:
    dynamic = [t for t in spec.inputs if any(isinstance(size, str) for size in t.shape)]
    at = [{axis: sizes[i] for axis, sizes in axes.items()} for i in range(3)]
    return {t.name: [list(t.at(**sizes)) for sizes in at] for t in dynamic}


def build_plan(
    onnx: Path,
    plan: Path,
    spec: GraphSpec,
    recipe: EngineRecipe,
    *,
    attention_layers: int,
    progress: Progress | None = None,
) -> PlanReport:
    """Build one plan in a process of its own; an interrupt ends that process and leaves no file.

    Args:
        onnx: the graph, with its external data beside it. plan: file to write, in a staged directory.
        attention_layers: fused attention operators that the graph must hold: one per draft layer in the
            block graph.
        progress: called about five times a second; TensorRT's own callback is silent for nearly the whole
            build.

    Raises:
        ValueError: the graph does not parse, attention has no kernel, or the builder fails; the message
            says which.
    """
    trt = load_module(recipe.backend)
    profiles = plan_profiles(spec, recipe)
    by_name = targets(trt) is not None
    assert recipe.compute_capability is not None
    request = {
        "backend": recipe.backend,
        "onnx": str(onnx.resolve()),
        "plan": str(plan.resolve()),
        "compute_capability": sm_name(recipe.compute_capability) if by_name else None,
        "profiles": profiles,
        "attention_layers": attention_layers,
        "options": {k: v for k, v in recipe.options.items() if k != "profiles"},
    }
    try:
        answer = _run_worker(request, lambda seconds: progress(spec.name, seconds) if progress else None)
        if "error" in answer:
            raise ValueError(f"engine {recipe.name}, {spec.name} graph: {_explain(answer['error'], recipe)}")
    except BaseException:
        plan.unlink(missing_ok=True)
        raise
    return PlanReport(graph=spec.name, profiles=tuple(profiles), **answer)


def _run_worker(request: dict[str, Any], tick: Callable[[float], None]) -> dict[str, Any]:
    package_root = str(Path(vllm_domino.__file__).parent.parent)
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), package_root]
    with tempfile.TemporaryDirectory(prefix="vllm-domino-build-") as folder:
        asked, out, err = (Path(folder) / name for name in ("request.json", "stdout", "stderr"))
        asked.write_text(json.dumps(request))
        code = "import sys; from vllm_domino.engine.tensorrt_worker import main; sys.exit(main(sys.argv[1]))"
        start = time.monotonic()
        with out.open("wb") as stdout, err.open("wb") as stderr:
            worker = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(asked)],
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
            try:
                while worker.poll() is None:
                    tick(time.monotonic() - start)
                    time.sleep(0.2 if time.monotonic() - start > 1 else 0.02)
            finally:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
        lines = out.read_text(errors="replace").splitlines()
        try:
            return json.loads(lines[-1])
        except (IndexError, ValueError):
            tail = " ".join(err.read_text(errors="replace").split())[-500:]
            return {
                "error": f"the builder process ended with code {worker.returncode}: {tail or 'no output'}"
            }


def _explain(error: str, recipe: EngineRecipe) -> str:
    """Known causes in a user's words, TensorRT's text after them."""
    if "decompos" in error or "no fused kernel" in error:
        return (
            f"TensorRT has no fused attention kernel for this head size in {recipe.dtype} on SM "
            f"{recipe.compute_capability}; try the other of float16 and bfloat16 (TensorRT: {error})"
        )
    if "-9" in error.split(":", maxsplit=1)[0]:
        return f"{error}; code -9 means killed for memory: free some (a full-size drafter takes about 7 GB)"
    return error
