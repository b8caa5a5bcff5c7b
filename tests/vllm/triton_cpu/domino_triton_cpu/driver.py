"""What Triton and vLLM ask of a driver when no kernel is ever compiled."""

from types import SimpleNamespace

import torch

# The module, not the class: Triton looks for exactly one subclass of DriverBase among the names here.
from triton.backends import driver as _driver
from triton.backends.compiler import GPUTarget

DEVICE = 0
PROPERTIES = {"max_shared_mem": 1 << 20, "multiprocessor_count": 2, "warpSize": 1}


class InterpretedDriver(_driver.DriverBase):
    """Answers as one CPU device with one stream."""

    def __init__(self):
        self.utils = SimpleNamespace(get_device_properties=lambda device: dict(PROPERTIES))

    @staticmethod
    def is_active():
        return True

    def map_python_to_cpp_type(self, ty):
        raise RuntimeError(f"no kernel is compiled on this backend (asked for the C++ type of {ty})")

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cpu

    def get_current_device(self):
        return DEVICE

    def set_current_device(self, device):
        assert device == DEVICE

    def get_current_stream(self, device=DEVICE):
        return 0

    def get_benchmarker(self):
        raise RuntimeError("the interpreter is not for timing: set TRITON_INTERPRET=1 and do not autotune")

    def get_empty_cache_for_benchmark(self):
        return torch.empty(0)

    def clear_cache(self, cache):
        pass
