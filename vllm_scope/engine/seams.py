"""Lists every symbol of vLLM that vllm-scope wraps or uses (the contract with vLLM).

Owns:  CONTRACT, and `config_of` (this package's part of an engine's configuration).
To:    wrapping (replaces symbols), digests (compares vLLM's source with known releases).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_scope.config import KEY, ScopeConfig
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.vllm_types import VllmConfig


@dataclass(frozen=True)
class Seam:
    """One symbol of vLLM that vllm-scope wraps or uses.

    Attributes:
        module, name: for example "vllm.v1.core.block_pool" and "BlockPool.get_new_blocks".
        parameters: the names of parameters that the wrapper reads, or that our call passes.
        reads: the names that vllm-scope reads or sets. If the symbol is a method, these names are
            attributes of `self`. If the symbol is a class, these names are attributes of its
            instances. If the symbol is a function, these are other names in its module.
        wrapped: True if vllm-scope replaces the symbol.
        holders: other modules that import the function by its name, and must get the wrapper too.
        instead: the official extension point that could replace the wrapper, or "".
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    wrapped: bool = False
    holders: tuple[str, ...] = ()
    instead: str = ""


def _wraps(
    name: str, parameters: str = "", reads: str = "", instead: str = "", holders: str = ""
) -> Seam:
    given, attributes, modules = (tuple(each.split()) for each in (parameters, reads, holders))
    return Seam("", name, given, attributes, True, modules, instead)


def _uses(name: str, reads: str = "", parameters: str = "") -> Seam:
    return Seam("", name, tuple(parameters.split()), tuple(reads.split()))


# The nearest official extension points, and the condition under which we could use each of them.
_SCHEDULER = "scheduler_cls, if several plugins and the user could each name a class"
_ROUTES = "the entry-point group vllm.endpoint_plugins, if VLLM_PLUGINS did not have to name it"
_WORKER = "worker_extension_cls, if it could extend methods of the worker"
_CAP = "max_cache_hit_length (since 0.33), if a request could carry it"
_ERROR = "EngineCoreOutput.error with RequestError.to_exception (since 0.33)"

# fmt: off
_BY_MODULE: dict[str, tuple[Seam, ...]] = {
    # Every process. If this list names a function in two modules, the function is wrapped only in
    # the first module that has it.
    "engine.arg_utils": (_wraps("EngineArgs.create_engine_config", "", "additional_config"),),
    "platforms.interface": (_wraps("Platform.validate_environ", "hard_fail"),),  # since 0.31
    "envs": (_wraps("validate_environ", "hard_fail", "environment_variables"),),  # in 0.30
    "entrypoints.common.startup": (_wraps("redact_sensitive_args", "args"),),  # since 0.33
    "entrypoints.serve.utils.api_utils": (_wraps("redact_sensitive_args", "args"),),
    "config.vllm": (
        _uses("set_current_vllm_config"),
        _uses("VllmConfig", "additional_config model_config parallel_config cache_config "
              "scheduler_config compilation_config speculative_config kernel_config "
              "kv_transfer_config device_config num_speculative_tokens"),
    ),
    "config.model": (
        _uses("ModelConfig", "model dtype runner_type enforce_eager use_mla hf_text_config "
              "max_model_len skip_tokenizer_init get_hidden_size get_vocab_size "
              "get_total_num_hidden_layers get_head_size get_num_attention_heads "
              "get_total_num_kv_heads get_num_experts logprobs_mode "
              "max_logprobs tokenizer revision tokenizer_revision quantization hf_overrides"),
    ),
    "config.parallel": (
        _uses("ParallelConfig", "world_size tensor_parallel_size pipeline_parallel_size "
              "prefill_context_parallel_size "
              "use_ubatching use_sequence_parallel_moe _api_process_count _api_process_rank "
              "distributed_executor_backend"),
    ),
    "config.cache": (_uses("CacheConfig", "kv_sharing_fast_prefill cache_dtype"),),
    "config.scheduler": (
        _uses("SchedulerConfig", "max_num_batched_tokens max_num_seqs async_scheduling"),
    ),
    "config.compilation": (
        _uses("CompilationConfig", "mode cudagraph_capture_sizes static_forward_context"),
        _uses("CompilationMode", "VLLM_COMPILE DYNAMO_TRACE_ONCE"),
    ),
    "config.kv_transfer": (_uses("KVTransferConfig", "kv_connector kv_connector_module_path"),),
    # The front-end
    "v1.engine.llm_engine": (
        _wraps("LLMEngine.add_request", "request_id prompt params",
               "vllm_config engine_core output_processor"),
        _wraps("LLMEngine.step"),
        _wraps("LLMEngine.has_unfinished_requests"),
        _uses("LLMEngine", "collective_rpc abort_request tokenizer"),
    ),
    "v1.engine.async_llm": (
        _wraps("AsyncLLM.add_request", "request_id prompt params",
               "vllm_config engine_core output_processor"),
        _wraps("AsyncLLM._add_request", "request prompt parent_req"),
        _wraps("AsyncLLM.generate", "prompt sampling_params"),
        _uses("AsyncLLM", "collective_rpc tokenizer abort"),
    ),
    "v1.engine.exceptions": (_uses("EngineDeadError"),),
    "v1.engine.core_client": (
        # AsyncMPClient has call_utility_all_async since 0.32.
        _uses("AsyncMPClient", "call_utility_all_async _call_utility_async core_engines"),
        _uses("InprocClient", "engine_core"),
        _uses("SyncMPClient", "outputs_queue resources"),
    ),
    "v1.engine.output_processor": (
        _wraps("OutputProcessor.add_request", "request prompt parent_req request_index",
               "request_states"),
        _wraps("RequestState._new_completion_output", "finish_reason",
               "request_id detokenizer logprobs_processor parent_req prompt_token_ids"),
        _uses("OutputProcessor", "has_unfinished_requests"),
    ),
    "v1.engine.parallel_sampling": (_uses("ParentRequest", "request_id sampling_params"),),
    "v1.engine.detokenizer": (
        _uses("IncrementalDetokenizer", "token_ids num_output_tokens"),
        _uses("BaseIncrementalDetokenizer", "decode_next"),
    ),
    "outputs": (
        _uses("CompletionOutput", "index finish_reason stop_reason logprobs"),
        _uses("RequestOutput", "request_id outputs kv_transfer_params"),
    ),
    "sampling_params": (
        _uses("SamplingParams", "n max_tokens extra_args output_kind logprob_token_ids skip_clone"),
        _uses("RequestOutputKind", "FINAL_ONLY"),
    ),
    "exceptions": (_uses("VLLMValidationError"), _uses("GracefulHTTPError")),
    "utils.network_utils": (_uses("get_ip"),),
    # LLM. If this list names a method in two modules, it is wrapped only in the first module that
    # has it.
    "entrypoints.common.offline": (
        _wraps("OfflineInferenceMixin._render_and_add_requests", "prompts params"),  # since 0.32
    ),
    "entrypoints.offline_utils": (
        _wraps("OfflineInferenceMixin._render_and_add_requests", "prompts params"),
    ),
    "entrypoints.generate.beam_search.offline": (
        _wraps("BeamSearchOfflineMixin.beam_search", "", "llm_engine"),
    ),
    # The HTTP server
    "entrypoints.generate.beam_search.online": (
        _wraps("BeamSearchOnlineMixin.beam_search", "", "engine_client"),
    ),
    "entrypoints.serve": (_wraps("register_vllm_serve_api_routers", "app", instead=_ROUTES),),
    "entrypoints.openai.completion.serving": (
        _wraps("OpenAIServingCompletion.create_completion", "request raw_request"),
    ),
    "entrypoints.openai.chat_completion.serving": (
        _wraps("OpenAIServingChat.create_chat_completion", "request raw_request"),
    ),
    "entrypoints.openai.responses.serving": (
        _wraps("OpenAIServingResponses.create_responses", "request raw_request"),
    ),
    "entrypoints.openai.chat_completion.batch_serving": (
        _wraps("OpenAIServingChatBatch.create_batch_chat_completion", "request raw_request"),
    ),
    "entrypoints.speech_to_text.base.serving": (
        _wraps("SpeechToTextBaseServing._create_speech_to_text", "audio_data request raw_request"),
    ),
    "v1.utils": (_wraps("RustFrontendProcessManager.__init__"),),
    # EngineCore
    "v1.engine.core": (
        _wraps("EngineCore.preprocess_add_request", "request",
               "vllm_config model_executor scheduler"),
        _wraps("EngineCore.collective_rpc", "method args"),
        _wraps("EngineCoreProc._handle_request_preproc_error", "request", "output_queue", _ERROR),
    ),
    "v1.engine": (
        _uses("EngineCoreRequest", "request_id external_req_id sampling_params prompt_token_ids "
              "resumable cache_salt client_index"),
        _uses("EngineCoreOutput", "request_id new_token_ids finish_reason stop_reason "
              "new_logprobs kv_transfer_params events trace_headers prefill_stats"),
        _uses("EngineCoreOutputs", "outputs finished_requests"),
        _uses("FinishReason", "ERROR LENGTH STOP"),
    ),
    "v1.request": (
        _uses("Request", "request_id sampling_params prompt_token_ids all_token_ids num_tokens "
              "num_computed_tokens num_in_flight_tokens num_prompt_tokens block_hashes "
              "client_index skip_reading_prefix_cache get_finished_reason"),
        _uses("RequestStatus", "FINISHED_ABORTED FINISHED_ERROR FINISHED_STOPPED"),
    ),
    "v1.core.sched.scheduler": (
        _wraps("Scheduler.add_request", "request",
               "vllm_config requests connector kv_cache_manager block_size "
               "finished_req_ids_dict max_num_scheduled_tokens", _SCHEDULER),
        _wraps("Scheduler.schedule", instead=_SCHEDULER),
        _wraps("Scheduler.finish_requests", "request_ids finished_status", "", _SCHEDULER),
        _wraps("Scheduler._free_request", "request", "", _SCHEDULER),
        _wraps("Scheduler._free_request_blocks", "request", "", _SCHEDULER),
        _wraps("Scheduler.update_from_output", "scheduler_output model_runner_output", "",
               _SCHEDULER),
    ),
    "v1.core.sched.output": (
        _uses("SchedulerOutput", "finished_req_ids scheduled_new_reqs num_scheduled_tokens "
              "scheduled_cached_reqs"),
        _uses("CachedRequestData", "resumed_req_ids"),
        _uses("NewRequestData", "req_id sampling_params prompt_token_ids num_computed_tokens"),
    ),
    "v1.core.kv_cache_manager": (
        _wraps("KVCacheManager.get_computed_blocks", "request", "coordinator block_pool", _CAP),
        _wraps("KVCacheManager.get_computed_blocks_for_connector", "request", "", _CAP),
        _wraps("KVCacheManager.reset_prefix_cache", "", "", _CAP),
        _uses("KVCacheManager", "get_blocks evict_blocks enable_caching"),
        _uses("KVCacheBlocks", "blocks"),
    ),
    "v1.core.kv_cache_coordinator": (
        _uses("KVCacheCoordinator", "find_longest_cache_hit single_type_managers"),
        _uses("HybridKVCacheCoordinator", "find_longest_cache_hit_per_group"),
    ),
    "v1.core.single_type_kv_cache_manager": (_uses("SingleTypeKVCacheManager", "block_size"),),
    "v1.core.block_pool": (_wraps("BlockPool.get_new_blocks", "num_blocks"),),
    "v1.core.kv_cache_utils": (
        _wraps("generate_block_hash_extra_keys", "request start_token_idx end_token_idx",
               holders="vllm.v1.core.block_pool"),
        _uses("KVCacheBlock", "block_id is_null"),
    ),
    "distributed.kv_transfer.kv_connector.v1.base": (
        _uses("KVConnectorBase_V1", "get_num_new_matched_tokens"),
    ),
    # Workers. Model Runner V1 is v1.worker.gpu_model_runner, and V2 is v1.worker.gpu.
    "v1.worker.worker_base": (
        _wraps("WorkerBase.__init__", "vllm_config", "device model_runner", _WORKER),
        _uses("WorkerBase.load_model"),
        _uses("WorkerBase.compile_or_warm_up_model"),
        _uses("WorkerBase.shutdown"),
    ),
    "v1.worker.gpu_worker": (
        _uses("Worker.reload_weights"),
        _uses("Worker.start_weight_update"),
        _uses("Worker.finish_weight_update"),
    ),
    "v1.worker.gpu_model_runner": (
        _uses("GPUModelRunner._model_forward"),
        _uses("GPUModelRunner.execute_model", "", "scheduler_output"),
        _uses("GPUModelRunner._dummy_run", "", "num_tokens skip_eplb is_profile"),
        _uses("GPUModelRunner", "get_model sample_tokens _init_kv_zero_meta _kv_block_zeroer "
              "input_batch positions query_start_loc use_async_spec_decode drafter"),
    ),
    "v1.sample.sampler": (
        _wraps("Sampler.forward", "logits sampling_metadata",
               "gather_logprobs gather_specific_token_logprobs pin_memory"),
    ),
    "v1.sample.metadata": (_uses("SamplingMetadata", "max_num_logprobs logprob_token_ids"),),
    "v1.worker.gpu_input_batch": (
        _uses("InputBatch", "req_ids num_reqs num_computed_tokens_cpu"),
    ),
    "v1.worker.gpu.model_runner": (
        _uses("GPUModelRunner.execute_model", "", "scheduler_output dummy_run"),
        _uses("GPUModelRunner._dummy_run", "", "num_tokens skip_attn skip_eplb is_profile"),
        _uses("GPUModelRunner", "get_model sample_tokens _init_kv_zero_meta kv_block_zeroer "
              "model_state num_speculative_steps speculator"),
    ),
    "v1.worker.gpu.model_states.interface": (
        _uses("ModelState.prepare_inputs", "", "input_batch req_states"),
    ),
    "v1.worker.gpu.input_batch": (
        _uses("InputBatch", "req_ids num_reqs query_start_loc_np num_computed_tokens_np positions"),
    ),
    "v1.worker.utils": (_uses("KVBlockZeroer", "zero_block_ids"),),
    "v1.outputs": (
        _uses("ModelRunnerOutput", "sampled_token_ids"),
        _uses("AsyncModelRunnerOutput", "get_output"),
        _uses("SamplerOutput", "logprobs_tensors sampled_token_ids"),
    ),
    "distributed.parallel_state": (_uses("get_pp_group"), _uses("get_tp_group")),
    "compilation.decorators": (_uses("_support_torch_compile", "do_not_compile"),),
    # vllm-scope relies on the source of `__init__`: all forwards use one graph, because torch's
    # guards are dropped (engine.model).
    "compilation.wrapper": (_uses("TorchCompileWithNoGuardsWrapper", "__init__"),),
    "model_executor.models.utils": (_uses("PPMissingLayer"),),
    "model_executor.layers.attention.attention": (
        _uses("Attention.forward", "", "query key value"),
        _uses("Attention", "attn_type num_heads num_kv_heads head_size head_size_v impl layer_name "
              "sliding_window kv_sharing_target_layer_name kv_cache"),
    ),
    "model_executor.layers.attention_layer_base": (_uses("AttentionLayerBase"),),
    "model_executor.layers.linear": (
        _uses("ReplicatedLinear", "output_size"),
        _uses("ReplicatedLinear.forward"),
        _uses("RowParallelLinear", "input_size"),
        _uses("RowParallelLinear.forward", "", "input_"),
    ),
    "model_executor.layers.logits_processor": (
        _uses("LogitsProcessor.forward", "", "lm_head hidden_states embedding_bias"),
    ),
    "model_executor.layers.utils": (
        _uses("dispatch_cpu_unquantized_gemm"), _uses("cpu_unquantized_gemm"),
    ),
    "v1.attention.backends.cpu_attn": (
        _uses("CPUAttentionBackendImpl.forward", "", "attn_metadata output"),
    ),
    # `vllm-scope doctor`
    "v1.executor.uniproc_executor": (_uses("UniProcExecutor", "driver_worker"),),
    "model_executor.model_loader": (_uses("register_model_loader"),),
    "model_executor.model_loader.base_loader": (
        _uses("BaseModelLoader", "download_model load_weights load_model"),
    ),
    "model_executor.model_loader.utils": (
        _uses("initialize_model", "", "vllm_config model_config prefix"),
    ),
    "utils.torch_utils": (_uses("set_default_torch_dtype"),),
}
# fmt: on

#: Every symbol that vllm-scope wraps or uses.
CONTRACT: tuple[Seam, ...] = tuple(
    replace(seam, module=f"vllm.{module}") for module, seams in _BY_MODULE.items() for seam in seams
)


#: Maps an engine's VllmConfig to this package's options in two forms: as in additional_config, and
#: parsed. The options are parsed only once, because each request needs the parsed form.
_parsed: Beside[tuple[object, ScopeConfig]] = Beside()


def config_of(vllm_config: VllmConfig) -> ScopeConfig | None:
    """This package's options in an engine's configuration; None if the engine has no such
    options."""
    additional = vllm_config.additional_config
    body = additional.get(KEY) if isinstance(additional, dict) else None
    if body is None:
        return None
    known = _parsed.of(vllm_config)
    if known is None or known[0] is not body:
        known = _parsed.put(vllm_config, (body, ScopeConfig.parse(body)))
    return known[1]
