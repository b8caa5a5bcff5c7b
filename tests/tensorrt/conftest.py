"""Exports that the tests share, and the stand-in TensorRT on the path."""

from __future__ import annotations

import importlib
import os
import sys

import pytest
import torch
from trt_helpers import FAKE_TRT, Export

from vllm_domino.model.drafter import HeadOptions

POOL = HeadOptions(candidate_pool=24, scores=True)


@pytest.fixture(scope="session")
def fp32_export(tmp_path_factory) -> Export:
    """What the stand-in runs: fp32 on ONNX Runtime equals PyTorch id by id."""
    return Export(tmp_path_factory.mktemp("fp32"), torch.float32, POOL, head_dim=16)


@pytest.fixture(scope="session")
def bf16_export(tmp_path_factory) -> Export:
    return Export(tmp_path_factory.mktemp("bf16"), torch.bfloat16, POOL)


@pytest.fixture(scope="session")
def fp16_export(tmp_path_factory) -> Export:
    return Export(tmp_path_factory.mktemp("fp16"), torch.float16, HeadOptions())


@pytest.fixture
def fake_trt(monkeypatch):
    """The stand-in as module `tensorrt`, for this process and the ones that it starts."""
    monkeypatch.syspath_prepend(FAKE_TRT)
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(FAKE_TRT), inherited))))
    _forget()
    yield importlib.import_module("tensorrt")
    _forget()


def _forget() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt"]:
        del sys.modules[name]
