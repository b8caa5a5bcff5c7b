"""Whether a speculative config is ours: decided by the drafter's config.json, never by the name of its path."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from vllm_domino.config.draft import is_domino


def is_ours(vllm_config: Any) -> bool:
    """True for a Domino checkpoint and for an engine directory; False for everything vLLM serves by itself."""
    spec = vllm_config.speculative_config
    if spec is None or spec.method != "dflash" or spec.model is None:
        return False
    return is_domino(_raw_config(spec.model, spec.revision))


@lru_cache(maxsize=8)
def _raw_config(model: str, revision: str | None) -> dict:
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    return get_hf_file_to_dict("config.json", model, revision or "main") or {}
