"""The training loop: Accelerate places it (CPU, one GPU, DDP, FSDP), everything else is a function of the
step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from vllm_domino.train.data import DataCounts, Sample, StepBatches, check_samples, read_samples
from vllm_domino.train.feature_store import FeatureStore
from vllm_domino.train.losses import lambda_base
from vllm_domino.train.objective import accepted_lengths
from vllm_domino.train.optim import build_optimizers, learning_rate_factor
from vllm_domino.train.recipe import DrafterRecipe, check_target, mask_token_id
from vllm_domino.train.run_dir import RunDirectory
from vllm_domino.train.target_features import FrozenTarget
from vllm_domino.train.tasks import Task, build_task


@dataclass(kw_only=True, slots=True, frozen=True)
class LoopOptions:
    """How often things happen and where; nothing here changes what is trained.

    features: directory of feature stores (`feature_store.py`); None runs the target in every step.
    """

    log_every: int = 20
    save_every: int = 500
    eval_every: int = 0
    resume: bool = False
    strict: bool = False
    features: Path | None = None
    stop_after: int | None = None  # end the process after this many steps of this call, as a kill would


def train_drafter(
    target_source: str,
    data: list[Path],
    out: Path,
    recipe: DrafterRecipe,
    options: LoopOptions | None = None,
    evaluate: Callable[[nn.Module, Any], dict] | None = None,
) -> dict:
    """Train one drafter and write its checkpoint to `out`; returns the facts for its card.

    `evaluate(drafter, target model)` gives figures for the log, called on the main process every
    `eval_every` steps.
    """
    trainer, facts = prepare_training(target_source, data, out, recipe, options or LoopOptions(), evaluate)
    facts = trainer.train() | facts
    if trainer.accelerator.is_main_process:
        (out / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def prepare_training(
    target_source: str,
    data: list[Path],
    out: Path,
    recipe: DrafterRecipe,
    options: LoopOptions,
    evaluate: Callable[[nn.Module, Any], dict] | None = None,
) -> tuple[Trainer, dict]:
    """Everything before the first step, with all that may be refused; returns facts of target and data too."""
    from transformers import AutoConfig, AutoTokenizer

    accelerator = Accelerator(mixed_precision="bf16" if recipe.precision == "bf16" else "no")
    tokenizer = AutoTokenizer.from_pretrained(target_source)
    target_config = AutoConfig.from_pretrained(target_source)
    mask_id = mask_token_id(recipe, tokenizer)
    layer_ids = check_target(recipe, target_config, mask_id)
    samples, counts = read_samples(data, recipe.max_length, options.strict)
    check_samples(
        samples, recipe.block_size, None if recipe.method == "eagle3" else mask_id, target_config.vocab_size
    )
    run = RunDirectory(out, recipe, target_source, data, options.resume, main=accelerator.is_main_process)
    accelerator.wait_for_everyone()  # every process has looked before the main one writes
    dtype = (
        torch.float32 if accelerator.device.type == "cpu" or recipe.precision == "fp32" else torch.bfloat16
    )
    target = FrozenTarget(target_source, layer_ids, dtype, accelerator.device)
    store = None
    if options.features:
        store = FeatureStore(options.features, target, samples, autocast=recipe.precision == "bf16")
    torch.manual_seed(recipe.seed)
    task = build_task(recipe, target, mask_id, samples, tokenizer.pad_token_id or 0, store)
    trainer = Trainer(accelerator, task, samples, recipe, options, run, evaluate)
    run.start()  # after everything that refuses: a refused call leaves no directory behind
    return trainer, _data_facts(counts, samples) | {"target": target_source}


class Trainer:
    """State of one run: the prepared module, its optimizers and the step counter."""

    def __init__(
        self,
        accelerator: Accelerator,
        task: Task,
        samples: list[Sample],
        recipe: DrafterRecipe,
        options: LoopOptions,
        run: RunDirectory,
        evaluate,
    ) -> None:
        self.accelerator, self.task, self.recipe, self.options, self.run = (
            accelerator,
            task,
            recipe,
            options,
            run,
        )
        self.evaluate = evaluate
        world = accelerator.num_processes
        self.batches = StepBatches(samples, recipe.batch_size, recipe.accumulation * world, recipe.seed)
        self.total_steps = recipe.steps or max(1, round(recipe.epochs * self.batches.steps_per_epoch))
        # FSDP shards the module, and optimizers must be made from the shards.
        self.module = accelerator.prepare(task.module.to(accelerator.device))
        self.optimizers = [accelerator.prepare(o) for o in build_optimizers(self.module, recipe)]
        self.peaks = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.done, self.slots, self.tokens = 0, 0, 0

    def train(self) -> dict:
        """Run all steps that are left; returns counts and throughput."""
        latest = self.run.latest_state()
        if self.options.resume and latest:
            self.done, path = latest
            self.accelerator.load_state(str(path))
        first, started = self.done, time.monotonic()
        while self.done < self.total_steps:
            values = self.step()
            self.done += 1
            if self.done % self.options.log_every == 0 or self.done == self.total_steps:
                seconds = time.monotonic() - started
                self.run.log(
                    self.done,
                    values()
                    | {
                        "tokens_per_s": round(self.tokens / seconds, 1),
                        "slots_per_s": round(self.slots / seconds, 1),
                        "steps_per_s": round((self.done - first) / seconds, 4),
                        "of": self.total_steps,
                    },
                )
            if self.options.eval_every and self.evaluate and self.done % self.options.eval_every == 0:
                self.run_evaluation()
            if self.done % self.options.save_every == 0 or self.done == self.total_steps:
                self.save()
            if self.options.stop_after and self.done - first >= self.options.stop_after:
                break
        seconds = time.monotonic() - started
        return {
            "steps": self.done,
            "seconds": round(seconds, 1),
            "tokens_per_s": round(self.tokens / seconds, 1),
            "slots_per_s": round(self.slots / seconds, 1),
            "processes": self.accelerator.num_processes,
            "parameters": sum(p.numel() for p in self.task.module.parameters()),
        }

    def lambda_base(self) -> float:
        """Share of the base loss in the step that comes next."""
        if not self.recipe.has_head or not self.recipe.curriculum:
            return 0.0
        return lambda_base(self.done, self.total_steps, decay_ratio=self.recipe.lambda_decay_ratio)

    def step(self) -> Callable[[], dict]:
        """One optimizer step; returns a function that gathers its figures when they are wanted."""
        accelerator, world = self.accelerator, self.accelerator.num_processes
        factor = learning_rate_factor(self.done, self.total_steps, self.recipe.warmup_ratio)
        for optimizer, lrs in zip(self.optimizers, self.peaks, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * factor
        epoch, micro = self.batches.step(self.done)
        mine = [self.task.prepare(indices, epoch) for indices in micro[accelerator.process_index :: world]]
        mine = [prepared.to(accelerator.device) for prepared in mine]
        local = torch.tensor([prepared.weight_sum for prepared in mine], device=accelerator.device).sum()
        weight_sum = accelerator.reduce(local, "sum").item()
        share, terms = self.lambda_base(), []
        for place, prepared in enumerate(mine):
            last = place == len(mine) - 1
            with nullcontext() if last else accelerator.no_sync(self.module):
                terms.append(self.task.loss(self.module, prepared, share, weight_sum))
                # DDP and FSDP average over processes, the loss is normalised over all of them already.
                accelerator.backward(terms[-1].loss * world)
            self.slots += prepared.slots * world
            self.tokens += prepared.tokens * world
        norm = accelerator.clip_grad_norm_(self.module.parameters(), self.recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return lambda: self.figures(terms, mine, norm, share, factor)

    def figures(self, terms, mine, norm, share, factor) -> dict:
        """Losses and teacher-forced acceptance of a step, summed over micro-batches and processes."""
        sums = torch.zeros(5, device=self.accelerator.device)
        for term, prepared in zip(terms, mine, strict=True):
            lengths, blocks = accepted_lengths(term.hits, prepared.weights)
            sums += torch.stack(
                [term.loss.detach().float(), term.base, term.final, lengths.float(), blocks.float()]
            )
        loss, base, final, lengths, blocks = self.accelerator.reduce(sums, "sum").tolist()
        out = {
            "loss": loss,
            "lambda": share,
            "lr_factor": round(factor, 5),
            "grad_norm": float(norm),
            "teacher_forced_acceptance": round(lengths / max(1.0, blocks), 4),
        }
        return out | ({"base_part": base, "final_part": final} if self.recipe.has_head else {})

    def run_evaluation(self) -> None:
        """Gather the weights and let the main process decode with them."""
        weights = self.accelerator.get_state_dict(self.module)
        if self.accelerator.is_main_process:
            self.run.log(self.done, self.evaluate(self.task.rebuild(weights), self.task.target.model))
        self.accelerator.wait_for_everyone()

    def save(self) -> None:
        """Resumable state of all processes, then the public checkpoint by the main one."""
        self.accelerator.save_state(str(self.run.state_path(self.done)), safe_serialization=False)
        self.accelerator.wait_for_everyone()
        self.run.commit_state(self.done)
        weights = self.accelerator.get_state_dict(self.module)
        if self.accelerator.is_main_process:
            self.task.write(weights, self.run.path)
        self.accelerator.wait_for_everyone()


def _data_facts(counts: DataCounts, samples: list[Sample]) -> dict:
    return {
        "samples": counts.read,
        "cut": counts.cut,
        "broken_lines": counts.broken,
        "data_tokens": sum(len(sample.ids) for sample in samples),
    }
