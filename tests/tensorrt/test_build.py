"""Plans for every GPU type that tensorrt_rtx builds for, and what cannot be built, refused in plain words."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from trt_helpers import Export, recipe

from vllm_domino.config.recipes import load_engine_recipe
from vllm_domino.engine.tensorrt import build_plan, check_recipe, plan_profiles
from vllm_domino.engine.tensorrt_module import load_module, targets
from vllm_domino.export.graphs import BlockGraph, ExportDrafter
from vllm_domino.export.tracing import trace
from vllm_domino.model.drafter import Drafter, HeadOptions

RTX_TARGETS = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")  # by hand: a version that drops one fails here


def build(export, wanted, folder, graph="block", **changes):
    spec = next(s for s in export.specs if s.name == graph)
    layers = export.config.num_hidden_layers if graph == "block" else 0
    values = {"attention_layers": layers} | changes
    return build_plan(export.folder / f"{graph}.onnx", folder / f"{graph}.plan", spec, wanted, **values)


def test_targets_of_tensorrt_rtx():
    assert targets(load_module("tensorrt_rtx")) == RTX_TARGETS


@pytest.mark.parametrize("capability", RTX_TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_build_for_every_gpu_type(capability, dtype, request, tmp_path):
    wanted = recipe(compute_capability=capability, dtype=dtype)
    if (capability, dtype) == ("7.5", "bfloat16"):
        with pytest.raises(ValueError, match='SM75 has no bfloat16; set dtype = "float16"'):
            check_recipe(wanted)
        return
    export = request.getfixturevalue("bf16_export" if dtype == "bfloat16" else "fp16_export")
    check_recipe(wanted, export.options.candidate_pool)
    for graph in ("context", "block"):
        report = build(export, wanted, tmp_path, graph)
        assert report.plan_bytes == (tmp_path / f"{graph}.plan").stat().st_size > 0
        assert report.seconds > 0
        assert report.peak_memory_bytes > 100_000_000


def test_build_of_a_pruned_vocabulary(tmp_path):
    export = Export(tmp_path, torch.bfloat16, HeadOptions(candidate_pool=24), kept=torch.arange(0, 210, 3))
    assert build(export, recipe(), tmp_path).plan_bytes > 0


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_sm90_and_sm100_need_tensorrt_and_such_a_gpu(name):
    wanted = load_engine_recipe(f"engines/{name}.toml")
    sm = wanted.compute_capability.replace(".", "")
    with pytest.raises(
        ValueError, match=f"SM{sm} needs tensorrt and a build on such a GPU; found tensorrt not installed"
    ):
        check_recipe(wanted)
    by_rtx = wanted.model_copy(update={"backend": "tensorrt_rtx"})
    with pytest.raises(
        ValueError, match=f'not for SM{sm}; set backend = "tensorrt" and run the build on a machine'
    ):
        check_recipe(by_rtx)


def test_refused_recipes():
    with pytest.raises(ValueError, match="no fused attention in float32; set dtype to float16 or bfloat16"):
        check_recipe(recipe().model_copy(update={"dtype": "float32"}))
    with pytest.raises(ValueError, match="candidate_pool is 3841; TensorRT's TopK takes at most 3840"):
        check_recipe(recipe(), 3841)
    check_recipe(recipe(), 3840)
    with pytest.raises(
        ValueError, match="unknown option 'profile' for backend tensorrt_rtx; did you mean 'profiles'"
    ):
        check_recipe(recipe(options={"profile": "grid"}))
    with pytest.raises(
        ValueError, match=r"option profiles is 'all'; it must be one of \['single', 'batch', 'grid'\]"
    ):
        check_recipe(recipe(options={"profiles": "all"}))
    with pytest.raises(ValueError, match="option workspace_mb is True; it must be of type int"):
        check_recipe(recipe(options={"workspace_mb": True}))
    with pytest.raises(ValueError, match="unknown option 'timing_cache' for backend tensorrt_rtx"):
        check_recipe(recipe(options={"timing_cache": "cache.bin"}))


def test_profiles_of_every_layout(bf16_export):
    context, block = bf16_export.specs
    row = list(bf16_export.config.context_row_shape)

    def shapes(spec, name, layout):
        return [p[name] for p in plan_profiles(spec, recipe(options={"profiles": layout}))]

    assert shapes(block, "anchor_ids", "single") == [[[1], [4], [4]]]
    assert shapes(block, "context_kv", "single") == [[[1, 16, *row], [4, 64, *row], [4, 64, *row]]]
    assert shapes(block, "context_kv", "batch")[1] == [[4, 16, *row], [4, 64, *row], [4, 64, *row]]
    assert shapes(block, "context_kv", "grid") == [[[b, s, *row]] * 3 for b in (1, 4) for s in (16, 64)]
    assert shapes(context, "positions", "single") == [[[1], [256], [2048]]]
    assert shapes(context, "positions", "grid") == [[[1], [16], [64]], [[1], [256], [2048]]]


def test_graph_without_fused_attention(fp32_export, tmp_path):
    """The fp32 form of the graphs takes attention apart by itself."""
    with pytest.raises(
        ValueError, match="block graph: the graph holds 0 fused attention operators, 2 needed"
    ):
        build(fp32_export, recipe(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_attention_that_has_no_kernel(fp32_export, tmp_path):
    """One operator per layer, but in fp32: TensorRT would have to take it apart, which it is not allowed to."""
    drafter = Drafter.from_checkpoint(fp32_export.checkpoint, HeadOptions()).eval()
    fused = BlockGraph(ExportDrafter(drafter, "fused"))
    spec = fp32_export.specs[1]
    spec = type(spec)(spec.name, spec.inputs, spec.outputs[:1])
    ir.save(trace(fused, spec, torch.float32), tmp_path / "block.onnx")
    with pytest.raises(
        ValueError, match=r"TensorRT has no fused attention kernel for this head size in bfloat16 on SM 8\.9"
    ):
        build_plan(tmp_path / "block.onnx", tmp_path / "block.plan", spec, recipe(), attention_layers=2)
    assert not (tmp_path / "block.plan").exists()


def test_graph_that_does_not_parse(bf16_export, tmp_path):
    (tmp_path / "block.onnx").write_bytes(b"no graph")
    with pytest.raises(ValueError, match="engine l40s, block graph: the parser refuses the graph"):
        build_plan(
            tmp_path / "block.onnx", tmp_path / "p", bf16_export.specs[1], recipe(), attention_layers=2
        )


def test_interrupted_build_ends_its_process_and_leaves_nothing(bf16_export, tmp_path):
    ticks = []

    def interrupt(graph, seconds):
        ticks.append((graph, seconds))
        if len(ticks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(bf16_export, recipe(), tmp_path, progress=interrupt)
    assert [graph for graph, _ in ticks] == ["block"] * 3
    assert ticks[0][1] < ticks[2][1]
    assert list(tmp_path.iterdir()) == []


def test_builder_process_that_is_killed(bf16_export, tmp_path, monkeypatch):
    load_module("tensorrt_rtx")  # this process keeps the real one
    (tmp_path / "tensorrt_rtx.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"the builder process ended with code -9.*killed for memory"):
        build(bf16_export, recipe(), tmp_path)


def test_tensorrt_options_and_timing_cache(fake_trt, bf16_export, tmp_path):
    """On the stand-in: `tensorrt` itself cannot be installed where NVIDIA's own package server is out of reach."""
    cache = tmp_path / "caches" / "timing.bin"
    options = {
        "optimization_level": 5,
        "timing_cache": str(cache),
        "version_compatible": True,
        "hardware_compatibility": "ampere_plus",
        "workspace_mb": 512,
        "max_aux_streams": 0,
    }
    wanted = recipe(name="h100", backend="tensorrt", compute_capability="9.0", options=options)
    check_recipe(wanted)
    report = build(bf16_export, wanted, tmp_path)
    assert len(report.profiles) == 4  # one per batch and context bucket
    assert cache.read_bytes() == b"timings"
    cache.write_bytes(b"earlier timings")
    build(bf16_export, wanted, tmp_path)
    assert cache.read_bytes() == b"earlier timings"
    other = wanted.model_copy(update={"compute_capability": "10.0"})
    with pytest.raises(
        ValueError,
        match=r"SM100 needs tensorrt and a build on such a GPU; found tensorrt 11.* and stand-in GPU \(SM90\)",
    ):
        check_recipe(other)
