"""The graphs on ONNX Runtime, bound to the caller's own memory (IOBinding on raw addresses)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from safetensors.torch import load_file
from torch import Tensor

from vllm_domino.engine.manifest import EngineManifest
from vllm_domino.export.report import VOCAB_FILE, GraphEntry, TensorEntry
from vllm_domino.runtime.cpu_threads import thread_affinities, thread_count
from vllm_domino.runtime.providers import CPU, provider_list
from vllm_domino.runtime.target_tables import target_tables

_ELEMENTS: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
}
_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16; numpy has no such type


class OnnxSession:
    """One engine directory of backend `onnxruntime`.

    A batch keeps its bindings: as long as addresses and shapes stay the same, a step makes one call.
    """

    backend = "onnxruntime"

    def __init__(self, folder: Path, manifest: EngineManifest, device: torch.device):
        self.config, self.options = manifest.config, manifest.head.options()
        self.dtype: torch.dtype = getattr(torch, manifest.dtype)
        self.context_buckets, self.batch_buckets = manifest.context_buckets, manifest.batch_buckets
        self.device = device
        # by draft_probs, candidate_ids, candidate_logits; only from an engine with scores
        self.scores: dict[str, Tensor] = {}
        self._vocab = load_file(folder / VOCAB_FILE) if (folder / VOCAB_FILE).is_file() else None
        axes = {
            "rows": (1, 64, 2048),
            "batch": _range(manifest.batch_buckets),
            "context": _range(manifest.context_buckets),
        }
        self._context = _Graph(folder, manifest, manifest.graphs["context"], device, axes)
        self._blocks = {
            entry.outputs[0].shape[1]: _Graph(folder, manifest, entry, device, axes)
            for name, entry in manifest.graphs.items()
            if name != "context"
        }  # by K
        self.draft_sizes = tuple(sorted(int(size) for size in self._blocks))
        self._tables: tuple[Tensor, Tensor] | None = None

    def bind_target(self, embedding: Tensor, lm_head: Tensor) -> None:
        """See `DraftSession`. A target in another dtype is cast once, and the log says so."""
        vocab = self._vocab or {}
        self._tables = target_tables(
            self.config,
            embedding,
            lm_head,
            self.dtype,
            vocab_ids=vocab.get("vocab_ids"),
            own_lm_head=vocab.get("lm_head"),
        )

    def context_rows(self, features: Tensor, positions: Tensor, out: Tensor) -> None:
        self._context.run((features, positions), (out,))

    def draft(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context_kv: Tensor,
        context_lengths: Tensor,
        out: Tensor,
    ) -> None:
        if self._tables is None:
            raise RuntimeError("the session is closed, or bind_target has not been called")
        inputs = (anchor_ids, anchor_positions, context_kv, context_lengths, *self._tables)
        block = self._blocks.get(out.shape[1])
        if block is None:
            raise RuntimeError(
                f"room for {out.shape[1]} draft tokens, this session drafts {self.draft_sizes}"
            )
        outputs = (out, *self._score_buffers(block.entry, out.shape[0])) if self.options.scores else (out,)
        block.run(inputs, outputs)

    def close(self) -> None:
        self._tables = None
        self._context.close()
        for block in self._blocks.values():
            block.close()

    def _score_buffers(self, graph: GraphEntry, batch: int) -> list[Tensor]:
        """Views [batch, …] of buffers that grow to the largest batch seen; another block makes them anew."""
        views = []
        for entry in graph.outputs[1:]:
            shape = (batch, *entry.shape[1:])
            held = self.scores.get(entry.name)
            if held is None or held.shape[0] < batch or held.shape[1:] != shape[1:]:
                held = torch.empty(shape, dtype=getattr(torch, entry.dtype), device=self.device)
                self.scores[entry.name] = held
            views.append(held[:batch])
        return views


class _Graph:
    """One ONNX Runtime session and the binding of its last call."""

    def __init__(
        self,
        folder: Path,
        manifest: EngineManifest,
        entry: GraphEntry,
        device: torch.device,
        axes: dict[str, tuple[int, int, int]],
    ):
        self.entry, self._kind, self._index = entry, device.type, device.index or 0
        providers = provider_list(manifest.providers, folder, device, entry.inputs, axes, manifest.options)
        self._session: ort.InferenceSession | None = ort.InferenceSession(
            folder / entry.file, _session_options(), providers=providers
        )
        used = self._session.get_providers()
        if providers[0][0] not in used:
            raise ValueError(
                f"engine {folder}: {providers[0][0]} did not start (ONNX Runtime fell back to "
                f"{', '.join(used)}); "
                "its log above says why; mend that, or build engines/cpu.toml"
            )
        self._run_options = ort.RunOptions()
        if providers[0][0] != CPU:
            # the caller orders work by its stream; the host never waits here
            self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._binding: Any = None
        self._bound: tuple[Any, ...] = ()

    def run(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        """Raises:
        RuntimeError: the run failed, or an output has another shape than the tensor bound to it.
        """
        if self._session is None:
            raise RuntimeError("the session is closed")
        key = tuple((t.data_ptr(), t.shape) for t in (*inputs, *outputs))
        if key != self._bound:
            self._bind(inputs, outputs)
            self._bound = key
        try:
            self._session.run_with_iobinding(self._binding, self._run_options)
        except Exception as error:  # ONNX Runtime has an exception type per status code
            self._bound = ()
            raise RuntimeError(f"ONNX Runtime could not run {self.entry.file}: {error}") from error

    def close(self) -> None:
        self._binding, self._bound, self._session = None, (), None

    def _bind(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        assert self._session is not None
        binding = self._session.io_binding()
        for entry, tensor in zip(self.entry.inputs, inputs, strict=True):
            binding.bind_input(*self._place(entry, tensor))
        for entry, tensor in zip(self.entry.outputs, outputs, strict=True):
            binding.bind_output(*self._place(entry, tensor))
        self._binding = binding

    def _place(self, entry: TensorEntry, tensor: Tensor) -> tuple[Any, ...]:
        assert tensor.is_contiguous(), (entry.name, tensor.stride())
        assert tensor.device.type == self._kind, (entry.name, tensor.device)
        element = _BFLOAT16 if tensor.dtype == torch.bfloat16 else _ELEMENTS[tensor.dtype]
        # an empty tensor has no address, and ONNX Runtime wants one; nothing is read from it
        address = tensor.data_ptr() or _EMPTY.data_ptr()
        return entry.name, self._kind, self._index, element, tuple(tensor.shape), address


_EMPTY = torch.zeros(64)


def _session_options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = thread_count()
    affinities = thread_affinities(options.intra_op_num_threads)
    if affinities is not None:
        options.add_session_config_entry("session.intra_op_thread_affinities", affinities)
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # Within a run, threads that spin save a wake-up per operator; after it they would take the target's cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _range(buckets: tuple[int, ...]) -> tuple[int, int, int]:
    return (buckets[0], buckets[len(buckets) // 2], buckets[-1]) if buckets else (1, 8, 64)
