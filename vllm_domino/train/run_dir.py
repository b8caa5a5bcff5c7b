"""The directory of one training run: identity, resumable state, metrics, and the checkpoint in the public
layout.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

from vllm_domino.train.recipe import DrafterRecipe


def file_digest(paths: list[Path]) -> str:
    """SHA-256 over the content of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


class RunDirectory:
    """`run.json` (who this is), `state/` (resume), `metrics.jsonl`, `tensorboard/`, and config.json +
    safetensors.

    Raises ValueError if the directory holds another run, or this one and `resume` is false.
    """

    def __init__(
        self, path: Path, recipe: DrafterRecipe, target: str, data: list[Path], resume: bool, main: bool
    ):
        self.path, self.main = path, main
        self.identity = {
            "recipe": json.loads(json.dumps(dataclasses.asdict(recipe))),
            "target": target,
            "data_sha256": file_digest(data),
        }
        self._check(resume)
        self._board: Any = None

    def _check(self, resume: bool) -> None:
        recorded = self.path / "run.json"
        if not recorded.exists():
            if (self.path / "config.json").exists():
                raise ValueError(
                    f"{self.path} holds a checkpoint that no run here made; choose another --out"
                )
            return
        found = json.loads(recorded.read_text())
        for key, wanted in _flat(self.identity).items():
            value = _flat(found).get(key)
            if value != wanted:
                raise ValueError(
                    f"{self.path} is another run: its {key} is {value!r}, this one has {wanted!r}; "
                    "choose another --out or delete the directory"
                )
        if not resume:
            raise ValueError(
                f"{self.path} holds this run already; go on with --resume or choose another --out"
            )

    def start(self) -> None:
        """Write the identity (main process only)."""
        if not self.main:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "run.json").write_text(json.dumps(self.identity, indent=2) + "\n")

    def latest_state(self) -> tuple[int, Path] | None:
        """Step and directory of the newest complete state, or None."""
        pointer = self.path / "state" / "latest.json"
        if not pointer.exists():
            return None
        step = json.loads(pointer.read_text())["step"]
        return step, self.path / "state" / f"step-{step}"

    def state_path(self, step: int) -> Path:
        """Where the state after `step` steps goes."""
        return self.path / "state" / f"step-{step}"

    def commit_state(self, step: int) -> None:
        """Point to a state that is completely written, and drop older ones (main process only)."""
        if not self.main:
            return
        pointer = self.path / "state" / "latest.json"
        fresh = pointer.with_suffix(".tmp")
        fresh.write_text(json.dumps({"step": step}))
        fresh.replace(pointer)
        for old in (self.path / "state").glob("step-*"):
            if old != self.state_path(step):
                shutil.rmtree(old)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl and the same numbers to TensorBoard, if installed (main process only)."""
        if not self.main:
            return
        with (self.path / "metrics.jsonl").open("a") as sink:
            sink.write(json.dumps({"step": step, "time": round(time.time(), 1)} | values) + "\n")
        board = self._tensorboard()
        if board:
            for name, value in values.items():
                if isinstance(value, int | float):
                    board.add_scalar(name, value, step)
            board.flush()

    def _tensorboard(self):
        if self._board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self.path / "tensorboard"))
            except ImportError:
                self._board = False
        return self._board


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat
