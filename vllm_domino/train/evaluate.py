"""Acceptance by the reference loop: the figure that training is for, measured without any engine or
server.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from vllm_domino.config.checkpoint import read_checkpoint
from vllm_domino.model.decode import speculative_decode
from vllm_domino.model.drafter import Drafter


def acceptance(
    target: nn.Module,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> dict:
    """Decode every prompt and count.

    Returns `acceptance_length` (tokens per target pass with drafts, bonus included, over all rounds
    together), `per_position` (share of rounds in which draft i was accepted), rounds, tokens and seconds.
    """
    accepted: list[int] = []
    tokens, started = 0, time.monotonic()
    generator = torch.Generator().manual_seed(seed)
    for prompt in prompts:
        result = speculative_decode(
            target,
            drafter,
            prompt,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            temperature=temperature,
            generator=generator,
        )
        accepted += result.accepted
        tokens += len(result.token_ids)
    return summarize(accepted, drafter.config.num_draft_tokens) | {
        "prompts": len(prompts),
        "tokens": tokens,
        "seconds": round(time.monotonic() - started, 1),
    }


def summarize(accepted: Sequence[int], num_drafts: int) -> dict:
    """Acceptance length, and by draft position, from the accepted drafts of every round."""
    rounds = max(1, len(accepted))
    return {
        "acceptance_length": round(1.0 + sum(accepted) / rounds, 4),
        "per_position": [round(sum(a > i for a in accepted) / rounds, 4) for i in range(num_drafts)],
        "rounds": len(accepted),
    }


def read_questions(path: Path, limit: int | None = None) -> list[str]:
    """The `question` (or `prompt`) of each JSONL line."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:limit]]
    return [row["question"] if "question" in row else row["prompt"] for row in rows]


def chat_prompts(tokenizer, questions: Sequence[str]) -> list[list[int]]:
    """Token ids of single-turn chats, thinking off, ready for the answer."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        for question in questions
    ]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def training_evaluation(target_source: str, path: Path, limit: int, max_new_tokens: int = 320) -> Callable:
    """What `train_drafter` calls while training: a few prompts, figures named `eval_…`."""
    from transformers import AutoTokenizer

    prompts = chat_prompts(AutoTokenizer.from_pretrained(target_source), read_questions(path, limit))

    def evaluate(drafter: nn.Module, target: nn.Module) -> dict:
        stop = target.generation_config.eos_token_id
        figures = acceptance(
            target,
            drafter,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=stop if isinstance(stop, list) else [stop],
        )
        return {f"eval_{name}": value for name, value in figures.items()}

    return evaluate


def read_drafter(source: str, without_head: bool = False) -> Drafter:
    """A public checkpoint in fp32; `without_head` takes the Domino head off: what the backbone is worth alone."""
    checkpoint = read_checkpoint(source)
    if without_head:
        kept = {
            n: t for n, t in checkpoint.weights.items() if not n.startswith(("prefix_gru.", "embed_proj."))
        }
        bare = dataclasses.replace(checkpoint.config, emb_dim=0, gru_hidden_dim=0, pure_draft_prefix_len=0)
        checkpoint = dataclasses.replace(checkpoint, config=bare, weights=kept)
    return Drafter.from_checkpoint(checkpoint, dtype=torch.float32)


def evaluate_checkpoint(
    target_source: str,
    draft_source: str,
    questions: Sequence[str],
    *,
    max_new_tokens: int = 320,
    temperature: float = 0.0,
    without_head: bool = False,
) -> dict:
    """Acceptance of a public checkpoint on a Transformers target in fp32, on the CPU, by the reference loop."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_source)
    target = AutoModelForCausalLM.from_pretrained(target_source, dtype=torch.float32).eval()
    stop = target.generation_config.eos_token_id
    figures = acceptance(
        target,
        read_drafter(draft_source, without_head),
        chat_prompts(tokenizer, questions),
        max_new_tokens=max_new_tokens,
        stop_ids=stop if isinstance(stop, list) else [stop],
        temperature=temperature,
    )
    return figures | {"temperature": temperature, "without_head": without_head}
