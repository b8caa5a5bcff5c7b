"""Exports that the tests share, and the stand-in TensorRT on the path."""

from __future__ import annotations

import pytest
import torch
from fake_trt.stand_in import on_path
from trt_helpers import Export

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
def fake_trt():
    """The stand-in as module `tensorrt`, for this process and the ones that it starts."""
    with on_path(alignment=256) as trt:
        yield trt
