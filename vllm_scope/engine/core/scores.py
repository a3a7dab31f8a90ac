"""Scores that are kept with KV blocks, so that a request that only probes may use the prefix cache.

Owns:  one ScoreIndex for each of vLLM's KV-cache managers, and the news of kept scores.
Runs:  in EngineCore, on the scheduler's thread.
From:  scheduler.   To: core.news.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm_scope.core.news import StepNews
from vllm_scope.core.score_index import ScoreIndex, ScoreKey
from vllm_scope.engine import wrapping
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.core.entered import entered
from vllm_scope.engine.seams import config_of
from vllm_scope.engine.vllm_types import KVCacheManager, Request, Scheduler, SchedulerOutput
from vllm_scope.request.resolved import Resolved

#: vLLM's KVCacheManager -> the blocks whose scores the workers hold.
_indices: Beside[ScoreIndex] = Beside()


def index_of(manager: object) -> ScoreIndex | None:
    return _indices.of(manager)


def new_index(scheduler: Scheduler) -> None:
    """Make the index if there is none yet, the prefix cache is on, and `scores_mib` is not 0."""
    manager = scheduler.kv_cache_manager
    if index_of(manager) is not None or not manager.enable_caching:
        return
    config = config_of(scheduler.vllm_config)
    assert config is not None
    if config.scores_mib:
        most_bytes = int(config.scores_mib * 2**20)
        step_tokens = 1 + scheduler.vllm_config.num_speculative_tokens
        index = ScoreIndex(_hash_block_size(scheduler), most_bytes, step_tokens)
        _indices.put(manager, index)


def _hash_block_size(scheduler: Scheduler) -> int:
    """Tokens of a block that has a hash. vllm 0.32, v1/core/sched/scheduler.py"""
    return int(getattr(scheduler, "hash_block_size", scheduler.block_size))


def kept_of(
    scheduler: Scheduler, request: Request, asked: Resolved, num_cached: int
) -> tuple[bytes, tuple[bytes, ...], int]:
    """Begin to keep a request's scores, if they can be kept. Returns Entrant.scores,
    Entrant.cached and Entrant.block_size."""
    index = index_of(scheduler.kv_cache_manager)
    if index is None or asked.scores_alone is None:
        return b"", (), 0
    num_blocks = num_cached // index.block_size
    index.begin(request.request_id, num_blocks)
    return asked.scores_alone, tuple(request.block_hashes[:num_blocks]), index.block_size


def fill_blocks(scheduler: Scheduler, output: SchedulerOutput, news: StepNews) -> None:
    """Put into the news which blocks are full once this step has run, and which scores the workers
    must forget."""
    index = index_of(scheduler.kv_cache_manager)
    if index is None:
        return
    for request_id in index.due():
        request = scheduler.requests[request_id]
        if request_id in output.num_scheduled_tokens:
            found = _filled(index, request)
            if found is not None:
                news.filled[request_id] = found
        index.look_again(request_id, request.num_tokens)
    news.filled_at_end = index.take_ended()
    news.forgotten_scores = index.take_forgotten()


def finish_request(scheduler: Scheduler, request: Request) -> None:
    """Forget a request that has ended. The next news names the blocks that the request filled and
    that no earlier news has named."""
    index = index_of(scheduler.kv_cache_manager)
    if index is not None and index.num_told(request.request_id) is not None:
        index.finish_request(request.request_id, _filled(index, request))


def _filled(index: ScoreIndex, request: Request) -> tuple[int, list[bytes]] | None:
    """As ScoreIndex.fill, for all tokens of a request that are computed or scheduled."""
    # Drafts may be rejected: tokens that are not known yet fill no block.
    num_tokens = min(request.num_computed_tokens, request.num_tokens)
    if not index.may_fill(request.request_id, num_tokens):
        return None
    known = entered(request)
    assert known is not None
    return index.fill(
        request.request_id, request.block_hashes, num_tokens,
        known.asked.scores_alone or b"", known.asked.score_bytes,
    )  # fmt: skip


def lose(scheduler: Scheduler, keys: Iterable[ScoreKey]) -> None:
    """Note that a worker does not hold some scores, so that their blocks are computed again."""
    index = index_of(scheduler.kv_cache_manager)
    if index is not None:
        index.lose(keys)


def freeze(scheduler: Scheduler, request: Request) -> None:
    """From now on keep only those blocks of a request that hold its prompt, or tokens that are
    scheduled already: no later stage scores these tokens."""
    index = index_of(scheduler.kv_cache_manager)
    if index is not None:
        num_tokens = max(request.num_computed_tokens, request.num_prompt_tokens)
        index.freeze(request.request_id, num_tokens)


def _reset(original: Callable[..., bool], self: KVCacheManager) -> bool:
    """KVCacheManager.reset_prefix_cache: clear the index too, because the model's weights may have
    changed."""
    done = original(self)
    index = index_of(self)
    if done and index is not None:
        index.clear()
    return done


def wrap() -> None:
    wrapping.wrap("KVCacheManager.reset_prefix_cache", _reset)
