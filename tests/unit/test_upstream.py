"""The checker of vLLM's names, on a made-up vLLM as a folder and as a wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_domino.plugin.upstream import SourceTree, check, main
from vllm_domino.plugin.upstream_names import UPSTREAM_NAMES, Upstream

SOURCES = {
    "__init__.py": "",
    "pkg/__init__.py": "from .base import Base as Exported\n",
    "pkg/base.py": (
        "class Base:\n"
        "    field: int = 0\n"
        "    def __init__(self, a, b=1):\n"
        "        self.x, self.y = a, b\n"
        "    def run(self, one, two): ...\n"
        "    @staticmethod\n"
        "    def make(kind): ...\n"
    ),
    "deep/child.py": (
        "from vllm.pkg import Exported\n"
        "try:\n"
        "    from vllm.pkg.base import missing_later\n"
        "except ImportError:\n"
        "    missing_later = None\n"
        "class Child(Exported):\n"
        "    pass\n"
        "def call(a, b, *, c, d=1): ...\n"
        "result = call(1, 2, c=3)\n"
    ),
}


@pytest.fixture(params=["folder", "wheel"])
def source(request, tmp_path: Path) -> Path:
    """The made-up vLLM."""
    if request.param == "wheel":
        path = tmp_path / "vllm-9.9-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for name, text in SOURCES.items():
                wheel.writestr(f"vllm/{name}", text)
        return path
    for name, text in SOURCES.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (Upstream("name", "deep.child:Child"), None),
        (Upstream("name", "deep.child:missing_later"), None),
        (Upstream("name", "deep.child:nothing"), "not found"),
        (Upstream("name", "gone.away:Child"), "module vllm.gone.away is gone"),
        (Upstream("attribute", "deep.child:Child.field"), None),
        (Upstream("attribute", "deep.child:Child.y"), None),  # assigned to self by a base, in a tuple
        (Upstream("attribute", "deep.child:Child.z"), "not found in the class"),
        (Upstream("attribute", "deep.child:Gone.z"), "class Gone not found"),
        (Upstream("overrides", "deep.child:Child.run", ("one", "two")), None),
        (
            Upstream("overrides", "deep.child:Child.run", ("one",)),
            "parameters are (one, two), expected (one)",
        ),
        (Upstream("overrides", "deep.child:Child.make", ("kind",)), None),
        (Upstream("overrides", "deep.child:Child.field", ()), "is no function"),
        (Upstream("calls", "pkg:Exported.__init__", ("a",)), None),
        (Upstream("calls", "deep.child:call", ("a", "b", "c")), None),
        (
            Upstream("calls", "deep.child:call", ("a", "b")),
            "parameters are (a, b, c, d)",
        ),  # c has become required
        (Upstream("calls", "deep.child:call", ("a", "b", "c", "e")), "parameters are"),
        (Upstream("source", "deep.child", ("call(1",)), None),
        (Upstream("source", "deep.child", ("call(9",)), "no longer in the source: call(9"),
    ],
)
def test_finds_what_is_there_and_says_what_changed(source: Path, entry: Upstream, problem: str | None):
    (finding,) = check(SourceTree(source), (entry,))
    assert (finding.problem is None) == (problem is None), finding.problem
    if problem is not None:
        assert problem in finding.problem


def test_exit_code_and_report(source: Path, capsys):
    assert main([str(source)]) == 1
    printed = capsys.readouterr().out
    assert "module vllm.v1.worker.gpu_model_runner is gone" in printed
    assert f"0 of {len(UPSTREAM_NAMES)} names as expected" in printed


def test_a_folder_without_vllm_is_refused(tmp_path: Path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "give a vLLM wheel" in capsys.readouterr().err


def test_installed_vllm_has_every_name():
    """By its files, not by importing it: the table must hold for the version that the tests run on."""
    from importlib.util import find_spec

    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("no vLLM installed")
    findings = check(SourceTree(Path(spec.origin).parent))
    assert [f"{f.entry.where}: {f.problem}" for f in findings if f.problem] == []


def test_every_vllm_import_of_the_plugin_is_in_the_table():
    """A name that the plugin imports and the table lacks would go unchecked."""
    import ast

    import vllm_domino.plugin

    checked = {(e.module, e.name.partition(".")[0]) for e in UPSTREAM_NAMES}
    modules = {module for module, _ in checked}
    missing = []
    for path in Path(vllm_domino.plugin.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                module = node.module.removeprefix("vllm.")
                missing += [
                    f"{path.name}: {module}.{a.name}" for a in node.names if (module, a.name) not in checked
                ]
            elif isinstance(node, ast.Import):
                names = [a.name.removeprefix("vllm.") for a in node.names if a.name.startswith("vllm.")]
                missing += [f"{path.name}: {name}" for name in names if name not in modules]
    assert missing == []


def test_the_checker_imports_no_vllm():
    code = "import sys, vllm_domino.plugin.upstream; print('vllm' in sys.modules, 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]
