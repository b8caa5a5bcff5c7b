"""`vllm-domino verify`: every byte of an engine directory, and its drafts against PyTorch where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vllm_domino.config.checkpoint import DraftCheckpoint
    from vllm_domino.engine.manifest import EngineManifest


def verify(
    folder: Annotated[Path, typer.Argument(help="Engine directory.")],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="The draft checkpoint it was made from; default: what its export recipe or manifest names."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as one line of JSON.")] = False,
) -> None:
    """Check an engine directory: digests, whether it fits this machine, and its drafts against PyTorch.

    On a machine that the engine is not for, it says so and checks what can be checked there (exit code 0). A changed
    byte, or drafts that disagree, is an error (exit code 1).
    """
    from vllm_domino.cli.console import out, print_json, step
    from vllm_domino.cli.diagnosis import misfit_here
    from vllm_domino.engine.catalog import CatalogEntry
    from vllm_domino.engine.check import load_engine_dir

    with step(f"Comparing the files of {folder} with their digests"):
        manifest = load_engine_dir(folder)
    outcome: dict[str, Any] = {"folder": str(folder), "files": len(manifest.files), "runs_here": True}
    reason = misfit_here(CatalogEntry(folder, manifest))
    if reason is not None:
        outcome |= {"runs_here": False, "reason": reason}
        lines = [f"{len(manifest.files)} files unchanged; drafts not checked: {reason}"]
    else:
        source = _reference(manifest, checkpoint)
        checked = _run(folder, manifest, source)
        outcome |= checked
        lines = [f"{len(manifest.files)} files unchanged, {checked['drafts']} drafts made"]
        if source is None:
            lines.append(
                "not compared with PyTorch: the draft checkpoint is not here, name it with --checkpoint"
            )
        else:
            lines.append(
                f"{checked['equal']} of {checked['drafts']} drafts equal PyTorch's in {manifest.dtype}"
            )
    if as_json:
        print_json(outcome)
        return
    for line in lines:
        out.print(line, markup=False)


def _reference(manifest: EngineManifest, named: str | None) -> DraftCheckpoint | None:
    """The checkpoint that the engine was made from; None where nobody names one that is here.

    Raises:
        ValueError: the one named on the command line cannot be read, or is another one.
    """
    from vllm_domino.config.checkpoint import read_checkpoint
    from vllm_domino.config.recipes import load_export_recipe

    recipe = Path("export") / f"{manifest.export_recipe}.toml"
    if named is not None:
        found = read_checkpoint(named, manifest.revision)
        if found.fingerprint != manifest.fingerprint:
            raise ValueError(
                f"--checkpoint {named}: its fingerprint is {found.fingerprint[:16]}…, the engine was made from "
                f"{manifest.fingerprint[:16]}… ({manifest.source}); name that one, or run `{manifest.build_command}`"
            )
        return found
    try:
        found = read_checkpoint(load_export_recipe(recipe).checkpoint, manifest.revision)
    except ValueError:
        return None
    return found if found.fingerprint == manifest.fingerprint else None


def _run(folder: Path, manifest: EngineManifest, source: DraftCheckpoint | None) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    from vllm_domino.cli.console import step
    from vllm_domino.config.vocabulary import prune
    from vllm_domino.export.report import VOCAB_FILE
    from vllm_domino.model.drafter import Drafter
    from vllm_domino.runtime.factory import open_session
    from vllm_domino.runtime.torch_session import TorchSession
    from vllm_domino.runtime.verify import check_session

    device, dtype = (
        torch.device("cuda" if manifest.compute_capability else "cpu"),
        getattr(torch, manifest.dtype),
    )
    reference = None
    if source is not None:
        if manifest.head.token_frequencies is not None:
            source = prune(source, load_file(folder / VOCAB_FILE)["vocab_ids"])
        drafter = Drafter.from_checkpoint(source, manifest.head.options())
        reference = TorchSession(drafter, device, dtype, own_lm_head=source.lm_head)
    with step("Drafting" if reference is None else "Drafting beside PyTorch") as progress:
        session = open_session(folder, device, dtype)
        try:
            checked = check_session(session, reference, device, progress.say)
        finally:
            session.close()
    return {"drafts": checked.drafts, "equal": checked.equal, "context_error": checked.context_error}
