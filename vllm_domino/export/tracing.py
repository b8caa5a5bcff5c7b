"""From a PyTorch module to a clean ONNX model that keeps the contract of its graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import onnx_ir as ir
import torch
from torch import Tensor, nn

import vllm_domino
from vllm_domino.export.contract import FLOAT, GraphSpec

OPSET = 23
# the largest sizes a graph accepts; bounds that the tracer may rely on, far above what is served
MAX_ROWS, MAX_BATCH, MAX_CONTEXT = 1 << 20, 4096, 1 << 20


def trace(module: nn.Module, spec: GraphSpec, dtype: torch.dtype) -> ir.Model:
    """The module as a clean ONNX model whose inputs and outputs are `spec`'s."""
    sizes = {"rows": (3, MAX_ROWS, 1), "batch": (2, MAX_BATCH, 1), "context": (5, MAX_CONTEXT, 0)}
    axes = {name: torch.export.Dim(name, min=low, max=high) for name, (_, high, low) in sizes.items()}
    examples: list[Tensor] = []
    dynamic: list[dict[int, object] | None] = []
    for tensor in spec.inputs:
        shape = tensor.at(**{name: example for name, (example, _, _) in sizes.items()})
        # never written or read: tracing runs on fake tensors, so this costs address space only
        examples.append(
            torch.empty(shape, dtype=dtype if tensor.dtype == FLOAT else getattr(torch, tensor.dtype))
        )
        found = {i: axes[size] for i, size in enumerate(tensor.shape) if isinstance(size, str)}
        dynamic.append(found or None)
    with _quiet():
        program = torch.onnx.export(
            module,
            tuple(examples),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=tuple(dynamic),
            input_names=[t.name for t in spec.inputs],
            output_names=[t.name for t in spec.outputs],
            external_data=True,
            optimize=True,
            verbose=False,
        )
    assert program is not None
    return _clean(program.model, spec)


def _clean(model: ir.Model, spec: GraphSpec) -> ir.Model:
    """Drop what differs between two runs (stack traces, paths, counters) and name every value uniquely.

    The exporter may give a value the name of an input (`embedding` is also an operator), which ONNX Runtime
    refuses.
    """
    graph = model.graph
    kept = {id(v) for v in (*graph.inputs, *graph.outputs)}
    for number, node in enumerate(graph.all_nodes()):
        node.name, node.doc_string = f"{node.op_type}_{number}", None
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
            value.doc_string = None
            if id(value) not in kept:
                value.name = f"v{number}" if len(node.outputs) == 1 else f"v{number}_{value.index()}"
    for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None
    graph.name, graph.doc_string, model.doc_string = spec.name, None, None
    graph.metadata_props.clear()
    model.metadata_props.clear()
    model.producer_name, model.producer_version = "vllm-domino", vllm_domino.__version__
    return model


def check_contract(model: ir.Model, spec: GraphSpec, dtype: torch.dtype, limit: int) -> None:
    """Assert that names, order, shapes and dtypes are the contract's, and no target's table is inside."""
    onnx_types = {torch.float32: "FLOAT", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
    for kind, values, wanted in (
        ("input", model.graph.inputs, spec.inputs),
        ("output", model.graph.outputs, spec.outputs),
    ):
        found = [
            (v.name, tuple(d if isinstance(d, int) else str(d) for d in v.shape or ()), v.dtype.name)
            for v in values
        ]
        names = {FLOAT: onnx_types[dtype], "float32": "FLOAT", "int64": "INT64"}
        expected = [(t.name, t.shape, names[t.dtype]) for t in wanted]
        assert found == expected, f"{spec.name} graph: {kind}s {found}, the contract says {expected}"
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    assert size <= limit, (
        f"{spec.name} graph: {size} bytes of weights, the drafter has {limit}: a target's table was baked in"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's chatter off the terminal; its errors still raise."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
