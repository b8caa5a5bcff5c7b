"""The engines under a folder, and whether each fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_domino.engine.check import ServingFacts, misfit
from vllm_domino.engine.manifest import MANIFEST_FILE, EngineManifest, read_manifest


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One engine directory: its manifest, or why it cannot be read."""

    folder: Path
    manifest: EngineManifest | None
    error: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(f.num_bytes for f in self.manifest.files.values()) if self.manifest else 0

    def problem(self, facts: ServingFacts) -> str | None:
        """Why it does not fit what is being served; None when it does."""
        return self.error if self.manifest is None else misfit(self.manifest, facts)


def find_engines(root: Path) -> list[CatalogEntry]:
    """Every engine directory in `root` (and `root` itself), by name; unfinished builds are left out."""
    if not root.is_dir():
        return []
    entries = []
    for path in sorted({*root.glob(MANIFEST_FILE), *root.glob(f"*/{MANIFEST_FILE}")}):
        if path.parent.name.startswith("."):
            continue
        try:
            entries.append(CatalogEntry(path.parent, read_manifest(path.parent)))
        except ValueError as error:
            entries.append(CatalogEntry(path.parent, None, str(error)))
    return entries
