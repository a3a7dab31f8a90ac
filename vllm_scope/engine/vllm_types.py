"""Types (Protocols) for the parts of vLLM's objects that engine/ uses.

Owns:  one Protocol for each class of vLLM. Both model runners have the same Protocol.
Runs:  nowhere. Only mypy reads these types. The file imports no module of vLLM.
To:    the other files of engine/.

seams.py names the same classes and attributes for the check when the engine starts. vllm-scope
itself sets the attributes whose names begin with `scope`. Some attributes have type Any, because
any other type would need a cast at each use. Most attributes of type Any are None in some requests
or engines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from queue import Queue

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from vllm_scope.core.news import StepNews

# The configuration


class EngineArgs(Protocol):
    """vllm.engine.arg_utils.EngineArgs"""

    additional_config: dict[str, object] | None


class ModelConfig(Protocol):
    """vllm.config.model.ModelConfig"""

    model: str
    dtype: torch.dtype
    runner_type: str
    enforce_eager: bool
    use_mla: bool
    hf_text_config: object
    max_model_len: int
    skip_tokenizer_init: bool
    logprobs_mode: str
    max_logprobs: int
    tokenizer: str
    revision: str | None
    tokenizer_revision: str | None
    quantization: str | None
    hf_overrides: Any

    def get_hidden_size(self) -> int: ...
    def get_vocab_size(self) -> int: ...
    def get_total_num_hidden_layers(self) -> int: ...
    def get_head_size(self) -> int: ...
    def get_num_attention_heads(self, parallel_config: ParallelConfig, /) -> int: ...
    def get_total_num_kv_heads(self) -> int: ...
    def get_num_experts(self) -> int: ...


class ParallelConfig(Protocol):
    """vllm.config.parallel.ParallelConfig"""

    world_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    distributed_executor_backend: object
    _api_process_count: int


class CacheConfig(Protocol):
    """vllm.config.cache.CacheConfig"""

    cache_dtype: str


class SchedulerConfig(Protocol):
    """vllm.config.scheduler.SchedulerConfig"""

    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool | None


class CompilationConfig(Protocol):
    """vllm.config.compilation.CompilationConfig"""

    mode: object
    cudagraph_capture_sizes: list[int] | None
    static_forward_context: dict[str, object]


class VllmConfig(Protocol):
    """vllm.config.vllm.VllmConfig"""

    additional_config: object
    model_config: ModelConfig
    parallel_config: ParallelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    compilation_config: CompilationConfig
    speculative_config: object
    num_speculative_tokens: int
    kv_transfer_config: Any
    device_config: Any


# The front-end


class SamplingParams(Protocol):
    """vllm.sampling_params.SamplingParams"""

    n: int
    max_tokens: int | None
    extra_args: Any
    output_kind: Any
    skip_clone: bool


class EngineCoreRequest(Protocol):
    """vllm.v1.engine.EngineCoreRequest"""

    request_id: str
    sampling_params: Any
    prompt_token_ids: list[int] | None
    resumable: bool
    cache_salt: str | None
    client_index: int


class ParentRequest(Protocol):
    """vllm.v1.engine.parallel_sampling.ParentRequest"""

    request_id: str
    sampling_params: SamplingParams


class Detokenizer(Protocol):
    """vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer"""

    token_ids: list[int]
    decode_next: Callable[..., str]

    def num_output_tokens(self) -> int: ...


class RequestState(Protocol):
    """vllm.v1.engine.output_processor.RequestState"""

    request_id: str
    detokenizer: Detokenizer
    logprobs_processor: Any  # vllm.v1.engine.logprobs.LogprobsProcessor
    parent_req: ParentRequest | None
    prompt_token_ids: list[int]  # a request with taps has token ids


class OutputProcessor(Protocol):
    """vllm.v1.engine.output_processor.OutputProcessor"""

    request_states: dict[str, RequestState]

    def has_unfinished_requests(self) -> bool: ...


class CompletionOutput(Protocol):
    """vllm.outputs.CompletionOutput"""

    index: int
    finish_reason: str | None
    stop_reason: Any
    logprobs: Any
    scope: object
    scope_texts: Sequence[str]


class RequestOutput(Protocol):
    """vllm.outputs.RequestOutput"""

    request_id: str
    outputs: list[CompletionOutput]
    kv_transfer_params: Any


class Engine(Protocol):
    """The attributes that LLMEngine and AsyncLLM of vllm.v1.engine have in common."""

    vllm_config: VllmConfig
    engine_core: Any
    output_processor: OutputProcessor

    @property
    def tokenizer(self) -> Any: ...


class LLMEngine(Engine, Protocol):
    """vllm.v1.engine.llm_engine.LLMEngine"""

    def add_request(self, request_id: str, prompt: Any, params: Any, /) -> object: ...
    def step(self) -> list[RequestOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def abort_request(self, request_ids: list[Any], /, internal: bool = False) -> object: ...
    def collective_rpc(self, method: str, *, args: tuple[object, ...] = ()) -> list[Any]: ...


class AsyncLLM(Engine, Protocol):
    """vllm.v1.engine.async_llm.AsyncLLM"""

    async def abort(self, request_ids: list[str], /, internal: bool = False) -> None: ...
    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, /
    ) -> AsyncIterator[RequestOutput]: ...
    def collective_rpc(
        self, method: str, *, args: tuple[object, ...] = ()
    ) -> Awaitable[list[Any]]: ...


# EngineCore


class EngineCore(Protocol):
    """vllm.v1.engine.core.EngineCore"""

    vllm_config: VllmConfig
    scheduler: Scheduler


class EngineCoreProc(EngineCore, Protocol):
    """vllm.v1.engine.core.EngineCoreProc"""

    output_queue: Queue[tuple[int, object]]


class EngineCoreOutput(Protocol):
    """vllm.v1.engine.EngineCoreOutput"""

    request_id: str
    finish_reason: object
    stop_reason: Any
    new_token_ids: list[int]
    new_logprobs: object
    events: object
    trace_headers: object
    prefill_stats: object


class EngineCoreOutputs(Protocol):
    """vllm.v1.engine.EngineCoreOutputs"""

    outputs: list[EngineCoreOutput]
    finished_requests: set[str] | None


class Request(Protocol):
    """vllm.v1.request.Request"""

    request_id: str
    all_token_ids: Sequence[int]
    num_tokens: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_in_flight_tokens: int
    block_hashes: Sequence[bytes]
    client_index: int
    skip_reading_prefix_cache: bool

    def get_finished_reason(self) -> object: ...


class NewRequestData(Protocol):
    """vllm.v1.core.sched.output.NewRequestData"""

    req_id: str
    num_computed_tokens: int
    sampling_params: object
    prompt_token_ids: Sequence[int]  # None for a request without token ids, which has no taps


class CachedRequestData(Protocol):
    """vllm.v1.core.sched.output.CachedRequestData"""

    resumed_req_ids: set[str]


class SchedulerOutput(Protocol):
    """vllm.v1.core.sched.output.SchedulerOutput"""

    finished_req_ids: set[str]
    num_scheduled_tokens: Mapping[str, int]
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    scope_news: StepNews


class KVCacheBlock(Protocol):
    """vllm.v1.core.kv_cache_utils.KVCacheBlock"""

    block_id: int
    is_null: bool


class KVCacheBlocks(Protocol):
    """vllm.v1.core.kv_cache_manager.KVCacheBlocks"""

    blocks: Sequence[Sequence[KVCacheBlock]]


class SingleTypeKVCacheManager(Protocol):
    """vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager"""

    block_size: int


class KVCacheCoordinator(Protocol):
    """vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator"""

    single_type_managers: Sequence[SingleTypeKVCacheManager]


class KVCacheManager(Protocol):
    """vllm.v1.core.kv_cache_manager.KVCacheManager"""

    coordinator: KVCacheCoordinator
    block_pool: object
    enable_caching: bool

    def get_blocks(self, request_id: str, /) -> KVCacheBlocks: ...
    def evict_blocks(self, block_ids: set[int], /) -> object: ...


class KVConnector(Protocol):
    """vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"""

    get_num_new_matched_tokens: Callable[..., tuple[int | None, bool]]


class Scheduler(Protocol):
    """vllm.v1.core.sched.scheduler.Scheduler"""

    vllm_config: VllmConfig
    requests: Mapping[str, Request]
    connector: KVConnector | None
    kv_cache_manager: KVCacheManager
    block_size: int
    max_num_scheduled_tokens: int
    finished_req_ids_dict: dict[int, set[str]] | None

    def add_request(self, request: Request, /) -> object: ...
    def finish_requests(
        self, request_ids: Iterable[str], finished_status: object, /
    ) -> Iterable[Request]: ...


# Workers


class SamplingMetadata(Protocol):
    """vllm.v1.sample.metadata.SamplingMetadata"""

    max_num_logprobs: int | None
    logprob_token_ids: dict[int, list[int]] | None


class SamplerOutput(Protocol):
    """vllm.v1.outputs.SamplerOutput"""

    sampled_token_ids: torch.Tensor
    logprobs_tensors: Any


class SamplerV1(Protocol):
    """vllm.v1.sample.sampler.Sampler"""

    pin_memory: bool

    def gather_logprobs(self, logprobs: Any, num_logprobs: int, token_ids: Any) -> Any: ...
    def gather_specific_token_logprobs(
        self, logprobs: Any, logprob_token_ids: dict[int, list[int]], sampled: Any, /
    ) -> Any: ...


class InputBatchV1(Protocol):
    """vllm.v1.worker.gpu_input_batch.InputBatch"""

    req_ids: list[str]
    num_reqs: int
    num_computed_tokens_cpu: NDArray[np.int32]


class InputBatchV2(Protocol):
    """vllm.v1.worker.gpu.input_batch.InputBatch"""

    req_ids: list[str]
    num_reqs: int
    query_start_loc_np: NDArray[np.int32]
    num_computed_tokens_np: NDArray[np.int32]
    positions: Tensor


class ModelState(Protocol):
    """vllm.v1.worker.gpu.model_states.interface.ModelState"""

    prepare_inputs: Callable[..., object]


class ModelRunner(Protocol):
    """GPUModelRunner of vllm.v1.worker.gpu_model_runner (V1), ...gpu.model_runner (V2)"""

    vllm_config: VllmConfig
    device: torch.device
    execute_model: Callable[..., object]
    sample_tokens: Callable[..., object]
    scope_dummy_run: Callable[..., object]
    _dummy_run: Callable[..., object]
    # V1
    _model_forward: Callable[..., object]
    _kv_block_zeroer: Any
    input_batch: InputBatchV1
    positions: Tensor
    query_start_loc: Any
    use_async_spec_decode: bool
    # V2
    model_state: ModelState
    num_speculative_steps: int

    def get_model(self) -> nn.Module: ...
    def _init_kv_zero_meta(self) -> object: ...


class Worker(Protocol):
    """vllm.v1.worker.worker_base.WorkerBase"""

    vllm_config: VllmConfig
    device: torch.device
    model_runner: ModelRunner
    load_model: Callable[..., object]
    compile_or_warm_up_model: Callable[..., object]
    shutdown: Callable[..., object]
