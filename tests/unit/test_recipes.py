"""Recipes: what ships is valid, and a wrong one is refused by the name of the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_domino.config.recipes import load_engine_recipe, load_export_recipe

ROOT = Path(__file__).parents[2]
# compute capability and dtype of every GPU type, from NVIDIA's table of CUDA GPUs; SM75 has no bf16
GPUS = {
    "t4": ("7.5", "float16"),
    "a100": ("8.0", "bfloat16"),
    "a10": ("8.6", "bfloat16"),
    "rtx3090": ("8.6", "bfloat16"),
    "l40s": ("8.9", "bfloat16"),
    "rtx4090": ("8.9", "bfloat16"),
    "h100": ("9.0", "bfloat16"),
    "h200": ("9.0", "bfloat16"),
    "b200": ("10.0", "bfloat16"),
    "rtx5090": ("12.0", "bfloat16"),
    "dgx-spark": ("12.1", "bfloat16"),
}


@pytest.mark.parametrize("path", sorted((ROOT / "export").glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_export_recipes(path):
    assert load_export_recipe(path).name == path.stem


@pytest.mark.parametrize("name", sorted(GPUS))
def test_shipped_gpu_recipes(name):
    recipe = load_engine_recipe(ROOT / "engines" / f"{name}.toml")
    assert (recipe.compute_capability, recipe.dtype) == GPUS[name]
    assert recipe.batch_buckets[0] == 1
    assert recipe.batch_buckets[-1] == 64
    assert recipe.context_buckets[-1] == recipe.draft_window
    assert recipe.candidate_pool == 2048
    # tensorrt_rtx has no SM90 and no SM100
    assert recipe.backend == ("tensorrt" if recipe.compute_capability in ("9.0", "10.0") else "tensorrt_rtx")


def test_cpu_recipe():
    recipe = load_engine_recipe(ROOT / "engines/cpu.toml")
    assert (recipe.backend, recipe.dtype, recipe.compute_capability) == ("onnxruntime", "float32", None)


def test_paths_are_relative_to_the_recipe(tmp_path):
    (tmp_path / "models/draft").mkdir(parents=True)
    path = tmp_path / "recipe.toml"
    path.write_text('checkpoint = "models/draft"\ntarget = "../target"\n')
    recipe = load_export_recipe(path)
    assert recipe.name == "recipe"
    assert recipe.checkpoint == str(tmp_path / "models/draft")
    assert recipe.target == str(tmp_path.parent / "target")
    path.write_text('checkpoint = "owner/name"\n')
    assert load_export_recipe(path).checkpoint == "owner/name"


def test_engine_overrides_dtype_and_pool():
    export = load_export_recipe(ROOT / "export/qwen3-8b.toml")
    assert (
        export.with_overrides(load_engine_recipe(ROOT / "engines/t4.toml")).build_name
        == "qwen3-8b-fp16-pool2048"
    )
    assert export.with_overrides(load_engine_recipe(ROOT / "engines/cpu.toml")).build_name == "qwen3-8b-fp32"
    by_load = export.with_overrides(load_engine_recipe(ROOT / "engines/cpu-by-load.toml"))
    assert by_load.build_name == "qwen3-8b-fp32-b4-b7"


GOOD = 'backend = "tensorrt_rtx"\ncompute_capability = "8.9"\ndtype = "bfloat16"\nbatch_buckets = [1]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "context_buckets = [2048]\nbatch_bucket = [1]\n", "'batch_bucket'; did you mean 'batch_buckets'"),
        (GOOD + "context_buckets = [2048]\nzzz = 1\n", "unknown key 'zzz'; known keys: name, backend"),
        ('backend = "onnxruntime"\ndtyp = "float32"\n', "missing key 'dtype' (found 'dtyp', the nearest)"),
        ('backend = "onnxruntime"\n', "missing key 'dtype'"),
        (GOOD, "missing key 'context_buckets': backend tensorrt_rtx"),
        (GOOD + "context_buckets = [512]\n", "context_buckets end at 512, draft_window is 2048"),
        (GOOD + "context_buckets = [2048, 512]\n", "ascending sizes from 1, found [2048, 512]"),
        (GOOD.replace("8.9", "8.8") + "context_buckets = [2048]\n", "'8.8' is not one of 7.5, 8.0, 8.6"),
        (GOOD.replace("bfloat16", "float32") + "context_buckets = [2048]\n", "dtype 'float32' has no fused attention"),
        (GOOD.replace("tensorrt_rtx", "tensorflow"), "backend: Input should be 'tensorrt', 'tensorrt_rtx' or"),
        ("backend = \n", "not valid TOML"),
    ],
)  # fmt: skip
def test_refused(tmp_path, text, message):
    path = tmp_path / "gpu.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        load_engine_recipe(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_missing_file_names_its_neighbours(tmp_path):
    (tmp_path / "l40s.toml").write_text("")
    with pytest.raises(ValueError, match=r"cannot be read .*; there are l40s\.toml"):
        load_engine_recipe(tmp_path / "l40.toml")
