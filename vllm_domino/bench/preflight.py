"""What is checked before the first server starts: models, engines, tokenizer, prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_domino.bench.datasets import Prompt, load_prompts, prompts_digest
from vllm_domino.bench.server import ServerSpec
from vllm_domino.bench.suite import Suite, VariantSettings, require_model, resolve_path

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """A suite that can run: servers by variant, prompts by data set."""

    suite: Suite
    path: Path
    servers: dict[str, ServerSpec]
    prompts: dict[str, list[Prompt]]
    tokenizer: str

    @property
    def digests(self) -> dict[str, str]:
        return {name: prompts_digest(prompts) for name, prompts in self.prompts.items()}


def prepare(
    suite: Suite, path: Path, only: Collection[str] = (), build: bool = False, say: Progress = print
) -> Plan:
    """Check everything that can be checked without a server.

    Args:
        only: names of variants; empty takes all.
        build: make engines that are not there and that the suite says how to build.

    Raises:
        ValueError: what is missing or does not fit, with the command or key that mends it.
    """
    variants = _chosen(suite, only)
    folder = path.parent
    model = require_model(
        f"suite {path}: server.model", suite.server.model, folder, "train, download or correct it"
    )
    for variant in variants:
        if build:
            _build_missing(variant, folder, say)
        _check_drafter(suite, path, variant, model)
    tokenizer = _tokenizer(model, suite.server.revision)
    prompts = {
        data.label: load_prompts(data, folder, tokenizer, _most(suite, data) + suite.warmup)
        for data in suite.data
    }
    servers = {variant.name: server_spec(suite, variant, model, folder) for variant in variants}
    return Plan(suite, path, servers, prompts, _local(model))


def server_spec(suite: Suite, variant: VariantSettings, model: str, folder: Path) -> ServerSpec:
    """The server of one variant."""
    speculative = dict(variant.speculative) if variant.speculative else None
    if speculative and variant.drafter:
        speculative["model"] = _local(resolve_path(variant.drafter, folder))
    args = (*suite.server.args, *variant.args)
    if suite.server.revision:
        args = ("--revision", suite.server.revision, *args)
    return ServerSpec(
        model=_local(model), speculative=speculative, args=args, env={**suite.server.env, **variant.env}
    )


def flag(args: tuple[str, ...], name: str) -> str | None:
    """The value of `--name value` or `--name=value`, the last one winning; None where it is not given."""
    value = None
    for index, arg in enumerate(args):
        if arg == name and index + 1 < len(args):
            value = args[index + 1]
        elif arg.startswith(f"{name}="):
            value = arg.split("=", 1)[1]
    return value


def _chosen(suite: Suite, only: Collection[str]) -> list[VariantSettings]:
    known = [variant.name for variant in suite.variant]
    wrong = sorted(set(only) - set(known))
    if wrong:
        raise ValueError(f"--only {wrong[0]}: no such variant in the suite; it has {', '.join(known)}")
    return [variant for variant in suite.variant if not only or variant.name in only]


def _most(suite: Suite, data: Any) -> int:
    return max(suite.prompts_at(data, concurrency) for concurrency in suite.concurrency)


def _local(found: str) -> str:
    """A folder as seen from here, when it lies below: results and logs then show no absolute path."""
    path = Path(found)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return found


def build_command(variant: VariantSettings, folder: Path) -> str:
    """What builds a variant's engine."""
    assert variant.build is not None
    assert variant.drafter is not None
    recipes = " ".join(_local(str((folder / recipe).resolve())) for recipe in variant.build)
    return f"vllm-domino build {recipes} --output {_local(resolve_path(variant.drafter, folder))}"


def _build_missing(variant: VariantSettings, folder: Path, say: Progress) -> None:
    if variant.build is None or variant.drafter is None:
        return
    out = Path(resolve_path(variant.drafter, folder))
    if (out / "engine.json").is_file() and not _stale(variant, out, folder):
        return
    from vllm_domino.config.recipes import load_engine_recipe, load_export_recipe
    from vllm_domino.engine.build import build_engine

    export, device = (folder / recipe for recipe in variant.build)
    say(f"building {_local(str(out))}")
    build_engine(load_export_recipe(export), load_engine_recipe(device), out, progress=say)


def _stale(variant: VariantSettings, engine: Path, folder: Path) -> bool:
    """Whether the engine's checkpoint, if it is a folder here, has other weights than the engine was built from."""
    from vllm_domino.config.checkpoint import read_checkpoint
    from vllm_domino.config.recipes import load_export_recipe
    from vllm_domino.engine.manifest import read_manifest

    assert variant.build is not None
    recipe = folder / variant.build[0]
    if not recipe.is_file():
        return False  # an engine copied here without its recipe
    checkpoint = Path(load_export_recipe(recipe).checkpoint)
    return (
        checkpoint.is_dir() and read_checkpoint(checkpoint).fingerprint != read_manifest(engine).fingerprint
    )


def _check_drafter(suite: Suite, path: Path, variant: VariantSettings, model: str) -> None:
    if variant.drafter is None:
        return
    where = f"suite {path}: variant {variant.name!r}"
    mend = "train, download or correct it"
    if variant.build is not None:
        mend = f"build it with `{build_command(variant, path.parent)}`, or run with --build"
    found = Path(require_model(where, variant.drafter, path.parent, mend))
    if not found.is_absolute():
        return  # an id: vLLM fetches it, and the variant is reported if it cannot
    if variant.build is not None or (found / "engine.json").is_file():
        from vllm_domino.engine.check import load_engine_dir, misfit

        manifest = load_engine_dir(found)
        if variant.build is not None and _stale(variant, found, path.parent):
            raise ValueError(
                f"{where}: {variant.drafter} was built from other weights than its export recipe names now; {mend}"
            )
        problem = misfit(manifest, _facts(suite, variant, model), where=_local(str(found)))
        if problem:
            raise ValueError(f"{where}: {problem}")


def _facts(suite: Suite, variant: VariantSettings, model: str) -> Any:
    """How the variant will be served, as far as the suite and the target's config say."""
    import torch
    from transformers import AutoConfig

    from vllm_domino.engine.check import ServingFacts, tokenizer_hash

    try:
        config = AutoConfig.from_pretrained(model, revision=suite.server.revision).get_text_config()
    except Exception as error:  # the hub and transformers raise many types; each means the same to the user
        raise ValueError(f"server.model {model}: its config cannot be read ({error})") from error
    args = (*suite.server.args, *variant.args)
    dtype = flag(args, "--dtype") or "auto"
    if dtype in ("auto", "half"):
        dtype = "float16" if dtype == "half" else str(config.dtype or torch.bfloat16).removeprefix("torch.")
    assert variant.speculative is not None
    return ServingFacts(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        dtype=dtype,
        tokenizer_hash=tokenizer_hash(model, suite.server.revision),
        num_speculative_tokens=int(variant.speculative.get("num_speculative_tokens") or 1),
        max_model_len=int(flag(args, "--max-model-len") or config.max_position_embeddings),
        capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
    )


def _tokenizer(model: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision)
    except Exception as error:  # as above
        raise ValueError(f"server.model {model}: its tokenizer cannot be read ({error})") from error
    if tokenizer.chat_template is None:
        raise ValueError(
            f"server.model {model}: its tokenizer has no chat template, and every prompt goes through it"
        )
    return tokenizer
