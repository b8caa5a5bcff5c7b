"""Prompts of a benchmark: the paper's eight sets from pinned revisions, or a JSONL file of one's own.

Every prompt goes through the target's chat template here, once, so that all variants get the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_domino.bench.suite import DataSettings

_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
_CODE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: the text after the chat template, its longest answer, and the right answer where one is known."""

    text: str
    max_tokens: int
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class KnownSet:
    """A public data set. files: pattern of the file in the repository; grade: how an answer is judged."""

    repo: str
    revision: str
    files: str
    question: Callable[[dict[str, Any]], str]
    answer: Callable[[dict[str, Any]], Any] | None = None
    instruction: str = ""
    grade: str | None = None


def _with_input(row: dict[str, Any]) -> str:
    return f"{row['instruction']}\n\nInput:\n{row['input']}" if row.get("input") else row["instruction"]


def _program(row: dict[str, Any]) -> str:
    starter = row.get("starter_code")
    return row["question_content"] + (
        f"\n\nUse this starter code:\n```python\n{starter}\n```" if starter else ""
    )


# MT-Bench is asked its first turn only: vLLM's client sends single requests.
KNOWN = {
    "gsm8k": KnownSet(
        "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", "main/test-*.parquet",
        lambda row: row["question"], lambda row: row["answer"].split("####")[-1], _BOXED, "gsm8k",
    ),
    "math500": KnownSet(
        "HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test.jsonl",
        lambda row: row["problem"], lambda row: row["answer"], _BOXED, "boxed",
    ),
    "aime25": KnownSet(
        "math-ai/aime25", "563bb8404243c5f09de6ec262f2db674fe5bce9b", "test.jsonl",
        lambda row: row["problem"], lambda row: row["answer"], _BOXED, "boxed",
    ),
    "humaneval": KnownSet(
        "openai/openai_humaneval", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544", "openai_humaneval/test-*.parquet",
        lambda row: _CODE.format(row["prompt"]),
    ),
    "mbpp": KnownSet(
        "google-research-datasets/mbpp", "4bb6404fdc6cacfda99d4ac4205087b89d32030c", "sanitized/test-*.parquet",
        lambda row: row["prompt"],
    ),
    "livecodebench": KnownSet(
        "livecodebench/code_generation_lite", "0fe84c3912ea0c4d4a78037083943e8f0c4dd505", "test6.jsonl", _program,
    ),
    "mt-bench": KnownSet(
        "HuggingFaceH4/mt_bench_prompts", "e3a795c5e9a82ee40611c416b8a7786c73198991", "data/train-*.parquet",
        lambda row: row["prompt"][0],
    ),
    "alpaca": KnownSet(
        "tatsu-lab/alpaca", "dce01c9b08f87459cf36a430d809084718273017", "data/train-*.parquet", _with_input,
    ),
}  # fmt: skip


def grade_of(settings: DataSettings) -> str | None:
    """How answers are judged: what the suite says, or what the known set has."""
    known = KNOWN.get(settings.source)
    return settings.grade or (known.grade if known else None)


def load_prompts(settings: DataSettings, folder: Path, tokenizer: Any, limit: int) -> list[Prompt]:
    """The first `limit` prompts, through the chat template.

    Raises:
        ValueError: the file is not there, has no prompts, or a line of it is no request; the set cannot be fetched.
    """
    known = KNOWN.get(settings.source)
    requests = _known_requests(settings, known, limit) if known else _file_requests(settings, folder, limit)
    if not requests:
        raise ValueError(f"data {settings.label!r}: {settings.source} has no prompts")
    return [_rendered(request, settings, tokenizer) for request in requests]


def prompts_digest(prompts: list[Prompt]) -> str:
    """SHA-256 over texts and lengths: two runs with equal digests sent the same."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.text, prompt.max_tokens]).encode())
    return digest.hexdigest()


def _known_requests(settings: DataSettings, known: KnownSet, limit: int) -> list[dict[str, Any]]:
    instruction = known.instruction if settings.instruction is None else settings.instruction
    requests = []
    for row in _fetch(settings.source, known)[:limit]:
        answer = known.answer(row) if known.answer else None
        requests.append(
            {
                "messages": _chat(known.question(row), instruction),
                "answer": None if answer is None else str(answer).strip(),
            }
        )
    return requests


def _fetch(name: str, known: KnownSet) -> list[dict[str, Any]]:
    """Rows of the pinned revision, from the local Hugging Face cache or the hub."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            known.repo, repo_type="dataset", revision=known.revision, allow_patterns=[known.files]
        )
        files = sorted(Path(folder).glob(known.files))
        if not files:
            raise FileNotFoundError(f"no {known.files} in it")
    except Exception as error:  # the hub raises many types; each means the same to the user
        raise ValueError(
            f"data set {name!r}: {known.repo} at {known.revision[:12]} cannot be fetched ({error}); fetch it where the "
            "hub can be reached and set HF_HOME, or name a JSONL file as `source`"
        ) from error
    rows: list[dict[str, Any]] = []
    for file in files:
        if file.suffix == ".parquet":
            import pandas as pd

            rows += pd.read_parquet(file).to_dict("records")
        else:
            rows += [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return rows


def _file_requests(settings: DataSettings, folder: Path, limit: int) -> list[dict[str, Any]]:
    path = folder / Path(settings.source).expanduser()
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValueError(
            f"data {settings.label!r}: {settings.source} cannot be read ({error.strerror}, at {path.resolve()}); "
            f"name a JSONL file, or one of {', '.join(KNOWN)}"
        ) from error
    requests = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            requests.append(_request(line, settings.instruction or "", f"{path.name}:{number}"))
        if len(requests) == limit:
            break
    return requests


def _request(line: str, instruction: str, where: str) -> dict[str, Any]:
    """An OpenAI request with `messages`, whatever form the line had."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error
    row = (
        row.get("body", row) if isinstance(row, dict) else {}
    )  # a line of OpenAI's batch files carries it in `body`
    question = row.get("prompt", row.get("question"))
    if "messages" not in row and not isinstance(question, str):
        raise ValueError(
            f"{where}: no request in it (found {', '.join(row) or 'nothing'}); a line needs 'messages', 'prompt' or "
            "'question'"
        )
    return {**row, "messages": row.get("messages") or _chat(str(question), instruction)}


def _chat(question: str, instruction: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{question}\n{instruction}" if instruction else question}]


def _rendered(request: dict[str, Any], settings: DataSettings, tokenizer: Any) -> Prompt:
    text = tokenizer.apply_chat_template(
        request["messages"],
        tools=request.get("tools"),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=settings.thinking,
    )
    longest = request.get("max_completion_tokens") or request.get("max_tokens") or settings.max_tokens
    answer = request.get("answer")
    return Prompt(text, int(longest), None if answer is None else str(answer).strip())
