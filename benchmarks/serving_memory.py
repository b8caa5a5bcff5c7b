"""Memory of `vllm serve` with a Domino engine above plain serving of the same target, on this machine's CPU.

    python benchmarks/serving_memory.py        # benchmarks/results/serving-memory.json, ten minutes

The bound: drafter weights x 1.2 + its context cache + 200 MB. Every server serves the tiny target with the same flags,
gets the same 32 questions at concurrency 16, and is measured as a whole process tree, idle after a warm-up and at the
peak of the load; the median of the repeats counts. Load on the machine does not change these figures. Plain serving is
without the plugin; vLLM's own DFlash is measured too, to tell what any drafter costs.

Counted are anonymous pages and, each once for the tree, resident pages of mapped files and shared memory. (The sum of
PSS is written down too. It is smaller where other processes map the same libraries.)

The K/V cache has a fixed number of blocks, so that both servers hold the same number of tokens: the drafter's context
rows then come on top. On a server whose budget is in bytes, as is vLLM's default, they are inside that budget and cost
cached tokens instead of memory. The kernel hands out cache pages when they are first written, so the result also says
whether the bound holds with only the rows that the load can have written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from vllm_domino.assets_path import GSM8K_QUESTIONS, TINY
from vllm_domino.bench import provenance
from vllm_domino.bench.memory import ProcessMemory, tree_file_bytes, tree_memory
from vllm_domino.bench.server import ServerSpec, VllmServer, exit_on_signals
from vllm_domino.config.recipes import load_engine_recipe, load_export_recipe
from vllm_domino.engine.build import build_engine
from vllm_domino.engine.manifest import EngineManifest
from vllm_domino.files import sha256_file

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/serving-memory.json"
QUESTIONS = (GSM8K_QUESTIONS, ROOT / "tests/vllm/questions.jsonl")
WEIGHTS_FACTOR, FIXED_BYTES = 1.2, 200_000_000
CONCURRENCY, MAX_TOKENS = 16, 256
BLOCKS, BLOCK_SIZE = 320, 32
ARGS = (
    *("--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "1024"),
    *("--max-num-seqs", str(CONCURRENCY), "--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
    *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(BLOCKS)),
)
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
       "HF_HUB_OFFLINE": "1"}  # fmt: skip
ENGINES = {"domino": "cpu", "domino-by-load": "cpu-by-load"}  # variant: engine recipe
DRAFTERS = {"dflash": TINY / "dflash"}  # vLLM's own, to compare with
VARIANTS = ("plain", *DRAFTERS, *ENGINES)
SCHEDULE = [[1, 1, 15], [2, CONCURRENCY, 7]]  # of the engine with shorter blocks
SETTLE_SECONDS, SAMPLE_SECONDS = 3.0, 0.2
ANSWER_SECONDS = 600.0


def engines(folder: Path) -> dict[str, tuple[Path, EngineManifest]]:
    """Both engines of the tiny drafter, by variant, built anew."""
    export = load_export_recipe(ROOT / "export/tiny.toml")
    made = {}
    for variant, recipe in ENGINES.items():
        out = folder / f"tiny-{recipe}"
        device = load_engine_recipe(ROOT / f"engines/{recipe}.toml")
        made[variant] = out, build_engine(export, device, out, export_root=folder / "export")
    return made


def spec_of(variant: str, drafter: Path | None) -> ServerSpec:
    """A server; those without a drafter of ours do not load the plugin either."""
    env = ENV if variant in ENGINES else {**ENV, "VLLM_PLUGINS": ""}
    config = speculative(variant, drafter) if drafter else None
    return ServerSpec(model=str(TINY / "target"), speculative=config, args=ARGS, env=env)


def speculative(variant: str, drafter: Path) -> dict[str, Any]:
    config = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": 15}
    by_load = {"num_speculative_tokens_per_batch_size": SCHEDULE} if variant == "domino-by-load" else {}
    return config | by_load


def measure(server: VllmServer, questions: list[str]) -> dict[str, Any]:
    """Warm up, then the tree's memory idle, at the peak of the load, and idle again."""
    ask(server, questions[:CONCURRENCY])
    time.sleep(SETTLE_SECONDS)
    idle = in_total(server.pid)
    with sampling(server.pid) as peaks:
        tokens = ask(server, questions)
    time.sleep(SETTLE_SECONDS)
    after = in_total(server.pid)
    # pages of files stay once they are touched, so those after the load were there at its peak
    anonymous = max(peaks)
    peak = {"total": anonymous + after["files"], "anonymous": anonymous, "files": after["files"]}
    metrics = server.metrics()
    return {
        "idle": idle,
        "peak": peak,
        "after": after,
        "output_tokens": tokens,
        "acceptance_length": metrics.acceptance_length,
        "processes": [process.model_dump() for process in tree_memory(server.pid)],
    }


def in_total(pid: int) -> dict[str, int]:
    tree = tree_memory(pid)
    anonymous, files = anonymous_bytes(tree), tree_file_bytes(pid)
    return {
        "total": anonymous + files,
        "anonymous": anonymous,
        "files": files,
        "pss": sum(process.pss for process in tree),
    }


def anonymous_bytes(tree: list[ProcessMemory]) -> int:
    values = [process.anonymous for process in tree]
    if not values or None in values:
        raise ValueError(
            "this kernel does not tell anonymous memory apart (Pss_Anon in smaps_rollup); it takes Linux 5.4"
        )
    return sum(value for value in values if value is not None)


@contextmanager
def sampling(pid: int) -> Iterator[list[int]]:
    """Anonymous bytes of the tree, several times a second, in a list."""
    found: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.is_set():
            found.append(anonymous_bytes(tree_memory(pid)))
            done.wait(SAMPLE_SECONDS)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def ask(server: VllmServer, questions: list[str]) -> int:
    """All questions, at most CONCURRENCY at a time; returns the output tokens."""

    def one(question: str) -> int:
        message = {"role": "user", "content": question}
        body = {"model": "tiny", "messages": [message], "max_tokens": MAX_TOKENS, "temperature": 0}
        reply = httpx.post(
            f"{server.url}/v1/chat/completions", json=body, timeout=ANSWER_SECONDS
        ).raise_for_status()
        return int(reply.json()["usage"]["completion_tokens"])

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return sum(pool.map(one, questions))


def above_plain(runs: list[dict[str, Any]], variant: str) -> dict[str, dict[str, int]]:
    """Medians of a variant minus those of plain serving."""
    parts = {"idle": ("total", "anonymous", "files", "pss"), "peak": ("total", "anonymous", "files")}
    return {
        when: {part: median(runs, variant, when, part) - median(runs, "plain", when, part) for part in names}
        for when, names in parts.items()
    }


def bound(manifest: EngineManifest, peak: int) -> dict[str, Any]:
    """The bound's parts, and whether `peak` bytes above plain serving are within it."""
    config = manifest.config
    row_bytes = 4 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    cache = BLOCKS * BLOCK_SIZE * row_bytes
    others = round(WEIGHTS_FACTOR * manifest.weight_bytes) + FIXED_BYTES
    return {
        "weight_bytes": manifest.weight_bytes,
        "context_row_bytes": row_bytes,
        "context_cache_bytes": cache,
        "bound": others + cache,
        "within_bound": peak <= others + cache,
        "within_bound_without_cache": peak <= others,
    }


def median(runs: list[dict[str, Any]], variant: str, when: str, part: str) -> int:
    return round(statistics.median(run[when][part] for run in runs if run["variant"] == variant))


def table(result: dict[str, Any]) -> str:
    """Megabytes, one line per figure."""
    lines = [f"{'MB':<44}{'idle':>9}{'peak':>9}"]
    for variant in VARIANTS:
        idle, peak = (median(result["runs"], variant, when, "total") / 1e6 for when in ("idle", "peak"))
        lines.append(f"{variant:<44}{idle:>9.1f}{peak:>9.1f}")
    for variant, found in result["variants"].items():
        for part in ("total", "anonymous", "files"):
            idle, peak = (found["above_plain"][when][part] / 1e6 for when in ("idle", "peak"))
            lines.append(f"{variant + ' above plain, ' + part:<44}{idle:>9.1f}{peak:>9.1f}")
        if "bound" in found:
            weights, cache = found["weight_bytes"] / 1e6, found["context_cache_bytes"] / 1e6
            held = "within" if found["within_bound"] else "NOT within"
            parts = f"{WEIGHTS_FACTOR} x {weights:.1f} + {cache:.1f} + {FIXED_BYTES / 1e6:.0f}"
            lines.append(f"{variant}: {held} {found['bound'] / 1e6:.1f} = {parts}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=ROOT / "runs/serving-memory", help="engines and logs")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--result", type=Path, default=RESULT)
    arguments = parser.parse_args()
    questions = [json.loads(line)["question"] for file in QUESTIONS for line in file.read_text().splitlines()]
    built = engines(arguments.work)
    runs = []
    with exit_on_signals():
        for repeat in range(arguments.repeats):
            for variant in VARIANTS:
                drafter = built[variant][0] if variant in built else DRAFTERS.get(variant)
                server = VllmServer(spec_of(variant, drafter), arguments.work / f"r{repeat}-{variant}.log")
                with server:
                    runs.append({"variant": variant, "repeat": repeat} | measure(server, questions))
                print(variant, {when: runs[-1][when] for when in ("idle", "peak", "after")}, flush=True)
    variants: dict[str, dict[str, Any]] = {}
    for variant in VARIANTS[1:]:
        above = above_plain(runs, variant)
        held = bound(built[variant][1], above["peak"]["total"]) if variant in built else {}
        variants[variant] = {"above_plain": above} | held
    result = {
        "schema_version": 1,
        "what": "memory of vllm serve's process tree above plain serving: tiny pair, fp32, K = 15, ONNX Runtime engine",
        "command": "python benchmarks/serving_memory.py",
        "bound": f"{WEIGHTS_FACTOR} x drafter weights + context cache + {FIXED_BYTES} bytes",
        "load": {"requests": len(questions), "concurrency": CONCURRENCY, "max_tokens": MAX_TOKENS},
        "server_args": ARGS,
        "variants": variants,
        "runs": runs,
        "note": arguments.note,
        "load_average": os.getloadavg(),
        "machine": provenance.machine().model_dump(),
        "versions": provenance.versions(),
        "hashes": {f"{out.name}/engine.json": sha256_file(out / "engine.json") for out, _ in built.values()},
        "commit": provenance.commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    arguments.result.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))
    print(arguments.result)


if __name__ == "__main__":
    main()
