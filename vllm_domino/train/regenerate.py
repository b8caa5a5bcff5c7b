"""Prompts in, training data out: the target's own answers, made by vLLM's offline engine in a process of its
own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(kw_only=True, slots=True, frozen=True)
class Regeneration:
    """How the target answers. `engine_args` are further keyword arguments of `vllm.LLM`."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 2048
    max_length: int = 3072
    dtype: str = "auto"
    seed: int = 0
    thinking: bool = False
    engine_args: dict[str, Any] | None = None


def read_prompts(path: Path, strict: bool = False) -> tuple[list[list[dict]], list[str]]:
    """Conversations of a JSONL file, as chat messages, and one message per broken line.

    A line has `messages`, `conversations` (from/value or role/content), `question`, `prompt` or
    `instruction`. Of a conversation everything before its last assistant turn is the prompt.
    """
    if not path.exists():
        raise ValueError(f"prompts: {path} does not exist; pass a JSONL file or a Hugging Face data set id")
    prompts, broken = [], []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            prompts.append(messages_of(json.loads(line)))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            problem = f"{path}:{number}: {type(error).__name__}: {error}"
            if strict:
                raise ValueError(f"prompts: {problem}; mend the line or drop --strict") from error
            broken.append(problem)
    if not prompts:
        raise ValueError(f"prompts: no usable line in {path}; each needs `question`, `prompt` or `messages`")
    return prompts, broken


def messages_of(row: dict) -> list[dict]:
    """Chat messages that stand before the answer to regenerate."""
    for name in ("question", "prompt", "instruction"):
        if name in row:
            return [{"role": "user", "content": str(row[name])}]
    turns = row["messages"] if "messages" in row else row["conversations"]
    roles = {"human": "user", "gpt": "assistant"}
    messages = [
        {
            "role": roles.get(turn.get("role", turn.get("from")), turn.get("role", turn.get("from"))),
            "content": turn.get("content", turn.get("value")),
        }
        for turn in turns
    ]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise KeyError("no user turn")
    return messages


def load_prompts(source: str, split: str, strict: bool) -> tuple[list[list[dict]], list[str]]:
    """From a JSONL file, or from a Hugging Face data set id (needs the `datasets` package)."""
    path = Path(source)
    if path.exists() or source.count("/") != 1 or path.suffix in (".json", ".jsonl"):
        return read_prompts(path, strict)
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"prompts: {source} is no file, and reading it from the Hugging Face hub needs the package "
            "`datasets`: `pip install datasets`, or pass a JSONL file"
        ) from error
    name = "main" if source == "openai/gsm8k" else None
    return [messages_of(row) for row in load_dataset(source, name, split=split)], []


def regenerate_shards(
    target: str,
    prompts: list[list[dict]],
    work: Path,
    options: Regeneration,
    env: dict[str, str],
    shards: int,
) -> list[Path]:
    """As `regenerate`, by `shards` engines side by side, every shards-th prompt by the same one; one file each."""
    import transformers.models.auto  # noqa: F401  (two threads that import it at once break each other)

    files = [work / f"regenerated-{shard}.jsonl" for shard in range(shards)]

    def answer(shard: int) -> None:
        regenerate(target, prompts[shard::shards], files[shard], options, f"greedy{shard}-", env=env)

    with ThreadPoolExecutor(shards) as pool:
        list(pool.map(answer, range(shards)))
    return files


def regenerate(
    target: str,
    prompts: list[list[dict]],
    out: Path,
    options: Regeneration,
    tag: str = "r",
    env: dict[str, str] | None = None,
) -> dict:
    """Answer all prompts into `out` (resumable); returns counts. Prompts that leave no room for an answer
    are left out.

    Sampled and greedy answers may share one file if their `tag` differs.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=options.thinking
        )
        for messages in prompts
    ]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    fitting = [(number, row) for number, row in enumerate(ids) if len(row) < options.max_length]
    out.parent.mkdir(parents=True, exist_ok=True)
    requests = out.with_suffix(f".{tag}.requests.jsonl")
    requests.write_text(
        "".join(
            json.dumps({"id": f"{tag}{number}", "prompt_token_ids": row}) + "\n" for number, row in fitting
        )
    )
    command = [
        sys.executable,
        "-m",
        "vllm_domino.plugin.generate",
        "--target",
        target,
        "--prompts",
        str(requests),
        "--out",
        str(out),
        "--dtype",
        options.dtype,
        "--temperature",
        str(options.temperature),
        "--top-p",
        str(options.top_p),
        "--max-tokens",
        str(options.max_tokens),
        "--max-model-len",
        str(options.max_length),
        "--seed",
        str(options.seed),
        "--engine-args",
        json.dumps(options.engine_args or {}),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
    if done.returncode:
        raise ValueError(
            f"regeneration ended with code {done.returncode}; what is answered is kept in {out}: "
            "mend what vLLM reports above and run the same command again"
        )
    requests.unlink()
    # vLLM writes to stdout while it shuts down, so the counts need not be the last line
    counts = next(json.loads(line) for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    cut = sum(json.loads(line)["finish_reason"] == "length" for line in out.read_text().splitlines())
    return counts | {"left_out_too_long": len(ids) - len(fitting), "cut_at_limit": cut}
