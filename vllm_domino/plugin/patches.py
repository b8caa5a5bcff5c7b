"""All that is changed in vLLM: two seams, the architecture names (DESIGN C6), and a mend for CPUs.

- `v1.worker.gpu.model_runner.init_speculator`: V2 picks its speculator from a fixed list. Gone with a registry.
- `v1.worker.gpu_model_runner.GPUModelRunner.__init__`: V1 picks its proposer the same way. Gone with V1, or as above.
- `ModelRegistry` entries: Domino's architecture names must resolve to some class when the config is read. Gone when
  vLLM knows Domino.
- `v1.sample.rejection_sampler.expand_batch_to_tokens`, on CPUs: see `_mend_sampling_on_cpus`.

Each patch is idempotent and raises when the name it replaces has gone. Drafters that are not ours pass through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_domino.config.draft import ARCHITECTURES
from vllm_domino.plugin.after_import import Patch, after_import
from vllm_domino.plugin.recognise import is_ours

_MARK = "_vllm_domino"
# vLLM only inspects this class when it reads the config; the drafter itself is never built from it.
_STAND_IN = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"
_GONE = (
    "vllm-domino: {} is gone from this vLLM; run `python -m vllm_domino.plugin.upstream` on its wheel and report the "
    "output"
)


def apply_patches() -> None:
    """Patch once; later calls find the marks and return. Modules that are not imported yet are patched when they are.

    Raises:
        RuntimeError: a module or a name is not in this vLLM.
    """
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name not in known:
            ModelRegistry.register_model(name, _STAND_IN)
    patches: dict[str, Patch] = {
        "vllm.v1.worker.gpu.model_runner": _patch_v2,
        "vllm.v1.worker.gpu_model_runner": _patch_v1,
    }
    if current_platform.is_cpu():
        patches["vllm.v1.sample.rejection_sampler"] = _mend_sampling_on_cpus
    for name, patch in patches.items():
        try:
            after_import(name, patch)
        except ModuleNotFoundError as error:
            raise RuntimeError(_GONE.format(name)) from error


def _named(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise RuntimeError(_GONE.format(f"{getattr(owner, '__name__', owner)}.{name}"))
    return found


def _patch_v2(runner_module: Any) -> None:
    stock = _named(runner_module, "init_speculator")
    if getattr(stock, _MARK, False):
        return

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not is_ours(vllm_config):
            return stock(vllm_config, device, req_states)
        from vllm_domino.plugin.speculator_v2 import DominoSpeculator

        return DominoSpeculator(vllm_config, device)

    setattr(init_speculator, _MARK, True)
    runner_module.init_speculator = init_speculator


def _patch_v1(runner_module: Any) -> None:
    runner_class = _named(runner_module, "GPUModelRunner")
    stock = _named(runner_class, "__init__")
    if getattr(stock, _MARK, False):
        return

    def __init__(  # noqa: N807
        self: Any, vllm_config: Any, device: Any, *args: Any, **kwargs: Any
    ) -> None:
        stock(self, vllm_config, device, *args, **kwargs)
        if is_ours(vllm_config) and hasattr(self, "drafter"):
            from vllm_domino.plugin.proposer_v1 import DominoProposer

            self.drafter = DominoProposer(vllm_config, device, self)
            # vLLM stops drafting for a whole batch when one request passes the drafter's length, and skips its
            # context rows too. The proposer gates every request by itself instead.
            self.effective_drafter_max_model_len = 1 << 62

    setattr(__init__, _MARK, True)
    runner_class.__init__ = __init__


def _mend_sampling_on_cpus(sampler_module: Any) -> None:
    """Replace vLLM's function by the same in plain PyTorch.

    The CPU kernel behind it (`cpu_triton_utils._expand_kernel_impl`, vLLM 0.32 and 0.33) fills a copy of its output, so
    that temperature, top-k and top-p of speculated tokens are uninitialised memory, whatever drafts them: sampled
    answers are wrong, and a wild top-k ends the server. Where the name has gone there is nothing to mend.
    """
    stock = getattr(sampler_module, "expand_batch_to_tokens", None)
    if stock is None or getattr(stock, _MARK, False):
        return

    def expand_batch_to_tokens(
        x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Tensor:
        """Values [B] repeated for each of their request's tokens [N], `replace_from` replaced."""
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
        return torch.repeat_interleave(values, counts, output_size=num_tokens)

    setattr(expand_batch_to_tokens, _MARK, True)
    sampler_module.expand_batch_to_tokens = expand_batch_to_tokens
