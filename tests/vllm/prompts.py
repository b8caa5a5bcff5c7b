"""What the tests inside vLLM ask."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import MAX_LEN

from vllm_domino.assets_path import GSM8K_QUESTIONS


def questions() -> list[str]:
    """32 questions of GSM8K's test split: the 16 that the package ships and the 16 after them (MIT licence, see
    vllm_domino/assets/gsm8k)."""
    files = (GSM8K_QUESTIONS, Path(__file__).with_name("questions.jsonl"))
    return [json.loads(line)["question"] for file in files for line in file.read_text().splitlines()]


def chat_prompts(tokenizer: Any) -> list[list[int]]:
    """Every question as the chat that the pair was trained on."""
    chats = [[{"role": "user", "content": question}] for question in questions()]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


# Around the sizes where something changes: a block, pages, and the limit, where the last drafts reach past it.
EDGE_LENGTHS = (1, 2, 3, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
END_LENGTHS = (MAX_LEN - 33, MAX_LEN - 17, MAX_LEN - 16, MAX_LEN - 15, MAX_LEN - 3, MAX_LEN - 2, MAX_LEN - 1)


def sized_prompts(chats: Sequence[Sequence[int]], count: int = 64) -> list[list[int]]:
    """Prompts from 1 token to one below the limit (vLLM wants room for a token): cuts of the chats laid end to end,
    and whole chats for the rest."""
    text = [token for chat in chats for token in chat]
    lengths = EDGE_LENGTHS + END_LENGTHS
    cuts = [text[53 * i : 53 * i + length] for i, length in enumerate(lengths)]
    assert [len(cut) for cut in cuts] == list(lengths)
    cuts += [list(chat) for chat in chats]
    cuts += [text[29 * i : 29 * i + 20 * i] for i in range(1, count)]
    return cuts[:count]
