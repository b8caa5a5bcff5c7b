"""Whether a TensorRT engine directory can be loaded here: GPU type, module and version, driver.

Asked before vLLM profiles memory, and by `doctor`. What does not depend on TensorRT (target, dtype, window,
digests) is checked in `check`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from vllm_domino.engine.manifest import EngineManifest, build_command
from vllm_domino.engine.tensorrt_module import (
    Device,
    installed_version,
    load_module,
    present_device,
    sm_name,
    version_tuple,
)


def check_tensorrt(where: str, manifest: EngineManifest) -> None:
    """Compare an engine with the machine.

    Raises:
        ValueError: the first thing that does not fit: found, needed, and what mends it.
    """
    assert manifest.compute_capability is not None
    found = installed_version(manifest.backend)
    device = present_device(load_module(manifest.backend) if found else None)
    if device is None or not _runs_on(manifest, device):
        here = "this machine has no GPU" if device is None else f"this GPU is {_describe(device)}"
        raise ValueError(
            f"{where}: built for {sm_name(manifest.compute_capability)}, {here}; with this device's recipe "
            f"run `{build_command(manifest.export_recipe)}`"
        )
    _check_version(where, manifest, found)
    _check_driver(where, manifest, device)


def _check_version(where: str, manifest: EngineManifest, found: str | None) -> None:
    """A plan runs on the version that built it; a `version_compatible` one on later ones of its major too."""
    needed = manifest.backend_version
    if found is None:
        load_module(manifest.backend)  # raises with the reason
        raise AssertionError("a module that cannot be imported was imported")
    have, need = version_tuple(found), version_tuple(needed)
    is_later = bool(manifest.options.get("version_compatible")) and have[0] == need[0] and have >= need
    if found != needed and not is_later:
        raise ValueError(
            f"{where}: built with {manifest.backend} {needed}, found {manifest.backend} {found}; install the "
            f"version that built it, or run `{manifest.build_command}` with this one"
        )


def _runs_on(manifest: EngineManifest, device: Device) -> bool:
    """Plans run on their own compute capability; `ampere_plus` ones on every GPU from SM80 on."""
    if manifest.options.get("hardware_compatibility") == "ampere_plus":
        return version_tuple(device.compute_capability) >= (8, 0)
    return device.compute_capability == manifest.compute_capability


def _check_driver(where: str, manifest: EngineManifest, device: Device) -> None:
    needed = _cuda_major(manifest.backend)
    if needed is None or device.driver is None or version_tuple(device.driver)[0] >= needed:
        return
    raise ValueError(
        f"{where}: this {manifest.backend} needs a driver for CUDA {needed}, found one for {device.driver}; "
        f"update the NVIDIA driver, or install {manifest.backend} for CUDA {version_tuple(device.driver)[0]}"
    )


def _cuda_major(backend: str) -> int | None:
    """Major CUDA version of the installed module, by its distribution's name; None where it is unknown."""
    for major in (13, 12):
        try:
            version(f"{backend.replace('_', '-')}-cu{major}")
        except PackageNotFoundError:
            continue
        return major
    return None


def _describe(device: Device) -> str:
    return f"{device.name} ({sm_name(device.compute_capability)})"
