"""Resolves new requests in EngineCore, and makes the keys of their KV blocks.

Owns:  the code that prepares a new request: it resolves the names of steering modules, adds
       server-wide edits, and makes the request's programs. Also the keys of edited KV blocks, and
       the remote calls about steering modules and server-wide edits.
Runs:  in EngineCore, when a request enters (input thread), when vLLM hashes its KV blocks, and when
       a remote call arrives.
From:  request.ticket (the tickets that front-ends send).   To: entered, scheduler.

The first edited KV block of a request and all later blocks have keys that depend on the edits, and
on the tokens to which the edits apply.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from vllm_scope.core.news import digest_of, know_digest, packed_of
from vllm_scope.core.registry import Registry
from vllm_scope.core.sums_room import SumsRoom
from vllm_scope.engine import wrapping
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.core.entered import Entered, entering, keep, keys_of
from vllm_scope.engine.core.variants import expand
from vllm_scope.engine.model import (
    CONNECTORS_BY_HASH,
    foreign_connector,
    global_reads,
    sites_of,
    worker_is_here,
)
from vllm_scope.engine.params import has_ticket, ticket_of, without_ticket
from vllm_scope.engine.seams import config_of
from vllm_scope.engine.vllm_types import EngineCore, EngineCoreRequest, Request, VllmConfig
from vllm_scope.engine.worker.replies import Described
from vllm_scope.errors import CapacityError, ScopeError, SpecError, shown
from vllm_scope.graph.tap.program_tables import capacity
from vllm_scope.program.block_keys import BlockKeys
from vllm_scope.program.compiler import OVERSHOOT, RequestProgram
from vllm_scope.program.held import Held
from vllm_scope.program.layout import Widths
from vllm_scope.program.lens_rows import num_lens_rows
from vllm_scope.program.operations import Cost, LogRange
from vllm_scope.request.resolve_edits import check_stages
from vllm_scope.request.resolved import Resolved, ResolvedEdit, ResolvedProbe
from vllm_scope.request.selectors import Ids, Selector
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Spec
from vllm_scope.request.ticket import Ticket
from vllm_scope.vectors import load_vectors

T = TypeVar("T")


#: The programs that a request holds; the request's columns (Entered.columns); and the entries of
#: the workers' tables that the request can need later.
_HeldBy = tuple[Held | None, tuple[bytes, ...], Cost]
#: This many ids of refused sessions are kept (CoreScope.refused).
MOST_REFUSED = 256


class CoreScope:
    """Holds the registry, and prepares new requests.

    Attributes:
        sessions: maps the id of a session of streamed input to vLLM's Request of the session, which
            is made from the first piece of the input. The scheduler does not know the session while
            the first piece waits for room.
        refused: the ids of the last sessions of which no piece was accepted. vLLM ends a session
            with a request of one dummy token. After a refused session, this request must not begin
            as a request of its own.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = config_of(vllm_config)
        assert config is not None
        self.connector = foreign_connector(vllm_config)
        self.num_stages = vllm_config.parallel_config.pipeline_parallel_size
        self.sites = sites_of(vllm_config, config)
        self.registry = Registry(self.sites)
        self.sums = SumsRoom(self.sites, config.moments_mib)
        for name, path in config.modules.items():
            self.registry.register_module(name, load_vectors(path))
        #: The reads that global sinks add to every request.
        self.everywhere = global_reads(config, self.sites)
        self.policies = config.policy_configs()
        self.sessions: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.refused: dict[str, None] = {}
        self.most = capacity(self.sites.vector_size, config.vectors_mib)
        #: The widths of rows, with which EngineCore makes entries of the device tables for a worker
        #: in this process. None if the workers run in other processes.
        self.widths: Widths | None = None
        if worker_is_here(vllm_config):
            itemsize = vllm_config.model_config.dtype.itemsize
            self.widths = Widths.of(self.sites.row_sizes, itemsize)

    def learn(self, replies: Iterable[Described]) -> None:
        """Store the layers before which the model changes the stream. The workers found these
        layers when the model was loaded. The workers reply before the first ticket arrives."""
        moved = tuple(sorted({layer for each in replies for layer in each["sites"]["moved"]}))
        if moved != self.sites.moved:
            self.sites = replace(self.sites, moved=moved)
            self.registry.know(self.sites)

    def enter(self, request: EngineCoreRequest, ticket: Ticket | None) -> Entered | None:
        """The Entered of a new request, with the current steering modules and server-wide edits.

        Args:
            request: vLLM's EngineCoreRequest.
            ticket: the request's ticket; None if the request has no ticket.

        Returns:
            None if no action reads, probes or edits the request's tokens.

        Raises:
            ScopeError: the current steering modules and server-wide edits do not allow the request,
                or EngineCore does not have a vector that the ticket names. vLLM ends the request
                with an error.
        """
        params = request.sampling_params
        if params is None:  # a pooling request
            return None
        if request.prompt_token_ids is None:  # prompt embeddings
            if self.registry.server is not None:
                raise SpecError(
                    "this server edits every request, and prompt embeddings cannot be edited; "
                    "send text or token ids, or repeat the request after these edits are removed."
                )
            return None
        own, edited = self.registry.resolve(ticket)
        asked = edited.joined(reads=self.everywhere.reads)
        if ticket is None and not (asked.edits or asked.reads):
            return None
        if asked.edits:
            self._check_connector()
        if request.resumable and not all(map(_is_of_all_tokens, asked.edits)):
            raise SpecError(
                "this server edits only the prompts or only the generated tokens of all requests, "
                "and a later piece of streamed input cannot be told from generated tokens; send "
                "the prompt in one piece, or repeat the request after these edits are removed."
            )
        ids, max_tokens = asked.ids_of(request.prompt_token_ids), params.max_tokens or 1
        firsts = [_first({read.tokens for read in self.everywhere.reads}, ids)]
        firsts += [] if ticket is None else [ticket.first_position]
        unchecked = _unchecked(asked, asked is not own, ticket)
        if self.widths is None:
            packed_of(asked)  # packed now, to save time on the scheduler's thread
        elif asked is own and ticket is not None and not ticket.modules:
            know_digest(asked, ticket.spec.digest)
        nonce = secrets.token_bytes(16) if asked.scaled else b""
        held, columns, reserve = self._held_of(asked, ids, max_tokens, unchecked)
        if asked.features:
            reserve += Cost(lens_rows=num_lens_rows(asked, ids, max_tokens))
        return Entered(
            asked,
            None if ticket is None else ticket.recipient,
            min((first for first in firsts if first is not None), default=None),
            _first({edit.tokens for edit in asked.edits}, ids),
            BlockKeys(asked.edits, len(ids), ids, nonce, asked.shared) if asked.edits else None,
            held, columns, unchecked,
            LogRange(0, max_tokens + OVERSHOOT, asked.num_states), reserve,
            self.sums if asked.moments else None, len(ids),
        )  # fmt: skip

    def _held_of(self, asked: Resolved, ids: Ids, max_tokens: int, unchecked: bool) -> _HeldBy:
        """The result of `_held_by`. If a spec is uniform (Resolved.uniform), the result is computed
        once for all requests with this spec."""
        if not asked.uniform or not len(ids):
            return self._held_by(asked, ids, max_tokens, unchecked)
        known: dict[tuple[bool, Cost], _HeldBy] = asked.__dict__.setdefault("_held", {})
        key = unchecked, self.most
        if key not in known:
            known[key] = self._held_by(asked, ids, max_tokens, unchecked)
        return known[key]

    def _held_by(self, asked: Resolved, ids: Ids, max_tokens: int, unchecked: bool) -> _HeldBy:
        """Returns three values: the request's programs, its columns, and the table entries that its
        policy can need later. A request without edits and banks holds no programs. If the workers
        do not need one of these values, the value is None or empty."""
        vectors = bool(asked.edits or asked.banked)
        if not (vectors or unchecked):
            return None, (), Cost()
        program = RequestProgram.compile(
            asked, self.sites, frozenset(self.sites.boundaries), len(ids), ids
        )
        columns = program.columns(len(ids) + max_tokens + OVERSHOOT)
        if not vectors:
            return None, columns, Cost()
        held, reserve = program.held(columns, digest_of(asked)), Cost()
        if asked.policy is not None and asked.scaled:
            most = self.policies[asked.policy.name].options.most_changes
            reserve = program.cost_of_change(columns) * most
        cost = held.cost + reserve
        if not cost.fits(self.most):
            raise CapacityError(
                f"with the server's edits the request takes {cost}; this engine has "
                f"{self.most}. Edit or probe fewer places, or repeat the request after the "
                "server's edits are removed."
            )
        if self.widths is not None and not held.few:
            held.rows(self.widths)  # computed now, to save time on the scheduler's thread
        return held, columns, reserve

    def check_edits(self, text: str | None, monitors: str | None = None) -> None:
        """Raises SpecError if this engine cannot apply these server-wide edits. Also raises
        SpecError if the engine's tables have too little room for the edits and monitors together.

        Args:
            monitors: a spec with the probes of the monitors that are set; None without monitors.
        """
        if text is None:
            return
        self._check_connector()
        edits = self.registry.parse_edits(text)
        check_stages(Resolved(edits=edits), self.num_stages)
        cost = self._cost_of(edits, None)
        if not cost.fits(self.most):
            raise SpecError(
                f"these edits take {cost}; this engine has {self.most} for "
                "all requests. Edit fewer places, or raise "
                "additional_config['scope'].vectors_mib."
            )
        self._check_together(edits, monitors)

    def check_monitors(self, monitors: str) -> None:
        """Raises SpecError if the engine's tables do not have enough room for these monitors and
        the server-wide edits together. `monitors` is a spec with the probes of the monitors."""
        self._check_together(self.registry.resolve(None)[1].edits, monitors)

    def _check_together(self, edits: tuple[ResolvedEdit, ...], monitors: str | None) -> None:
        if not edits or monitors is None:
            return
        cost = self._cost_of(edits, monitors)
        if not cost.fits(self.most):
            raise SpecError(
                "every request would have the server-wide edits and the monitors, which take "
                f"{cost} together, and would be refused; this engine has {self.most}. Edit fewer "
                "places, set fewer monitors, or raise additional_config['scope'].vectors_mib."
            )

    def _cost_of(self, edits: tuple[ResolvedEdit, ...], monitors: str | None) -> Cost:
        """The Cost of a request with only server-wide edits and monitors."""
        probes = () if monitors is None else _probes_of(monitors, self.sites)
        # A server-wide edit applies to all prompt tokens, to all generated tokens, or to all tokens
        # (registry.TIERS). Therefore one prompt token and some generated tokens give the right
        # count.
        program = RequestProgram.compile(
            Resolved(probes=probes, edits=edits), self.sites, frozenset(self.sites.boundaries), 1,
            [0],
        )  # fmt: skip
        return program.cost(2 + OVERSHOOT)

    def _check_connector(self) -> None:
        """Raises SpecError if the KV connector can mix edited KV with the KV of other requests."""
        if self.connector is not None:
            raise SpecError(
                f"this engine shares KV through {shown(self.connector)}, which can mix the KV of "
                "edited and plain requests. Start the engine without this connector, or with "
                f"{' or '.join(CONNECTORS_BY_HASH)}. Reads and probes are still possible."
            )


@lru_cache(maxsize=1)  # a controller changes edits often, and resolving 64 monitors takes 20 ms
def _probes_of(monitors: str, sites: Sites) -> tuple[ResolvedProbe, ...]:
    return Spec.from_json(monitors).resolve(sites).probes


def _first(selectors: set[Selector], ids: Ids) -> int | None:
    """The first position that any of the selectors can select; None if there are no selectors."""
    return min((one.first_position(len(ids), ids) for one in selectors), default=None)


def _is_of_all_tokens(edit: ResolvedEdit) -> bool:
    """True if a server-wide edit edits prompt tokens and generated tokens."""
    return edit.tokens.picks_phase(False) and edit.tokens.picks_phase(True)


def _unchecked(asked: Resolved, more: bool, ticket: Ticket | None) -> bool:
    """True if the request can deliver more bytes in one step than its front-end has checked."""
    changed = more or (ticket is not None and bool(ticket.modules))
    encoded = any(read.encoding is not None for read in asked.reads)
    return bool(asked.taking) and (changed or encoded)


# Requests in

_scopes: Beside[CoreScope] = Beside()
#: Maps vLLM's EngineCore to True if the configuration has global sinks, which read every request.
_reads_all: Beside[bool] = Beside()
_making = threading.Lock()


def _preprocess(
    original: Callable[..., tuple[T, int]], self: EngineCore, request: EngineCoreRequest
) -> tuple[T, int]:
    if not _concerns(self, request):
        return original(self, request)
    # The workers do not need the ticket, because the step's news (core.news) contains the data that
    # the workers need.
    ticket = ticket_of(request.sampling_params)
    request.sampling_params = without_ticket(request.sampling_params)
    scope = _scope_of(self)
    if request.resumable:
        return _piece_of(original, self, scope, request, ticket)
    if request.request_id in scope.refused:
        del scope.refused[request.request_id]
        raise SpecError("every piece of this streamed input was refused, and the session ends.")
    if ticket is None or not ticket.variants:
        return _entered_as(original, self, scope, request, ticket)
    found = original(self, request)
    tickets = ticket.of_variants()
    expand(
        found[0], request, len(tickets),
        lambda number: _entered_as(original, self, scope, request, tickets[number])[0],
        self.vllm_config.model_config.get_vocab_size(),
    )  # fmt: skip
    return found


def _piece_of(
    original: Callable[..., tuple[T, int]], self: EngineCore, scope: CoreScope,
    request: EngineCoreRequest, ticket: Ticket | None,
) -> tuple[T, int]:  # fmt: skip
    """The same as `_entered_as`, for a piece of streamed input. A later piece has the edits and
    reads of the first piece."""
    # `sessions` does not have a session that began before there was a CoreScope.
    if request.request_id in scope.sessions or request.request_id in self.scheduler.requests:
        return original(self, request)
    try:
        found = _entered_as(original, self, scope, request, ticket)
    except ScopeError:
        scope.refused[request.request_id] = None
        if len(scope.refused) > MOST_REFUSED:
            del scope.refused[next(iter(scope.refused))]
        raise
    scope.refused.pop(request.request_id, None)
    scope.sessions[request.request_id] = found[0]
    return found


def _entered_as(
    original: Callable[..., tuple[T, int]], self: EngineCore, scope: CoreScope,
    request: EngineCoreRequest, ticket: Ticket | None,
) -> tuple[T, int]:  # fmt: skip
    """Make vLLM's Request, and store the request's Entered. The caller has already removed the
    ticket from `request`."""
    found = scope.enter(request, ticket)
    if found is None:
        return original(self, request)
    if found.keys is not None:
        entering[request.request_id] = found.keys
    try:
        made = original(self, request)
        # Room for sums is reserved last, because a refused request must not reserve room. Reserved
        # room becomes free only when a user drops the sums.
        if found.sums is not None:
            found.sums.enter(found.asked.moments)
        keep(made[0], found)
        return made
    finally:
        entering.pop(request.request_id, None)


def _concerns(engine: EngineCore, request: EngineCoreRequest) -> bool:
    """True if a request can have taps. This is so in three cases: the request has a ticket; there
    are global sinks; or a CoreScope exists, because a CoreScope can have server-wide edits. All
    other requests need no CoreScope."""
    if _scopes.of(engine) is not None or has_ticket(request.sampling_params):
        return True
    known = _reads_all.of(engine)
    if known is None:
        config = config_of(engine.vllm_config)
        known = _reads_all.put(engine, config is not None and bool(config.global_sinks))
    return known


def _scope_of(engine: EngineCore) -> CoreScope:
    """EngineCore's CoreScope. The first request (on the input thread) or the first remote call (on
    another thread) makes the CoreScope."""
    with _making:
        return _scopes.of(engine) or _scopes.put(engine, CoreScope(engine.vllm_config))


def _extra_keys(
    original: Callable[..., tuple[tuple[object, ...] | None, T]],
    request: Request,
    start: int,
    stop: int,
    *rest: object,
) -> tuple[tuple[object, ...] | None, T]:
    found, following = original(request, start, stop, *rest)
    keys = keys_of(request)
    key = None if keys is None else keys.key(start, stop)
    return (found if key is None else (*(found or ()), ("scope", key))), following


# Remote calls

#: Sends the remote call with a given name to every worker, and returns the workers' answers.
Ask = Callable[[str], list[Described]]


def _register(engine: EngineCore, ask: Ask, name: str, data: bytes) -> str:
    scope = _scope_of(engine)
    scope.learn(_tapped(ask))
    return scope.registry.register(name, data)


def _set_edits(
    engine: EngineCore, ask: Ask, text: str | None, monitors: str | None = None
) -> str | None:
    scope = _scope_of(engine)
    if text is not None:
        scope.learn(_tapped(ask))
        scope.check_edits(text, monitors)
    return scope.registry.set_edits(text)


def _tapped(ask: Ask) -> list[Described]:
    """The workers' answers to `scope_describe`. Raises SpecError if the model has no taps, because
    steering modules and edits have no effect on a model without taps."""
    found = ask("scope_describe")
    reason = next((each["reason"] for each in found if each["reason"]), None)
    if reason is not None:
        raise SpecError(f"this model cannot be tapped: {reason}.")
    return found


#: Maps the name of a remote call to the function that answers the call in EngineCore. Workers
#: cannot answer these calls, because only EngineCore has the registry.
_ANSWERS: dict[str, Callable[..., object]] = {
    "scope_register": _register,
    "scope_unregister": lambda engine, ask, name: _scope_of(engine).registry.unregister(name),
    "scope_modules": lambda engine, ask: _scope_of(engine).registry.modules(),
    "scope_set_edits": _set_edits,
    "scope_check_monitors": lambda engine, ask, text: _scope_of(engine).check_monitors(text),
    "scope_get_edits": lambda engine, ask: _scope_of(engine).registry.server_text,
    "scope_hold": lambda engine, ask, *args: _scope_of(engine).registry.hold(*args),
}
#: EngineCore adds the steering modules to the answers to these remote calls.
_WITH_MODULES = ("scope_connect", "scope_describe")


def _collective_rpc(
    original: Callable[..., list[Any]],
    self: EngineCore,
    method: Any,
    timeout: object = None,
    args: tuple[object, ...] = (),
    kwargs: dict[str, object] | None = None,
) -> list[Any]:
    """EngineCore.collective_rpc. EngineCore itself answers the remote calls in _ANSWERS, and frees
    the room of sums that are dropped."""
    if method in _ANSWERS:

        def ask(name: str) -> list[Described]:
            return original(self, name, timeout, (), None)

        return [_ANSWERS[method](self, ask, *args, **(kwargs or {}))]
    found = original(self, method, timeout, args, kwargs)
    if method in _WITH_MODULES:
        _scope_of(self).learn(found)
        modules = _scope_of(self).registry.modules()
        found = [{**each, "modules": modules} for each in found]
    if method == "scope_drop_moments":
        known = _scope_of(self).sums.drop(str(args[0]))
        return [known or any(found)]
    return found


def wrap() -> None:
    wrapping.wrap("EngineCore.preprocess_add_request", _preprocess)
    wrapping.wrap("EngineCore.collective_rpc", _collective_rpc)
    wrapping.wrap("generate_block_hash_extra_keys", _extra_keys)
