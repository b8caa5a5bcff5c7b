"""The import direction of DESIGN's picture, held by parsing every import; and what importing the plugin costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_domino

ROOT = Path(vllm_domino.__file__).parent
# A folder may import those to its left, and itself. `files`, `assets_path` and the package itself belong to everyone.
PIPELINE = ("config", "model", "export", "engine", "runtime", "plugin")
# At the side: these use the pipeline (not the plugin's vLLM part) and nothing in the pipeline uses them.
SIDE = ("train", "bench")
SHARED = ("", "files", "assets_path")
# Imports no vLLM itself; doctor asks it for the supported window.
LIGHT_PLUGIN_MODULES = ("vllm_domino.plugin.register", "vllm_domino.plugin.version")


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, wherever the statement stands, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def folder_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else ""


def allowed(folder: str) -> set[str]:
    if folder in PIPELINE:
        return {*PIPELINE[: PIPELINE.index(folder) + 1], *SHARED}
    if folder in SIDE:
        return {*PIPELINE[:-1], folder, *SHARED}
    if folder == "cli":
        return {*PIPELINE, *SIDE, "cli", *SHARED}
    return set(SHARED)


def test_every_folder_has_its_place():
    found = {folder_of(path) for path in modules()}
    assert found <= {*PIPELINE, *SIDE, "cli", ""}, "a new folder needs a place in the import direction"


def test_import_direction():
    wrong = []
    for path in modules():
        may = allowed(folder_of(path))
        for name, line in imports(path):
            if not name.startswith("vllm_domino."):
                continue
            part = name.split(".")[1]
            part = part if (ROOT / part).is_dir() or part in SHARED else ""
            if part not in may:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


def test_only_the_plugin_imports_vllm():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        if folder_of(path) != "plugin"
        for name, line in imports(path)
        if name.split(".")[0] == "vllm"
    ]
    assert found == []


def test_the_command_line_uses_only_the_light_part_of_the_plugin():
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        if folder_of(path) == "cli"
        for name, line in imports(path)
        if name.startswith("vllm_domino.plugin") and not name.startswith(LIGHT_PLUGIN_MODULES)
    ]
    assert found == []


def test_only_the_tensorrt_builder_and_session_import_tensorrt():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        if not (folder_of(path) in ("engine", "runtime") and path.name.startswith("tensorrt"))
        for name, line in imports(path)
        if name.split(".")[0] in ("tensorrt", "tensorrt_rtx")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        # vLLM imports the entry point in every process, wanted or not.
        ("vllm_domino.plugin.register", ("torch", "vllm", "onnxruntime", "transformers", "pydantic")),
        ("vllm_domino.plugin.version", ("torch", "vllm", "onnxruntime")),
        ("vllm_domino.cli.main", ("torch", "vllm", "onnxruntime", "transformers", "onnx", "numpy")),
        ("vllm_domino.bench.server", ("torch", "vllm")),
    ],
)
def test_importing_pulls_in_nothing_heavy(module: str, absent: tuple[str, ...]):
    code = f"import sys, {module}; print(*sorted(n for n in {absent!r} if n in sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == []


def test_the_entry_point_resolves():
    from importlib.metadata import entry_points

    (found,) = entry_points(group="vllm.general_plugins", name="domino")
    assert found.value == "vllm_domino.plugin.register:register"
    assert callable(found.load())
