"""The scheduler's side: a read is never served from the prefix cache.

Owns:  the cap on a reading request's prefix-cache hit.
Runs:  in EngineCore, when a request is scheduled first or after preemption.

A token whose KV comes from the cache is not computed, so its rows do not exist. A
request that reads from position p on may hit the cache below p only. What it
computes enters the cache as ever, and plain requests hit it.
"""

from __future__ import annotations

from typing import Any

#: Where the front-end puts the request's handle, beside `scope` in `extra_args`.
HANDLE = "scope_handle"


def handle_of(sampling_params: Any) -> dict[str, Any] | None:
    """The handle of a reading request; None for a plain one."""
    extra = getattr(sampling_params, "extra_args", None)
    if not extra or "scope" not in extra:
        return None
    handle = extra.get(HANDLE)
    return handle if isinstance(handle, dict) else None


class _CappedLookup:
    """A KV-cache coordinator whose hits end before a position."""

    def __init__(self, coordinator: Any, cap: int) -> None:
        self._coordinator = coordinator
        self._cap = cap

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        return self._coordinator.find_longest_cache_hit(
            block_hashes, min(max_cache_hit_length, self._cap)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)


def get_computed_blocks(original: Any, self: Any, request: Any) -> Any:
    handle = handle_of(request.sampling_params)
    if handle is None:
        return original(self, request)
    coordinator = self.coordinator
    self.coordinator = _CappedLookup(coordinator, int(handle["first_position"]))
    try:
        return original(self, request)
    finally:
        self.coordinator = coordinator


def wrap() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from vllm_scope.engine.plugin import wrap_method

    wrap_method(KVCacheManager, "get_computed_blocks", ["request"], get_computed_blocks)
