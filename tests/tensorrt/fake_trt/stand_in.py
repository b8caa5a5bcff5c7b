"""Engine directories for the stand-in TensorRT: what serving on the TensorRT session without a GPU needs.

`on_path()` makes `import tensorrt` find the stand-in, here and in processes started from here. `engine_on_stand_in`
turns an ONNX Runtime engine directory (fp32) into a TensorRT one whose plans the stand-in runs.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from vllm_domino.config.recipes import EngineRecipe
from vllm_domino.engine.check import load_engine_dir
from vllm_domino.engine.manifest import MANIFEST_FILE
from vllm_domino.engine.tensorrt import PLANS, plan_profiles
from vllm_domino.export.contract import block_graph, context_graph
from vllm_domino.export.report import FileEntry, GraphEntry

HERE = Path(__file__).parent


@contextmanager
def on_path(alignment: int = 64) -> Iterator[ModuleType]:
    """The stand-in as module `tensorrt`, gone again at the end.

    alignment: of addresses; TensorRT's is 256, which torch's CPU allocator does not give.
    """
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "STANDIN_ALIGNMENT")}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), before["PYTHONPATH"])))
    os.environ["STANDIN_ALIGNMENT"] = str(alignment)
    sys.path.insert(0, str(HERE))
    _forget()
    try:
        yield importlib.import_module("tensorrt")
    finally:
        _forget()
        sys.path.remove(str(HERE))
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def engine_on_stand_in(
    trt: ModuleType,
    engine: Path,
    out: Path,
    *,
    batch_buckets: Sequence[int] = (1, 4, 32),
    context_buckets: Sequence[int] = (64, 512),
) -> Path:
    """Write `out`; its draft window is the last context bucket."""
    manifest = load_engine_dir(engine)
    recipe = EngineRecipe(
        name="stand-in",
        backend="tensorrt",
        compute_capability=trt.STANDS_IN_FOR["compute_capability"],
        dtype="float16",  # recipes refuse float32 on a GPU; only the sizes are used
        draft_window=context_buckets[-1],
        batch_buckets=tuple(batch_buckets),
        context_buckets=tuple(context_buckets),
    )
    out.mkdir()
    specs = context_graph(manifest.config), block_graph(manifest.config, manifest.head.options())
    profiles = {spec.name: plan_profiles(spec, recipe) for spec in specs}
    for spec in specs:
        plan = trt.make_plan(engine / manifest.graphs[spec.name].file, profiles[spec.name])
        (out / PLANS[spec.name]).write_bytes(plan)
    shutil.copyfile(engine / "config.json", out / "config.json")
    written = manifest.model_copy(
        update={
            "name": f"{manifest.name}-stand-in",
            "backend": recipe.backend,
            "backend_version": trt.__version__,
            "compute_capability": recipe.compute_capability,
            "providers": (),
            "draft_window": recipe.draft_window,
            "batch_buckets": recipe.batch_buckets,
            "context_buckets": recipe.context_buckets,
            "graphs": {s.name: GraphEntry.of(s, PLANS[s.name], manifest.dtype) for s in specs},
            "profiles": profiles,
            "files": {path.name: FileEntry.of(path) for path in sorted(out.iterdir())},
        }
    )
    (out / MANIFEST_FILE).write_text(written.model_dump_json(indent=2))
    return out


def _forget() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt"]:
        del sys.modules[name]
