"""The two TensorRT modules behind one door: `tensorrt` and `tensorrt_rtx` share the API that is used here.

Importable without either; `load_module` imports one. Versions: 10.15 is the first `tensorrt` whose parser
knows RMSNormalization and RotaryEmbedding; `tensorrt_rtx` 1.4 the first that this project's build was tried
with.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

SUPPORTED_VERSIONS = {"tensorrt": ((10, 15), (12, 0)), "tensorrt_rtx": ((1, 4), (2, 0))}  # from, below
EXTRAS = {"tensorrt": "gpu", "tensorrt_rtx": "rtx"}  # of our own package


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a plan has to fit: compute_capability as "8.9", driver as the CUDA version it supports, "13.0"."""

    name: str
    compute_capability: str
    driver: str | None = None


def load_module(backend: str) -> ModuleType:
    """Import `tensorrt` or `tensorrt_rtx`.

    Raises:
        ValueError: not installed, cannot be loaded, or a version outside `SUPPORTED_VERSIONS`.
    """
    assert backend in SUPPORTED_VERSIONS, backend
    mend = f"pip install 'vllm-domino[{EXTRAS[backend]}]'"
    try:
        module = importlib.import_module(backend)
        if installed_version(backend) is None:
            raise ImportError(f"{list(module.__path__)} is not NVIDIA's")
    except (ImportError, OSError) as error:  # OSError: the bindings are there, the libraries are not
        raise ValueError(
            f"backend {backend}: the Python module {backend} cannot be imported ({error}); {mend}"
        ) from error
    lowest, above = SUPPORTED_VERSIONS[backend]
    found = version_tuple(module.__version__)
    if not lowest <= found[:2] < above:
        window = f"{_dotted(lowest)} up to, not including, {_dotted(above)}"
        raise ValueError(
            f"backend {backend}: found version {module.__version__}, supported is {window}; {mend}"
        )
    return module


def installed_version(backend: str) -> str | None:
    """The version of the module, None where it cannot be imported; for `doctor` and messages."""
    try:
        # a folder of that name on the path imports as an empty module
        return getattr(importlib.import_module(backend), "__version__", None)
    except (ImportError, OSError):
        return None


def present_device(trt: ModuleType | None, device: torch.device | None = None) -> Device | None:
    """The GPU that `trt` would run on, or None without one.

    A stand-in module that runs on a CPU (tests) says which GPU it plays in an attribute `STANDS_IN_FOR`, a
    dict with `Device`'s fields.
    """
    played: dict[str, Any] | None = getattr(trt, "STANDS_IN_FOR", None)
    if played is not None:
        return Device(**played)
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return Device(
        name=torch.cuda.get_device_name(device),
        compute_capability=f"{major}.{minor}",
        driver=_driver_version(),
    )


def targets(trt: ModuleType) -> tuple[str, ...] | None:
    """What this module builds for on any machine, as ("8.9", …); None: only for the GPU at hand."""
    names = getattr(trt, "ComputeCapability", None)
    if names is None:
        return None
    found = (re.fullmatch(r"SM(\d+)(\d)", name) for name in names.__members__)
    return tuple(sorted((f"{m[1]}.{m[2]}" for m in found if m), key=version_tuple))


def sm_name(compute_capability: str) -> str:
    """Name a compute capability as NVIDIA does: "8.9" -> "SM89"."""
    return "SM" + compute_capability.replace(".", "")


def version_tuple(version: str) -> tuple[int, ...]:
    """Make versions comparable: "10.15.1.29" -> (10, 15, 1, 29)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _driver_version() -> str | None:
    """Ask the driver itself: torch knows only the CUDA version that it was built with."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
