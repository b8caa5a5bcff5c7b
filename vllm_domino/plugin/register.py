"""The entry point of `vllm.general_plugins`: vLLM calls it in every process, more than once."""

SUPPORTED_VLLM = ((0, 32), (0, 33))  # oldest and newest minor version that the seams were checked on
SKIP_VERSION_CHECK = "VLLM_DOMINO_SKIP_VERSION_CHECK"


def register() -> None:
    """Make vLLM serve Domino drafters. Idempotent; imports vLLM's runners, so only once they are needed.

    Raises:
        RuntimeError: this vLLM is outside the supported window, or a name that is patched has gone.
    """
    from vllm_domino.plugin.version import check_vllm_version

    check_vllm_version()
    from vllm_domino.plugin.patches import apply_patches

    apply_patches()
