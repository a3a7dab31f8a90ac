"""Controls requests with taps in the scheduler: their start, their use of cached KV, and their end.

Owns:  the code that lets requests wait for room in the workers' tables (core.admission); the limit
       of the cached KV that a reading request uses; the code that makes the news (core.news).
Runs:  in EngineCore, on the scheduler's thread.
From:  entered (EngineCore's data about requests).   To: engine.worker.attach (the news).

If a token's KV comes from the prefix cache, the model does not compute the token, and the taps
write no rows of the token. Therefore a request that reads from position p on uses cached KV only
for positions below p. The KV that a reading request computes enters the prefix cache as usual.
Requests without taps can use this KV.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

from vllm_scope.core.admission import Admission
from vllm_scope.core.news import Entrant, StepNews, Told
from vllm_scope.core.score_index import ScoreIndex
from vllm_scope.engine import wrapping
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.core import clearing, scores
from vllm_scope.engine.core.entered import any_entered, entered
from vllm_scope.engine.core.scores import fill_blocks, index_of, kept_of, new_index
from vllm_scope.engine.core.variants import (
    aborted,
    most_tokens,
    stands_for_some,
    variants_of,
    with_variants,
)
from vllm_scope.engine.core.verdicts import has_due, take_due
from vllm_scope.engine.heap import seldom
from vllm_scope.engine.model import sites_of, worker_is_here
from vllm_scope.engine.seams import config_of
from vllm_scope.engine.vllm_types import (
    KVCacheManager,
    KVConnector,
    Request,
    Scheduler,
    SchedulerOutput,
)
from vllm_scope.graph.tap.program_tables import capacity
from vllm_scope.graph.tap.tables import log_places
from vllm_scope.program.held import Held
from vllm_scope.program.operations import Cost, LogRange
from vllm_scope.sinks.request import Ended

T = TypeVar("T")


@dataclass
class _State:
    """This module's data about one scheduler of vLLM.

    Attributes:
        told: the record of the data that the workers hold.
        admission: the scheduler's Admission; None before the first request with programs.
        ended: maps the id of an ended request with sinks to the request's accepted tokens. An entry
            stays in this mapping until a step's news contains the entry.
        tapped: ids of the requests with taps that have not ended. While there are such requests,
            Python's garbage collections are rarer in this process.
        summing: ids of running requests with Moments.
        accepted: maps the id of an ended request with Moments to the request's number of tokens. An
            entry stays in this mapping until a step's news contains the entry.
        resting: True from a step at which `_is_quiet` is True, until a request with taps enters or
            `index` has news.
        index: the scheduler's ScoreIndex, if `resting` is True.
    """

    told: Told
    admission: Admission[Request] | None = None
    ended: dict[str, Ended] = field(default_factory=dict)
    tapped: set[str] = field(default_factory=set)
    summing: set[str] = field(default_factory=set)
    accepted: dict[str, int] = field(default_factory=dict)
    resting: bool = False
    index: ScoreIndex | None = None

    def __del__(self) -> None:
        if self.tapped:  # the scheduler is freed, and `leave` will not be called
            seldom.end()

    def enter(self, request_id: str) -> None:
        """Record a request with taps."""
        if not self.tapped:
            seldom.begin()
        self.tapped.add(request_id)

    def leave(self, request_id: str) -> None:
        """Record the end of a request with taps."""
        if request_id in self.tapped:
            self.tapped.remove(request_id)
            if not self.tapped:
                seldom.end()


_states: Beside[_State] = Beside()


def _state_of(scheduler: Scheduler) -> _State:
    found = _states.of(scheduler)
    if found is None:
        here = worker_is_here(scheduler.vllm_config)
        found = _states.put(scheduler, _State(Told(here)))
    return found


# Room for requests


def admission_of(scheduler: object) -> Admission[Request] | None:
    """The scheduler's Admission; None before the first request with programs."""
    state = _states.of(scheduler)
    return None if state is None else state.admission


def _log_of(scheduler: object, request_id: str, asked: LogRange) -> LogRange:
    """The request's range of places in the log of states."""
    admission = admission_of(scheduler)
    if admission is None or not asked.size:
        return asked
    return asked._replace(start=admission.log_start(request_id))


def _new_admission(scheduler: Scheduler) -> Admission[Request]:
    vllm_config = scheduler.vllm_config
    config = config_of(vllm_config)
    assert config is not None
    most = capacity(sites_of(vllm_config, config).vector_size, config.vectors_mib)
    most += Cost(lens_rows=config.lens_rows_running)
    admission: Admission[Request] = Admission(most, log_places(config.states_mib))
    _state_of(scheduler).admission = admission
    return admission


def _held_by(request: object) -> tuple[Held | None, int, Cost]:
    """Returns three values of a request: its programs in the workers' tables, or None; the number
    of places that it needs in the log of states; and `Entered.reserve`."""
    found = entered(request)
    if found is None:
        return None, 0, Cost()
    return found.held, found.logged.size, found.reserve


def _add_to_scheduler(original: Callable[..., object], self: Scheduler, request: Request) -> None:
    known, variants = entered(request), variants_of(self, request)
    if known is not None or variants:
        _state_of(self).resting = False
    # vLLM adds a piece of streamed input to the earlier request with the same id, and frees only
    # the earlier request.
    if known is not None and request.request_id not in self.requests:
        _state_of(self).enter(request.request_id)
    if variants:
        for one in variants:
            self.add_request(one)
        return
    if self.connector is not None and known is not None:
        _take_nothing_from(self.connector)
    if known is not None and known.asked.scores_alone is not None:
        new_index(self)
    held, admission = _held_by(request), admission_of(self)
    if request.request_id not in self.requests:
        if held[0] is not None and admission is None:
            admission = _new_admission(self)
        if admission is not None and not admission.enter(request, *held):
            return
    # The reads and edits of the earlier request apply to a piece of streamed input too.
    original(self, request)


def _let_in(self: Scheduler, admission: Admission[Request]) -> None:
    """Move waiting requests to the scheduler while the workers' tables have room. Requests with a
    lens wait in one queue, and all other requests in a second queue. Each queue keeps its order."""
    for line in admission.lines:
        while line:
            held, num_logged, reserve = _held_by(line[0])
            if held is not None and not admission.admit(
                line[0].request_id, held, num_logged, reserve
            ):
                break
            _enqueue(self, line.popleft())


def _free(
    original: Callable[..., T], self: Scheduler, request: Request, *args: object, **kwargs: object
) -> T:
    out = original(self, request, *args, **kwargs)
    known, name = entered(request), request.request_id
    if known is not None:
        state = _state_of(self)
        state.leave(name)
        if known.has_sinks:
            # With streamed input, vLLM adds all tokens after the first piece to the prompt. The
            # workers know only the first piece as the prompt.
            after_first = tuple(request.all_token_ids[known.num_prompt :])
            state.ended[name] = Ended(after_first, str(request.get_finished_reason()))
        if name in state.summing:
            state.summing.remove(name)
            state.accepted[name] = request.num_tokens
    scores.finish_request(self, request)
    admission = admission_of(self)
    if admission is not None and admission.release(name):
        _let_in(self, admission)
    return out


def _finish(
    original: Callable[..., list[Request]],
    self: Scheduler,
    request_ids: str | Iterable[str] | None,
    status: object,
) -> list[Request]:
    """Scheduler.finish_requests. The scheduler can end only requests that it has. Therefore, if a
    request that must end still waits for room, the wrapper first moves the request to the
    scheduler."""
    request_ids = with_variants(self, request_ids)
    admission = admission_of(self)
    if admission is None or not admission.waiting:
        return _as_known(self, original(self, request_ids, status), status)
    some = {request_ids} if isinstance(request_ids, str) else request_ids
    some = None if some is None else set(some)
    for request in admission.take_out(some):
        _enqueue(self, request)
    found = original(self, some, status)
    # If the first waiting request has ended, the requests after it can perhaps start.
    _let_in(self, admission)
    return _as_known(self, found, status)


def _as_known(scheduler: Scheduler, ended: list[Request], status: object) -> list[Request]:
    """The ended requests. If variants were aborted, the result has, in their place, the
    front-end's request that stands for them."""
    from vllm.v1.request import RequestStatus

    return aborted(scheduler, ended) if status == RequestStatus.FINISHED_ABORTED else ended


_enqueue: Any = None


# News for the workers


def _schedule(
    original: Callable[..., SchedulerOutput], self: Scheduler, *args: object, **kwargs: object
) -> SchedulerOutput:
    """Scheduler.schedule. Adds the step's news to the output as the attribute `scope_news`. vLLM
    sends the output to every worker."""
    if _rests(self):
        return original(self, *args, **kwargs)
    most = most_tokens(self)
    with nullcontext() if most is None else _bounded(self, most):
        output = original(self, *args, **kwargs)
    due = take_due(self)
    news = StepNews(zeroed=clearing.due(self), begun=due.begun, scales=due.scales)
    for new in output.scheduled_new_reqs:
        request = self.requests[new.req_id]
        known = entered(request)
        if known is not None:
            summing = _state_of(self).summing
            # In Model Runner V2, `scheduled_new_reqs` also contains requests that begin again after
            # preemption. If the sums of such a request were dropped, no room is reserved again.
            if known.sums is not None and new.req_id not in summing:
                # The room is reserved again, because a user can have dropped the sums after the
                # request entered.
                known.sums.enter_again(known.asked.moments)
                summing.add(new.req_id)
            number = _state_of(self).told.number_of(known.asked, news)
            news.entrants[new.req_id] = Entrant(
                known.recipient, number, known.columns, known.unchecked,
                _log_of(self, new.req_id, known.logged),
                *kept_of(self, request, known.asked, new.num_computed_tokens),
            )  # fmt: skip
            if known.held is not None:
                news.held[new.req_id] = known.held
    # In Model Runner V2, the scheduler's list of new requests also contains the resumed requests.
    for req_id in (*output.scheduled_cached_reqs.resumed_req_ids, *news.entrants):
        known = entered(self.requests[req_id])
        if known is not None and known.asked.num_states:
            news.resumed[req_id] = self.requests[req_id].num_tokens
    state = _states.of(self)
    fill_blocks(self, output, news)
    if state is not None and state.ended:
        news.ended = {r: state.ended.pop(r) for r in output.finished_req_ids if r in state.ended}
    if state is not None and (state.summing or state.accepted):
        over = output.finished_req_ids & state.accepted.keys()
        news.accepted = {r: state.accepted.pop(r) for r in over}
        running = state.summing & output.num_scheduled_tokens.keys()
        news.accepted |= {r: self.requests[r].num_tokens for r in running}
    if news:
        output.scope_news = news
    return output


def _rests(scheduler: Scheduler) -> bool:
    """True if the scheduler is quiet (`_is_quiet`). While the scheduler rests, this function only
    checks whether `index` has news."""
    state = _states.of(scheduler)
    if state is None or not state.resting:
        if not _is_quiet(scheduler):
            return False
        state = _state_of(scheduler)
        state.resting, state.index = True, index_of(scheduler.kv_cache_manager)
    elif state.index is not None and state.index.has_news:
        # A worker has reported lost scores, or all scores were dropped.
        state.resting = False
    return state.resting


def _is_quiet(scheduler: Scheduler) -> bool:
    """True if no request has taps, and the workers need no news of earlier requests."""
    if any_entered() or stands_for_some(scheduler):
        return False
    state, index = _states.of(scheduler), index_of(scheduler.kv_cache_manager)
    return not (
        (state is not None and (state.ended or state.accepted))
        or (index is not None and index.has_news)
        or clearing.is_due(scheduler)
        or has_due(scheduler)
    )


@contextmanager
def _bounded(scheduler: Scheduler, most: int) -> Iterator[None]:
    """In the `with` block, the scheduler schedules at most `most` tokens."""
    before = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = min(before, most)
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before


def news_in(scheduler_output: object) -> StepNews | None:
    """The news of a step; None if the step has no news."""
    found = getattr(scheduler_output, "scope_news", None)
    return found if isinstance(found, StepNews) else None


# Use of the KV of other requests


def _capped(
    original: Callable[..., T],
    self: KVCacheManager,
    request: Request,
    *args: int | None,
    **kwargs: int | None,
) -> T:
    """KVCacheManager.get_computed_blocks, and the same method for KV connectors. A request can use
    the prefix cache only for positions below the first position whose row it needs. There is one
    exception: if a request only probes, and the workers store the scores of its first blocks, the
    request can also use the KV of these blocks.

    Args:
        args, kwargs: from vLLM 0.33 on, vLLM's own cap `max_cache_hit_length`; empty in earlier
            versions of vLLM.
    """
    known = entered(request)
    if known is None or known.first_read is None:
        return original(self, request, *args, **kwargs)
    first, index, probes = known.first_read, index_of(self), known.asked.scores_alone
    if index is not None and probes is not None:
        count = index.num_known(request.block_hashes, probes)
        # A preempted request already has the scores of the KV blocks that the request had filled.
        # The request does not get stored scores of later blocks. Therefore the request must compute
        # these later blocks.
        told = index.num_told(request.request_id)
        first = max(first, min(count, count if told is None else told) * index.block_size)
    if _takes_cap(original):
        given = (*args, *kwargs.values(), None)[0]
        most = request.num_tokens - 1 if given is None else given
        return original(self, request, min(most, first))
    with _lookups_end(self.coordinator, first):
        return original(self, request)


@cache
def _takes_cap(original: Callable[..., object]) -> bool:
    return "max_cache_hit_length" in inspect.signature(original).parameters


@contextmanager
def _lookups_end(coordinator: object, first: int) -> Iterator[None]:
    """In the `with` block, a KV-cache coordinator finds cached KV only below position `first`. The
    methods are replaced on the object and not on its class, because vLLM tests the class.
    vllm 0.32, v1/core/kv_cache_manager.py, get_computed_blocks_for_connector"""
    names = ("find_longest_cache_hit", "find_longest_cache_hit_per_group")
    # vLLM's lookup for KV connectors can call the lookup without connectors for the same request.
    # If the outer call has already set the cap, the inner call must not set the cap again.
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


def _take_nothing_from(connector: KVConnector) -> None:
    """Make sure that requests with taps use no KV from a KV connector. If a token's KV came from a
    connector, the model would not compute the token. Such KV could also come from a failed request
    with equal edits."""
    if "get_num_new_matched_tokens" not in connector.__dict__:
        lookup = connector.get_num_new_matched_tokens
        connector.get_num_new_matched_tokens = partial(_lookup_outside, lookup)


def _lookup_outside(
    lookup: Callable[..., tuple[int | None, bool]],
    request: Request,
    *args: object,
    **kwargs: object,
) -> tuple[int | None, bool]:
    """A connector's get_num_new_matched_tokens. The result for a request with taps is (0, False).

    The wrapper still calls the connector, because some connectors record the call. If the connector
    answers None tokens ("ask again later"), the result is (None, False).
    """
    if entered(request) is None:
        return lookup(request, *args, **kwargs)
    kept, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, True
    try:
        tokens, _ = lookup(request, *args, **kwargs)
    finally:
        request.skip_reading_prefix_cache = kept
    return (None if tokens is None else 0), False


def _lookup_below(
    lookup: Callable[..., T], first: int, block_hashes: object, max_cache_hit_length: int
) -> T:
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
