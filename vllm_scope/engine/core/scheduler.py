"""The scheduler: when a request with taps starts, how far it may hit the KV cache, how it ends.

Owns:  the wait for room in the workers' tables (core.admission), the cap on a reading request's
       prefix-cache hits, and the message to workers that a request with sinks is over.
Runs:  in EngineCore, on the scheduler's thread.
From:  entry (the programs of a request).

A token whose KV comes from the cache is not computed, so it has no rows: a request that reads
from position p on may hit the cache below p only. What it computes enters the cache as usual,
and plain requests hit it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from vllm_scope.core.admission import Admission
from vllm_scope.engine import wrapping
from vllm_scope.engine.core import clearing
from vllm_scope.engine.model import hidden_size_of
from vllm_scope.engine.params import handle_of, with_handle
from vllm_scope.engine.seams import config_of
from vllm_scope.graph.tap.tables import capacity
from vllm_scope.program.operations import Program
from vllm_scope.sinks.request import Ended

# Room for requests


def _admission_of(scheduler: Any) -> Admission | None:
    """None until a request with programs comes."""
    admission: Admission | None = scheduler.__dict__.get("scope_admission")
    return admission


def _new_admission(scheduler: Any) -> Admission:
    vllm_config = scheduler.vllm_config
    config = config_of(vllm_config)
    assert config is not None
    admission = Admission(capacity(hidden_size_of(vllm_config), config.vectors_mib))
    scheduler.scope_admission = admission
    return admission


def _programs_of(request: Any) -> tuple[Program, ...]:
    """The programs whose places a request holds; none for a plain one."""
    programs: tuple[Program, ...] = getattr(request, "scope_programs", ())
    return programs


def _add_to_scheduler(original: Any, self: Any, request: Any) -> None:
    if self.connector is not None and handle_of(request.sampling_params) is not None:
        _take_nothing_from(self.connector)
    programs, admission = _programs_of(request), _admission_of(self)
    if request.request_id not in self.requests:
        if programs and admission is None:
            admission = _new_admission(self)
        if admission is not None and not admission.enter(request, programs):
            return
    original(self, _as_it_entered(self, request))


def _as_it_entered(self: Any, request: Any) -> Any:
    """Give a piece of streamed input the handle of its session, which is a request of the same id.

    The workers and the admission hold what the session entered with; the server's edits may
    have changed since.
    """
    session, params = self.requests.get(request.request_id), request.sampling_params
    if session is not None and params is not None:
        handle = handle_of(session.sampling_params)
        if handle_of(params) != handle:
            request.sampling_params = with_handle(params, handle)
    return request


def _let_in(self: Any, admission: Admission) -> None:
    """Move waiting requests to the scheduler, in order, while there is room."""
    while admission.waiting:
        first = admission.waiting[0]
        programs = _programs_of(first)
        if programs and not admission.admit(first.request_id, programs):
            return
        _enqueue(self, _as_it_entered(self, admission.waiting.popleft()))


def _free(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(self, request, *args, **kwargs)
    handle = handle_of(request.sampling_params)
    if handle is not None and handle.get("sinks"):
        ended = Ended(tuple(request.output_token_ids), str(request.get_finished_reason()))
        self.__dict__.setdefault("scope_ended", {})[request.request_id] = ended
    admission = _admission_of(self)
    if admission is not None and admission.release(request.request_id):
        _let_in(self, admission)
    return out


def _finish(original: Any, self: Any, request_ids: Any, status: Any) -> Any:
    """Scheduler.finish_requests: requests that wait for room end from the scheduler's queue."""
    admission = _admission_of(self)
    if admission is None or not admission.waiting:
        return original(self, request_ids, status)
    some = {request_ids} if isinstance(request_ids, str) else request_ids
    some = None if some is None else set(some)
    for request in admission.take_out(some):
        _enqueue(self, _as_it_entered(self, request))
    found = original(self, some, status)
    # If the first in line has gone, there may be room for those behind it.
    _let_in(self, admission)
    return found


_enqueue: Any = None


# The end of requests with sinks


def _schedule(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Scheduler.schedule: add the accepted tokens of requests that are over, and the blocks that
    workers zero before the step."""
    output = original(self, *args, **kwargs)
    ended = self.__dict__.get("scope_ended")
    if ended:
        output.scope_ended = {r: ended.pop(r) for r in output.finished_req_ids if r in ended}
    clearing.send(self, output)
    return output


def ended_in(scheduler_output: Any) -> dict[str, Ended]:
    """Request with sinks that is over -> what the scheduler accepted."""
    found = getattr(scheduler_output, "scope_ended", None)
    return found if isinstance(found, dict) else {}


# KV of other requests


def _capped(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """KVCacheManager.get_computed_blocks and its twin for KV connectors: hits end below the
    request's first position.

    Args:
        args, kwargs: since vLLM 0.33 `max_cache_hit_length`, the same cap; none before.
    """
    handle = handle_of(request.sampling_params)
    if handle is None or handle.get("first_position") is None:
        return original(self, request, *args, **kwargs)
    first = int(handle["first_position"])
    if _takes_cap(original):
        given = (*args, *kwargs.values(), None)[0]
        most = request.num_tokens - 1 if given is None else given
        return original(self, request, min(most, first))
    with _lookups_end(self.coordinator, first):
        return original(self, request)


@cache
def _takes_cap(original: Any) -> bool:
    return "max_cache_hit_length" in inspect.signature(original).parameters


@contextmanager
def _lookups_end(coordinator: Any, first: int) -> Iterator[None]:
    """Cap the hits of a KV-cache coordinator. On the instance, as vLLM tests its class.
    vllm 0.32, v1/core/kv_cache_manager.py, get_computed_blocks_for_connector"""
    names = ("find_longest_cache_hit", "find_longest_cache_hit_per_group")
    # A lookup for connectors may call the other one for the same request, which is then capped.
    nested = any(name in coordinator.__dict__ for name in names)
    here = [name for name in names if hasattr(coordinator, name) and not nested]
    lookups = {name: getattr(coordinator, name) for name in here}
    for name, lookup in lookups.items():
        setattr(coordinator, name, partial(_lookup_below, lookup, first))
    try:
        yield
    finally:
        for name in lookups:
            delattr(coordinator, name)


def _take_nothing_from(connector: Any) -> None:
    """Give requests with taps no KV of a KV connector: their tokens would not be computed, and it
    may hold KV of a request with the same edits that failed."""
    if "get_num_new_matched_tokens" not in connector.__dict__:
        lookup = connector.get_num_new_matched_tokens
        connector.get_num_new_matched_tokens = partial(_lookup_outside, lookup)


def _lookup_outside(lookup: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """get_num_new_matched_tokens -> (tokens, False). The connector is called all the same, as
    some take notes; None tokens means to ask again later."""
    if handle_of(request.sampling_params) is None:
        return lookup(request, *args, **kwargs)
    kept, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, True
    try:
        tokens, _ = lookup(request, *args, **kwargs)
    finally:
        request.skip_reading_prefix_cache = kept
    return (None if tokens is None else 0), False


def _lookup_below(lookup: Any, first: int, block_hashes: Any, max_cache_hit_length: int) -> Any:
    return lookup(block_hashes, min(max_cache_hit_length, first))


def wrap() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    global _enqueue
    _enqueue = Scheduler.add_request
    wrapping.wrap("Scheduler.add_request", _add_to_scheduler)
    wrapping.wrap("Scheduler.schedule", _schedule)
    wrapping.wrap("Scheduler._free_request", _free)
    wrapping.wrap("Scheduler.finish_requests", _finish)
    wrapping.wrap("KVCacheManager.get_computed_blocks", _capped)
    wrapping.wrap("KVCacheManager.get_computed_blocks_for_connector", _capped)
