"""A record of every draft, for finding out why acceptance is not what it should be. Off unless asked for: it waits."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import Tensor

TRACE_VARIABLE = "VLLM_DOMINO_TRACE"


class DraftTrace:
    """Appends one JSON line per draft step: anchor ids, anchor positions and draft ids of every request."""

    def __init__(self, path: Path):
        self._file = path.open("a", buffering=1)

    @classmethod
    def from_environment(cls) -> DraftTrace | None:
        """The trace that VLLM_DOMINO_TRACE names (a file, appended to), or None."""
        path = os.environ.get(TRACE_VARIABLE)
        return cls(Path(path)) if path else None

    def write(self, anchor_ids: Tensor, positions: Tensor, drafts: Tensor) -> None:
        line = {"anchors": anchor_ids.tolist(), "positions": positions.tolist(), "drafts": drafts.tolist()}
        self._file.write(json.dumps(line) + "\n")
