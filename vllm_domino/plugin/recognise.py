"""Whether a speculative config is ours: decided by the drafter's config.json, never by the name of its path."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from vllm_domino.config.draft import is_domino

ENGINE_MARK = "vllm_domino_engine"  # in the config.json of every engine directory, DFlash ones included


def is_ours(vllm_config: Any) -> bool:
    """True for a Domino checkpoint and for an engine directory; False for everything vLLM serves by itself."""
    spec = vllm_config.speculative_config
    if spec is None or spec.method != "dflash" or spec.model is None:
        return False
    raw = _raw_config(spec.model, spec.revision)
    return is_domino(raw) or ENGINE_MARK in raw


@lru_cache(maxsize=8)
def _raw_config(model: str, revision: str | None) -> dict:
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    return get_hf_file_to_dict("config.json", model, revision or "main") or {}
