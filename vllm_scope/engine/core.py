"""The scheduler's side: which KV a request may share, and when there is room for it.

Owns:  the cap on a reading request's prefix-cache hit, the keys of edited KV blocks,
       what a steering module's name and the server-wide edits mean for a request that
       enters, and who waits until the workers' tables have room for it (ledger).
Runs:  in EngineCore: when a request enters (input thread), is hashed, is scheduled.

A token whose KV comes from the cache is not computed, so its rows do not exist: a
request that reads from position p on may hit the cache below p only. What it computes
enters the cache as ever, and plain requests hit it. KV that an edit has touched is
keyed by the edit's content and the tokens it falls on, from the first edited block on.
"""

from __future__ import annotations

import threading
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_scope.compile import BlockKeys, RequestProgram
from vllm_scope.engine.delivery import global_reads
from vllm_scope.engine.model import (
    CONNECTORS_BY_HASH,
    foreign_connector,
    hidden_size_of,
    sites_of,
)  # fmt: skip
from vllm_scope.engine.seams import config_of, wrap_function, wrap_method
from vllm_scope.errors import CapacityError, SpecError, shown
from vllm_scope.ledger import Ledger
from vllm_scope.plan import OVERSHOOT
from vllm_scope.program import Cost, Program
from vllm_scope.registry import Registry
from vllm_scope.resolve import Resolved
from vllm_scope.sinks.request import Ended
from vllm_scope.spec import Spec
from vllm_scope.tap.tables import capacity
from vllm_scope.vectors import load_vectors

#: Where the handle of a request with taps is, beside `scope` in `extra_args`. Made by
#: the front-end: `key`, `frontend`, `first_position` (None reads nothing), `vectors`
#: (it edits or probes), `follows` (its caller sees outputs before the last). EngineCore
#: adds `modules` (name -> digest) and `server` (digest of the server-wide edits); for a plain
#: request too, where the server edits all, and `sinks` where rows go elsewhere than to memory.
HANDLE = "scope_handle"


def handle_of(sampling_params: Any) -> dict[str, Any] | None:
    """The handle of a request with taps; None for a plain one."""
    extra = getattr(sampling_params, "extra_args", None)
    handle = extra.get(HANDLE) if extra else None
    return handle if isinstance(handle, dict) else None


@dataclass(frozen=True)
class Entry:
    """What a request with vectors is given as it enters, beside its handle.

    Attributes:
        keys: how its edits key its KV blocks; None where nothing is edited.
        programs: those whose places it holds in the workers' tables.
    """

    keys: BlockKeys | None
    programs: tuple[Program, ...]


class CoreScope:
    """The registry, and what it makes of requests that enter."""

    def __init__(self, vllm_config: Any) -> None:
        config = config_of(vllm_config)
        assert config is not None
        self.connector = foreign_connector(vllm_config)
        self.sites = sites_of(vllm_config, config)
        self.registry = Registry(self.sites)
        for name, path in config.modules.items():
            self.registry.register_module(name, load_vectors(path))
        #: What global sinks read of every request.
        self.everywhere = global_reads(config, self.sites)
        self.most = capacity(self.sites.hidden_size, config.vectors_mib)

    def stamp(self, request: Any) -> Entry | None:
        """Give a request that enters what names and the server's edits mean now.

        Returns:
            None where it has no vectors.

        Raises:
            ScopeError: the front-end had let it in, and a name has changed its meaning
                since then. vLLM ends the request with an error.
        """
        params, server = request.sampling_params, self.registry.server
        if request.prompt_token_ids is None:  # prompt embeddings
            if params is not None and server is not None:
                raise SpecError(
                    "this server edits every request, and prompt embeddings cannot be edited; "
                    "send text or token ids, or send it again when the server's edits are gone."
                )
            return None
        if params is not None and self.everywhere.reads:
            params = request.sampling_params = self._stamp_reads(request)
        handle = handle_of(params)
        if params is None or not (server is not None or (handle and handle["vectors"])):
            return None
        handle = {**(handle or {}), "server": server}
        spec = Spec.from_json(params.extra_args["scope"]) if "key" in handle else None
        names = self.registry.names
        modules = spec.modules if spec is not None else ()
        handle["modules"] = {name: names[name] for name in modules if name in names}
        asked = self.registry.resolve(spec, handle["modules"], server)
        asked = asked.joined(reads=self.everywhere.reads)
        if asked.edits:
            self._check_connector()
        prompt_ids = np.asarray(request.prompt_token_ids, np.int64)
        program = RequestProgram.compile(
            asked, self.sites, frozenset(self.sites.boundaries), len(prompt_ids), prompt_ids
        )
        programs: tuple[Program, ...] = ()
        if program.has_vectors:
            most = len(prompt_ids) + (params.max_tokens or 1) + OVERSHOOT
            programs = tuple(program.with_drafts(most))
            cost = Cost.of(programs)
            if not cost.fits(self.most):
                raise CapacityError(
                    f"with the server's edits the request takes {cost}; this engine has "
                    f"{self.most}. Edit fewer places, or send it again when they are gone."
                )
        keys = BlockKeys(asked.edits, len(prompt_ids), prompt_ids) if asked.edits else None
        params = copy(params)
        params.extra_args = {**(params.extra_args or {}), HANDLE: handle}
        request.sampling_params = params
        return Entry(keys, programs)

    def check_edits(self, text: str | None) -> None:
        """Raises SpecError for server-wide edits that no request could hold."""
        if text is None:
            return
        self._check_connector()
        asked = Resolved(edits=self.registry.parse_edits(text))
        # One token of the prompt, and then generated ones: edits of the server pick phases.
        ids = np.zeros(1, np.int64)
        program = RequestProgram.compile(
            asked, self.sites, frozenset(self.sites.boundaries), 1, ids
        )
        if not program.cost(2 + OVERSHOOT).fits(self.most):
            raise SpecError(
                f"these edits take {program.cost(2 + OVERSHOOT)}; this engine has {self.most} for "
                "all requests. Edit fewer places, or raise "
                "additional_config['scope'].vectors_mib."
            )

    def _check_connector(self) -> None:
        """Raises SpecError where edited KV would be found under the tokens alone."""
        if self.connector is not None:
            raise SpecError(
                f"this engine shares KV through {shown(self.connector)}, which may give KV of "
                "edited tokens to plain requests, or theirs to edited ones; edits need an engine "
                f"without it, or with {' or '.join(CONNECTORS_BY_HASH)}. Reads and probes stay."
            )

    def _stamp_reads(self, request: Any) -> Any:
        """Its sampling parameters, with a handle that says what global sinks read."""
        ids = np.asarray(request.prompt_token_ids, np.int64)
        firsts = [read.tokens.first_position(len(ids), ids) for read in self.everywhere.reads]
        handle = dict(handle_of(request.sampling_params) or {})
        if handle.get("first_position") is not None:
            firsts.append(handle["first_position"])
        handle |= {"first_position": min(firsts), "sinks": True, "vectors": handle.get("vectors")}
        params = copy(request.sampling_params)
        params.extra_args = {**(params.extra_args or {}), HANDLE: handle}
        return params


# Requests in

#: Of requests whose construction, in which vLLM hashes their blocks, is under way.
_entering: dict[str, BlockKeys | None] = {}
_making = threading.Lock()


def _preprocess(original: Any, self: Any, request: Any) -> Any:
    nothing_asked = "scope" not in self.__dict__ and handle_of(request.sampling_params) is None
    if nothing_asked and not _has_global_sinks(self):
        return original(self, request)
    entry = _scope_of(self).stamp(request)
    if entry is None:
        return original(self, request)
    _entering[request.request_id] = entry.keys
    try:
        made = original(self, request)
        made[0].scope_keys, made[0].scope_programs = entry.keys, entry.programs
        return made
    finally:
        del _entering[request.request_id]


def _scope_of(engine: Any) -> CoreScope:
    """EngineCore's, made when something is asked for the first time: by a request, on the
    input thread, or by a remote call, on another."""
    with _making:
        if "scope" not in engine.__dict__:
            engine.scope = CoreScope(engine.vllm_config)
    scope: CoreScope = engine.scope
    return scope


def _has_global_sinks(engine: Any) -> bool:
    if "scope_global" not in engine.__dict__:
        config = config_of(engine.vllm_config)
        engine.scope_global = config is not None and bool(config.global_sinks)
    return bool(engine.scope_global)


def _extra_keys(original: Any, request: Any, start: int, stop: int, *rest: Any) -> Any:
    found, following = original(request, start, stop, *rest)
    keys = getattr(request, "scope_keys", None) or _entering.get(request.request_id)
    key = keys.key(start, stop) if keys is not None else None
    return (found if key is None else (*(found or ()), ("scope", key))), following


def _collective_rpc(
    original: Any, self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
) -> Any:
    """The workers' registries and EngineCore's are told by the same calls, this one first:
    what it refuses, no worker hears of; what a worker refuses, it takes back."""
    telling = {"scope_register": "register", "scope_unregister": "unregister",
               "scope_set_edits": "set_edits"}  # fmt: skip
    if method not in telling:
        return original(self, method, timeout, args, kwargs)
    if method == "scope_set_edits":
        _scope_of(self).check_edits(*args, **(kwargs or {}))
    registry = _scope_of(self).registry
    before = registry.meant()
    getattr(registry, telling[method])(*args, **(kwargs or {}))
    try:
        return original(self, method, timeout, args, kwargs)
    except Exception:
        registry.restore(before)
        raise


# Room for requests


def _ledger_of(scheduler: Any) -> Ledger | None:
    """None while no request has held anything."""
    ledger: Ledger | None = scheduler.__dict__.get("scope_ledger")
    return ledger


def _new_ledger(scheduler: Any) -> Ledger:
    vllm_config = scheduler.vllm_config
    config = config_of(vllm_config)
    assert config is not None
    ledger = Ledger(capacity(hidden_size_of(vllm_config), config.vectors_mib))
    scheduler.scope_ledger = ledger
    return ledger


def _programs_of(request: Any) -> tuple[Program, ...]:
    """Whose places it holds; none of a plain one."""
    programs: tuple[Program, ...] = getattr(request, "scope_programs", ())
    return programs


def _add_to_scheduler(original: Any, self: Any, request: Any) -> None:
    # vLLM sends each piece of streamed input as a request of the same id.
    if request.request_id in self.requests:
        original(self, _as_it_entered(request, self.requests[request.request_id]))
        return
    programs, ledger = _programs_of(request), _ledger_of(self)
    if programs and ledger is None:
        ledger = _new_ledger(self)
    if ledger is None or ledger.enter(request, programs):
        original(self, request)


def _as_it_entered(piece: Any, session: Any) -> Any:
    """Streamed input: its session keeps what it entered with, as others do that run. The workers
    and the ledger know it by that; the server's edits may be others by now."""
    params, handle = piece.sampling_params, handle_of(session.sampling_params)
    if params is not None and handle_of(params) != handle:
        params = piece.sampling_params = copy(params)
        extra = {**(params.extra_args or {}), HANDLE: handle}
        params.extra_args = {k: v for k, v in extra.items() if k != HANDLE or v is not None}
    return piece


def _let_in(self: Any, ledger: Ledger) -> None:
    """Those for whom there is room now, in their order."""
    while ledger.waiting:
        first = ledger.waiting[0]
        programs = _programs_of(first)
        if programs and not ledger.admit(first.request_id, programs):
            return
        _enter(self, ledger.waiting.popleft())


def _enter(self: Any, request: Any) -> None:
    session = self.requests.get(request.request_id)
    _enqueue(self, request if session is None else _as_it_entered(request, session))


def _free(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(self, request, *args, **kwargs)
    handle = handle_of(request.sampling_params)
    if handle is not None and handle.get("sinks"):
        ended = Ended(tuple(request.output_token_ids), str(request.get_finished_reason()))
        self.__dict__.setdefault("scope_ended", {})[request.request_id] = ended
    ledger = _ledger_of(self)
    if ledger is not None and ledger.release(request.request_id):
        _let_in(self, ledger)
    return out


def _finish(original: Any, self: Any, request_ids: Any, status: Any) -> Any:
    """Requests that still wait for room end as others do: from the scheduler's queue."""
    ledger = _ledger_of(self)
    if ledger is None or not ledger.waiting:
        return original(self, request_ids, status)
    some = {request_ids} if isinstance(request_ids, str) else request_ids
    some = None if some is None else set(some)
    for request in ledger.take_out(some):
        _enter(self, request)
    found = original(self, some, status)
    # Where the first in line has gone, there may be room for those behind it.
    _let_in(self, ledger)
    return found


_enqueue: Any = None


# The end of requests with sinks


def _schedule(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """What the scheduler accepted goes to the workers with the news that it is over."""
    output = original(self, *args, **kwargs)
    ended = self.__dict__.get("scope_ended")
    if ended:
        output.scope_ended = {r: ended.pop(r) for r in output.finished_req_ids if r in ended}
    return output


def ended_in(scheduler_output: Any) -> dict[str, Ended]:
    """Of requests that end with this step and have sinks: what was accepted."""
    found = getattr(scheduler_output, "scope_ended", None)
    return found if isinstance(found, dict) else {}


# KV of other requests


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


def _get_computed_blocks(original: Any, self: Any, request: Any) -> Any:
    handle = handle_of(request.sampling_params)
    if handle is None or handle.get("first_position") is None:
        return original(self, request)
    coordinator = self.coordinator
    self.coordinator = _CappedLookup(coordinator, int(handle["first_position"]))
    try:
        return original(self, request)
    finally:
        self.coordinator = coordinator


def wrap() -> None:
    from vllm.v1.core import block_pool, kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    global _enqueue
    wrap_method(EngineCore, "preprocess_add_request", ["request"], _preprocess)
    wrap_method(EngineCore, "collective_rpc", ["method", "args"], _collective_rpc)
    _enqueue = Scheduler.add_request
    wrap_method(Scheduler, "add_request", ["request"], _add_to_scheduler)
    wrap_method(Scheduler, "schedule", [], _schedule)
    wrap_method(Scheduler, "_free_request", ["request"], _free)
    wrap_method(Scheduler, "finish_requests", ["request_ids", "finished_status"], _finish)
    wrap_method(KVCacheManager, "get_computed_blocks", ["request"], _get_computed_blocks)
    wrap_function(
        [kv_cache_utils, block_pool], "generate_block_hash_extra_keys",
        ["request", "start_token_idx", "end_token_idx"], _extra_keys,
    )  # fmt: skip
