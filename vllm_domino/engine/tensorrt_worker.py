"""Parses one ONNX graph and builds one plan, in a process of its own (started by `tensorrt.build_plan`).

A process of its own because TensorRT's builder cannot be interrupted from Python, keeps gigabytes of host
memory after it returns, prints to the process's streams, and has crashed on graphs that it does not know.
It imports nothing but the standard library and TensorRT, so it starts in a moment.

The request is one JSON file (see `Request` in `tensorrt.py`); the answer is the last line on stdout, JSON
too: {"error": text} or {"seconds": …, "peak_memory_bytes": …, "layers": …, "plan_bytes": …}.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any


def main(path: str) -> int:
    """Answer the request in file `path`; the exit code says whether a plan was written."""
    request = json.loads(Path(path).read_text())
    try:
        answer = _build(request)
    except _BuildError as error:
        answer = {"error": str(error)}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return int("error" in answer)


class _BuildError(Exception):
    """A build that cannot succeed; the text is for the user."""


def _build(request: dict[str, Any]) -> dict[str, Any]:
    start = time.monotonic()
    trt = importlib.import_module(request["backend"])
    log = _logger(trt)
    builder = trt.Builder(log)
    # from TensorRT 11 on and in TensorRT-RTX every network is strongly typed; 10.x has to be told
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(request["onnx"]):
        problems = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise _BuildError(f"the parser refuses the graph: {'; '.join(problems)}")
    _require_fused_attention(trt, network, request["attention_layers"])
    config = _config(trt, builder, network, request)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _BuildError(f"the builder gave up: {'; '.join(log.errors[-3:]) or 'no reason given'}")
    Path(request["plan"]).write_bytes(plan)
    _save_timing_cache(config, request)
    return {
        "seconds": time.monotonic() - start,
        "peak_memory_bytes": _peak_memory_bytes(),
        "layers": network.num_layers,
        "plan_bytes": plan.nbytes,
    }


def _require_fused_attention(trt: Any, network: Any, expected: int) -> None:
    """Refuse a graph that does not hold one fused attention operator per layer.

    `IAttention` may not be taken apart unless somebody marks it decomposable, so with all of them there a
    missing kernel fails the build instead of making a slow engine.
    """
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    found = kinds.count(trt.LayerType.ATTENTION_OUTPUT)
    if found != expected:
        raise _BuildError(
            f"the graph holds {found} fused attention operators, {expected} needed: it was exported in a "
            "form that TensorRT has no kernel for; export again with dtype float16 or bfloat16"
        )


def _config(trt: Any, builder: Any, network: Any, request: dict[str, Any]) -> Any:
    config, options = builder.create_builder_config(), request["options"]
    config.clear_flag(
        trt.BuilderFlag.TF32
    )  # on by default; what little fp32 there is (rotary angles) stays exact
    # one stream: a step is one chain of small kernels, and capture needs no side streams
    config.max_aux_streams = options.get("max_aux_streams", 0)
    if request["compute_capability"] is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, request["compute_capability"]), 0)
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(
            trt.BuilderFlag.REQUIRE_USER_ALLOCATION
        )  # TensorRT-RTX: guarantees CUDA graph capture
    if "optimization_level" in options:
        config.builder_optimization_level = options["optimization_level"]
    if "workspace_mb" in options:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options["workspace_mb"] << 20)
    if options.get("version_compatible"):
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        # the lean runtime inside a plan would be code from a file; the installed one is used
        config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
    if "hardware_compatibility" in options:
        level = options["hardware_compatibility"].upper()
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    if "timing_cache" in options:
        path = Path(options["timing_cache"])
        content = path.read_bytes() if path.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(content), ignore_mismatch=False)
    for shapes in request["profiles"]:
        profile = builder.create_optimization_profile()
        for name, (low, usual, high) in shapes.items():
            profile.set_shape(name, low, usual, high)
        config.add_optimization_profile(profile)
    assert {network.get_input(i).name for i in range(network.num_inputs)} >= set(request["profiles"][0])
    return config


def _peak_memory_bytes() -> int:
    """The most memory that this process held; `getrusage` would count what its parent held when it forked."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def _save_timing_cache(config: Any, request: dict[str, Any]) -> None:
    if "timing_cache" not in request["options"]:
        return
    path = Path(request["options"]["timing_cache"])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(config.get_timing_cache().serialize())
    partial.replace(path)


def _logger(trt: Any) -> Any:
    """A logger that keeps the errors and prints nothing: the parser warns about every integer input."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(text.strip())

    return Log()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
