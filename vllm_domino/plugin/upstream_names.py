"""Every name of vLLM that the plugin relies on, as data: what it is, its parameters, and what it is for.

`python -m vllm_domino.plugin.upstream WHEEL` compares this table with the source of any vLLM. A name that the plugin
begins to use belongs here; whoever moves the supported window runs the check first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["overrides", "calls", "name", "attribute", "source"]


@dataclass(frozen=True, slots=True)
class Upstream:
    """One thing that must be there.

    kind:
        overrides: a method that a subclass of ours replaces; its parameters must be exactly `detail`.
        calls: a function or method that we call with the arguments `detail`; more parameters are fine if optional.
        name: a module-level name, defined or imported (`where` is what we import it from).
        attribute: a field, property, method, or something that a method of the class assigns to `self`.
        source: the text `detail` stands in the module; for what only its callers decide.
    where: module, then class and member where there are any: "v1.worker.gpu_model_runner:GPUModelRunner.__init__",
        without the leading "vllm.".
    """

    kind: Kind
    where: str
    detail: tuple[str, ...] = ()
    why: str = ""

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    @property
    def name(self) -> str:
        return self.where.partition(":")[2]


_V2 = "v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator"
_V1 = "v1.spec_decode.dflash:DFlashProposer"
_RUNNER = "v1.worker.gpu_model_runner:GPUModelRunner"
_COMMON = "v1.attention.backend:CommonAttentionMetadata"
_LAYER = "model_executor.layers.attention_layer_base:AttentionLayerBase"


def _attributes(owner: str, names: str, why: str) -> tuple[Upstream, ...]:
    return tuple(Upstream("attribute", f"{owner}.{name}", why=why) for name in names.split())


V2_SEAM = (
    Upstream("name", "v1.worker.gpu.model_runner:init_speculator", why="patched: returns our speculator"),
    Upstream(
        "source",
        "v1.worker.gpu.model_runner",
        ("init_speculator(",),
        "the runner calls it by its global name",
    ),
    Upstream(
        "overrides",
        "v1.worker.gpu.spec_decode:init_speculator",
        ("vllm_config", "device", "req_states"),
        "patched",
    ),
    Upstream("calls", f"{_V2}.__init__", ("vllm_config", "device"), "made by the patch"),
    Upstream(
        "overrides",
        f"{_V2}.load_draft_model",
        ("target_model", "target_attn_layer_names"),
        "opens the session",
    ),
    Upstream("overrides", f"{_V2}.capture", (), "longest context before graphs are captured"),
    Upstream(
        "overrides",
        f"{_V2}._generate_draft",
        (
            "num_reqs",
            "num_tokens_padded",
            "attn_metadata",
            "slot_mappings",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
        ),
        "the block graph in place of the stock draft",
    ),
    Upstream(
        "source",
        "v1.worker.gpu.spec_decode.dflash.speculator",
        ("self.model.combine_hidden_states(", "self.model.precompute_and_store_context_kv("),
        "how features and context rows reach our model",
    ),
    Upstream("attribute", f"{_V2}.propose", why="overridden with *args: its parameters may change"),
    Upstream(
        "source",
        "v1.worker.gpu.model_runner",
        ("num_speculative_tokens=num_spec_tokens", "draft_tokens[:, num_spec_tokens:] = -1"),
        "how a step's number of draft tokens reaches our speculator; the rest is dropped",
    ),
    *_attributes(
        _V2,
        "draft_tokens input_buffers block_tables draft_kv_cache_group_id num_query_per_req hidden_states "
        "max_num_tokens draft_max_seq_len max_model_len num_speculative_steps dtype device vllm_config "
        "_speculator_name",
        "read or set by our speculator",
    ),
)

V1_SEAM = (
    Upstream("overrides", f"{_RUNNER}.__init__", ("vllm_config", "device"), "patched: sets our proposer"),
    *_attributes(_RUNNER, "drafter effective_drafter_max_model_len", "set by the patch"),
    Upstream("calls", f"{_V1}.__init__", ("vllm_config", "device", "runner"), "made by the patch"),
    Upstream("overrides", f"{_V1}.load_model", ("target_model",), "opens the session"),
    Upstream("attribute", f"{_V1}.dummy_run", why="overridden with *args: its parameters may change"),
    Upstream(
        "overrides",
        f"{_V1}.propose",
        (
            "num_speculative_tokens",
            "target_token_ids",
            "target_positions",
            "target_hidden_states",
            "next_token_ids",
            "token_indices_to_sample",
            "common_attn_metadata",
            "sampling_metadata",
            "mm_embed_inputs",
            "num_rejected_tokens_gpu",
            "slot_mappings",
        ),
        "context rows and drafts",
    ),
    *_attributes(
        _V1, "model _draft_attn_layer_names max_batch_size dtype device vllm_config", "read or set by ours"
    ),
    *_attributes(
        _COMMON,
        "query_start_loc seq_lens max_seq_len block_table_tensor slot_mapping",
        "read by our proposer",
    ),
)

CONTEXT_CACHE = (
    Upstream("name", _LAYER, why="base of the context layer"),
    Upstream("overrides", f"{_LAYER}.get_attn_backend", (), "the context layer's backend"),
    Upstream("overrides", f"{_LAYER}.get_kv_cache_spec", ("vllm_config",), "how vLLM learns the row's size"),
    Upstream(
        "name",
        "model_executor.models.extract_hidden_states:CacheOnlyAttentionBackend",
        why="base of our backend",
    ),
    Upstream(
        "attribute",
        "model_executor.models.extract_hidden_states:CacheOnlyAttentionBackend.get_name",
        why="overridden",
    ),
    Upstream(
        "attribute",
        "model_executor.models.extract_hidden_states:CacheOnlyAttentionBackend.get_builder_cls",
        why="overridden",
    ),
    Upstream(
        "overrides",
        "v1.attention.backend:AttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
        "hands metadata through",
    ),
    Upstream("attribute", "v1.attention.backend:AttentionCGSupport.ALWAYS", why="our cache is graph-safe"),
    *_attributes(
        "v1.kv_cache_interface:FullAttentionSpec",
        "block_size num_kv_heads head_size dtype",
        "the row's page layout",
    ),
    Upstream(
        "attribute",
        "config.compilation:CompilationConfig.static_forward_context",
        why="where layers register",
    ),
    Upstream("attribute", "config.cache:CacheConfig.block_size", why="page size"),
)

CONFIGURATION = (
    *_attributes(
        "config.speculative:SpeculativeConfig",
        "method model revision num_speculative_tokens draft_sample_method",
        "which drafter, and how many drafts",
    ),
    *_attributes(
        "config.model:ModelConfig",
        "get_hidden_size get_total_num_hidden_layers hf_text_config tokenizer tokenizer_revision dtype max_model_len",
        "the target's facts",
    ),
    *_attributes(
        "config.parallel:ParallelConfig", "tensor_parallel_size pipeline_parallel_size", "refused above 1"
    ),
    *_attributes(
        "config.scheduler:SchedulerConfig",
        "max_num_seqs max_num_batched_tokens async_scheduling",
        "buffer sizes",
    ),
    *_attributes(
        "config:VllmConfig",
        "model_config speculative_config parallel_config lora_config scheduler_config cache_config compilation_config",
        "where the configs lie",
    ),
    Upstream(
        "calls",
        "transformers_utils.repo_utils:get_hf_file_to_dict",
        ("file_name", "model", "revision"),
        "the drafter's config.json",
    ),
    Upstream(
        "name", "model_executor.models.interfaces:supports_eagle3", why="targets that give hidden states"
    ),
    Upstream("name", "logger:init_logger", why="log lines in vLLM's format"),
    Upstream(
        "name", "model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM", why="stand-in architecture"
    ),
    Upstream(
        "calls",
        "model_executor.models.registry:_ModelRegistry.register_model",
        ("model_arch", "model_cls"),
        "names",
    ),
    Upstream("calls", "model_executor.models.registry:_ModelRegistry.get_supported_archs", (), "idempotence"),
)

GRAPHS = (
    Upstream("name", "config.compilation:CUDAGraphMode", why="which of the captured steps are whole graphs"),
    Upstream(
        "source",
        "v1.worker.gpu.cudagraph_utils",
        ("self._capture_descs",),
        "batch sizes about to be captured, for TensorRT's contexts",
    ),
    *_attributes(_V2, "query_cudagraph_manager _num_graph_context_tokens", "read before graphs are captured"),
)

SAMPLING_ON_CPUS = (
    Upstream("name", "platforms:current_platform", why="whether this is a CPU"),
    Upstream(
        "source",
        "v1.sample.rejection_sampler",
        ("def expand_batch_to_tokens(", "expand_batch_to_tokens("),
        "patched on CPUs",
    ),
)

UPSTREAM_NAMES = (*V2_SEAM, *V1_SEAM, *CONTEXT_CACHE, *CONFIGURATION, *GRAPHS, *SAMPLING_ON_CPUS)
