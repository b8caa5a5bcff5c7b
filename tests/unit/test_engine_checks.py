"""Engine directories: broken ones and those that do not fit are refused with found, needed and the command."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from small_drafters import small_config, write_small_checkpoint

from vllm_domino.engine.catalog import find_engines
from vllm_domino.engine.check import ServingFacts, check_fit, load_engine_dir
from vllm_domino.engine.manifest import EngineManifest, TargetFacts, read_manifest
from vllm_domino.engine.target import target_facts, tokenizer_hash, vocabulary_hash
from vllm_domino.export.report import FileEntry, HeadEntry

FACTS = ServingFacts(
    hidden_size=32,
    vocab_size=97,
    num_layers=4,
    dtype="bfloat16",
    tokenizer_hash="a" * 64,
    num_speculative_tokens=5,
    max_model_len=512,
)
BUILD = "vllm-domino build export/small.toml engines/cpu.toml"


def manifest(folder, **changes) -> EngineManifest:
    values = {
        "name": "small-cpu",
        "export_recipe": "small",
        "engine_recipe": "cpu",
        "source": "checkpoint",
        "revision": None,
        "fingerprint": "0" * 64,
        "draft": small_config().to_dict(),
        "target": TargetFacts(
            source="owner/target",
            hidden_size=32,
            vocab_size=97,
            num_layers=4,
            layer_ids=(0, 2),
            tokenizer_sha256="a" * 64,
        ),
        "backend": "onnxruntime",
        "backend_version": "1.32.0",
        "dtype": "float32",
        "compute_capability": None,
        "providers": ("CPUExecutionProvider",),
        "head": HeadEntry(),
        "block_size": 5,
        "draft_window": 256,
        "batch_buckets": (),
        "context_buckets": (),
        "graphs": {},
        "weight_bytes": 1000,
        "files": {p.name: FileEntry.of(p) for p in sorted(folder.iterdir()) if p.name != "engine.json"},
        "verification": None,
        "versions": {"vllm-domino": "0.1.0"},
        "built_by": "somebody@somewhere",
        "built_at": "2026-01-01T00:00:00+00:00",
        "build_seconds": 1.0,
    }
    return EngineManifest(**(values | changes))


@pytest.fixture
def engine(tmp_path):
    """An engine directory as the build writes it, with stand-ins for the graphs."""
    folder = tmp_path / "built/small-cpu"
    folder.mkdir(parents=True)
    for name in ("block.onnx", "block.onnx.data", "context.onnx", "context.onnx.data", "config.json"):
        (folder / name).write_text(name * 10)
    (folder / "engine.json").write_text(manifest(folder).model_dump_json())
    return folder


def test_a_whole_directory_is_read_back(engine):
    read = load_engine_dir(engine)
    assert read == manifest(engine)
    assert read.config == small_config()
    assert read.build_command == BUILD


def test_missing_and_empty_directories(tmp_path):
    with pytest.raises(ValueError, match="no such directory; build it with `vllm-domino build"):
        load_engine_dir(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"no engine\.json in it \(found an empty directory\); build it with"
    ):
        load_engine_dir(tmp_path)


@pytest.mark.parametrize("name", ["block.onnx", "block.onnx.data", "context.onnx.data", "config.json"])
def test_missing_truncated_and_changed_files(engine, name):
    path = engine / name
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(ValueError, match=f"file {name} is missing.*{BUILD}"):
        load_engine_dir(engine)
    path.write_bytes(content[:-1])
    with pytest.raises(
        ValueError, match=f"{len(content) - 1} bytes, the record says {len(content)}.*{BUILD}"
    ):
        load_engine_dir(engine)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"{name}: SHA-256 .*: the file was changed.*{BUILD}"):
        load_engine_dir(engine)
    path.write_bytes(content)
    load_engine_dir(engine)


def test_a_file_outside_the_directory_is_never_followed(engine):
    raw = json.loads((engine / "engine.json").read_text())
    raw["files"]["../../secret"] = {"sha256": "0" * 64, "num_bytes": 1}
    (engine / "engine.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"file \.\./\.\./secret is missing"):
        load_engine_dir(engine)


def test_unknown_manifest_versions_and_broken_manifests(engine):
    path = engine / "engine.json"
    raw = json.loads(path.read_text())
    for version in (0, 2, None, "1"):
        path.write_text(json.dumps(raw | {"schema_version": version}))
        with pytest.raises(
            ValueError, match=f"manifest version {version!r}, this version reads 1; .*{BUILD}"
        ):
            load_engine_dir(engine)
    for text in ("", "{", "[]", path.read_text()[: len(raw) // 2]):
        path.write_text(text)
        with pytest.raises(ValueError, match="not valid JSON"):
            load_engine_dir(engine)
    path.write_text(json.dumps(raw | {"dtype": "int8"}))
    with pytest.raises(ValueError, match=f"field dtype: .*{BUILD}"):
        load_engine_dir(engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "the target's hidden size is 64, this drafter is for 32 .*owner/target.*; serve"),
        ({"vocab_size": 98}, "the target's vocabulary is 98, this drafter is for 97"),
        ({"num_layers": 6}, "the target's number of layers is 6, this drafter is for 4"),
        ({"tokenizer_hash": "b" * 64}, "the target's tokenizer is bbbbbbbbbbbb…, this drafter is for aaaaaaaaaaaa…"),
        ({"num_speculative_tokens": 6}, r"num_speculative_tokens is 6, .* 1 to 5 tokens \(block size 5\); set "),
        ({"capability": (8, 9)}, "built for CPUs .* compute capability 8.9; build one for it with `vllm-domino build"),
    ],
)  # fmt: skip
def test_what_does_not_fit(engine, change, message):
    with pytest.raises(ValueError, match=message):
        check_fit(engine, dataclasses.replace(FACTS, **change))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tokenizer_hash": None},
        {"num_speculative_tokens": 1},
        {"dtype": "float16"},
        {"max_model_len": 100_000},  # served; drafting stops past the drafter's length
    ],
)
def test_what_fits(engine, change):
    assert check_fit(engine, dataclasses.replace(FACTS, **change)).draft_window == 256


def test_layer_ids_out_of_range_of_a_shallower_target(tmp_path):
    folder = write_small_checkpoint(tmp_path / "c", num_target_layers=None, target_layer_ids=(0, 9))
    with pytest.raises(
        ValueError, match=r"target_layer_ids \[0, 9\] are out of range, the target has 4 layers"
    ):
        check_fit(folder, FACTS)
    assert check_fit(folder, dataclasses.replace(FACTS, num_layers=11)).draft_window == 2048


def test_plain_checkpoints_are_checked_by_the_same_rules(tmp_path):
    folder = write_small_checkpoint(tmp_path / "c", shift_label=False)
    on_gpu = dataclasses.replace(FACTS, num_speculative_tokens=4, capability=(8, 9))
    assert check_fit(folder, on_gpu).backend == "pytorch"
    with pytest.raises(ValueError, match="num_speculative_tokens is 5, this drafter drafts 1 to 4"):
        check_fit(folder, FACTS)
    with pytest.raises(ValueError, match="hidden size is 33"):
        check_fit(folder, dataclasses.replace(FACTS, hidden_size=33))


def test_a_gpu_engine_names_what_it_needs(engine):
    gpu = manifest(
        engine,
        backend="tensorrt_rtx",
        backend_version="1.7.1",
        dtype="bfloat16",
        compute_capability="8.9",
        batch_buckets=(1, 64),
        context_buckets=(128, 256),
        providers=(),
        engine_recipe="l40s",
    )
    with pytest.raises(
        ValueError, match=r"built for bfloat16, the target is float16.*serve with --dtype bfloat16"
    ):
        check_fit(gpu, dataclasses.replace(FACTS, dtype="float16"))
    with pytest.raises(
        ValueError, match=r"longest context bucket is 256, .* up to 512 tokens .*engines/l40s\.toml"
    ):
        check_fit(gpu.model_copy(update={"draft_window": 2048}), FACTS)


def test_a_refusal_names_engines_beside_it_that_fit(engine):
    other = engine.parent / "other"
    shutil.copytree(engine, other)
    raw = json.loads((other / "engine.json").read_text())
    raw["draft"]["vocab_size"] = raw["target"]["vocab_size"] = 98
    (other / "engine.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"; engines here that fit: {other}$"):
        check_fit(engine, dataclasses.replace(FACTS, vocab_size=98))


def test_catalog_lists_engines_and_says_why_one_does_not_fit(engine):
    (engine.parent / "broken").mkdir()
    (engine.parent / "broken/engine.json").write_text("{")
    (engine.parent / ".x.partial-1").mkdir()
    (engine.parent / ".x.partial-1/engine.json").write_text("{")
    broken, whole = find_engines(engine.parent)
    assert (broken.folder.name, whole.folder.name) == ("broken", "small-cpu")
    assert "not valid JSON" in broken.problem(FACTS)
    assert whole.problem(FACTS) is None
    assert "hidden size is 1" in whole.problem(dataclasses.replace(FACTS, hidden_size=1))
    assert whole.num_bytes == sum(p.stat().st_size for p in engine.iterdir() if p.name != "engine.json")
    assert find_engines(engine.parent / "nowhere") == []


def test_an_engine_that_lost_its_manifest_is_not_taken_for_a_checkpoint(engine):
    (engine / "engine.json").unlink()
    with pytest.raises(ValueError, match=r"no engine\.json in it \(found block\.onnx"):
        check_fit(engine, FACTS)
    with pytest.raises(ValueError, match=r"no engine\.json in it"):
        read_manifest(engine)


def test_vocabulary_hash_depends_on_tokens_and_ids_only():
    assert vocabulary_hash({"a": 0, "b": 1}) == vocabulary_hash({"b": 1, "a": 0})
    assert vocabulary_hash({"a": 0, "b": 1}) != vocabulary_hash({"a": 1, "b": 0})
    assert vocabulary_hash({"a": 0, "b": 1}) != vocabulary_hash({"a": 0, "c": 1})
    assert tokenizer_hash(None) is None
    assert tokenizer_hash("/nowhere/at/all") is None


def test_target_facts_from_a_transformers_folder(tmp_path):
    config = {"model_type": "qwen3", "hidden_size": 32, "vocab_size": 97, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = target_facts(small_config(), str(tmp_path))
    assert (facts.hidden_size, facts.vocab_size, facts.num_layers, facts.layer_ids) == (32, 97, 4, (0, 2))
    assert facts.source == tmp_path.name
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 40}))
    with pytest.raises(ValueError, match="hidden_size is 40, the draft checkpoint is for 32"):
        target_facts(small_config(), str(tmp_path))
