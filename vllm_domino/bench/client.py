"""Load through vLLM's own client (`vllm bench serve`), as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm_domino.bench.datasets import Prompt
from vllm_domino.bench.server import SERVER_ENV, ServerError, VllmServer
from vllm_domino.bench.vllm_command import find_vllm

CLIENT_SECONDS = 6 * 3600.0
# Prompts come through the chat template already: the server must not put a second start token before them.
_BODY = {"add_special_tokens": False}


@dataclass(frozen=True, slots=True)
class Load:
    """One cell's traffic. tokenizer: folder or id; seed: of every request."""

    prompts: Sequence[Prompt]
    concurrency: int
    temperature: float
    seed: int
    tokenizer: str


def served_name(server: VllmServer) -> str:
    """The model's name in requests, from the server itself."""
    return str(httpx.get(f"{server.url}/v1/models", timeout=30.0).raise_for_status().json()["data"][0]["id"])


def warm_up(server: VllmServer, model: str, prompts: Sequence[Prompt], load: Load) -> None:
    """Send `prompts` at the cell's concurrency and forget the answers.

    Raises:
        ServerError: the server died or refused one.
    """

    def send(prompt: Prompt) -> None:
        body = {
            **_BODY,
            "model": model,
            "prompt": prompt.text,
            "max_tokens": min(prompt.max_tokens, 64),
            "temperature": load.temperature,
        }
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=600.0).raise_for_status()

    try:
        with ThreadPoolExecutor(load.concurrency) as pool:
            list(pool.map(send, prompts))
    except httpx.HTTPError as error:
        server.check_alive()
        raise ServerError(
            f"a warm-up request failed ({error}); the end of {server.log}:\n{server.tail()}"
        ) from error


def run_client(server: VllmServer, model: str, load: Load, folder: Path, name: str) -> dict[str, Any]:
    """Send the load; returns the client's own result with every request's times, lengths and text.

    Raises:
        ServerError: the server died meanwhile.
        ValueError: the client itself failed; the message has the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, result = (folder / f"{name}.prompts.jsonl").resolve(), folder / f"{name}.client.json"
    data.write_text(
        "".join(json.dumps({"prompt": p.text, "output_tokens": p.max_tokens}) + "\n" for p in load.prompts)
    )
    result.unlink(missing_ok=True)
    command = client_command(server.url, model, load, data, result.resolve())
    log = folder / f"{name}.client.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **SERVER_ENV},
        )
        try:
            _wait(process, server)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0 or not result.is_file():
        server.check_alive()
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise ValueError(
            f"`vllm bench serve` ended with exit code {process.returncode}; the end of {log}:\n{tail}"
        )
    return json.loads(result.read_text())


def client_command(url: str, model: str, load: Load, data: Path, result: Path) -> list[str]:
    """`vllm bench serve` as it is started: same prompts, same order, no request before the first measured one."""
    body = {**_BODY, "seed": load.seed} if load.temperature > 0 else _BODY
    options = {
        "backend": "openai",
        "base-url": url,
        "endpoint": "/v1/completions",
        "model": model,
        "tokenizer": load.tokenizer,
        "dataset-name": "custom",
        "dataset-path": str(data),
        "custom-output-len": "-1",
        "num-prompts": str(len(load.prompts)),
        "max-concurrency": str(load.concurrency),
        "request-rate": "inf",
        "temperature": str(load.temperature),
        "extra-body": json.dumps(body),
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "50,90,99",
        "ready-check-timeout-sec": "0",
        "result-dir": str(result.parent),
        "result-filename": result.name,
    }
    flags = (
        "skip-chat-template",
        "disable-shuffle",
        "no-oversample",
        "save-result",
        "save-detailed",
        "disable-tqdm",
    )
    command = [find_vllm(), "bench", "serve"]
    for key, value in options.items():
        command += [f"--{key}", value]
    return command + [f"--{flag}" for flag in flags]


def _wait(process: subprocess.Popen[bytes], server: VllmServer) -> None:
    """Until the client ends; a dead server ends it, since the client would only collect errors."""
    waited = 0.0
    while True:
        try:
            process.wait(2.0)
            return
        except subprocess.TimeoutExpired:
            waited += 2.0
            server.check_alive()
            if waited > CLIENT_SECONDS:
                raise ValueError(f"`vllm bench serve` did not end within {CLIENT_SECONDS:.0f} s") from None
