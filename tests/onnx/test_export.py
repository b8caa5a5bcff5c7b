"""The files that an export writes: contract, determinism, what is not in them, and failures that leave nothing."""

from __future__ import annotations

import errno
import hashlib
import math
import subprocess
import sys

import onnx
import onnx_ir
import pytest
import torch
from small_drafters import small_config, write_small_checkpoint

from vllm_domino.config.checkpoint import read_checkpoint
from vllm_domino.export.onnx_export import export_graphs
from vllm_domino.export.report import load_export
from vllm_domino.model.drafter import Drafter, HeadOptions

ELEMENT = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.INT64: "int64",
}


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    """A bf16 export: (checkpoint, folder, report)."""
    root = tmp_path_factory.mktemp("bf16")
    checkpoint = write_small_checkpoint(
        root / "checkpoint", dtype=torch.bfloat16, block_size=4, shift_label=False
    )
    report = export_graphs(
        read_checkpoint(checkpoint), HeadOptions(), torch.bfloat16, root / "out", verify_context=32
    )
    return checkpoint, root / "out", report


def _tensors(values):
    return [
        (
            v.name,
            [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim],
            ELEMENT[v.type.tensor_type.elem_type],
        )
        for v in values
    ]


def test_inputs_and_outputs_are_the_contracts(engines):
    """Written out here from DESIGN C4, for the small drafter (L 2, Hkv 2, D 8, H 32, F 2, V 97, T 4)."""
    _, folder = engines("shift")
    block, context = (
        onnx.load(folder / f"{name}.onnx", load_external_data=False) for name in ("block", "context")
    )
    onnx.checker.check_model(str(folder / "block.onnx"))
    assert _tensors(block.graph.input) == [
        ("anchor_ids", ["batch"], "int64"),
        ("anchor_positions", ["batch"], "int64"),
        ("context_kv", ["batch", "context", 2, 2, 2, 8], "float32"),
        ("context_lengths", ["batch"], "int64"),
        ("embedding", [97, 32], "float32"),
        ("lm_head", [97, 32], "float32"),
    ]
    assert _tensors(block.graph.output) == [("draft_ids", ["batch", 4], "int64")]
    assert _tensors(context.graph.input) == [
        ("features", ["rows", 64], "float32"),
        ("positions", ["rows"], "int64"),
    ]
    assert _tensors(context.graph.output) == [("context_rows", ["rows", 2, 2, 2, 8], "float32")]
    assert all(o.version >= 23 for m in (block, context) for o in m.opset_import if o.domain == "")


def test_low_precision_graphs_hold_one_attention_operator_per_layer(bf16):
    _, folder, report = bf16
    model = onnx.load(folder / "block.onnx")
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Attention") == 2
    assert not {"Softmax", "GRU", "Loop", "Scan", "If"} & set(kinds)
    floats = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert sum(len(t.raw_data) for t in floats) < 256  # rotary frequencies and other constants, no weight
    assert report.form == "fused"
    assert report.verification.equal == report.verification.drafts > 0


def test_no_table_of_the_target_and_no_path_is_inside(engines, bf16):
    for folder, checkpoint in ((engines("shift")[1], engines("shift")[0]), (bf16[1], bf16[0])):
        drafter = Drafter.from_checkpoint(read_checkpoint(checkpoint))
        weights = sum(p.numel() * p.element_size() for p in drafter.parameters())
        size = sum((folder / f"{n}.onnx.data").stat().st_size for n in ("block", "context"))
        # K/V projections are in both graphs, and the exporter folds transpositions of small weights into copies
        shared = sum(p.nbytes for n, p in drafter.named_parameters() if ".k_proj." in n or ".v_proj." in n)
        copies = 2 * drafter.head.embed_proj[2].weight.nbytes
        assert size <= 1.01 * weights + shared + copies
        block = onnx.load(folder / "block.onnx", load_external_data=False)
        assert 97 * 32 not in {math.prod(t.dims) for t in block.graph.initializer}
        for name in ("block", "context"):
            model = onnx.load(folder / f"{name}.onnx", load_external_data=False)
            text = model.SerializeToString()
            assert b"vllm_domino/" not in text
            assert b".py" not in text
            assert str(folder.parent).encode() not in text
            assert not any(n.doc_string or n.metadata_props for n in model.graph.node)


def _digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.onnx*")}


def test_same_checkpoint_same_bytes_in_another_process(bf16, tmp_path):
    checkpoint, folder, _ = bf16
    code = f"""
import torch
from pathlib import Path
from vllm_domino.config.checkpoint import read_checkpoint
from vllm_domino.export.onnx_export import export_graphs
from vllm_domino.model.drafter import HeadOptions
out = Path({str(tmp_path / "again")!r})
export_graphs(read_checkpoint({str(checkpoint)!r}), HeadOptions(), torch.bfloat16, out, verify=False)
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1"}
    )
    assert _digests(tmp_path / "again") == _digests(folder)
    assert len(_digests(folder)) == 4


def test_record_is_read_back_and_a_changed_byte_is_refused(bf16, tmp_path):
    import shutil

    shutil.copytree(bf16[1], tmp_path / "copy")
    assert load_export(tmp_path / "copy") == bf16[2]
    data = tmp_path / "copy/block.onnx.data"
    content = bytearray(data.read_bytes())
    content[1000] ^= 1
    data.write_bytes(content)
    with pytest.raises(ValueError, match=r"block\.onnx\.data: SHA-256 .* the file was changed"):
        load_export(tmp_path / "copy")


@pytest.fixture
def quick_trace(monkeypatch):
    """Tracing replaced by a graph of one node, so that tests of what surrounds it are fast."""
    import vllm_domino.export.onnx_export as module

    def trace(_module, spec, dtype):
        value = onnx_ir.Value(
            name="x", shape=onnx_ir.Shape([1]), type=onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
        )
        weight = onnx_ir.Value(name="w", const_value=onnx_ir.tensor(torch.zeros(4000).numpy(), name="w"))
        graph = onnx_ir.Graph(
            [value], [value], nodes=[], initializers=[weight], opset_imports={"": 23}, name=spec.name
        )
        return onnx_ir.Model(graph, ir_version=10)

    monkeypatch.setattr(module, "trace", trace)
    monkeypatch.setattr(module, "check_contract", lambda *a, **k: None)
    return module


def test_disk_full_leaves_nothing(quick_trace, checkpoint_dir, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "exports/out"
    monkeypatch.setattr(quick_trace.ir, "save", full)
    with pytest.raises(ValueError, match="the disk is full"):
        export_graphs(read_checkpoint(checkpoint_dir), HeadOptions(), torch.float32, out, verify=False)
    assert list(out.parent.iterdir()) == []


def test_two_exports_into_one_folder(quick_trace, checkpoint_dir, tmp_path):
    out = tmp_path / "exports/out"

    def second(_line):
        if not refused:
            with pytest.raises(ValueError, match="is writing it; wait for that one to end") as caught:
                export_graphs(
                    read_checkpoint(checkpoint_dir), HeadOptions(), torch.float32, out, verify=False
                )
            refused.append(caught.value)

    refused: list[ValueError] = []
    export_graphs(
        read_checkpoint(checkpoint_dir), HeadOptions(), torch.float32, out, verify=False, progress=second
    )
    assert refused
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]


def test_a_graph_that_drafts_otherwise_is_refused(engines, tmp_path):
    """Weights of another seed behind the same graph: the check must notice, and name the draft."""
    from vllm_domino.export.verify import verify_graphs

    _, folder = engines("shift")
    how = {"verify_context": 8, "progress": lambda _: None}
    other = read_checkpoint(write_small_checkpoint(tmp_path / "other", seed=5, block_size=4))
    with pytest.raises(ValueError, match="rows differ from PyTorch's"):
        verify_graphs(other, HeadOptions(), torch.float32, folder, **how)
    changed = read_checkpoint(engines("shift")[0])
    changed.weights["embed_proj.2.weight"] *= -1
    with pytest.raises(ValueError, match=r"block graph: draft \d is \d+, PyTorch drafts \d+"):
        verify_graphs(changed, HeadOptions(), torch.float32, folder, **how)


def test_config_of_the_fixture():
    assert small_config().feature_size == 64
