"""Facts about a target model, read from its config and tokenizer without loading its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from vllm_domino.config.draft import DraftConfig
from vllm_domino.engine.manifest import TargetFacts


def vocabulary_hash(vocab: dict[str, int]) -> str:
    """SHA-256 over (token, id) in order of id: equal for equal vocabularies, however they are stored."""
    digest = hashlib.sha256()
    for token, index in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def tokenizer_hash(source: str | None, revision: str | None = None) -> str | None:
    """`vocabulary_hash` of a model's tokenizer; None where there is none to read."""
    if source is None:
        return None
    from transformers import AutoTokenizer

    try:
        return vocabulary_hash(AutoTokenizer.from_pretrained(source, revision=revision).get_vocab())
    except (
        Exception
    ):  # transformers raises whatever its backends raise; a target without tokenizer is served too
        return None


def target_facts(config: DraftConfig, source: str | None, revision: str | None = None) -> TargetFacts:
    """What the manifest records; without a named target, what the drafter's own config says about it.

    Raises:
        ValueError: the named target cannot be read, or is not one that this drafter fits.
    """
    facts: dict[str, Any] = {
        "hidden_size": config.target_hidden_size or config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_target_layers,
        "layer_ids": config.target_layer_ids,
    }
    if source is None:
        return TargetFacts(**facts)
    from transformers import AutoConfig

    try:
        target = AutoConfig.from_pretrained(source, revision=revision).get_text_config()
    except Exception as error:  # the hub and transformers raise many types; each means the same to the user
        raise ValueError(f"target {source!r} of the export recipe cannot be read: {error}") from error
    found = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_hidden_layers,
    }
    for key, value in found.items():
        if facts[key] is not None and facts[key] != value:
            raise ValueError(
                f"target {source}: {key} is {value}, the draft checkpoint is for {facts[key]}; "
                "name the target that the drafter was trained for in the export recipe"
            )
    name = Path(source).name if Path(source).is_dir() else source
    return TargetFacts(source=name, **{**facts, **found}, tokenizer_sha256=tokenizer_hash(source, revision))
