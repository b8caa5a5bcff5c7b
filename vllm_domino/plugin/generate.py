"""Answer prompts with the target through vLLM's offline engine: the data that a drafter is trained on.

A process of its own (`python -m vllm_domino.plugin.generate`), so that training never shares memory with an
engine.

In:  JSONL, one `{"id": str, "prompt_token_ids": [int]}` per line.
Out: JSONL, one `{"id", "prompt_token_ids", "response_token_ids", "finish_reason"}` per line, appended chunk
     by chunk; ids that are in it already are not asked again, so a killed run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path


def read_done(path: Path) -> set[str]:
    """Ids answered so far; a last line that a kill cut short is removed from the file."""
    if not path.exists():
        return set()
    done, kept = set(), []
    for line in path.read_text().splitlines():
        try:
            done.add(json.loads(line)["id"])
            kept.append(line)
        except (json.JSONDecodeError, KeyError):
            continue
    path.write_text("".join(line + "\n" for line in kept))
    return done


def generate(arguments: argparse.Namespace) -> dict:
    """Answer every request that is not answered yet; returns counts and throughput."""
    from vllm import LLM, SamplingParams

    requests = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    done = read_done(arguments.out)
    todo = [request for request in requests if request["id"] not in done]
    sys.stderr.write(f"{len(todo)} of {len(requests)} prompts to answer\n")
    if not todo:
        return {"requests": len(requests), "answered": 0, "tokens": 0, "seconds": 0.0}
    engine = LLM(
        model=str(arguments.target),
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        seed=arguments.seed,
        **json.loads(arguments.engine_args),
    )
    sampling = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        detokenize=False,
    )
    # four full batches: a stop loses little, and the tail of a chunk leaves few seats empty
    size = arguments.chunk or 4 * engine.llm_engine.vllm_config.scheduler_config.max_num_seqs
    started, tokens = time.monotonic(), 0
    with arguments.out.open("a") as sink:
        for start in range(0, len(todo), size):
            chunk = todo[start : start + size]
            outputs = engine.generate(
                [{"prompt_token_ids": request["prompt_token_ids"]} for request in chunk],
                sampling,
                use_tqdm=False,
            )
            for request, output in zip(chunk, outputs, strict=True):
                answer = output.outputs[0]
                tokens += len(answer.token_ids)
                sink.write(
                    json.dumps(
                        {
                            "id": request["id"],
                            "prompt_token_ids": request["prompt_token_ids"],
                            "response_token_ids": list(answer.token_ids),
                            "finish_reason": answer.finish_reason,
                        }
                    )
                    + "\n"
                )
            sink.flush()
            seconds = time.monotonic() - started
            sys.stderr.write(f"{start + len(chunk)}/{len(todo)} answered, {tokens / seconds:.0f} tokens/s\n")
    return {
        "requests": len(requests),
        "answered": len(todo),
        "tokens": tokens,
        "seconds": round(time.monotonic() - started, 1),
    } | acceptance(engine)


def acceptance(engine) -> dict:
    """Acceptance length by vLLM's own counters, if the engine speculates and keeps statistics."""
    try:
        counters = {metric.name: metric for metric in engine.get_metrics()}
    except AssertionError:  # statistics are off, as they are by default offline
        return {}
    drafts = counters.get("vllm:spec_decode_num_drafts")
    if drafts is None or not drafts.value:
        return {}
    accepted = counters["vllm:spec_decode_num_accepted_tokens"].value
    by_position = counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return {
        "acceptance_length": round(1.0 + accepted / drafts.value, 4),
        "per_position": [round(count / drafts.value, 4) for count in by_position],
    }


def main() -> None:
    """Command line of the regeneration process; the last line of stdout is JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_domino.plugin.generate", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--target", required=True, help="model directory or Hugging Face id")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=3072)
    parser.add_argument(
        "--chunk", type=int, help="prompts per write to --out (default: four times max_num_seqs)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine-args", default="{}", help="JSON of further vLLM engine arguments")
    sys.stdout.write(json.dumps(generate(parser.parse_args())) + "\n")


if __name__ == "__main__":
    main()
