"""The shipped tiny pair from one file of questions and answers: every step, its settings and its card.

Each step is a process of its own with one thread: several fit side by side on a machine with two cores, and
none keeps the memory of another.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from vllm_domino.train.recipe import DrafterRecipe
from vllm_domino.train.regenerate import Regeneration, load_prompts, regenerate_shards
from vllm_domino.train.run_dir import file_digest

DRAFTER = {
    "num_hidden_layers": 3,
    "gru_hidden_dim": 256,
    "emb_dim": 128,
    "target_layer_ids": [1, 4, 7, 10],
    "num_anchors": 16,
    "batch_size": 16,
    "max_length": 512,
    "steps": 2000,
    "optimizer": "muon",
    "learning_rate": 2e-3,
    "matrix_learning_rate": 3e-3,
    "init_from_target": True,
}
EAGLE = {"eagle_steps": 5, "num_hidden_layers": 1, "init_from_target": False}
METHODS = {"domino": {}, "dflash": {}, "eagle3": EAGLE}
ENGINE_ARGS = {"enforce_eager": True, "max_num_seqs": 256, "max_num_batched_tokens": 4096}
GREEDY = Regeneration(max_tokens=320, max_length=768, dtype="float32", engine_args=ENGINE_ARGS)
SHARDS = 2  # engines of one thread that answer side by side
MAX_TOKENS = 320

# glibc returns large blocks to the kernel at once; keeping them saves a quarter of the time of a step.
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(200 << 20),
    "THP_MEM_ALLOC_ENABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def one_thread() -> dict[str, str]:
    """Environment of a training process, or of a vLLM engine, that keeps to one thread on any core."""
    return os.environ | MALLOC | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}


def recipe_of(method: str) -> DrafterRecipe:
    """The recipe of one of the shipped drafters."""
    return DrafterRecipe.read(None, DRAFTER | METHODS[method] | {"method": method})


def run_target(questions: Path, out: Path, processes: int, **changes) -> dict:
    """Train tokenizer and target in `processes` processes of one thread; returns the target's facts."""
    arguments = [
        f"--{name.replace('_', '-')}={value}" for name, value in changes.items() if value is not None
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        "-m",
        "vllm_domino.train.target_main",
        "--data",
        str(questions),
        "--out",
        str(out),
        *arguments,
    ]
    if subprocess.run(command, env=one_thread(), check=False).returncode:
        raise ValueError(
            f"training the target failed; see above, then run `vllm-domino train target --out {out}` again"
        )
    return json.loads((out / "facts.json").read_text())


def tiny_answers(target: Path, pairs: Path, work: Path) -> list[Path]:
    """Greedy answers to all questions and to a variation of each; returns one file per engine.

    The target was trained on the questions and knows their answers better than any others': a drafter that sees
    only those learns a surer target than it will meet.
    """
    messages, _ = load_prompts(str(pairs), "train", strict=True)
    messages = [message for one in messages for message in (one, other_numbers(one))]
    return regenerate_shards(str(target), messages, work, GREEDY, one_thread(), SHARDS)


def other_numbers(messages: list[dict]) -> list[dict]:
    """The same question with other digits: new to the target, and like what it was trained on."""
    digits = random.Random(json.dumps(messages))

    def other(found: re.Match[str]) -> str:
        first, rest = digits.choice("123456789"), found[0][1:]
        return first + "".join(digits.choice("0123456789") for _ in rest)

    return [one | {"content": re.sub(r"\d+", other, one["content"])} for one in messages]


def drafter_command(
    target: Path, data: list[Path], out: Path, changes: dict, features: Path | None = None
) -> list[str]:
    """Command line that trains a drafter with the shipped recipe and some changes to it."""
    values = DRAFTER | METHODS.get(changes.get("method", ""), {}) | changes
    return recipe_command(target, data, out, values, features)


def recipe_command(
    target: Path, data: list[Path], out: Path, values: dict, features: Path | None = None
) -> list[str]:
    """Command line that trains a drafter with these recipe fields, or goes on with the run in `out`.

    Drafters with the same `features` directory share what the target computes.
    """
    command = [sys.executable, "-m", "vllm_domino.cli.main", "train", "drafter", "--target", str(target)]
    command += [f"--data={path}" for path in data]
    command += ["--out", str(out), *(f"--set={name}={json.dumps(value)}" for name, value in values.items())]
    command += ["--features", str(features)] if features else []
    command += ["--save-every=100"]  # on a CPU five hundred steps are most of an hour
    return [*command, "--resume"] if (out / "run.json").exists() else command


def start_drafter(
    method: str, target: Path, data: list[Path], out: Path, features: Path | None = None
) -> subprocess.Popen:
    """Train one of the shipped drafters in the background; its log is `OUT/train.log`."""
    return in_background(drafter_command(target, data, out, {"method": method}, features), out)


def in_background(command: list[str], out: Path) -> subprocess.Popen:
    """Start a training command with one thread; its log is `OUT/train.log`."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "train.log").open("a") as log:
        return subprocess.Popen(command, env=one_thread(), stdout=log, stderr=log)


def wait_for(process: subprocess.Popen, out: Path) -> None:
    """Raises ValueError if the training of `in_background` fails."""
    if process.wait():
        raise ValueError(
            f"training {out.name} failed: see {out / 'train.log'}, then run the same command again"
        )


def make_tiny(source: str, out: Path, test_data: Path | None = None) -> dict:
    """Run every step that is not done yet; returns a summary. `out` then holds target, domino, dflash, eagle3 and
    `token-frequencies.json`.
    """
    from vllm_domino.train.data import count_tokens
    from vllm_domino.train.evaluate import evaluate_checkpoint, read_questions
    from vllm_domino.train.target_main import load_pairs

    started = time.monotonic()
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    pairs = work / "pairs.jsonl"
    if not pairs.exists():
        pairs.write_text("".join(json.dumps(pair) + "\n" for pair in load_pairs(source)))
    target = out / "target"
    if not (target / "facts.json").exists():
        run_target(pairs, target, processes=min(2, os.cpu_count() or 1))
    data = tiny_answers(target, pairs, work)
    counts, _ = count_tokens(data, strict=True)
    (out / "token-frequencies.json").write_text(json.dumps(counts) + "\n")
    waves = (
        [["domino", "dflash"], ["eagle3"]] if (os.cpu_count() or 1) > 1 else [[method] for method in METHODS]
    )
    for wave in waves:
        running = {
            method: start_drafter(method, target, data, work / method, work / "features")
            for method in wave
            if not (work / method / "facts.json").exists()
        }
        for method, process in running.items():
            wait_for(process, work / method)
    summary = {
        "seconds": round(time.monotonic() - started),
        "machine": platform.processor() or platform.machine(),
    }
    for method in METHODS:
        publish(work / method, out / method)
        if test_data and method != "eagle3":  # vLLM itself decodes with EAGLE-3
            figures = evaluate_checkpoint(
                str(target), str(out / method), read_questions(test_data, 128), max_new_tokens=MAX_TOKENS
            )
            summary[method] = figures["acceptance_length"]
    return summary


def publish(run: Path, out: Path) -> None:
    """Copy the checkpoint of a run and write its card."""
    import shutil

    out.mkdir(parents=True, exist_ok=True)
    for file in [*run.glob("*.safetensors"), *run.glob("*.safetensors.index.json"), run / "config.json"]:
        shutil.copy(file, out / file.name)
    facts, identity = json.loads((run / "facts.json").read_text()), json.loads((run / "run.json").read_text())
    (out / "README.md").write_text(card(out.name, out, facts, identity["recipe"], identity["data_sha256"]))


def card(name: str, directory: Path, facts: dict, recipe: dict, data_digest: str) -> str:
    """README of one checkpoint: how it was made, and the hash of what came out."""
    weights = sorted(directory.glob("*.safetensors"))
    settings = "\n".join(
        f"| `{key}` | {value} |" for key, value in sorted(recipe.items()) if value is not None
    )
    return f"""# Tiny {name}

One step of `vllm-domino train tiny`: trained on the target's greedy answers to the questions of GSM8K's train
split (MIT licence, OpenAI).

| | |
|---|---|
| steps | {facts["steps"]} |
| seed | {recipe["seed"]} |
| time | {facts["seconds"]:.0f} s in {facts.get("processes", 1)} process(es) of one thread |
| throughput | {facts["tokens_per_s"]} tokens/s |
| data | SHA-256 {data_digest} |
| weights | SHA-256 {file_digest(weights)} (files in the order of their names) |

| recipe | |
|---|---|
{settings}
"""
