"""The paper's ablation (its §5): what the head, teacher forcing and the curriculum are each worth, same data
and steps.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from vllm_domino.train.data import Sample
from vllm_domino.train.replay import replay_checkpoint
from vllm_domino.train.tiny import drafter_command, in_background, wait_for

# row -> what differs from the shipped Domino recipe
ROWS: dict[str, dict] = {
    "trained_without_head": {"method": "dflash"},
    "test_time_training": {"method": "domino", "prefixes": "self", "curriculum": False},
    "teacher_forcing": {"method": "domino", "curriculum": False},
    "teacher_forcing_curriculum": {"method": "domino"},
}
HEAD_REMOVED = "head_removed"  # no training: the last row's drafter, its head taken off


def run_ablation(
    target: Path,
    data: list[Path],
    out: Path,
    answers: list[Sample],
    *,
    steps: int,
    seeds: list[int],
    jobs: int = 1,
) -> dict:
    """Train every row with every seed (those done already are kept) and replay the greedy answers.

    Returns row -> {"acceptance_length": mean over seeds, "by_seed": {seed: figure}, "steps": steps}.
    """
    todo = [(row, seed) for seed in seeds for row in ROWS]
    running: list[tuple[subprocess.Popen, Path]] = []
    for row, seed in todo:
        directory = out / f"{row}-{seed}"
        if (directory / "facts.json").exists():
            continue
        while len(running) >= jobs:
            wait_for(*running.pop(0))
        changes = ROWS[row] | {"steps": steps, "seed": seed}
        command = drafter_command(target, data, directory, changes, out / "work/features")
        running.append((in_background(command, directory), directory))
    for process, directory in running:
        wait_for(process, directory)
    figures: dict[str, dict] = {row: {} for row in [HEAD_REMOVED, *ROWS]}
    for row, seed in todo:
        checkpoint = str(out / f"{row}-{seed}")
        figures[row][seed] = replay_checkpoint(str(target), checkpoint, answers)["acceptance_length"]
        if row == "teacher_forcing_curriculum":
            bare = replay_checkpoint(str(target), checkpoint, answers, without_head=True)
            figures[HEAD_REMOVED][seed] = bare["acceptance_length"]
    return {row: _summary(by_seed, steps) for row, by_seed in figures.items()}


def _summary(by_seed: dict[int, float], steps: int) -> dict:
    mean = torch.tensor(list(by_seed.values()), dtype=torch.float64).mean().item()
    return {"acceptance_length": round(mean, 4), "by_seed": by_seed, "steps": steps}
