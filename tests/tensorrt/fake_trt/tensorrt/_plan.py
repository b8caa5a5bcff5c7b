"""The stand-in's plan file: a JSON header and an ONNX model, run by ONNX Runtime on raw addresses."""

from __future__ import annotations

import ctypes
import json
import tempfile
from pathlib import Path

import onnx
import torch

from vllm_domino.export.contract import GraphSpec, TensorSpec
from vllm_domino.export.verify import CpuGraph

MAGIC = b"STANDIN\0"
_DTYPES = {1: "FLOAT", 7: "INT64", 10: "HALF", 16: "BF16"}  # onnx.TensorProto element types
TORCH = {"FLOAT": torch.float32, "INT64": torch.int64, "HALF": torch.float16, "BF16": torch.bfloat16}


def graph_tensors(model: onnx.ModelProto) -> tuple[list[dict], list[dict]]:
    """Inputs and outputs as {"name", "shape" (-1 for dynamic), "dtype"}."""

    def entry(value: onnx.ValueInfoProto) -> dict:
        kind = value.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]
        return {"name": value.name, "shape": shape, "dtype": _DTYPES[kind.elem_type]}

    return [entry(v) for v in model.graph.input], [entry(v) for v in model.graph.output]


def pack(model: onnx.ModelProto, header: dict) -> bytes:
    """The plan's bytes; `model` holds its weights."""
    text = json.dumps(header, sort_keys=True).encode()
    return MAGIC + len(text).to_bytes(8, "little") + text + model.SerializeToString()


def unpack(plan: bytes) -> tuple[dict, bytes]:
    """Header and ONNX bytes; ValueError where these are no plan's."""
    if plan[: len(MAGIC)] != MAGIC:
        raise ValueError("magic tag does not match")
    size = int.from_bytes(plan[8:16], "little")
    return json.loads(plan[16 : 16 + size]), plan[16 + size :]


class Program:
    """The ONNX model of a plan, loaded."""

    def __init__(self, header: dict, model: bytes):
        self.inputs, self.outputs = header["inputs"], header["outputs"]
        named = GraphSpec("plan", tuple(TensorSpec(t["name"], (), "") for t in self.inputs), ())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.onnx"
            path.write_bytes(model)
            self._graph = CpuGraph(path, named, threads=1)

    def run(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        """Read inputs at their addresses, write outputs at theirs; low precision is computed in fp32."""
        feeds = []
        for tensor in self.inputs:
            value = view(addresses[tensor["name"]], shapes[tensor["name"]], tensor["dtype"])
            feeds.append(value.float() if value.dtype in (torch.float16, torch.bfloat16) else value)
        for tensor, value in zip(self.outputs, self._graph.run(*feeds), strict=True):
            view(addresses[tensor["name"]], tuple(value.shape), tensor["dtype"]).copy_(value)


def view(address: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor over raw memory."""
    kind, count = TORCH[dtype], 1
    for size in shape:
        count *= size
    raw = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=kind).view(shape)
