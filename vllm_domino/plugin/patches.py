"""All that is changed in vLLM: two seams and the architecture names (DESIGN C6).

| patched | why | gone when |
|---|---|---|
| `v1.worker.gpu.model_runner.init_speculator` | V2 picks its speculator from a fixed list | vLLM has a registry for speculators |
| `v1.worker.gpu_model_runner.GPUModelRunner.__init__` | V1 picks its proposer the same way | V1 is removed, or as above |
| `ModelRegistry` entries | Domino's architecture names must resolve to some class when the config is read | vLLM knows Domino |

Each patch is idempotent and raises when the name it replaces has gone. Drafters that are not ours pass through.
"""

from __future__ import annotations

from typing import Any

from vllm_domino.config.draft import ARCHITECTURES
from vllm_domino.plugin.recognise import is_ours

_MARK = "_vllm_domino"
# vLLM only inspects this class when it reads the config; the drafter itself is never built from it.
_STAND_IN = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"


def apply_patches() -> None:
    """Patch once; later calls find the marks and return."""
    import vllm.v1.worker.gpu.model_runner as v2_runner
    import vllm.v1.worker.gpu_model_runner as v1_runner
    from vllm import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name not in known:
            ModelRegistry.register_model(name, _STAND_IN)
    _patch_v2(v2_runner)
    _patch_v1(_named(v1_runner, "GPUModelRunner"))


def _named(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise RuntimeError(
            f"vllm-domino: {getattr(owner, '__name__', owner)}.{name} is gone from this vLLM; "
            "run `python -m vllm_domino.plugin.upstream` on its wheel and report the output"
        )
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


def _patch_v1(runner_class: Any) -> None:
    stock = _named(runner_class, "__init__")
    if getattr(stock, _MARK, False):
        return

    def __init__(self: Any, vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, vllm_config, device, *args, **kwargs)
        if is_ours(vllm_config) and hasattr(self, "drafter"):
            from vllm_domino.plugin.proposer_v1 import DominoProposer

            self.drafter = DominoProposer(vllm_config, device, self)
            # vLLM stops drafting for a whole batch when one request passes the drafter's length, and skips its
            # context rows too. The proposer gates every request by itself instead.
            self.effective_drafter_max_model_len = 1 << 62

    setattr(__init__, _MARK, True)
    runner_class.__init__ = __init__
