"""What keeps a TensorRT engine from being loaded, each with its message; on the stand-in module."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_domino.engine import tensorrt_check
from vllm_domino.engine.tensorrt_check import check_tensorrt


def manifest(**changes):
    """The fields of an engine manifest that the check reads."""
    values = {
        "backend": "tensorrt",
        "backend_version": "11.4.0.106",
        "compute_capability": "9.0",
        "options": {},
        "batch_buckets": (1, 8),
        "export_recipe": "qwen3-8b",
        "engine_recipe": "h100",
        "build_command": "vllm-domino build export/qwen3-8b.toml engines/h100.toml",
    }
    return SimpleNamespace(**(values | changes))


def test_fits(fake_trt):
    check_tensorrt("engine", manifest())
    check_tensorrt(
        "engine", manifest(options={"hardware_compatibility": "ampere_plus"}, compute_capability="8.0")
    )


def test_other_gpu_type(fake_trt):
    with pytest.raises(
        ValueError,
        match=r"engine: built for SM89, this GPU is stand-in GPU \(SM90\); with .* run `vllm-domino",
    ):
        check_tensorrt("engine", manifest(compute_capability="8.9"))


def test_no_gpu_here():
    with pytest.raises(ValueError, match="built for SM89, this machine has no GPU"):
        check_tensorrt("engine", manifest(backend="tensorrt_rtx", compute_capability="8.9"))


def test_other_version(fake_trt):
    with pytest.raises(
        ValueError, match=r"built with tensorrt 11\.3\.0\.1, found tensorrt 11\.4\.0\.106; install .* or run"
    ):
        check_tensorrt("engine", manifest(backend_version="11.3.0.1"))
    compatible = {"version_compatible": True}
    check_tensorrt("engine", manifest(backend_version="11.3.0.1", options=compatible))
    for version in ("11.5.0.1", "10.15.0.1"):
        with pytest.raises(ValueError, match="found tensorrt"):
            check_tensorrt("engine", manifest(backend_version=version, options=compatible))


def test_old_driver(fake_trt, monkeypatch):
    monkeypatch.setattr(tensorrt_check, "_cuda_major", lambda backend: 13)
    monkeypatch.setitem(fake_trt.STANDS_IN_FOR, "driver", "12.8")
    with pytest.raises(
        ValueError, match=r"needs a driver for CUDA 13, found one for 12\.8; update the NVIDIA driver"
    ):
        check_tensorrt("engine", manifest())
