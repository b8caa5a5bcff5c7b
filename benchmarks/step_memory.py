"""Memory of session and draft step with a drafter of 0.4 GB: what the tiny pair of serving_memory.py is too small for.

    python benchmarks/step_memory.py DIR        # engine in DIR, benchmarks/results/step-memory.json; 20 minutes

Random weights, fp32, ONNX Runtime, one thread, no vLLM: a process opens the engine, writes context rows and drafts a
few times. What it takes above before are anonymous pages at the peak, and resident pages of files; the target's tables
and the paged context cache are there before. `one_slice` is without the bounds that a CPU has on context rows at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from make_full_size import CONFIG, write
from serving_memory import FIXED_BYTES, WEIGHTS_FACTOR

from vllm_domino.bench import provenance
from vllm_domino.bench.memory import tree_file_bytes, tree_memory
from vllm_domino.config.recipes import EngineRecipe, ExportRecipe
from vllm_domino.engine.build import build_engine
from vllm_domino.engine.check import load_engine_dir
from vllm_domino.runtime import draft_step
from vllm_domino.runtime.onnx_session import OnnxSession

RESULT = Path(__file__).parent / "results/step-memory.json"
DRAFTER = replace(
    CONFIG,
    hidden_size=1024,
    intermediate_size=3072,
    num_attention_heads=16,
    vocab_size=32768,
    mask_token_id=32767,
)
WINDOW, PAGE, STEPS = 512, 32, 4
CASES = ((1, 512), (16, 128), (16, 512))  # requests, context tokens
CPU = torch.device("cpu")


def engine(folder: Path) -> Path:
    """The drafter's engine, built where it is not there yet."""
    out = folder / "engine"
    try:
        load_engine_dir(out)
    except ValueError:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, DRAFTER)
        export = ExportRecipe(
            name="step-memory", checkpoint=str(folder / "checkpoint"), candidate_pool=2048, verify_context=256
        )
        device = EngineRecipe(
            name="cpu",
            backend="onnxruntime",
            dtype="float32",
            draft_window=WINDOW,
            providers=("CPUExecutionProvider",),
        )
        build_engine(export, device, out, export_root=folder / "export", progress=print)
    return out


def measure(folder: Path, batch: int, context: int, one_slice: bool) -> dict:
    """In a process of its own, since memory that was once touched stays with it."""
    torch.set_num_threads(1)
    if one_slice:
        draft_step.CPU_GATHER_BYTES, draft_step.CPU_PROJECT_ROWS = 1 << 40, draft_step.PROJECT_ROWS
    manifest = load_engine_dir(folder)
    config = manifest.config
    table = torch.randn(config.vocab_size, config.hidden_size)
    pages = torch.ones(batch * context // PAGE + 1, PAGE, torch.Size(config.context_row_shape).numel())
    blocks = torch.arange(1, len(pages), dtype=torch.int32).view(batch, -1)
    start = _memory()
    session = OnnxSession(folder, manifest, CPU)
    session.bind_target(table, table)
    step = draft_step.DraftStep(session, max_requests=batch, max_rows=1024, draft_window=WINDOW, device=CPU)
    step.attach_cache(pages)
    opened = _memory()
    peaks, done = [opened[0]], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            peaks.append(_memory()[0])

    sampler = threading.Thread(target=sample)
    sampler.start()
    rows = torch.arange(1024)
    step.store_context(torch.randn(len(rows), config.feature_size), rows, rows % (len(pages) * PAGE))
    seconds = []
    for _ in range(STEPS):
        before = time.thread_time()
        step.draft(torch.arange(batch), torch.full((batch,), context - 1), blocks, context)
        seconds.append(time.thread_time() - before)
    done.set()
    sampler.join()
    files = _memory()[1] - start[1]
    return {
        "batch": batch,
        "context": context,
        "one_slice": one_slice,
        "opened_bytes": sum(opened) - sum(start),
        "peak_bytes": max(peaks) - start[0] + files,
        "files_bytes": files,
        "step_cpu_ms": round(1e3 * min(seconds)),
        "weight_bytes": manifest.weight_bytes,
    }


def _memory() -> tuple[int, int]:
    """Anonymous bytes, and resident bytes of files, of this process."""
    anonymous = tree_memory(os.getpid())[0].anonymous
    assert anonymous is not None, "this kernel has no Pss_Anon"
    return anonymous, tree_file_bytes(os.getpid())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = engine(arguments.folder)
    if arguments.case:
        print(json.dumps(measure(out, *json.loads(arguments.case))))
        return
    os.environ["VLLM_DOMINO_ORT_THREADS"] = "1"
    rows = []
    for batch, context in CASES:
        for one_slice in (True, False):
            case = json.dumps([batch, context, one_slice])
            command = [sys.executable, __file__, str(arguments.folder), "--case", case]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(run.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    bound = round(WEIGHTS_FACTOR * rows[0]["weight_bytes"]) + FIXED_BYTES
    result = {
        "schema_version": 1,
        "what": "memory of session and draft step above the process before it, a drafter of 0.4 GB, fp32, one thread",
        "command": "python benchmarks/step_memory.py DIR",
        "bound": f"{WEIGHTS_FACTOR} x drafter weights + {FIXED_BYTES} bytes, of the whole serving process",
        "bound_bytes": bound,
        "rows": [row | {"of_bound": round(row["peak_bytes"] / bound, 3)} for row in rows],
        "note": arguments.note,
        "machine": provenance.machine().model_dump(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
