"""What must hold before a drafter is served, in vLLM's terms; refused at start, never half-way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import supports_eagle3

from vllm_domino.engine.check import ServingFacts, tokenizer_hash


def refuse_unsupported(vllm_config: Any, target_model: nn.Module) -> None:
    """Raises:
    ValueError: a way of serving that the drafter does not support, with the flag to change.
    """
    parallel = vllm_config.parallel_config
    for name, size, flag in (
        ("tensor parallel", parallel.tensor_parallel_size, "--tensor-parallel-size 1"),
        ("pipeline parallel", parallel.pipeline_parallel_size, "--pipeline-parallel-size 1"),
    ):
        if size > 1:
            raise ValueError(
                f"vllm-domino: {name} size is {size}, it must be 1: serve with {flag}, or without Domino"
            )
    if vllm_config.lora_config is not None:
        raise ValueError(
            "vllm-domino: LoRA is on and not supported with a Domino drafter: serve without --enable-lora"
        )
    if vllm_config.speculative_config.draft_sample_method != "greedy":
        raise ValueError(
            "vllm-domino: draft_sample_method is "
            f"{vllm_config.speculative_config.draft_sample_method!r}; only 'greedy' is supported: leave it out"
        )
    if not supports_eagle3(target_model):
        raise ValueError(
            f"vllm-domino: the target {type(target_model).__name__} cannot hand out the hidden states of its layers; "
            "serve a target that vLLM's EAGLE-3 supports (Qwen3, Llama, …), or without --speculative-config"
        )


def serving_facts(vllm_config: Any, device: torch.device) -> ServingFacts:
    """The target and this way of serving it, as `check_fit` compares them with a drafter."""
    model, spec = vllm_config.model_config, vllm_config.speculative_config
    text = model.hf_text_config
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return ServingFacts(
        hidden_size=model.get_hidden_size(),
        vocab_size=text.vocab_size,
        num_layers=model.get_total_num_hidden_layers(),
        dtype=str(model.dtype).removeprefix("torch."),
        tokenizer_hash=tokenizer_hash(model.tokenizer, model.tokenizer_revision),
        num_speculative_tokens=spec.num_speculative_tokens,
        max_model_len=model.max_model_len,
        capability=capability,
    )


def target_weights(target_model: nn.Module, vocab_size: int, hidden_size: int) -> tuple[Tensor, Tensor]:
    """The target's own embedding [V, H] and LM head [V, H], as views without vLLM's padding rows.

    Raises:
        ValueError: one of them is no plain matrix (a quantized one).
    """
    language = (
        target_model.get_language_model() if hasattr(target_model, "get_language_model") else target_model
    )
    inner = getattr(language, "model", language)
    head = getattr(language, "lm_head", None)
    if head is None:
        head = getattr(target_model, "lm_head", None)
    embedding = _plain_matrix("embedding", inner.embed_tokens, vocab_size, hidden_size)
    return embedding, _plain_matrix("LM head", head, vocab_size, hidden_size)


def _plain_matrix(name: str, layer: Any, vocab_size: int, hidden_size: int) -> Tensor:
    # quantized layers keep their weight under other names, drop it once it is packed, transpose it, or hold it in a
    # narrower type (fp8 counts as floating point too)
    weight = getattr(layer, "weight", None)
    if (
        weight is None
        or weight.dtype not in (torch.float32, torch.float16, torch.bfloat16)
        or weight.dim() != 2
        or weight.shape[0] < vocab_size
        or weight.shape[1] != hidden_size
    ):
        found = "none" if weight is None else f"{weight.dtype} of shape {list(weight.shape)}"
        method = type(getattr(layer, "quant_method", None)).__name__
        raise ValueError(
            f"vllm-domino: the target's {name} must be a plain matrix of {vocab_size} x {hidden_size}, found {found} "
            f"({method}): serve a target whose embedding and LM head are not quantized, or without Domino"
        )
    return weight[:vocab_size]
