"""`vllm-domino train …`: data, target, drafter, evaluation, and the tiny pair in one command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train drafters: regenerate data, train, evaluate.", no_args_is_help=True)

Target = Annotated[str, typer.Option(help="Target model: directory or Hugging Face id.")]
Strict = Annotated[bool, typer.Option(help="Stop at the first broken line instead of skipping it.")]


@app.command()
def data(
    target: Target,
    prompts: Annotated[
        str, typer.Option(help="JSONL file, or Hugging Face data set id such as openai/gsm8k.")
    ],
    out: Annotated[Path, typer.Option(help="JSONL of prompt and response ids; an interrupted run goes on.")],
    split: Annotated[str, typer.Option(help="Split of a Hugging Face data set.")] = "train",
    limit: Annotated[int | None, typer.Option(help="Use the first N prompts.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: float = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Longest response.")] = 2048,
    max_length: Annotated[int, typer.Option(help="Longest prompt and response together.")] = 3072,
    dtype: str = "auto",
    thinking: Annotated[bool, typer.Option(help="Let the chat template switch thinking on.")] = False,
    tag: Annotated[str, typer.Option(help="Prefix of ids, to keep several passes in one file.")] = "r",
    seed: int = 0,
    engine_args: Annotated[str, typer.Option(help="JSON of further vLLM engine arguments.")] = "{}",
    strict: Strict = False,
) -> None:
    """Let the target answer prompts through vLLM's offline engine."""
    from vllm_domino.train.regenerate import Regeneration, load_prompts, regenerate

    messages, broken = load_prompts(prompts, split, strict)
    for problem in broken:
        typer.echo(f"skipped {problem}", err=True)
    options = Regeneration(
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        max_length=max_length,
        dtype=dtype,
        seed=seed,
        thinking=thinking,
        engine_args=json.loads(engine_args),
    )
    typer.echo(
        json.dumps(regenerate(target, messages[:limit], out, options, tag) | {"broken_lines": len(broken)})
    )


@app.command()
def frequencies(
    training_data: Annotated[
        list[Path],
        typer.Argument(metavar="DATA", help="JSONL from `train data`; more than one may be given."),
    ],
    out: Annotated[Path, typer.Option(help="JSON to write: token id -> count.")],
    strict: Strict = False,
) -> None:
    """Count the tokens of the target's answers, for `token_frequencies` of an export recipe."""
    from vllm_domino.train.data import count_tokens

    counts, read = count_tokens(training_data, strict)
    for problem in read.broken:
        typer.echo(f"skipped {problem}", err=True)
    out.write_text(json.dumps(counts) + "\n")
    typer.echo(
        json.dumps({"samples": read.read, "tokens": sum(counts.values()), "different_tokens": len(counts)})
    )


@app.command()
def target(
    questions: Annotated[Path, typer.Option("--data", help="JSONL with `question` and `answer`.")],
    out: Annotated[Path, typer.Option(help="Directory of the target to write.")],
    vocab_size: int = 4096,
    epochs: Annotated[float | None, typer.Option(help="Default: the shipped target's.")] = None,
    processes: Annotated[int, typer.Option(help="Processes of one thread each.")] = 2,
    seed: int = 0,
) -> None:
    """Train the tiny target (and its tokenizer) from scratch."""
    from vllm_domino.train.tiny import run_target

    typer.echo(
        json.dumps(run_target(questions, out, processes, vocab_size=vocab_size, epochs=epochs, seed=seed))
    )


@app.command()
def drafter(
    target: Target,
    training_data: Annotated[
        list[Path], typer.Option("--data", help="JSONL from `train data`; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="Run directory; the checkpoint is written there.")],
    recipe: Annotated[Path | None, typer.Option(help="TOML with recipe fields.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Recipe field=value; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest state in --out.")] = False,
    eval_prompts: Annotated[
        Path | None, typer.Option(help="JSONL of questions to decode while training.")
    ] = None,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0: never.")] = 0,
    eval_limit: int = 16,
    save_every: int = 500,
    log_every: int = 20,
    processes: Annotated[int, typer.Option(help="Processes on this host (DDP); 1: this one.")] = 1,
    features: Annotated[
        Path | None,
        typer.Option(
            help="Keep the target's features here (a local disk), for later epochs and other drafters of this target "
            "and data. Takes tokens x layers x hidden size x 2 bytes (4 with precision fp32): 4.3 GB for the tiny pair."
        ),
    ] = None,
    strict: Strict = False,
) -> None:
    """Train a Domino, DFlash or EAGLE-3 drafter.

    On 8 GPUs: `--processes 8` (DDP), or `accelerate launch --use_fsdp … -m vllm_domino.cli.main train
        drafter …`.
    """
    if processes > 1:
        raise typer.Exit(_relaunch(processes))
    from vllm_domino.train.evaluate import training_evaluation
    from vllm_domino.train.loop import LoopOptions, train_drafter
    from vllm_domino.train.recipe import DrafterRecipe, parse_changes

    options = LoopOptions(
        log_every=log_every,
        save_every=save_every,
        eval_every=eval_every,
        resume=resume,
        strict=strict,
        features=features,
    )
    evaluate = training_evaluation(target, eval_prompts, eval_limit) if eval_prompts else None
    facts = train_drafter(
        target, training_data, out, DrafterRecipe.read(recipe, parse_changes(change or [])), options, evaluate
    )
    typer.echo(json.dumps(facts))


@app.command("eval")
def evaluate(
    target: Target,
    draft: Annotated[str, typer.Option(help="Draft checkpoint: directory or Hugging Face id.")],
    questions: Annotated[Path, typer.Option("--data", help="JSONL with `question` or `prompt`.")],
    limit: Annotated[int, typer.Option(help="Use the first N questions.")] = 128,
    max_tokens: int = 320,
    temperature: float = 0.0,
    without_head: Annotated[bool, typer.Option(help="Drop the Domino head: the backbone alone.")] = False,
) -> None:
    """Acceptance length and acceptance by position, by the reference loop."""
    from vllm_domino.train.evaluate import evaluate_checkpoint, read_questions

    figures = evaluate_checkpoint(
        target,
        draft,
        read_questions(questions, limit),
        max_new_tokens=max_tokens,
        temperature=temperature,
        without_head=without_head,
    )
    typer.echo(json.dumps(figures))


@app.command()
def replay(
    target: Target,
    draft: Annotated[str, typer.Option(help="Domino, DFlash or EAGLE-3 checkpoint.")],
    answers: Annotated[Path, typer.Option("--data", help="Greedy answers of the target, from `train data`.")],
    limit: int = 128,
    num_drafts: Annotated[
        int | None, typer.Option(help="Drafts per round; default: the whole block.")
    ] = None,
    without_head: bool = False,
) -> None:
    """Acceptance of greedy decoding from answers made before: the figures of `eval`, in seconds."""
    from vllm_domino.train.data import read_samples
    from vllm_domino.train.replay import replay_checkpoint

    samples, _ = read_samples([answers], max_length=1 << 30, strict=True)
    figures = replay_checkpoint(
        target, draft, samples[:limit], num_drafts=num_drafts, without_head=without_head
    )
    typer.echo(json.dumps(figures))


@app.command()
def ablation(
    target: Annotated[Path, typer.Option()],
    training_data: Annotated[list[Path], typer.Option("--data", help="JSONL from `train data`; repeatable.")],
    answers: Annotated[Path, typer.Option(help="Greedy answers to held-out questions, from `train data`.")],
    out: Annotated[Path, typer.Option()],
    steps: int = 1400,
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1",
    jobs: Annotated[int, typer.Option(help="Runs side by side.")] = 1,
    limit: int = 128,
) -> None:
    """The paper's ablation on the tiny pair: head, teacher forcing and curriculum, same data and steps."""
    from vllm_domino.train.ablation import run_ablation
    from vllm_domino.train.data import read_samples

    samples, _ = read_samples([answers], max_length=1 << 30, strict=True)
    table = run_ablation(
        target,
        training_data,
        out,
        samples[:limit],
        steps=steps,
        jobs=jobs,
        seeds=[int(seed) for seed in seeds.split(",")],
    )
    (out / "ablation.json").write_text(json.dumps(table, indent=2) + "\n")
    typer.echo(json.dumps(table))


@app.command()
def results(
    target: Annotated[Path, typer.Option()],
    runs: Annotated[Path, typer.Option(help="Directory with the runs domino, dflash and eagle3.")],
    test: Annotated[Path, typer.Option(help="JSONL of held-out questions.")],
    answers: Annotated[Path, typer.Option(help="The target's greedy answers to them, from `train data`.")],
    out: Annotated[Path, typer.Option(help="JSON to write.")],
    ablation_table: Annotated[
        Path | None, typer.Option("--ablation", help="JSON from `train ablation`.")
    ] = None,
    command: Annotated[list[str] | None, typer.Option(help="A command to record; may be repeated.")] = None,
) -> None:
    """Measure the trained drafters and write them up with their provenance."""
    from vllm_domino.train.results import tiny_results

    found = {method: runs / method for method in ("domino", "dflash", "eagle3") if (runs / method).is_dir()}
    figures = tiny_results(target, found, test, answers, ablation_table, command or [])
    out.write_text(json.dumps(figures, indent=2) + "\n")
    typer.echo(json.dumps(figures["acceptance_length"]))


@app.command()
def plot(
    result: Annotated[
        Path, typer.Argument(help="JSON of `train results` or `train smollm2`.", exists=True, dir_okay=False)
    ],
) -> None:
    """Draw acceptance by draft position, and learning curves; the PNG lies beside the JSON."""
    from vllm_domino.train.plot import plot_training

    typer.echo(plot_training(result))


@app.command()
def tiny(
    questions: Annotated[
        str, typer.Option("--data", help="GSM8K train JSONL, or a Hugging Face id.")
    ] = "openai/gsm8k",
    out: Annotated[
        Path,
        typer.Option(help="Directory for target, domino, dflash and eagle3; 5 GB, most of it in OUT/work."),
    ] = Path("tiny"),
    test_data: Annotated[Path | None, typer.Option(help="JSONL of questions to evaluate on.")] = None,
) -> None:
    """Make the whole tiny pair: tokenizer, target, regenerated data, Domino, DFlash and EAGLE-3 drafters."""
    from vllm_domino.train.tiny import make_tiny

    typer.echo(json.dumps(make_tiny(questions, out, test_data)))


@app.command()
def smollm2(
    humaneval: Annotated[Path, typer.Option(help="HumanEval's JSONL, gzipped or not.")],
    train_questions: Annotated[
        str, typer.Option("--data", help="GSM8K train JSONL, or a Hugging Face id.")
    ] = "openai/gsm8k",
    test_questions: Annotated[
        str, typer.Option("--test-data", help="GSM8K test JSONL, or a Hugging Face id.")
    ] = "openai/gsm8k",
    out: Annotated[
        Path,
        typer.Option(help="Directory for target, domino, dflash and results; 5 GB, most of it in OUT/work."),
    ] = Path("runs/smollm2"),
    questions: Annotated[int, typer.Option(help="Questions of GSM8K to train on.")] = 2000,
    steps: Annotated[int, typer.Option(help="Training steps of each drafter.")] = 1000,
) -> None:
    """Drafters for SmolLM2-135M-Instruct: convert it, let it answer, train Domino and DFlash, measure."""
    from vllm_domino.train.smollm2 import make_smollm2

    figures = make_smollm2(train_questions, test_questions, humaneval, out, questions=questions, steps=steps)
    typer.echo(json.dumps(figures))


def _relaunch(processes: int) -> int:
    """Run this same command under torchrun; Accelerate finds its processes there."""
    kept, skip = [], False
    for argument in sys.argv[1:]:
        if skip or argument == "--processes" or argument.startswith("--processes="):
            skip = argument == "--processes"
            continue
        kept.append(argument)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    return subprocess.run([*launcher, "-m", "vllm_domino.cli.main", *kept], check=False).returncode
