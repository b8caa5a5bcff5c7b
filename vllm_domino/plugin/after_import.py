"""Patch a module when it is imported, if it ever is.

vLLM loads plugins in every process, and most of them run no model: importing the runners there to patch them would take
33 MB of each.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Patch = Callable[[Any], None]


class _Finder(MetaPathFinder):
    """Finds what the other finders find, and has the patch run after the module's own code."""

    def __init__(self) -> None:
        self.patches: dict[str, Patch] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.patches:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        execute, patch = spec.loader.exec_module, self.patches[fullname]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def after_import(name: str, patch: Patch) -> None:
    """Run `patch(module)` now where the module is imported already, else right after its import. `patch` is idempotent,
    and what it raises fails the import.

    Raises:
        ModuleNotFoundError: there is no such module, so that the patch could never run.
    """
    if name in sys.modules:
        patch(sys.modules[name])
        return
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"no module {name}", name=name)
    _finder.patches[name] = patch
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
