"""Patches of modules that are imported later: after their own code, once per import, and never silently skipped."""

import importlib
import sys

import pytest

from vllm_domino.plugin import after_import as module
from vllm_domino.plugin.after_import import after_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `made_up` with the module `made_up.late`."""
    (tmp_path / "made_up").mkdir()
    (tmp_path / "made_up/__init__.py").touch()
    (tmp_path / "made_up/late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "made_up.late"
    for name in ("made_up.late", "made_up"):
        sys.modules.pop(name, None)
        module._finder.patches.pop(name, None)


def _double(imported):
    imported.value *= 2


def test_patched_when_it_is_imported(package):
    after_import(package, _double)
    assert package not in sys.modules
    assert importlib.import_module(package).value == 2
    del sys.modules[package]
    assert importlib.import_module(package).value == 2
    assert sys.meta_path.count(module._finder) == 1


def test_patched_at_once_where_it_is_imported_already(package):
    imported = importlib.import_module(package)
    after_import(package, _double)
    assert imported.value == 2


def test_a_patch_that_fails_fails_the_import(package):
    def refuse(imported):
        raise RuntimeError("the name is gone")

    after_import(package, refuse)
    with pytest.raises(RuntimeError, match="the name is gone"):
        importlib.import_module(package)
    assert package not in sys.modules


def test_a_module_that_is_not_there(package):
    with pytest.raises(ModuleNotFoundError):
        after_import("made_up.gone", _double)
