"""Where figures come from: code, versions, machine, suite, recipes and weights."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from vllm_domino.bench.suite import Suite, resolve_path
from vllm_domino.files import sha256_file

_PACKAGES = (
    "vllm-domino", "vllm", "torch", "transformers", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13",
    "numpy",
)  # fmt: skip


class Machine(BaseModel):
    """The hardware, without its name. gpus: one line per GPU (name, memory, driver, power limit)."""

    model_config = ConfigDict(extra="forbid")

    cpu: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    system: str


class Provenance(BaseModel):
    """Everything that is needed to run this again, or to see why it came out otherwise.

    commit: of the source that ran; "-dirty" marks changes that were not committed.
    hashes: SHA-256 of the suite, of recipes, of engines' manifests (which hold a digest of every file) and of drafters'
        and targets' weights, by what the suite calls them.
    data: per data set, SHA-256 over the prompts sent.
    """

    model_config = ConfigDict(extra="forbid")

    commit: str | None
    command: str
    versions: dict[str, str]
    machine: Machine
    environment: dict[str, str]
    hashes: dict[str, str]
    data: dict[str, str]

    def same_source(self, other: Provenance) -> bool:
        """Whether both would measure the same thing on the same machine."""
        names = ("commit", "versions", "machine", "hashes", "data")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def collect(suite: Suite, suite_path: Path, data: dict[str, str]) -> Provenance:
    """Provenance of a run of `suite`."""
    folder = suite_path.parent
    hashes = {suite_path.name: sha256_file(suite_path)}
    for variant in suite.variant:
        for recipe in variant.build or ():
            path = folder / recipe
            if path.is_file():
                hashes[Path(recipe).name] = sha256_file(path)
        if variant.drafter:
            hashes |= _model_hash(variant.drafter, folder)
    hashes |= _model_hash(suite.server.model, folder)
    return Provenance(
        commit=commit(),
        command=command_line(),
        versions=versions(),
        machine=machine(),
        environment={
            k: v for k, v in sorted(os.environ.items()) if k.startswith(("OMP_", "VLLM_DOMINO_ORT", "MKL_"))
        },
        hashes=hashes,
        data=data,
    )


def command_line() -> str:
    """What was typed; of the program and of absolute paths only the name, since results are passed on."""
    words = [Path(sys.argv[0]).name]
    for argument in sys.argv[1:]:
        option, equals, value = argument.rpartition("=")
        words.append(option + equals + (Path(value).name if Path(value).is_absolute() else value))
    return " ".join(words)


def machine() -> Machine:
    """This machine."""
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=_gpus(),
        system=f"{platform.system()} {platform.release()}",
    )


def _model_hash(name: str, folder: Path) -> dict[str, str]:
    """One digest for a local model folder: its engine manifest, or its config and weights; nothing for an id."""
    path = Path(resolve_path(name, folder))
    if not path.is_dir():
        return {}
    manifest = path / "engine.json"
    if manifest.is_file():
        return {f"{path.name}/engine.json": sha256_file(manifest)}
    digest = hashlib.sha256()
    for file in sorted([*path.glob("config.json"), *path.glob("*.safetensors")]):
        digest.update(f"{file.name}\0{sha256_file(file)}\0".encode())
    return {path.name: digest.hexdigest()}


def commit() -> str | None:
    """HEAD of the source tree that this package runs from; None for an installed one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "vllm_domino"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("-dirty" if changed.strip() else "")


def versions() -> dict[str, str]:
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpus() -> tuple[str, ...]:
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version,power.limit",
        "--format=csv,noheader",
    ]
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=30
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in lines if line.strip())
