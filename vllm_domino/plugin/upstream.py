"""Check the names that the plugin relies on against the source of any vLLM, without installing or importing it.

    python -m vllm_domino.plugin.upstream vllm-0.33.0-….whl        a wheel
    python -m vllm_domino.plugin.upstream path/to/vllm             an unpacked wheel, a checkout, or site-packages/vllm

Prints one line per name, and exits with 1 if one is missing or has changed.
"""

from __future__ import annotations

import argparse
import ast
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm_domino.plugin.upstream_names import UPSTREAM_NAMES, Upstream


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. problem: None when the name is as the plugin expects it."""

    entry: Upstream
    problem: str | None


class SourceTree:
    """The Python files of one vLLM, by module name without the leading "vllm."."""

    def __init__(self, path: Path):
        """Open a wheel or a folder.

        Raises:
            ValueError: neither, or no vLLM in it.
        """
        self.path = path
        self._zip = zipfile.ZipFile(path) if path.is_file() and zipfile.is_zipfile(path) else None
        self._root = path / "vllm" if (path / "vllm" / "__init__.py").is_file() else path
        if self.read("") is None:
            raise ValueError(
                f"{path}: no vLLM source in it; give a vLLM wheel, or the folder that holds vllm/__init__.py"
            )
        self.tree = cache(self._parse)

    def read(self, module: str) -> str | None:
        """A module's source text; None if there is no such module."""
        for name in _files(module):
            if self._exists(name):
                return self._text(name)
        return None

    def _is_package(self, module: str) -> bool:
        return self._exists(_files(module)[-1])

    def _exists(self, name: str) -> bool:
        if self._zip is not None:
            return f"vllm/{name}" in self._zip.NameToInfo
        return (self._root / name).is_file()

    def _text(self, name: str) -> str:
        return (
            self._zip.read(f"vllm/{name}") if self._zip is not None else (self._root / name).read_bytes()
        ).decode()

    def _parse(self, module: str) -> ast.Module | None:
        text = self.read(module)
        return None if text is None else ast.parse(text)

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Definition of a module-level name and the module it lies in; imports within vLLM are followed."""
        tree = self.tree(module)
        if tree is None:
            return None
        for node in _statements(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = _absolute(module, node, self._is_package(module))
                        found = (module, node) if source is None else self.find(source, alias.name)
                        if found is not None:  # else a later `except ImportError` may define it
                            return found
        return None

    def lineage(self, module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases, nearest first, as far as they lie in vLLM."""
        found = self.find(module, name)
        if found is None:
            return
        where, definition = found
        if not isinstance(definition, ast.ClassDef):
            return
        yield where, definition
        for base in definition.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base  # Base[T]
            if isinstance(plain, ast.Name):
                yield from self.lineage(where, plain.id)


def _files(module: str) -> list[str]:
    """Where a module may lie; the package form last."""
    stem = module.replace(".", "/")
    return [f"{stem}.py", f"{stem}/__init__.py"] if stem else ["__init__.py"]


def check(tree: SourceTree, entries: tuple[Upstream, ...] = UPSTREAM_NAMES) -> list[Finding]:
    """Look every entry up."""
    return [Finding(entry, _problem(tree, entry)) for entry in entries]


def _problem(tree: SourceTree, entry: Upstream) -> str | None:
    text = tree.read(entry.module)
    if text is None:
        return f"module vllm.{entry.module} is gone"
    if entry.kind == "source":
        missing = [part for part in entry.detail if part not in text]
        return f"no longer in the source: {', '.join(missing)}" if missing else None
    owner, _, member = entry.name.partition(".")
    if not member:
        found = tree.find(entry.module, owner)
        if found is None:
            return "not found"
        return _signature_problem(entry, found[1], is_method=False)
    lineage = list(tree.lineage(entry.module, owner))
    if not lineage:
        return f"class {owner} not found"
    for _, node in lineage:
        definition = _member(node, member)
        if definition is not None:
            return _signature_problem(entry, definition, is_method=True)
    return "not found in the class or its bases"


def _signature_problem(entry: Upstream, node: ast.AST, is_method: bool) -> str | None:
    if entry.kind not in ("overrides", "calls"):
        return None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "is no function any more"
    names, optional, catches_all = _parameters(node, is_method)
    if entry.kind == "overrides":
        return None if tuple(names) == entry.detail else _differs(entry.detail, names)
    unknown = [name for name in entry.detail if name not in names] if not catches_all else []
    demanded = [name for name in names if name not in optional and name not in entry.detail]
    return _differs(entry.detail, names) if unknown or demanded else None


def _differs(expected: tuple[str, ...], found: list[str]) -> str:
    return f"parameters are ({', '.join(found)}), expected ({', '.join(expected)})"


def _parameters(
    node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool
) -> tuple[list[str], set[str], bool]:
    """Names without self, those with a default, and whether it takes any."""
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    optional = {a.arg for a in positional[len(positional) - len(args.defaults) :]}
    optional |= {
        a.arg for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is not None
    }
    names = [a.arg for a in (positional[1:] if is_method and not static else positional)]
    return names + [a.arg for a in args.kwonlyargs], optional, args.kwarg is not None


def _member(node: ast.ClassDef, name: str) -> ast.AST | None:
    """What a class body defines under a name, or the method that assigns it to `self`."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == name:
            return statement
        if isinstance(statement, ast.Assign | ast.AnnAssign) and name in _assigned(statement):
            return statement
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            flat = [
                t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
            for target in flat:
                if isinstance(target, ast.Attribute) and target.attr == name and _is_self(target.value):
                    return inner
    return None


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Module-level statements, those under `if` and `try` included."""
    pending = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try):
            pending += node.body + node.orelse
        if isinstance(node, ast.Try):
            pending += [statement for handler in node.handlers for statement in handler.body]


def _absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str | None:
    """Module of an import, without the leading "vllm."; None when it lies outside vLLM."""
    if node.level == 0:
        if node.module == "vllm":
            return ""
        return node.module.removeprefix("vllm.") if node.module and node.module.startswith("vllm.") else None
    # One dot is the folder that the module lies in; for a package's own __init__ that is the package itself.
    parts = module.split(".") if module else []
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def main(arguments: list[str] | None = None) -> int:
    """Print the report; 0 when everything is as expected."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_domino.plugin.upstream", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("vllm", type=Path, help="a vLLM wheel, or a folder with its source")
    parser.add_argument("--quiet", action="store_true", help="print only what is wrong, and the last line")
    options = parser.parse_args(arguments)
    try:
        tree = SourceTree(options.vllm)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    findings = check(tree)
    for finding in findings:
        if finding.problem is not None:
            sys.stdout.write(f"changed  {finding.entry.where}: {finding.problem} ({finding.entry.why})\n")
        elif not options.quiet:
            sys.stdout.write(f"found    {finding.entry.where}\n")
    wrong = sum(finding.problem is not None for finding in findings)
    sys.stdout.write(f"{len(findings) - wrong} of {len(findings)} names as expected in {options.vllm.name}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
