"""`python -m vllm_domino.train.target_main`: one process (of several) that trains the tiny target."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import distributed

from vllm_domino.train.run_dir import file_digest
from vllm_domino.train.target import TargetRecipe, chat_ids, save_target, train_target
from vllm_domino.train.tokenizer import train_tokenizer


def load_pairs(source: str, split: str = "train") -> list[dict]:
    """`question` and `answer` of a JSONL file, or of a Hugging Face data set such as openai/gsm8k."""
    path = Path(source)
    if path.exists():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ValueError(
                f"data: {source} is no file, and the hub needs the package `datasets`: "
                "`pip install datasets`, "
                "or pass `--data gsm8k_train.jsonl`"
            ) from error
        rows = list(load_dataset(source, "main", split=split))
    return [{"question": row["question"], "answer": row["answer"]} for row in rows]


def main() -> None:
    """Train on all pairs; rank 0 writes the model, its tokenizer and `facts.json`."""
    parser = argparse.ArgumentParser(prog="python -m vllm_domino.train.target_main")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=TargetRecipe().vocab_size)
    parser.add_argument("--epochs", type=float, default=TargetRecipe().epochs)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    pairs = load_pairs(str(arguments.data))
    # Every process learns the same merges from the same text.
    tokenizer = train_tokenizer([text for pair in pairs for text in pair.values()], arguments.vocab_size)
    samples = [chat_ids(tokenizer, pair["question"], pair["answer"]) for pair in pairs]
    recipe = TargetRecipe(vocab_size=arguments.vocab_size, epochs=arguments.epochs, seed=arguments.seed)
    model, facts = train_target(samples, tokenizer, recipe, arguments.out / "metrics.jsonl")
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        save_target(model, tokenizer, arguments.out)
        facts |= {"data_sha256": file_digest([arguments.data])}
        (arguments.out / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
