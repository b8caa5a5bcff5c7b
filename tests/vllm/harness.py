"""vLLM inside the test process, the Transformers reference beside it, and what is compared between them.

Importing this module sets the environment, so it must come before the first import of vLLM. Which of vLLM's model
runners is tested is decided by the process: V2 under `TRITON_INTERPRET=1`, else V1 (see `make vllm-v1`, `vllm-v2`).
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

V2 = os.environ.get("TRITON_INTERPRET") == "1"
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1" if V2 else "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: tests reach its session and its counters
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
_BEFORE = dict(os.environ)
os.environ.update(ENVIRONMENT)
SERVER_ENVIRONMENT = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import vllm_domino  # noqa: E402
from vllm_domino.assets_path import TINY  # noqa: E402
from vllm_domino.config.checkpoint import read_checkpoint  # noqa: E402
from vllm_domino.config.recipes import EngineRecipe, ExportRecipe  # noqa: E402

PAIR_VARIABLE = "VLLM_DOMINO_TEST_PAIR"  # another folder with target/, domino/ and dflash/
PAIR = Path(os.environ.get(PAIR_VARIABLE, TINY))
TARGET, DOMINO, DFLASH = PAIR / "target", PAIR / "domino", PAIR / "dflash"
MAX_LEN = 512
BLOCK = 15  # draft tokens per step, where a test does not say otherwise
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_LEN,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "block_size": 32,  # the smallest on a CPU
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,
    "disable_log_stats": False,
    "distributed_executor_backend": "uni",
    "seed": 0,
}
_request_ids = itertools.count()


def build_test_engine(folder: Path, drafter: Path = DOMINO) -> Path:
    """A tiny drafter's CPU engine, built once per state of the code that makes it.

    In a process of its own: models that vLLM compiled in this one leave settings behind that torch.export fails on.
    """
    from vllm_domino.engine.build import build_engine
    from vllm_domino.engine.check import load_engine_dir

    digest = hashlib.sha256(read_checkpoint(drafter).fingerprint.encode())
    package = Path(vllm_domino.__file__).parent
    for part in ("config", "engine", "export", "model"):
        for source in sorted((package / part).glob("*.py")):
            digest.update(source.read_bytes())
    digest.update((TARGET / "config.json").read_bytes())
    root = folder / digest.hexdigest()[:16]
    engine = root / "tiny-cpu"
    try:
        load_engine_dir(engine)
    except ValueError:
        export = ExportRecipe(name="tiny", checkpoint=str(drafter), target=str(TARGET), verify_context=256)
        device = EngineRecipe(
            name="cpu",
            backend="onnxruntime",
            dtype="float32",
            providers=("CPUExecutionProvider",),
            short_blocks=(4, 8),
        )
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(build_engine, export, device, engine, export_root=root / "export").result()
    return engine


def untied_target(
    folder: Path, make_head: Callable[[torch.Tensor], dict[str, torch.Tensor]], **config: Any
) -> Path:
    """A copy of the tiny target whose LM head is apart from its embedding.

    make_head: the head's tensors by name, from the tied matrix [V, H].
    config: further fields of config.json.
    """
    shutil.copytree(TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights = {k: value for file in TARGET.glob("*.safetensors") for k, value in load_file(file).items()}
    weights |= make_head(weights["model.embed_tokens.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False} | config))
    return folder


def speculative(model: Path | str, tokens: int = BLOCK) -> dict[str, Any]:
    """What a user writes into `--speculative-config`."""
    return {"method": "dflash", "model": str(model), "num_speculative_tokens": tokens}


@contextmanager
def open_llm(
    spec: dict[str, Any] | None = None, *, target: Path = TARGET, trace: Path | None = None, **options: Any
) -> Iterator[Any]:
    """vLLM's offline engine in this process, freed at the end."""
    from vllm import LLM
    from vllm.v1.engine import core

    # An engine that ends, or that refuses to start, would end the process group of the others in this process.
    core.cleanup_dist_env_and_memory = lambda: None
    os.environ.pop("VLLM_DOMINO_TRACE", None)
    if trace is not None:
        os.environ["VLLM_DOMINO_TRACE"] = str(trace)
    try:
        llm = LLM(str(target), speculative_config=spec, **(OPTIONS | options))
        llm.llm_engine.logger_manager.stat_loggers.append(_Tally())
        yield llm
    finally:
        os.environ.pop("VLLM_DOMINO_TRACE", None)
        llm = None
        gc.collect()


@contextmanager
def environment_before_vllm() -> Iterator[None]:
    """For starting servers: vLLM's CPU backend changes the environment, and does not start where it did so before."""
    now = dict(os.environ)
    os.environ.clear()
    os.environ.update(_BEFORE)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(now)


def generate(
    llm: Any, prompts: Sequence[Sequence[int]], params: Any, *, concurrency: int | None = None
) -> list[Any]:
    """One `RequestOutput` per prompt, in order, with at most `concurrency` requests in the engine at any time.

    params: for all prompts, or a list with one for each.
    """
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    each = [one.clone() for one in (params if isinstance(params, list) else [params] * len(prompts))]
    for one in each:
        one.output_kind = RequestOutputKind.FINAL_ONLY
    waiting = list(zip(range(len(prompts)), prompts, each, strict=True))[::-1]
    index_of: dict[str, int] = {}
    done: dict[int, Any] = {}
    try:
        while len(done) < len(prompts):
            while waiting and (concurrency is None or len(index_of) < concurrency):
                index, prompt, wanted = waiting.pop()
                name = f"test-{next(_request_ids)}"
                index_of[name] = index
                engine.add_request(name, {"prompt_token_ids": list(prompt)}, wanted)
            for output in engine.step():
                if output.finished:
                    done[index_of.pop(output.request_id)] = output
    finally:
        engine.abort_request(list(index_of))  # after an error, so that the next test finds the engine empty
    return [done[i] for i in range(len(prompts))]


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    """The token ids of every output's first sequence."""
    return [list(output.outputs[0].token_ids) for output in outputs]


class _Tally:
    """A logger of vLLM's statistics, the ones that /metrics sums up. Prometheus itself holds those of one engine in a
    process only, and tests keep several."""

    def __init__(self) -> None:
        self.drafts = self.accepted = self.preemptions = self.cached_tokens = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        if scheduler_stats is not None:
            self.cached_tokens += scheduler_stats.prefix_cache_stats.hits
            if scheduler_stats.spec_decoding_stats is not None:
                self.drafts += scheduler_stats.spec_decoding_stats.num_drafts
                self.accepted += scheduler_stats.spec_decoding_stats.num_accepted_tokens
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Asked for every few seconds; nothing to say."""


@dataclass(frozen=True)
class Counters:
    """Of one engine since it started: verified drafts, accepted draft tokens, and so on."""

    drafts: int
    accepted: int
    preemptions: int
    cached_tokens: int
    failures: int

    @classmethod
    def of(cls, llm: Any) -> Counters:
        from vllm_domino.plugin.metrics import DRAFT_FAILURES

        loggers = llm.llm_engine.logger_manager.stat_loggers
        (tally,) = (one for one in loggers if isinstance(one, _Tally))
        return cls(**vars(tally), failures=int(DRAFT_FAILURES._value.get()))

    def since(self, before: Counters) -> Counters:
        return Counters(*(getattr(self, f) - getattr(before, f) for f in self.__dataclass_fields__))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verification, the bonus token included."""
        return 1 + self.accepted / self.drafts


def runner_of(llm: Any) -> Any:
    """vLLM's model runner behind an in-process LLM."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def proposer_of(llm: Any) -> Any:
    """The object that drafts: V1 calls it the drafter, V2 the speculator."""
    runner = runner_of(llm)
    return runner.speculator if V2 else runner.drafter


class Trace:
    """The drafts that the plugin recorded since the last `take`."""

    def __init__(self, path: Path):
        self.path = path

    def take(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(position, anchor, drafts) of every request in every step; empties the record."""
        entries = []
        for line in self.path.read_text().splitlines():
            step = json.loads(line)
            drafts = map(tuple, step["drafts"])
            entries += zip(step["positions"], step["anchors"], drafts, strict=True)
        os.truncate(self.path, 0)
        return entries


@contextmanager
def capture_log(name: str = "vllm.domino") -> Iterator[list[logging.LogRecord]]:
    """Records of one logger; vLLM's do not reach the root logger, so pytest's own capture does not see them."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    keep = Keep()
    logger = logging.getLogger(name)
    logger.addHandler(keep)
    try:
        yield records
    finally:
        logger.removeHandler(keep)


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of Pearson's test; cells that expect fewer than 10 are pooled into one."""
    total = counts.sum()
    expected = probabilities * total
    small = expected < 10
    seen = torch.cat((counts[~small].double(), counts[small].sum().double().view(1)))
    wanted = torch.cat((expected[~small], expected[small].sum().view(1)))
    if wanted[-1] < 1e-9:
        assert seen[-1] == 0, "a token of probability zero was drawn"
        seen, wanted = seen[:-1], wanted[:-1]
    if len(seen) < 2:
        return 1.0
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), statistic / 2))
