"""Wraps the methods of LLMEngine, AsyncLLM and OutputProcessor that add requests.

Owns:  the code that makes the ticket of a request.
Runs:  in the front-end process, on its main thread or event loop.
From:  prepared (the checked spec).   To: results.inbox, engine.core (the ticket), outputs.

Promise: the SamplingParams object of a caller never changes. vLLM handles a request without a scope
as usual.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeVar

from vllm_scope.engine import control, functions, wrapping
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.frontend import ahead, translators
from vllm_scope.engine.frontend.connection import (
    Connection,
    connect_async,
    connect_sync,
    connection_of,
    connections,
    needs_connection,
)
from vllm_scope.engine.frontend.prepared import (
    Prepared,
    aside,
    is_known,
    is_quick,
    prepare,
    streamed,
)  # fmt: skip
from vllm_scope.engine.frontend.running import Running, runs
from vllm_scope.engine.heap import seldom
from vllm_scope.engine.monitors import monitors_of, no_beams
from vllm_scope.engine.params import (
    TICKET,
    asks,
    dedicated,
    names_module,
    params_of,
    used_by_vllm,
    with_ticket,
)
from vllm_scope.engine.refusals import Refusing, named
from vllm_scope.engine.vllm_types import (
    AsyncLLM,
    Engine,
    EngineCoreRequest,
    LLMEngine,
    OutputProcessor,
    ParentRequest,
    SamplingParams,
)
from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.request.spec import Spec
from vllm_scope.request.ticket import Recipient, Ticket, travelling
from vllm_scope.results.budget import asking
from vllm_scope.results.buffer import Pending
from vllm_scope.results.inbox import inbox

T = TypeVar("T")
#: The checked request that the current `prepared_as` block adds to the engine; None if the request
#: is not checked yet.
_ahead: ContextVar[Prepared | None] = ContextVar("vllm_scope_ahead", default=None)


@contextmanager
def prepared_as(found: Prepared | None) -> Iterator[None]:
    """A request that is added in the `with` block uses `found`, and is not checked again. If
    `found` is None, the request is checked as usual."""
    token = _ahead.set(found)
    try:
        yield
    finally:
        _ahead.reset(token)


def _open(
    connection: Connection,
    prepared: Prepared,
    request: EngineCoreRequest,
    parent: ParentRequest | None,
    child: int,
    held: Container[bytes],
) -> Pending:
    """Make a request's buffer. Replace the spec in the request by the ticket.

    Args:
        parent: vLLM's ParentRequest if the request has several completions (n > 1), otherwise None.
        child: the completion's index in the request.
        held: digests of the vectors that EngineCore holds.
    """
    box, spec, params = inbox(), prepared.spec, request.sampling_params
    pending = box.open(
        prepared.own, connection.sites, prepared.prompt_ids, prepared.max_tokens,
        connection.num_stages, prepared.num_bytes,
        parent.sampling_params.n if parent is not None else 1,
    )  # fmt: skip
    awaits = _is_answered(connection, prepared, params)
    if not awaits:
        pending.await_nothing()
    recipient = Recipient(
        pending.key,
        box.address.frontend,
        getattr(request, "external_req_id", None) or request.request_id,
        _shared_of(parent).uid,
        child,
        asking.get().owner,
        params.output_kind.name != "FINAL_ONLY",
        awaits,
    )
    every = prepared.variants or (spec,)
    named = {digest: array for one in every for digest, array in one.arrays.items()}
    arrays = travelling(array for digest, array in named.items() if digest not in held)
    ticket = Ticket(
        recipient, prepared.first_position, spec.modules, spec.packed, arrays,
        [one.packed for one in prepared.variants],
    )  # fmt: skip
    request.sampling_params = with_ticket(params, ticket, ("scope", translators.DECORATORS))
    return pending


def _is_answered(connection: Connection, prepared: Prepared, params: object) -> bool:
    """True if workers send this process data for the request: rows, scores, a policy's decisions,
    the error of a function, or a message that workers send for each request."""
    return prepared.answered or connection.always_answers or functions.has(params)


@dataclass
class _Shared:
    """The data that the completions of one request share.

    Attributes:
        prepared: the checked request; None before the first completion enters.
    """

    prepared: Prepared | None = None

    @cached_property
    def uid(self) -> str:
        """The value of `Recipient.uid` for all completions."""
        return secrets.token_hex(16)


#: Maps vLLM's ParentRequest to the data that the completions of this request share.
_shared: Beside[_Shared] = Beside()


def _shared_of(parent: ParentRequest | None) -> _Shared:
    """The data that the completions of a ParentRequest share. A request with one completion has no
    parent, and gets a new _Shared."""
    if parent is None:
        return _Shared()
    return _shared.of(parent) or _shared.put(parent, _Shared())


def _prepared_of(
    processor: object, request: EngineCoreRequest, parent: ParentRequest | None
) -> Prepared:
    """The checked request, as one object for all completions of the request.

    Raises:
        SpecError: the engine cannot run the request.
    """
    shared = _shared_of(parent)
    if shared.prepared is None:
        found = _ahead.get()
        if found is None or not _is_of(found, request):
            found = prepare(connection_of(processor), request)
        shared.prepared = found
    return shared.prepared


def _is_of(found: Prepared, request: EngineCoreRequest) -> bool:
    """True if the request has the same prompt and the same `max_tokens` as `found`."""
    same_length = found.max_tokens == (request.sampling_params.max_tokens or 1)
    return same_length and found.prompt_ids == request.prompt_token_ids


async def _prepare_ahead(
    engine: AsyncLLM, params: SamplingParams, prompt: object
) -> Prepared | None:
    """Prepare a large request with several completions on another thread. Otherwise return None.

    vLLM adds all completions of a request without an await in between. If the check ran there, the
    event loop could not serve other requests during the check.
    vllm 0.31 to 0.33, v1/engine/async_llm.py, AsyncLLM.add_request

    Raises:
        SpecError: the engine cannot run the request.
    """
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if ids is None or not asks(params) or getattr(params, "n", 1) == 1:
        return None
    if is_quick(params.extra_args["scope"], ids):
        return None
    request: Any = SimpleNamespace(sampling_params=params, prompt_token_ids=ids, resumable=False)
    with Refusing(translators.decorators_of(params).paths):
        connection = connection_of(engine.output_processor)
        return await asyncio.to_thread(prepare, connection, request)


def _unknown_modules(engine: Engine, params: SamplingParams) -> bool:
    """True if the spec names a steering module about which the front-end must ask the engine."""
    connection = connections.of(engine.output_processor)
    text = params.extra_args["scope"] if asks(params) else None
    if connection is None or not names_module(text):
        return False
    with suppress(SpecError):
        return bool(connection.lacks(Spec.from_json(text).modules))
    return False  # a malformed spec is refused later, with the reason


def _add_to_processor(
    original: Callable[..., object],
    self: OutputProcessor,
    request: EngineCoreRequest,
    prompt: object,
    parent_req: ParentRequest | None = None,
    request_index: int = 0,
    *args: object,
    **kwargs: object,
) -> None:
    """OutputProcessor.add_request. vLLM calls this method for each completion of a request."""
    rest = (prompt, parent_req, request_index, *args)
    extra = getattr(request.sampling_params, "extra_args", None)
    if extra and TICKET in extra:
        with Refusing():
            raise SpecError(
                f"extra_args has {TICKET!r}, which vllm-scope makes itself; leave it out."
            )
    if not asks(request.sampling_params):
        original(self, request, *rest, **kwargs)
        return
    text = request.sampling_params.extra_args["scope"]
    decorators = translators.decorators_of(request.sampling_params)
    with Refusing(decorators.paths):
        prepared, held = _prepared_of(self, request, parent_req), ahead.held_by(self)
        connection = connection_of(self)
        pending = _open(connection, prepared, request, parent_req, request_index, held)
    functions.salt(request, request_index)
    original(self, request, *rest, **kwargs)
    state = self.request_states[request.request_id]
    runs.put(state, Running(pending, decorators, state.detokenizer, text))
    # A server's heap is frozen, so that its full collections are short, and a server always has
    # requests: its garbage must not wait. vLLM frees the state when the request ends.
    if connection.offline:
        seldom.begin_for(state)


def _applying(engine: Engine, params: SamplingParams) -> translators.Applying:
    """The translators that apply to a request; none if the request is prepared ahead. Sweeps and
    harvests prepare requests ahead. They do so only if no translator, such as the monitors', added
    actions to every request when the sweep or harvest began."""
    return () if _ahead.get() is not None else translators.applying(params, engine.vllm_config)


def _translated(
    engine: Engine,
    applied: translators.Applying,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> tuple[Any, tuple[object, ...], dict[str, object]]:
    """Returns the SamplingParams, args and kwargs of a call. In the SamplingParams, a spec replaces
    the keys of other systems. If the prompt is an EngineCoreRequest, the returned prompt is a copy
    that has these SamplingParams."""
    prompt = params_of(args, kwargs, 1, "prompt")
    given = used_by_vllm(args, kwargs, 2)
    with Refusing():
        connection = connection_of(engine.output_processor)
        params = translators.translated(given, applied, connection.sites, connection.saes)
        if params is not given:
            functions.check(params, engine)
        if asks(params):
            params = dedicated(params)
    if getattr(prompt, "sampling_params", None) is not None:
        prompt = copy(prompt)
        prompt.sampling_params = params
        if "prompt" in kwargs:
            kwargs = kwargs | {"prompt": prompt}
        else:
            args = (args[0], prompt, *args[2:])
    if "params" in kwargs:
        return params, args, kwargs | {"params": params}
    return params, (*args[:2], params, *args[3:]), kwargs


def _add_sync(original: Callable[..., T], self: LLMEngine, *args: object, **kwargs: object) -> T:
    control.flush(self)
    params = used_by_vllm(args, kwargs, 2)
    ahead.send(self, monitors_of(self.vllm_config))
    asked = asks(params)
    applied = _applying(self, params)
    if asked or applied:
        if needs_connection(self):
            connect_sync(self)
        params, args, kwargs = _translated(self, applied, args, kwargs)
        if _unknown_modules(self, params):
            connection = connection_of(self.output_processor)
            doubts = connection.num_doubts
            connection.learn_modules(self.collective_rpc("scope_modules")[0], doubts)
    states = self.output_processor.request_states
    num_before = len(states)
    try:
        return original(self, *args, **kwargs)
    except ScopeError:
        # An EngineCore in this process can refuse a request that the output processor already has.
        # The request is aborted by vLLM's internal id, because the caller can have given the same
        # id to other requests. If the request has several completions, it is aborted by the id of
        # their parent. Otherwise vLLM would keep the parent.
        # vllm 0.32, v1/engine/output_processor.py, OutputProcessor.abort_requests
        for name in islice(states, num_before, num_before + 1):
            self.abort_request(
                [(states[name].parent_req or states[name]).request_id], internal=True
            )
        raise


def _add_async(
    original: Callable[..., Awaitable[T]], self: AsyncLLM, *args: object, **kwargs: object
) -> Awaitable[T]:
    ahead.send_soon(self, monitors_of(self.vllm_config))
    given = used_by_vllm(args, kwargs, 2)
    asked = asks(given)
    applied = _applying(self, given)
    if not asked and not applied:
        return original(self, *args, **kwargs)

    async def ask_first() -> T:
        if needs_connection(self):
            await connect_async(self)
        params, positional, named = await aside(
            _translated, self, applied, args, kwargs, if_large=given.extra_args
        )
        prompt = params_of(positional, named, 1, "prompt")
        if asks(params) and isinstance(prompt, AsyncGenerator):
            # A piece of streamed input can have its own parameters. Such a piece does not get
            # `params`, and would enter without the spec.
            # vllm 0.32, v1/engine/async_llm.py, AsyncLLM._add_streaming_input_request
            with Refusing():
                raise streamed(Spec.from_json(params.extra_args["scope"]))
        extra = params.extra_args or {}
        large = () if is_known(extra.get("scope")) else extra
        if await aside(_unknown_modules, self, params, if_large=large):
            connection = connection_of(self.output_processor)
            doubts = connection.num_doubts
            connection.learn_modules((await self.collective_rpc("scope_modules"))[0], doubts)
        with prepared_as(_ahead.get() or await _prepare_ahead(self, params, prompt)):
            return await original(self, *positional, **named)

    return ask_first()


async def _add_one_async(
    original: Callable[..., Awaitable[object]],
    self: AsyncLLM,
    request: EngineCoreRequest,
    prompt: object,
    parent_req: ParentRequest | None,
    *args: object,
    **kwargs: object,
) -> None:
    """AsyncLLM._add_request, which calls the output processor on the event loop. If the request is
    large, another thread prepares the request before this call."""
    params = request.sampling_params
    found = _ahead.get()
    if (
        asks(params)
        and found is None
        and not is_quick(params.extra_args["scope"], request.prompt_token_ids)
    ):
        found = _shared_of(parent_req).prepared
        if found is None:
            with Refusing(translators.decorators_of(params).paths):
                connection = connection_of(self.output_processor)
                found = await asyncio.to_thread(prepare, connection, request)
    with prepared_as(found):
        try:
            await original(self, request, prompt, parent_req, *args, **kwargs)
        except asyncio.CancelledError:
            # If the caller is cancelled while vLLM adds the request, vLLM itself does not abort the
            # request. The request is aborted by vLLM's internal id, because the caller can have
            # given the same id to other requests.
            # vllm 0.30 to 0.33, v1/engine/async_llm.py, AsyncLLM.generate: `q` is None then
            await self.abort([(parent_req or request).request_id], internal=True)
            raise


def _add_several(
    original: Callable[..., T],
    self: object,
    prompts: Iterable[object],
    params: Sequence[object],
    *args: object,
    **kwargs: object,
) -> T:
    """OfflineInferenceMixin._render_and_add_requests. If there are several prompts and one prompt
    is refused, the error names this prompt."""
    number = 0

    def counted() -> Iterator[object]:
        nonlocal number
        for number, prompt in enumerate(prompts):  # noqa: B007
            yield prompt

    try:
        return original(self, counted(), params, *args, **kwargs)
    except ScopeError as error:
        if len(params) < 2:
            raise
        raise named(error, f"prompts[{number}]") from None


def _beam_search(original: Callable[..., T], self: Any, *args: object, **kwargs: object) -> T:
    """BeamSearchOfflineMixin.beam_search."""
    config = self.llm_engine.vllm_config
    if monitors_of(config):
        raise SpecError(no_beams(config))
    return original(self, *args, **kwargs)


@cache
def wrap_llm() -> None:
    """Wrap LLM.beam_search, and the method by which LLM.generate adds requests. Call this function
    only after the methods' modules were imported, because the import takes time."""
    wrapping.wrap("OfflineInferenceMixin._render_and_add_requests", _add_several)
    wrapping.wrap("BeamSearchOfflineMixin.beam_search", _beam_search)


def wrap() -> None:
    wrapping.wrap("LLMEngine.add_request", _add_sync)
    wrapping.wrap("AsyncLLM.add_request", _add_async)
    wrapping.wrap("AsyncLLM._add_request", _add_one_async)
    wrapping.wrap("OutputProcessor.add_request", _add_to_processor)
