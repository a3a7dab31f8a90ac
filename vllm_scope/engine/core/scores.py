"""Keeps an index of stored scores. With stored scores, requests that only probe can use cached KV.

Owns:  one ScoreIndex for each of vLLM's KV-cache managers, and the news about stored scores.
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

#: Maps vLLM's KVCacheManager to the index of the KV blocks whose scores the workers hold.
_indices: Beside[ScoreIndex] = Beside()


def index_of(manager: object) -> ScoreIndex | None:
    return _indices.of(manager)


def new_index(scheduler: Scheduler) -> None:
    """Make the scheduler's ScoreIndex, if the prefix cache is on and `scores_mib` is not 0. If the
    ScoreIndex exists already, do nothing."""
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
    """The number of tokens in each block that vLLM hashes. vllm 0.32, v1/core/sched/scheduler.py"""
    return int(getattr(scheduler, "hash_block_size", scheduler.block_size))


def kept_of(
    scheduler: Scheduler, request: Request, asked: Resolved, num_cached: int
) -> tuple[bytes, tuple[bytes, ...], int]:
    """Begin to store a request's scores, if possible. Returns three values for the request's
    Entrant: the digest of its probes, the hashes of its cached blocks, and the size of a block."""
    index = index_of(scheduler.kv_cache_manager)
    if index is None or asked.scores_alone is None:
        return b"", (), 0
    num_blocks = num_cached // index.block_size
    index.begin(request.request_id, num_blocks)
    return asked.scores_alone, tuple(request.block_hashes[:num_blocks]), index.block_size


def fill_blocks(scheduler: Scheduler, output: SchedulerOutput, news: StepNews) -> None:
    """Add the KV blocks that are full after this step to the news. The requests take turns, so that
    only some of them add blocks in one step (core.score_index). Also add the scores that workers
    must drop."""
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
    """Remove an ended request from the ScoreIndex. If the request filled KV blocks that no earlier
    news names, the next news names these blocks."""
    index = index_of(scheduler.kv_cache_manager)
    if index is not None and index.num_told(request.request_id) is not None:
        index.finish_request(request.request_id, _filled(index, request))


def _filled(index: ScoreIndex, request: Request) -> tuple[int, list[bytes]] | None:
    """The result of ScoreIndex.fill for all computed or scheduled tokens of a request."""
    # Draft tokens can be rejected. Therefore only accepted tokens count as tokens of a full block.
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
    """Record that a worker does not have some stored scores. Later requests then do not use cached
    KV for the blocks of these scores, but compute these blocks again."""
    index = index_of(scheduler.kv_cache_manager)
    if index is not None:
        index.lose(keys)


def freeze(scheduler: Scheduler, request: Request) -> None:
    """Record that a later stage of the request begins. The stage scores only tokens after the
    prompt that are not scheduled yet. From now on, store scores only for the KV blocks that have
    none of these tokens."""
    index = index_of(scheduler.kv_cache_manager)
    if index is not None:
        num_tokens = max(request.num_computed_tokens, request.num_prompt_tokens)
        index.freeze(request.request_id, num_tokens)


def _reset(original: Callable[..., bool], self: KVCacheManager) -> bool:
    """KVCacheManager.reset_prefix_cache. The wrapper also clears the ScoreIndex, because the
    model's weights have perhaps changed."""
    done = original(self)
    index = index_of(self)
    if done and index is not None:
        index.clear()
    return done


def wrap() -> None:
    wrapping.wrap("KVCacheManager.reset_prefix_cache", _reset)
