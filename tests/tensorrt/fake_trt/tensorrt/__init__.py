"""A stand-in for NVIDIA's `tensorrt` on a CPU: the calls that this project makes, with TensorRT's own rules.

A plan is an ONNX model with a header (see `_plan`); enqueueing it runs ONNX Runtime on the addresses that
the context was given. Refused as TensorRT refuses them (an error in the log, `False` or `None` as the
answer): a plan of another version or GPU type, a shape outside the active profile, an enqueue with a shape,
an address or the scratch memory missing, a misaligned address, a capture right after a shape change, a
replay after one.

Environment: STANDIN_COMPUTE_CAPABILITY (default 9.0), STANDIN_ALIGNMENT (default 256; torch aligns CPU
memory to 64), STANDIN_FAIL_AT ("3,4": the enqueues of this process, counted from 0, that fail).
"""

from __future__ import annotations

import ctypes
import enum
import os
from contextlib import contextmanager

from tensorrt import _plan
from tensorrt._builder import (
    Builder,
    BuilderFlag,
    HardwareCompatibilityLevel,
    LayerType,
    MemoryPoolType,
    NetworkDefinitionCreationFlag,
    OnnxParser,
    make_plan,
)

__all__ = [
    "Builder",
    "BuilderFlag",
    "HardwareCompatibilityLevel",
    "LayerType",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "make_plan",
]
__version__ = "11.4.0.106"
STANDS_IN_FOR = {
    "name": "stand-in GPU",
    "compute_capability": os.environ.get("STANDIN_COMPUTE_CAPABILITY", "9.0"),
    "driver": "13.0",
}
SCRATCH_BYTES = 4096

DataType = enum.Enum("DataType", "FLOAT HALF BF16 INT64")
TensorIOMode = enum.Enum("TensorIOMode", "INPUT OUTPUT")
ExecutionContextAllocationStrategy = enum.Enum(
    "ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED"
)

enqueues = 0  # of this process
fail_at: set[int] = {int(n) for n in os.environ.get("STANDIN_FAIL_AT", "").split(",") if n}
_graph: list | None = None  # the graph that is being captured


class ILogger:
    Severity = enum.Enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")


@contextmanager
def capture(graph: list):
    """Enqueues inside are recorded into `graph`, and not run: what `torch.cuda.graph` does."""
    global _graph
    _graph = graph
    try:
        yield graph
    finally:
        _graph = None


def replay(graph: list) -> None:
    """Run what was captured, with the shapes and addresses of that time."""
    for context, shapes, addresses in graph:
        assert context._shapes == shapes, "a captured context's shape changed between capture and replay"
        context._engine._program.run(addresses, shapes)


def is_capturing() -> bool:
    return _graph is not None


class Runtime:
    def __init__(self, logger: ILogger):
        self._logger = logger

    def deserialize_cuda_engine(self, plan: bytes) -> ICudaEngine | None:
        try:
            header, model = _plan.unpack(bytes(plan))
        except (ValueError, IndexError) as error:
            return self._error(f"IRuntime::deserializeCudaEngine: {error}")
        if header["version"] != __version__:
            return self._error(
                "The engine plan file is not compatible with this version of TensorRT, expecting library "
                f"version {__version__} got {header['version']}"
            )
        here = STANDS_IN_FOR["compute_capability"]
        if header["compute_capability"] != here:
            return self._error(
                "The engine plan file is generated on an incompatible device, expecting compute "
                f"{here} got compute {header['compute_capability']}"
            )
        return ICudaEngine(header, _plan.Program(header, model), self._logger)

    def _error(self, text: str) -> None:
        self._logger.log(ILogger.Severity.ERROR, text)


class ICudaEngine:
    def __init__(self, header: dict, program: _plan.Program, logger: ILogger):
        self._program, self._profiles, self._logger = program, header["profiles"], logger
        self._tensors = {t["name"]: t for t in (*header["inputs"], *header["outputs"])}
        self._inputs = [t["name"] for t in header["inputs"]]

    device_memory_size_v2 = SCRATCH_BYTES
    num_io_tensors = property(lambda self: len(self._tensors))
    num_optimization_profiles = property(lambda self: len(self._profiles))

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self._tensors[name]["dtype"]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name]["shape"])

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        fixed = [self._tensors[name]["shape"]] * 3
        return [tuple(shape) for shape in self._profiles[index].get(name, fixed)]

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> IExecutionContext:
        return IExecutionContext(self, strategy)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine, strategy: ExecutionContextAllocationStrategy):
        self._engine = engine
        self._needs_scratch = strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self._scratch: tuple[int, int] | None = None
        self._profile = 0
        tensors = engine._tensors
        self._shapes = {
            n: tuple(tensors[n]["shape"]) for n in engine._inputs if -1 not in tensors[n]["shape"]
        }
        self._addresses: dict[str, int] = {}
        self._ran_with: dict[str, tuple[int, ...]] | None = None  # shapes of the last enqueue

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        if not 0 <= index < self._engine.num_optimization_profiles:
            return self._error(f"profile {index} is out of range")
        if index != self._profile:
            dynamic = self._engine._profiles[index]
            self._shapes = {n: s for n, s in self._shapes.items() if n not in dynamic}
        self._profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        if len(shape) != len(low) or any(not a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
            return self._error(f"{name}: {tuple(shape)} is outside {low}…{high}")
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self._engine._tensors:
            return self._error(f"no tensor {name}")
        if address % int(os.environ.get("STANDIN_ALIGNMENT", "256")):
            return self._error(f"{name}: address {address:#x} is not aligned to 256 bytes")
        self._addresses[name] = address
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % int(os.environ.get("STANDIN_ALIGNMENT", "256")) == 0
        self._scratch = (address, size)

    def execute_async_v3(self, stream: int) -> bool:
        global enqueues
        number, enqueues = enqueues, enqueues + 1
        if number in fail_at:
            return self._error(f"enqueue {number} fails because a test asked for it")
        engine = self._engine
        missing = [n for n in engine._inputs if n not in self._shapes]
        missing += [n for n in engine._tensors if n not in self._addresses]
        if missing:
            return self._error(f"shape or address of {', '.join(missing)} is not set")
        if self._needs_scratch:
            if self._scratch is None or self._scratch[1] < engine.device_memory_size_v2:
                return self._error("no device memory, or too little of it")
            ctypes.memset(self._scratch[0], number % 256, engine.device_memory_size_v2)
        if is_capturing():
            if self._ran_with != self._shapes:
                return self._error(
                    "operation not permitted when stream is capturing: first enqueue after a shape change"
                )
            _graph.append((self, dict(self._shapes), dict(self._addresses)))
            return True
        self._ran_with = dict(self._shapes)
        engine._program.run(self._addresses, self._shapes)
        return True

    def _error(self, text: str) -> bool:
        self._engine._logger.log(ILogger.Severity.ERROR, f"IExecutionContext: {text}")
        return False
