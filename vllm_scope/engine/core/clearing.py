"""Zeroes KV blocks that can hold NaN after a faulty edit, before a request uses them again.

Owns:  in EngineCore, the set of the unfit blocks, which are KV blocks that can hold NaN; in the
       worker, the code that zeroes unfit blocks.
From:  engine.worker.faults (a failed request), the scheduler (freed blocks).

Some attention kernels, such as vLLM's CPU kernel, read the whole block that holds a token. If the
block contains NaN, the token's result is then also NaN, because 0 * NaN is NaN. Therefore, if
another request gets the blocks of a faulty request, the worker zeroes these blocks before the next
forward. EngineCore gets the report of a fault only after a step has ended. If an edited request
ends or is preempted during a step, EngineCore does not know yet whether the step has a fault.
Therefore the blocks that this step writes count as unfit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from vllm_scope.engine import wrapping
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.core.entered import entered
from vllm_scope.engine.vllm_types import KVCacheBlock, ModelRunner, Request, Scheduler
from vllm_scope.errors import CompatError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class _Unfit:
    """Ids of KV blocks that can hold NaN. The blocks in `free` belong to no request. The blocks in
    `due` belong to a new request, and the workers must zero these blocks."""

    def __init__(self) -> None:
        self.free: set[int] = set()
        self.due: set[int] = set()


#: Maps vLLM's BlockPool to the unfit blocks of this pool.
_unfit: Beside[_Unfit] = Beside()


def first_edited(request: object) -> int | None:
    """A lower bound of the positions whose KV depends on the request's edits; None if there are no
    edits."""
    known = entered(request)
    return None if known is None else known.first_edited


def _blocks_from(scheduler: Scheduler, request: Request, first: int) -> set[int]:
    """The ids of the blocks that hold a request's KV from position `first` on."""
    manager = scheduler.kv_cache_manager
    found: set[int] = set()
    groups = manager.get_blocks(request.request_id).blocks
    for blocks, one in zip(groups, manager.coordinator.single_type_managers, strict=True):
        found |= {
            block.block_id for block in blocks[first // one.block_size :] if not block.is_null
        }
    return found


def _withdraw(scheduler: Scheduler, block_ids: set[int]) -> None:
    """Remove blocks from the prefix cache, and let the workers zero the blocks before the next
    use."""
    scheduler.kv_cache_manager.evict_blocks(block_ids)
    pool = scheduler.kv_cache_manager.block_pool
    (_unfit.of(pool) or _unfit.put(pool, _Unfit())).free.update(block_ids)


def withdraw(scheduler: Scheduler, request: Request) -> set[str]:
    """Remove the blocks with edited KV of a faulty request from the prefix cache. From then on,
    these blocks count as unfit.

    Returns:
        The ids of other edited requests that share some of this KV.
    """
    first = first_edited(request)
    if first is None:
        return set()
    block_ids = _blocks_from(scheduler, request, first)
    _withdraw(scheduler, block_ids)
    return {
        other.request_id
        for other in scheduler.requests.values()
        if other is not request
        and (edited := first_edited(other)) is not None
        and block_ids & _blocks_from(scheduler, other, edited)
    }


def _free_blocks(original: Callable[..., T], self: Scheduler, request: Request) -> T:
    """Scheduler._free_request_blocks. vLLM calls this method when a request ends or is preempted.
    If a running step still writes edited KV into blocks of the request, these blocks leave the
    prefix cache and count as unfit."""
    first = first_edited(request)
    if first is not None and request.num_in_flight_tokens:
        written = max(request.num_computed_tokens - request.num_in_flight_tokens, 0)
        _withdraw(self, _blocks_from(self, request, max(first, written)))
    return original(self, request)


def _new_blocks(
    original: Callable[..., list[KVCacheBlock]], self: object, num_blocks: int
) -> list[KVCacheBlock]:
    """BlockPool.get_new_blocks. Unfit blocks among the new blocks move from `free` to `due`."""
    blocks = original(self, num_blocks)
    unfit = _unfit.of(self)
    if unfit is not None and unfit.free:
        found = unfit.free.intersection(block.block_id for block in blocks)
        unfit.free -= found
        unfit.due |= found
    return blocks


def is_due(scheduler: Scheduler) -> bool:
    """True if some unfit blocks are not zeroed yet. In this case, `due` can return blocks after the
    next call of Scheduler.schedule."""
    unfit = _unfit.of(scheduler.kv_cache_manager.block_pool)
    return unfit is not None and bool(unfit.free or unfit.due)


def due(scheduler: Scheduler) -> list[int]:
    """The ids of the blocks that the workers must zero before the step that was just scheduled."""
    unfit = _unfit.of(scheduler.kv_cache_manager.block_pool)
    if unfit is None or not unfit.due:
        return []
    found, unfit.due = sorted(unfit.due), set()
    return found


def warm_up(runner: ModelRunner) -> None:
    """Zero block 0 now, so that the kernel that zeroes blocks is not compiled during a step. Block
    0 is vLLM's null block, which belongs to no request.

    Raises:
        CompatError: this package cannot zero single blocks of this KV cache.
    """
    try:
        zero(runner, [0])
    except Exception as error:
        raise CompatError(
            "this engine cannot zero KV blocks, which is needed after an edit that overflows "
            f"({type(error).__name__}: {error})"
        ) from error


def zero(runner: ModelRunner, block_ids: list[int]) -> None:
    """Zero blocks of a worker's KV cache, on the current stream."""
    if runner.device.type == "cpu":
        for cache in _caches_of(runner):
            cache[block_ids] = 0
        return
    # The object that zeroes blocks is the attribute kv_block_zeroer of Model Runner V2, or
    # _kv_block_zeroer of V1. If vLLM itself zeroes KV blocks, this object exists already.
    zeroer = getattr(runner, "kv_block_zeroer", None) or getattr(runner, "_kv_block_zeroer", None)
    if zeroer is None:
        runner._init_kv_zero_meta()
        zeroer = getattr(runner, "kv_block_zeroer", None) or runner._kv_block_zeroer
    zeroer.zero_block_ids(block_ids)
    if runner.vllm_config.kv_transfer_config is not None:
        import torch

        # A KV connector can fill a block on another CUDA stream. The zeros must be written before
        # the connector fills the block.
        torch.cuda.current_stream().synchronize()


def _caches_of(runner: ModelRunner) -> list[Tensor]:
    """The KV caches of the attention layers, [num_blocks, ...] each. If several layers share one KV
    cache, the list contains this cache only once."""
    import torch

    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    caches = (getattr(layer, "kv_cache", None) for layer in layers)
    found = {c.data_ptr(): c for c in caches if isinstance(c, torch.Tensor) and c.dim()}
    return list(found.values())


def wrap() -> None:
    wrapping.wrap("BlockPool.get_new_blocks", _new_blocks)
    wrapping.wrap("Scheduler._free_request_blocks", _free_blocks)
