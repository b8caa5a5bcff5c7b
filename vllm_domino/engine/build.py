"""Make an engine directory: the exported graphs, made ready for one device, and what describes them."""

from __future__ import annotations

import getpass
import json
import platform
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_domino.config.checkpoint import DraftCheckpoint
from vllm_domino.config.recipes import EngineRecipe, ExportRecipe
from vllm_domino.config.vocabulary import read_recipe_checkpoint
from vllm_domino.engine.manifest import MANIFEST_FILE, EngineManifest
from vllm_domino.engine.target import target_facts
from vllm_domino.export.contract import block_graph, context_graph
from vllm_domino.export.onnx_export import export_as, head_options, tool_versions
from vllm_domino.export.report import VOCAB_FILE, ExportReport, FileEntry, GraphEntry, HeadEntry, load_export
from vllm_domino.files import require_space, staged_directory

EXPORT_ROOT = Path("export/built")
ENGINE_ROOT = Path("engines/built")
Progress = Callable[[str], None]


def default_engine_dir(export_recipe: ExportRecipe, engine_recipe: EngineRecipe) -> Path:
    """Where a build lands when nobody says otherwise."""
    return ENGINE_ROOT / f"{export_recipe.name}-{engine_recipe.name}"


def build_engine(
    export_recipe: ExportRecipe,
    engine_recipe: EngineRecipe,
    out: Path | None = None,
    *,
    export_root: Path = EXPORT_ROOT,
    progress: Progress | None = None,
) -> EngineManifest:
    """Write the engine directory `out`, replacing it as a whole; export first where there are no graphs yet.

    Raises:
        ValueError: a recipe that cannot be built here, as `read_recipe_checkpoint`, `export_graphs` and the
            TensorRT builder, a full disk, or another process writing `out`.
    """
    say, start = progress or (lambda _: None), time.monotonic()
    out = out or default_engine_dir(export_recipe, engine_recipe)
    recipe = export_recipe.with_overrides(engine_recipe)
    _check_buildable(recipe, engine_recipe)
    say(f"reading {recipe.checkpoint}")
    checkpoint = read_recipe_checkpoint(recipe)
    target = target_facts(checkpoint.config, recipe.target, recipe.target_revision)
    folder = export_root / recipe.build_name
    report = _exported(checkpoint, recipe, folder, say)
    require_space(out.parent, int(report.weight_bytes * 1.1))
    with staged_directory(out) as stage:
        made = _onnx_files(folder, report, stage) if engine_recipe.backend == "onnxruntime" else None
        made = made or _plans(folder, report, checkpoint, engine_recipe, stage, say)
        if (folder / VOCAB_FILE).is_file():
            shutil.copyfile(folder / VOCAB_FILE, stage / VOCAB_FILE)
        (stage / "config.json").write_text(json.dumps(_hf_config(checkpoint, recipe), indent=2) + "\n")
        say("computing digests")
        manifest = EngineManifest(
            name=f"{export_recipe.name}-{engine_recipe.name}",
            export_recipe=export_recipe.name,
            engine_recipe=engine_recipe.name,
            source=report.source,
            revision=report.revision,
            fingerprint=report.fingerprint,
            draft=report.draft,
            target=target,
            backend=engine_recipe.backend,
            dtype=engine_recipe.dtype,
            compute_capability=engine_recipe.compute_capability,
            providers=engine_recipe.providers,
            options=engine_recipe.options,
            head=report.head,
            block_size=checkpoint.config.block_size,
            draft_window=engine_recipe.draft_window,
            batch_buckets=engine_recipe.batch_buckets,
            context_buckets=engine_recipe.context_buckets,
            weight_bytes=report.weight_bytes,
            files={path.name: FileEntry.of(path) for path in sorted(stage.iterdir())},
            verification=report.verification,
            built_by=f"{getpass.getuser()}@{platform.node()}",
            built_at=datetime.now(UTC).isoformat(timespec="seconds"),
            build_seconds=round(time.monotonic() - start, 1),
            **made,
        )
        (stage / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2) + "\n")
    say(f"wrote {out} in {manifest.build_seconds:.0f} s")
    return manifest


def _check_buildable(recipe: ExportRecipe, engine: EngineRecipe) -> None:
    if engine.backend == "onnxruntime":
        if engine.dtype != "float32" and not any(not p.startswith("CPU") for p in engine.providers):
            raise ValueError(
                f"engine {engine.name}: dtype {engine.dtype} has no CPU kernels in ONNX Runtime; set dtype "
                f'= "float32"'
            )
        return
    if recipe.short_blocks:
        raise ValueError(
            f"engine {engine.name}: short_blocks are for backend 'onnxruntime' only, as a plan holds its weights and "
            "every further block would hold them again; remove the key, or build one engine per draft_tokens"
        )
    from vllm_domino.engine.tensorrt import check_recipe

    check_recipe(engine, recipe.candidate_pool or None)


def _exported(checkpoint: DraftCheckpoint, recipe: ExportRecipe, folder: Path, say: Progress) -> ExportReport:
    """The graphs of this very checkpoint, made by these versions: those in `folder`, or new ones there."""
    head = HeadEntry.of(head_options(recipe), checkpoint)
    try:
        report = load_export(folder)
        versions = tool_versions("torch", "onnx", "onnxscript", "onnx-ir")
        made_from = report.fingerprint, report.head, report.versions
        if made_from == (checkpoint.fingerprint, head, versions):
            say(f"using the graphs in {folder}")
            return report
    except ValueError:
        pass  # none there, or not whole: made anew
    return export_as(recipe, checkpoint, folder, say)


def _onnx_files(folder: Path, report: ExportReport, stage: Path) -> dict[str, Any]:
    """Copies, not links: an engine directory stands for itself."""
    for name in report.files:
        shutil.copyfile(folder / name, stage / name)
    versions = tool_versions("torch", "onnx", "onnxscript", "onnxruntime")
    return {"graphs": report.graphs, "backend_version": versions["onnxruntime"], "versions": versions}


def _plans(
    folder: Path,
    report: ExportReport,
    checkpoint: DraftCheckpoint,
    engine: EngineRecipe,
    stage: Path,
    say: Progress,
) -> dict[str, Any]:
    from vllm_domino.engine.tensorrt import PLANS, build_plan
    from vllm_domino.engine.tensorrt_module import load_module

    config = checkpoint.config
    specs = (context_graph(config), block_graph(config, report.head.options()))
    profiles, plans, graphs = {}, {}, {}
    for spec in specs:
        say(f"building {PLANS[spec.name]} for compute capability {engine.compute_capability}")
        plan = build_plan(
            folder / report.graphs[spec.name].file,
            stage / PLANS[spec.name],
            spec,
            engine,
            attention_layers=config.num_hidden_layers if spec.name == "block" else 0,
            progress=lambda graph, seconds: say(f"building {PLANS[graph]}: {seconds:.0f} s"),
        )
        profiles[spec.name] = [dict(profile) for profile in plan.profiles]
        plans[spec.name] = {
            "seconds": round(plan.seconds, 1),
            "peak_memory_bytes": plan.peak_memory_bytes,
            "plan_bytes": plan.plan_bytes,
            "layers": plan.layers,
        }
        graphs[spec.name] = GraphEntry.of(spec, PLANS[spec.name], report.dtype)
    version = load_module(engine.backend).__version__
    versions = tool_versions("torch", "onnx", "onnxscript") | {engine.backend: version}
    return {
        "graphs": graphs,
        "profiles": profiles,
        "plans": plans,
        "backend_version": version,
        "versions": versions,
    }


def _hf_config(checkpoint: DraftCheckpoint, recipe: ExportRecipe) -> dict[str, Any]:
    """What vLLM itself reads. A plain DFlash backbone is named Domino too: the plugin serves both."""
    return {**checkpoint.config.to_dict(), "architectures": ["DominoDraftModel"], "dtype": recipe.dtype}
