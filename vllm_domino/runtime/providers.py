"""ONNX Runtime's execution providers by name, with the options that serving needs.

What a provider compiles for a GPU is kept in `provider-cache/` of the engine directory, so that a second
start does not build anything. Option names as in ONNX Runtime 1.31's provider headers; the GPU providers
have not been run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch

from vllm_domino.export.report import TensorEntry

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TENSORRT, TENSORRT_RTX = "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"
CACHE_DIR = "provider-cache"


def provider_list(
    names: tuple[str, ...],
    folder: Path,
    device: torch.device,
    inputs: tuple[TensorEntry, ...],
    axes: Mapping[str, tuple[int, int, int]],
    options: Mapping[str, Any],
) -> list[tuple[str, dict[str, str]]]:
    """What `InferenceSession(providers=…)` takes.

    Args:
        folder: the engine directory. inputs: of the graph. axes: smallest, usual and largest size of a
            dynamic axis.
        options: of the engine recipe, "PROVIDER.key" or "key"; they win over the defaults here.

    Raises:
        ValueError: a provider that this ONNX Runtime does not have.
    """
    names = names or (CPU,)
    available = ort.get_available_providers()
    missing = [name for name in names if name not in available]
    if missing:
        raise ValueError(
            f"engine {folder}: needs ONNX Runtime's {missing[0]}, this onnxruntime {ort.__version__} has "
            f"{', '.join(available)}; install the onnxruntime build that has it, or build engines/cpu.toml"
        )
    return [(name, _options(name, folder, device, inputs, axes, options)) for name in names]


def _options(
    name: str,
    folder: Path,
    device: torch.device,
    inputs: tuple[TensorEntry, ...],
    axes: Mapping[str, tuple[int, int, int]],
    options: Mapping[str, Any],
) -> dict[str, str]:
    if name == CPU:
        return {}
    stream = str(torch.cuda.current_stream(device).cuda_stream)
    values = {"device_id": str(device.index or 0), "user_compute_stream": stream}
    cache = str(folder / CACHE_DIR)
    if name == TENSORRT:
        values |= {
            "has_user_compute_stream": "1",
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": cache,
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": cache,
        }
        values |= {f"trt_profile_{kind}_shapes": text for kind, text in _profile(inputs, axes).items()}
    elif name == TENSORRT_RTX:
        values |= {"has_user_compute_stream": "1", "nv_runtime_cache_path": cache}
        values |= {f"nv_profile_{kind}_shapes": text for kind, text in _profile(inputs, axes).items()}
    elif name == CUDA:
        values |= {"cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0"}
    for key, value in options.items():
        scope, _, rest = key.rpartition(".")
        if scope in ("", name):
            values[rest] = str(int(value)) if isinstance(value, bool) else str(value)
    return values


def _profile(inputs: tuple[TensorEntry, ...], axes: Mapping[str, tuple[int, int, int]]) -> dict[str, str]:
    """`name:1x2x3,other:4` for the smallest, usual and largest shapes of the inputs that vary."""
    texts = {}
    for index, kind in enumerate(("min", "opt", "max")):
        shapes = []
        for tensor in inputs:
            if any(isinstance(size, str) for size in tensor.shape):
                sizes = [axes[size][index] if isinstance(size, str) else size for size in tensor.shape]
                shapes.append(f"{tensor.name}:{'x'.join(map(str, sizes))}")
        texts[kind] = ",".join(shapes)
    return texts
