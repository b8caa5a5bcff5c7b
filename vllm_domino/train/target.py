"""The tiny pair's target: a Qwen3-architecture language model, trained from scratch on chat-formatted
answers.

It need not solve the problems. It has to be fluent, stop by itself and be sure of what it says: drafts are
only as long as the target is predictable.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import distributed
from torch.nn import functional

IGNORED = -100


@dataclass(kw_only=True, slots=True, frozen=True)
class TargetRecipe:
    """Shape and training of the tiny target. The defaults are the shipped one.

    Deep and narrow: a drafter of two layers then costs about as small a part of the target as the public
    drafters do of theirs (5 layers of 36), and a decoding step is bound by its overheads and not by arithmetic, as
    it is on a GPU.
    """

    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    epochs: float = 2.2
    tokens_per_step: int = 8192
    learning_rate: float = 5e-3
    embedding_learning_rate: float = 3e-3
    warmup_ratio: float = 0.04
    question_weight: float = 0.3
    seed: int = 0


def build_target(recipe: TargetRecipe, tokenizer):
    """A freshly initialised `Qwen3ForCausalLM` with tied embeddings, fp32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_position_embeddings,
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(config).float()


def chat_ids(tokenizer, question: str, answer: str | None = None) -> tuple[list[int], int]:
    """Token ids of the chat and the length of its prompt part; with an answer the ids end in `<|im_end|>`."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    if answer is None:
        return prompt, len(prompt)
    response = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return prompt + response, len(prompt)


def batches(samples: Sequence[tuple[list[int], int]], tokens: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of sample indices, about `tokens` padded tokens each, samples of like length
    together.
    """
    rng = random.Random(seed)
    while True:
        order = sorted(range(len(samples)), key=lambda i: len(samples[i][0]) + rng.random() * 16)
        groups: list[list[int]] = []
        group: list[int] = []
        longest = 0
        for index in order:
            longest = max(longest, len(samples[index][0]))
            if group and longest * (len(group) + 1) > tokens:
                groups.append(group)
                group, longest = [], len(samples[index][0])
            group.append(index)
        groups.append(group)
        rng.shuffle(groups)
        yield from groups


def collate(samples, indices, pad: int, question_weight: float):
    """Ids [B, T] int64, labels [B, T] int64 (next token, IGNORED on padding), weights [B, T] float32."""
    width = max(len(samples[i][0]) for i in indices)
    ids = torch.full((len(indices), width), pad)
    labels = torch.full((len(indices), width), IGNORED)
    weights = torch.zeros(len(indices), width)
    for row, index in enumerate(indices):
        tokens, prompt = samples[index]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens) - 1] = torch.tensor(tokens[1:])
        weights[row, : len(tokens) - 1] = 1.0
        weights[row, : prompt - 1] = question_weight
    return ids, labels, weights


def backward_language_model(model, ids, labels, weights, chunk: int = 512) -> float:
    """Weighted mean cross-entropy over the supervised positions; gradients are left in the parameters.

    Logits exist for `chunk` positions at a time, forward and backward: they stay in the cache, where logits
    of the whole batch would be written to memory and read back several times.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]
    kept = labels != IGNORED
    hidden, targets, shares = hidden[kept], labels[kept], weights[kept] / weights[kept].sum()
    total, grads = 0.0, []
    for rows in torch.arange(len(targets)).split(chunk):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        leaf = hidden[part].detach().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model.lm_head(leaf)  # [n, V]
        loss = (
            functional.cross_entropy(logits.float(), targets[part], reduction="none") * shares[part]
        ).sum()
        loss.backward()
        grads.append(leaf.grad)
        total += loss.item()
    hidden.backward(torch.cat(grads))
    return total


def optimizers(model, recipe: TargetRecipe):
    """Muon for the matrices of the layers, AdamW for the tied embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in n]
    muon = torch.optim.Muon(
        matrices, lr=recipe.learning_rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(others, lr=recipe.embedding_learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    return muon, adam


def schedule(step: int, steps: int, warmup_ratio: float) -> float:
    """Factor on the learning rate: linear warm-up, then linear to zero."""
    warmup = max(1, int(steps * warmup_ratio))
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (steps - step) / max(1, steps - warmup))


def average_gradients(model) -> None:
    """Mean of the gradients over all processes, in one flat all-reduce; nothing to do in a single process."""
    if not distributed.is_initialized():
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def train_target(samples, tokenizer, recipe: TargetRecipe, log: Path, model=None):
    """Train (or go on training) a target on `(ids, prompt length)` samples; returns the model and its facts.

    With `torch.distributed` initialised, `tokens_per_step` is split over the processes. Two processes of one
    thread each are faster than one of two threads wherever somebody else uses a core too.
    """
    rank, world = (
        (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    )
    model = model or build_target(recipe, tokenizer)
    model.train()
    per_epoch = sum(len(ids) for ids, _ in samples)
    steps = max(1, int(recipe.epochs * per_epoch / recipe.tokens_per_step))
    stream = islice(batches(samples, recipe.tokens_per_step // world, recipe.seed), rank, None, world)
    pair = optimizers(model, recipe)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in pair]
    log.parent.mkdir(parents=True, exist_ok=True)
    started, step, tokens = time.monotonic(), 0, 0
    with log.open("a") as sink:
        while step < steps:
            ids, labels, weights = collate(
                samples, next(stream), tokenizer.pad_token_id, recipe.question_weight
            )
            factor = schedule(step, steps, recipe.warmup_ratio)
            for optimizer, lrs in zip(pair, peaks, strict=True):
                for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                    group["lr"] = lr * factor
            loss = backward_language_model(model, ids, labels, weights)
            average_gradients(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + int((labels != IGNORED).sum())
            seconds = time.monotonic() - started
            if rank == 0 and (step % 10 == 0 or step == steps):
                sink.write(
                    json.dumps(
                        {
                            "step": step,
                            "of": steps,
                            "loss": round(loss, 4),
                            "lr": factor,
                            "seconds": round(seconds, 1),
                            "tokens_per_s": round(tokens * world / seconds),
                        }
                    )
                    + "\n"
                )
                sink.flush()
    facts = {
        "steps": step,
        "tokens": tokens * world,
        "seconds": round(time.monotonic() - started, 1),
        "final_loss": loss,
        "recipe": asdict(recipe),
    }
    return model.eval(), facts


def save_target(model, tokenizer, directory: Path) -> None:
    """Write bf16 weights in files of at most 4 MB with the tokenizer beside them."""
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.do_sample = False
    model.save_pretrained(directory, max_shard_size="4MB")
    tokenizer.save_pretrained(directory)
    # Transformers 5 writes a class name that older readers do not know; both know this one.
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")
