"""From a folder to a session: an engine directory by its manifest, a plain checkpoint in PyTorch."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors.torch import load_file

from vllm_domino.config.checkpoint import read_checkpoint
from vllm_domino.engine.check import load_engine_dir
from vllm_domino.engine.manifest import EngineManifest, build_command, is_engine_dir
from vllm_domino.export.report import VOCAB_FILE
from vllm_domino.model.drafter import Drafter
from vllm_domino.runtime.session import DraftSession
from vllm_domino.runtime.torch_session import TorchSession

logger = logging.getLogger("vllm.domino")


def open_session(
    path: Path, device: torch.device, dtype: torch.dtype, *, max_batch: int | None = None
) -> DraftSession:
    """Open what `--speculative-config` points at.

    Args:
        path: an engine directory or a draft checkpoint's folder.
        device: where the target runs.
        dtype: the target's; a plain checkpoint runs in it, an engine in its own.
        max_batch: largest batch that will be drafted for; above an engine's buckets it is drafted in slices.

    Raises:
        ValueError: the directory is broken or not for this machine; see `load_engine_dir`.
    """
    if not is_engine_dir(path):
        checkpoint = read_checkpoint(path)
        logger.info(
            "%s is a plain draft checkpoint and runs in PyTorch, which is slower than an engine; build one "
            "with `%s`",
            path,
            build_command(),
        )
        drafter = Drafter.from_checkpoint(checkpoint)
        return TorchSession(drafter, device, dtype, own_lm_head=checkpoint.lm_head)
    manifest = load_engine_dir(path)
    if manifest.backend == "onnxruntime":
        from vllm_domino.runtime.onnx_session import OnnxSession

        return OnnxSession(path, manifest, device)
    return _tensorrt(path, manifest, device, max_batch)


def _tensorrt(
    path: Path, manifest: EngineManifest, device: torch.device, max_batch: int | None
) -> DraftSession:
    from vllm_domino.runtime.tensorrt_session import TensorRTSession

    largest = manifest.batch_buckets[-1]
    if max_batch is not None and max_batch > largest:
        logger.warning(
            "%s: --max-num-seqs is %d and the engine's largest batch %d, so a full batch takes %d engine calls "
            "or more; for fewer, add %d to batch_buckets in engines/%s.toml and run `%s`",
            path,
            max_batch,
            largest,
            -(-max_batch // largest),
            max_batch,
            manifest.engine_recipe,
            manifest.build_command,
        )
    vocab = load_file(path / VOCAB_FILE) if (path / VOCAB_FILE).is_file() else {}
    return TensorRTSession(
        path,
        backend=manifest.backend,
        config=manifest.config,
        options=manifest.head.options(),
        dtype=getattr(torch, manifest.dtype),
        device=device,
        batch_buckets=manifest.batch_buckets,
        context_buckets=manifest.context_buckets,
        max_batch=max_batch,
        vocab_ids=vocab.get("vocab_ids"),
        lm_head=vocab.get("lm_head"),
    )
