"""The stand-in's builder: parses the ONNX file and packs it with the profiles that it was given."""

from __future__ import annotations

import enum
from pathlib import Path

import onnx

from tensorrt import _plan

LayerType = enum.Enum("LayerType", "ATTENTION_OUTPUT OTHER")
BuilderFlag = enum.Enum("BuilderFlag", "TF32 VERSION_COMPATIBLE EXCLUDE_LEAN_RUNTIME")
NetworkDefinitionCreationFlag = enum.IntEnum("NetworkDefinitionCreationFlag", "STRONGLY_TYPED", start=0)
HardwareCompatibilityLevel = enum.Enum(
    "HardwareCompatibilityLevel", "NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY"
)
MemoryPoolType = enum.Enum("MemoryPoolType", "WORKSPACE")


class _Layer:
    def __init__(self, node: onnx.NodeProto):
        self.type = LayerType.ATTENTION_OUTPUT if node.op_type == "Attention" else LayerType.OTHER


class _Network:
    def __init__(self, flags: int):
        assert flags & 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED, "10.x needs the flag"
        self.model: onnx.ModelProto | None = None
        self._inputs: list[dict] = []
        self._layers: list[_Layer] = []

    def load(self, model: onnx.ModelProto) -> None:
        self.model = model
        self._inputs, _ = _plan.graph_tensors(model)
        self._layers = [_Layer(node) for node in model.graph.node]

    num_inputs = property(lambda self: len(self._inputs))
    num_layers = property(lambda self: len(self._layers))

    def get_input(self, index: int) -> _Input:
        return _Input(self._inputs[index])

    def get_layer(self, index: int) -> _Layer:
        return self._layers[index]


class _Input:
    def __init__(self, tensor: dict):
        self.name, self.shape = tensor["name"], tuple(tensor["shape"])


class _ParserError:
    def __init__(self, text: str):
        self._text = text

    def desc(self) -> str:
        return self._text


class OnnxParser:
    def __init__(self, network: _Network, logger: object):
        self._network, self._errors = network, []

    def parse_from_file(self, path: str) -> bool:
        try:
            self._network.load(onnx.load(path))
        except Exception as error:
            self._errors.append(_ParserError(f"ModelImporter: {error}"))
        return not self._errors

    num_errors = property(lambda self: len(self._errors))

    def get_error(self, index: int) -> _ParserError:
        return self._errors[index]


class _Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[list[int]]] = {}

    def set_shape(self, name: str, low: list[int], usual: list[int], high: list[int]) -> None:
        assert all(a <= b <= c for a, b, c in zip(low, usual, high, strict=True)), (low, usual, high)
        self.shapes[name] = [list(low), list(usual), list(high)]


class _TimingCache:
    def __init__(self, content: bytes):
        self._content = content or b"timings"

    def serialize(self) -> bytes:
        return self._content


class _BuilderConfig:
    def __init__(self) -> None:
        self.flags = {BuilderFlag.TF32}
        self.profiles: list[_Profile] = []
        self.max_aux_streams, self.builder_optimization_level = None, 3
        self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE
        self._cache: _TimingCache | None = None

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: MemoryPoolType, size: int) -> None:
        assert size > 0

    def create_timing_cache(self, content: bytes) -> _TimingCache:
        return _TimingCache(content)

    def set_timing_cache(self, cache: _TimingCache, ignore_mismatch: bool) -> bool:
        self._cache = cache
        return True

    def get_timing_cache(self) -> _TimingCache | None:
        return self._cache

    def add_optimization_profile(self, profile: _Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1


class _HostMemory(bytes):
    nbytes = property(len)


class Builder:
    def __init__(self, logger: object):
        self._logger = logger

    def create_network(self, flags: int = 0) -> _Network:
        return _Network(flags)

    def create_builder_config(self) -> _BuilderConfig:
        return _BuilderConfig()

    def create_optimization_profile(self) -> _Profile:
        return _Profile()

    def build_serialized_network(self, network: _Network, config: _BuilderConfig) -> _HostMemory | None:
        import tensorrt

        model = network.model
        assert model is not None
        inputs, outputs = _plan.graph_tensors(model)
        dynamic = {t["name"] for t in inputs if -1 in t["shape"]}
        for profile in config.profiles or [_Profile()]:
            if set(profile.shapes) != dynamic:
                self._logger.log(tensorrt.ILogger.Severity.ERROR, f"profile must cover {sorted(dynamic)}")
                return None
        float_input = any(t["dtype"] == "FLOAT" for t in inputs)
        if float_input and any(n.op_type == "Attention" for n in model.graph.node):
            text = "Attention operation was not supported by a dedicated kernel; mark it as decomposable"
            self._logger.log(tensorrt.ILogger.Severity.ERROR, text)
            return None
        return _HostMemory(_plan.pack(model, header(inputs, outputs, [p.shapes for p in config.profiles])))


def header(inputs: list[dict], outputs: list[dict], profiles: list[dict]) -> dict:
    import tensorrt

    return {
        "version": tensorrt.__version__,
        "compute_capability": tensorrt.STANDS_IN_FOR["compute_capability"],
        "inputs": inputs,
        "outputs": outputs,
        "profiles": profiles,
    }


def make_plan(onnx_path: Path, profiles: list[dict]) -> bytes:
    """A plan of any ONNX file, fp32 too: what tests that compare drafts id by id run on."""
    model = onnx.load(onnx_path)
    return _plan.pack(model, header(*_plan.graph_tensors(model), profiles))
