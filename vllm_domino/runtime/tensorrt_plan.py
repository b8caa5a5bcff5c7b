"""One TensorRT plan in memory: its contexts, their shapes and addresses, and the enqueue.

An execution context carries shapes, and a captured CUDA graph is tied to the context that it was captured
from. So every
shape that is drafted with has a context of its own, made at load: a step sets addresses that changed and
enqueues, nothing else. Contexts share the plan's weights and one scratch buffer, since steps run one after
another on one stream.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vllm_domino.export.contract import FLOAT, GraphSpec

ALIGNMENT = 256  # bytes, of every address that a context is given
_TRT_DTYPES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BF16", torch.int64: "INT64"}

Axes = Mapping[str, int]


class Plan:
    """A deserialized plan.

    Args:
        trt: the module (`tensorrt` or `tensorrt_rtx`).
        spec: what the plan must read and write, in which order `run` takes tensors.
        runtime_cache: file of kernels that `tensorrt_rtx` compiled earlier for this GPU; unused by
            `tensorrt`.

    Raises:
        ValueError: TensorRT refuses the plan, or its tensors are not the contract's; the message holds
            TensorRT's.
    """

    def __init__(
        self,
        trt: ModuleType,
        path: Path,
        spec: GraphSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        runtime_cache: Path | None = None,
    ):
        self.spec, self.dtype, self.device = spec, dtype, device
        self._trt, self._log = trt, _logger(trt)
        self._runtime = trt.Runtime(self._log)
        self._engine = self._deserialize(path)
        self._require_contract(path)
        self._profiles = [
            {t.name: self._engine.get_tensor_profile_shape(t.name, i) for t in self._dynamic()}
            for i in range(self._engine.num_optimization_profiles)
        ]
        self._config = _rtx_config(trt, self._engine, runtime_cache)
        self._contexts: dict[tuple[int, ...], _Context] = {}
        self._roaming: _Context | None = None  # its shape changes, so it is never captured
        self._scratch: Tensor | None = None

    @property
    def scratch_bytes(self) -> int:
        """Device memory that any profile needs beside weights, inputs and outputs."""
        return self._engine.device_memory_size_v2

    @property
    def is_open(self) -> bool:
        """False once closed."""
        return self._engine is not None

    def use_scratch(self, scratch: Tensor) -> None:
        """Take `scratch` (uint8, `scratch_bytes` or more, aligned) before the first context is made."""
        assert not self._contexts
        assert scratch.numel() >= self.scratch_bytes
        self._scratch = scratch

    def covers(self, axes: Axes) -> bool:
        """Whether a profile takes these sizes."""
        return self._profile_for(axes) is not None

    def largest(self, axis: str) -> int:
        """The largest size of a dynamic axis that any profile takes."""
        sizes = [
            self._profiles[i][t.name][2][t.shape.index(axis)]
            for i in range(len(self._profiles))
            for t in self._dynamic()
            if axis in t.shape
        ]
        return max(sizes)

    def reserve(self, axes: Axes) -> None:
        """Make the context of one shape now, so that a step with it neither allocates nor changes a shape."""
        key = tuple(axes.values())
        if key not in self._contexts:
            self._contexts[key] = self._new_context()
            self._set_shape(self._contexts[key], axes)

    def run(self, axes: Axes, tensors: Sequence[Tensor], *, capturing: bool) -> None:
        """Enqueue on the caller's stream.

        Args:
            axes: sizes of the dynamic axes, in one order for every call.
            tensors: inputs then outputs, as in the contract.
            capturing: whether the stream is being captured into a CUDA graph.

        Raises:
            RuntimeError: TensorRT refuses; the message holds its words.
        """
        context = self._contexts.get(tuple(axes.values()))
        if capturing and (context is None or not context.has_run):
            raise RuntimeError(
                f"{self.spec.name} plan: {dict(axes)} is captured into a CUDA graph before it ran once; "
                "reserve() the shape, run it, then capture"
            )
        if context is None:
            context = self._roam(axes)
        for name, tensor in zip(self._names(), tensors, strict=True):
            address = tensor.data_ptr()
            if context.addresses.get(name) != address:
                self._set_address(context, name, tensor, address)
        if not context.trt.execute_async_v3(self._stream()):
            raise RuntimeError(f"{self.spec.name} plan: {self._log.last('enqueue failed')}")
        context.has_run = True

    def close(self) -> None:
        """Contexts first: they use the engine."""
        self._contexts.clear()
        self._roaming = self._scratch = self._config = None
        self._engine = self._runtime = None

    def save_runtime_cache(self, path: Path) -> None:
        """Keep what `tensorrt_rtx` compiled for this GPU; nothing for `tensorrt`."""
        cache = self._config.get_runtime_cache() if self._config is not None else None
        if cache is None:
            return
        content = bytes(cache.serialize())
        if path.is_file() and path.stat().st_size == len(content):
            return
        partial = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(exist_ok=True)
            partial.write_bytes(content)
            partial.replace(path)
        except OSError:  # an engine directory may be read-only; the next start compiles again
            partial.unlink(missing_ok=True)

    def _deserialize(self, path: Path) -> Any:
        with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise ValueError(
                f"{path}: TensorRT {self._trt.__version__} refuses it: {self._log.last('no reason')}"
            )
        return engine

    def _require_contract(self, path: Path) -> None:
        """Names, modes, dtypes and shapes of the plan against the contract."""
        engine, trt = self._engine, self._trt
        found = {}
        for i in range(engine.num_io_tensors):
            name = engine.get_tensor_name(i)
            is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            found[name] = (is_input, engine.get_tensor_dtype(name), tuple(engine.get_tensor_shape(name)))
        wanted = {}
        for is_input, specs in ((True, self.spec.inputs), (False, self.spec.outputs)):
            for t in specs:
                kind = self.dtype if t.dtype == FLOAT else getattr(torch, t.dtype)
                shape = tuple(-1 if isinstance(size, str) else size for size in t.shape)
                wanted[t.name] = (is_input, getattr(trt.DataType, _TRT_DTYPES[kind]), shape)
        if found != wanted:
            different = sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
            name = different[0]
            raise ValueError(
                f"{path}: tensor {name} is {found.get(name, 'missing')}, the manifest says "
                f"{wanted.get(name, 'nothing of it')}; build the engine again"
            )

    def _new_context(self) -> _Context:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy if self._config is None else self._config)
        if context is None:
            raise ValueError(
                f"{self.spec.name} plan: no execution context: {self._log.last('no reason given')}"
            )
        assert self._scratch is not None, "use_scratch comes first"
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        return _Context(context)

    def _roam(self, axes: Axes) -> _Context:
        if self._roaming is None:
            self._roaming = self._new_context()
        if self._roaming.axes != tuple(axes.values()):
            self._set_shape(self._roaming, axes)
        return self._roaming

    def _set_shape(self, context: _Context, axes: Axes) -> None:
        profile = self._profile_for(axes)
        if profile is None:
            raise RuntimeError(f"{self.spec.name} plan: no profile takes {dict(axes)}")
        done = True
        if profile != context.profile:
            done = context.trt.set_optimization_profile_async(profile, self._stream())
            context.profile = profile
        for t in self._dynamic():
            done = done and context.trt.set_input_shape(t.name, t.at(**axes))
        context.axes, context.has_run = tuple(axes.values()), False
        if not done:
            context.axes = None
            raise RuntimeError(f"{self.spec.name} plan: {dict(axes)}: {self._log.last('shape refused')}")

    def _profile_for(self, axes: Axes) -> int | None:
        """The profile with the least room above these sizes: the more exact, the better its kernels fit."""
        best, least = None, None
        for index, shapes in enumerate(self._profiles):
            wanted = {t.name: t.at(**axes) for t in self._dynamic()}
            if not all(_within(wanted[name], low, high) for name, (low, _, high) in shapes.items()):
                continue
            room = sum(sum(high) - sum(low) for low, _, high in shapes.values())
            if least is None or room < least:
                best, least = index, room
        return best

    def _set_address(self, context: _Context, name: str, tensor: Tensor, address: int) -> None:
        if address % ALIGNMENT and self.device.type == "cuda":
            raise RuntimeError(
                f"{self.spec.name} plan: {name} lies at {address:#x}, not aligned to {ALIGNMENT} bytes"
            )
        assert tensor.is_contiguous(), name
        if not context.trt.set_tensor_address(name, address):
            raise RuntimeError(f"{self.spec.name} plan: {self._log.last(f'address of {name} refused')}")
        context.addresses[name] = address

    def _names(self) -> list[str]:
        return [t.name for t in (*self.spec.inputs, *self.spec.outputs)]

    def _dynamic(self) -> list[Any]:
        return [t for t in self.spec.inputs if any(isinstance(size, str) for size in t.shape)]

    def _stream(self) -> int:
        # vLLM runs on a stream of its own; on the default stream TensorRT would wait for the device in
        # every step
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0


class _Context:
    """An execution context and what it was last told."""

    def __init__(self, trt: Any):
        self.trt = trt
        self.profile = 0  # the one that a new context starts with
        self.axes: tuple[int, ...] | None = None
        self.addresses: dict[str, int] = {}
        self.has_run = False  # with its present shape


def _within(shape: Sequence[int], low: Sequence[int], high: Sequence[int]) -> bool:
    return all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))


def _rtx_config(trt: ModuleType, engine: Any, runtime_cache: Path | None) -> Any:
    """How `tensorrt_rtx` makes contexts; None for `tensorrt`, which takes the allocation strategy alone.

    Kernels are compiled when a shape is set (EAGER), not beside a fallback during the first steps: then the
    first served step is as fast as the last, and nothing compiles while a CUDA graph is captured.
    """
    if not hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
        return None
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
    config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # vLLM captures the whole step
    cache = config.create_runtime_cache()
    if runtime_cache is not None and runtime_cache.is_file():
        cache.deserialize(
            runtime_cache.read_bytes()
        )  # of another GPU or version it is rejected: compiled anew
    config.set_runtime_cache(cache)
    return config


def _logger(trt: ModuleType) -> Any:
    """Keeps the last errors, for exceptions; TensorRT's functions only answer `False` or `None`."""

    class Log(trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self._errors = [*self._errors[-4:], text.strip()]

        def last(self, default: str) -> str:
            errors, self._errors = self._errors, []
            return "; ".join(errors) or default

    return Log()
