"""The demo's parts: the tiny pair's engine, two servers, the same questions to both, and what came out."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import vllm_domino
from vllm_domino.assets_path import GSM8K_QUESTIONS, TINY
from vllm_domino.bench.server import Metrics, ServerError, ServerSpec, VllmServer

CACHE_VARIABLE = "VLLM_DOMINO_CACHE"
NUM_DRAFT_TOKENS = 15
CANDIDATE_POOL = 256  # as export/tiny.toml
DRAFT_WINDOW = 512  # as engines/cpu.toml
WARM_UP_QUESTIONS = 2
MODEL_NAME = "tiny"
# fp32, so that greedy outputs can be compared token by token; no prefix cache, so that nothing is answered from memory.
SERVER_ARGS = (
    *(
        "--served-model-name",
        MODEL_NAME,
        "--dtype",
        "float32",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "4",
    ),
    *("--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
)
# One thread: at this size more threads only wait for each other. One GB of cache instead of a share of all memory.
SERVER_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. acceptance_length: tokens per verified step of this answer, None without drafts."""

    text: str
    tokens: int
    seconds: float
    acceptance_length: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class DemoRun:
    """All answers of one server, and the difference of its counters over them."""

    answers: tuple[Answer, ...]
    metrics: Metrics

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the time of all requests, prefill included."""
        return sum(a.tokens for a in self.answers) / sum(a.seconds for a in self.answers)


def tiny_pair(folder: Path | None = None) -> tuple[Path, Path]:
    """Folders of the target and of the Domino drafter.

    Raises:
        ValueError: one of them is not there.
    """
    root = folder or TINY
    pair = root / "target", root / "domino"
    for part in pair:
        if not (part / "config.json").is_file():
            raise ValueError(
                f"{part}: no config.json; the pair is a folder with target/ and domino/, and the shipped one is "
                "made by `vllm-domino train`"
            )
    return pair


def questions(limit: int = 16) -> list[str]:
    """The first questions of the GSM8K test split, which nothing was trained on."""
    lines = GSM8K_QUESTIONS.read_text().splitlines()[:limit]
    return [json.loads(line)["question"] for line in lines]


def cache_folder(folder: Path | None = None) -> Path:
    """Where engines of the demo are kept: never inside the installed package."""
    if folder is not None:
        return folder
    if CACHE_VARIABLE in os.environ:
        return Path(os.environ[CACHE_VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-domino"


def ensure_engine(drafter: Path, target: Path, cache: Path | None, progress: Progress) -> Path:
    """The CPU engine of this very checkpoint, from the cache or built now.

    Raises:
        ValueError: the checkpoint cannot be read or exported.
    """
    from vllm_domino.config.checkpoint import read_checkpoint
    from vllm_domino.config.recipes import EngineRecipe, ExportRecipe
    from vllm_domino.engine.build import build_engine
    from vllm_domino.engine.check import load_engine_dir

    fingerprint = read_checkpoint(drafter).fingerprint
    build = f"{vllm_domino.__version__}-{fingerprint[:12]}-pool{CANDIDATE_POOL}-window{DRAFT_WINDOW}"
    folder = cache_folder(cache) / f"{MODEL_NAME}-{build}"
    engine = folder / f"{MODEL_NAME}-cpu"
    try:
        if load_engine_dir(engine).fingerprint == fingerprint:
            progress(f"using {engine}")
            return engine
    except ValueError:
        pass  # none there, or not whole: made anew
    # Not export/tiny.toml and engines/cpu.toml: an installed package has no recipes beside it.
    export = ExportRecipe(
        name=MODEL_NAME, checkpoint=str(drafter), target=str(target), candidate_pool=CANDIDATE_POOL
    )
    device = EngineRecipe(
        name="cpu",
        backend="onnxruntime",
        dtype="float32",
        providers=("CPUExecutionProvider",),
        draft_window=DRAFT_WINDOW,
    )
    build_engine(export, device, engine, export_root=folder / "export", progress=progress)
    return engine


def serve_and_ask(
    target: Path, engine: Path | None, asked: Sequence[str], max_tokens: int, log: Path, progress: Progress
) -> DemoRun:
    """Serve `target` (with `engine` as drafter), ask every question alone after a warm-up, and stop the server.

    Raises:
        ServerError: the server did not start, died, or refused a request.
    """
    speculative = None
    if engine is not None:
        speculative = {"method": "dflash", "model": str(engine), "num_speculative_tokens": NUM_DRAFT_TOKENS}
    args = SERVER_ARGS if _has_compiler() else (*SERVER_ARGS, "--enforce-eager")
    spec = ServerSpec(model=str(target), speculative=speculative, args=args, env=SERVER_ENV)
    progress(f"starting (log: {log})")
    with VllmServer(spec, log) as server, httpx.Client(base_url=server.url, timeout=300.0) as client:
        progress(f"ready after {server.ready_seconds:.0f} s, asking {len(asked)} questions")
        for question in asked[:WARM_UP_QUESTIONS]:
            _ask(server, client, question, max_tokens)
        start = before = server.metrics()
        answers = []
        for question in asked:
            text, tokens, seconds = _ask(server, client, question, max_tokens)
            after = server.metrics()
            answers.append(Answer(text, tokens, seconds, after.since(before).acceptance_length))
            before = after
        return DemoRun(tuple(answers), before.since(start))


def _ask(server: VllmServer, client: httpx.Client, question: str, max_tokens: int) -> tuple[str, int, float]:
    """One greedy chat completion: text, output tokens, seconds."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    started = time.perf_counter()
    try:
        response = client.post("/v1/chat/completions", json=body)
        seconds = time.perf_counter() - started
        response.raise_for_status()
    except httpx.HTTPError as error:
        server.check_alive()
        raise ServerError(
            f"the server did not answer ({error}); the end of {server.log}:\n{server.tail()}"
        ) from error
    reply = response.json()
    return reply["choices"][0]["message"]["content"] or "", reply["usage"]["completion_tokens"], seconds


def compare(plain: DemoRun, domino: DemoRun) -> dict[str, Any]:
    """The demo's closing line."""
    pairs = list(zip(plain.answers, domino.answers, strict=True))
    length = domino.metrics.acceptance_length
    return {
        "prompts": len(pairs),
        "identical_outputs": sum(a.text == b.text and a.tokens == b.tokens for a, b in pairs),
        "acceptance_length": None if length is None else round(length, 3),
        "baseline_tok_s": round(plain.tokens_per_second, 1),
        "domino_tok_s": round(domino.tokens_per_second, 1),
        "speedup": round(domino.tokens_per_second / plain.tokens_per_second, 3),
    }


def _has_compiler() -> bool:
    """vLLM compiles the target with a C++ compiler; without one it must be told not to."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))
