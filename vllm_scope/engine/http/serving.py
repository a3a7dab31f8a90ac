"""Adds scopes to the answers of `vllm serve`, and adds this package's routes.

Owns:  the wrappers of the app of vLLM's HTTP server, and of the handlers that make completions.
Runs:  in each API server process.
To:    server (does not import vLLM).

A translator makes a scope from the keys of another system (engine.frontend.translators).

Promise: vLLM handles a request without a scope as usual. A request with a scope, or with a
translator's keys, gets its data, or an error with the reason. If the answers of a path have no
field for a scope, each such request on this path gets an error.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_scope.engine import control, wrapping
from vllm_scope.engine.frontend import translators
from vllm_scope.engine.frontend.connection import connection_of
from vllm_scope.engine.frontend.outputs import Outputs, outdated, settle
from vllm_scope.engine.frontend.prepared import aside
from vllm_scope.engine.frontend.running import runs
from vllm_scope.engine.http.calls import EngineCalls
from vllm_scope.engine.monitors import monitors_of, no_beams, share
from vllm_scope.engine.params import asks, params_of
from vllm_scope.engine.refusals import Refusing, named, refusal
from vllm_scope.engine.seams import config_of
from vllm_scope.engine.vllm_types import AsyncLLM, EngineCoreRequest, OutputProcessor
from vllm_scope.errors import ConfigError, ScopeError, SpecError, shown
from vllm_scope.results.inbox import inbox, limit
from vllm_scope.server import faces
from vllm_scope.server.answer import Answer, current
from vllm_scope.server.exchange import running
from vllm_scope.server.options import ScopeOptions
from vllm_scope.server.settings import ADMIN_KEY
from vllm_scope.server.shared import Shared
from vllm_scope.transport.folders import RUN, end_run

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

T = TypeVar("T")
PATHS = ("/v1/completions", "/v1/chat/completions")
#: In a stream, the rows and scores can be behind the text by at most this number of tokens.
MOST_BEHIND = 2
_LATE_POLL_S, _LATE_POLL_MOST_S = 0.002, 0.02


# Answers


def _create(
    original: Callable[..., Awaitable[object]],
    self: object,
    request: Any,
    raw_request: Request | None = None,
) -> Awaitable[object]:
    """OpenAIServingCompletion.create_completion and OpenAIServingChat.create_chat_completion."""
    if raw_request is None or not (_asks_us(request) or _monitored(raw_request)):
        return original(self, request, raw_request)
    return _create_with_scope(original, self, request, raw_request)


def _asks_us(request: Any) -> bool:
    """True if a request has a scope or a translator's key, in `vllm_xargs` or in other fields."""
    body = request.model_extra
    # The request class of /v1/chat/completions/batch does not declare `vllm_xargs`. Therefore the
    # value can have any type.
    xargs = getattr(request, "vllm_xargs", None)
    if isinstance(xargs, dict) and (
        any(name.startswith("scope") for name in xargs) or translators.has_keys(xargs)
    ):
        return True
    return bool(body) and (_misplaced(body) is not None or faces.has_fields(body))


def _monitored(raw_request: Request) -> bool:
    """True if the answer of a request can contain verdicts of monitors."""
    engine = raw_request.app.state.engine_client
    return current.get() in PATHS and bool(monitors_of(engine.vllm_config))


def _misplaced(body: Mapping[str, object]) -> str | None:
    """The error text if a body has a scope outside `vllm_xargs`, or a translator's keys in
    `extra_args`; otherwise None."""
    extra = body.get("extra_args")
    if "scope" in body:
        what = "'scope', which must be"
    elif isinstance(extra, dict) and ("scope" in extra or translators.has_keys(extra)):
        what = "'extra_args', which are for offline use. Over HTTP the fields must be"
    else:
        return None
    return f"the body has {what} in 'vllm_xargs': {{'vllm_xargs': {{'scope': ...}}}}."


async def _create_with_scope(
    original: Callable[..., Awaitable[Any]], self: object, request: Any, raw_request: Request
) -> object:
    _check_place(raw_request)
    if (why := _misplaced(request.model_extra or {})) is not None:
        raise refusal()(why)
    state = raw_request.app.state.scope
    engine = raw_request.app.state.engine_client
    limit(state.settings.rows_of(engine.vllm_config.parallel_config._api_process_count))
    with Refusing():
        xargs = request.vllm_xargs or {}
        operator = state.settings.is_operators(raw_request.headers.get(ADMIN_KEY, ""))
        parse = partial(ScopeOptions.parse, operator=operator)
        options = await aside(parse, xargs, if_large=xargs)
        words = faces.Words.find(xargs, request.model_extra, translators.keys())
        owner, settings = state.owner_of(raw_request), state.settings
        inline = settings.binary_bytes if running(owner).body.binary else settings.inline_bytes
        answer = Answer(options, state.store, inline, owner, request.n or 1, bool(request.stream))
        answer.replies = await aside(words.begin, answer.keep, if_large=words.values)
    if words.fields:
        beside = {name: translators.Uncounted(value) for name, value in words.fields.items()}
        request.vllm_xargs = {**xargs, **beside}
    token = current.set(answer)
    streams = False
    try:
        made = await original(self, request, raw_request)
        if isinstance(made, AsyncGenerator):
            made = await _stream(answer, made)
            streams = True
        elif hasattr(made, "choices"):
            await answer.fill(made)
        return made
    finally:
        current.reset(token)
        # The budget counts the rows of a binary answer until the answer is sent.
        if not streams and not answer.exchange.body.binary:
            answer.close()


def _check_place(raw_request: Request) -> None:
    path = current.get()
    if not isinstance(path, str) or path not in PATHS:
        raise refusal()(_no_place(raw_request.url.path))


def _beam_search(original: Callable[..., T], self: Any, *args: object, **kwargs: object) -> T:
    """BeamSearchOnlineMixin.beam_search."""
    config = self.engine_client.vllm_config
    if isinstance(current.get(), Answer) or monitors_of(config):
        raise refusal()(no_beams(config))
    return original(self, *args, **kwargs)


def _no_place(path: str) -> str:
    return f"answers of {path} have no field for a scope; use {' or '.join(PATHS)}."


async def _stream(answer: Answer, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The chunks of the answer, with their scopes. Before the first chunk, waits until the engine
    has accepted the whole request.

    Without this wait, vLLM would answer a refused request with status 200, and then send the error.
    """
    first = asyncio.ensure_future(anext(chunks))
    opened = asyncio.ensure_future(answer.opened.wait())
    try:
        await asyncio.wait([first, opened], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        first.cancel()
        raise
    finally:
        opened.cancel()
    if answer.error is not None:
        if not first.cancel():  # another prompt already has its first chunk
            await chunks.aclose()
        raise answer.error
    # From now on an error must reach vLLM's generator of chunks, which sends the error as an event.
    answer.opened.set()
    made = _chunks(answer, chunks, first)

    async def end() -> None:
        # If the client disconnects during a chunk, only the garbage collector would close the
        # generator without this call. If the client disconnects before the first chunk, the
        # generator never runs, and cannot cancel `first`.
        await made.aclose()
        first.cancel()

    answer.exchange.closing.append(end)
    return made


async def _chunks(
    answer: Answer, chunks: AsyncGenerator[str, None], first: asyncio.Future[str]
) -> AsyncGenerator[str, None]:
    try:
        async with aclosing(chunks):
            try:
                yield await answer.chunk(await first)
            finally:
                first.cancel()
            async for text in chunks:
                yield await answer.chunk(text)
    finally:
        answer.close()


def _generate(
    original: Callable[..., Outputs], self: AsyncLLM, *args: object, **kwargs: object
) -> Outputs:
    """AsyncLLM.generate. `original` is the wrapper of engine.frontend, which has already added
    results to the outputs."""
    place, params = current.get(), params_of(args, kwargs, 1, "sampling_params")
    extra = getattr(params, "extra_args", None)
    ours = asks(params) or translators.has_keys(extra)
    if not ours and isinstance(place, Answer):
        ours = bool(monitors_of(self.vllm_config))
    if place is None or not ours:
        return original(self, *args, **kwargs)
    if isinstance(place, str):
        raise refusal()(_no_place(place))
    try:
        prompt = place.add_prompt()
    except SpecError as error:
        raise refusal()(str(error)) from None
    return _followed(place, prompt, self, original(self, *args, **kwargs))


async def _followed(answer: Answer, prompt: int, engine: AsyncLLM, stream: Outputs) -> Outputs:
    try:
        async with aclosing(stream):
            async for output in stream:
                connection = connection_of(engine.output_processor)
                answer.holds = connection.limits.optimistic
                _take(answer, prompt, output)
                if answer.streams and not answer.holds and answer.waits:
                    timeout = connection.deliver_timeout_s
                    answer.waits = await _catch_up(answer, prompt, output, timeout)
                yield output
    except Exception as caught:
        error = caught
        if isinstance(caught, ScopeError) and answer.num_prompts > 1:
            error = named(caught, f"prompt[{prompt}]")
        refused = answer.streams and not answer.opened.is_set() and isinstance(error, ScopeError)
        answer.fail(error)
        if not refused:
            if error is caught:
                raise
            raise error from None
        # `_stream` raises the error before any chunk, and cancels vLLM's generator of chunks. If
        # `_followed` raised too, the generator would log a traceback for each refused stream.


def _take(answer: Answer, prompt: int, output: Any) -> None:
    for completion in output.outputs:
        if completion.scope is not None:
            answer.take(prompt, completion)


async def _catch_up(answer: Answer, prompt: int, output: Any, timeout: float) -> bool:
    """Wait until the data of the completions is at most MOST_BEHIND tokens behind their text.
    Returns False if the data is still missing after `timeout` seconds."""
    limit, wait = time.monotonic() + timeout, _LATE_POLL_S
    while any(
        completion.finish_reason is None
        and completion.scope is not None
        and completion.scope.error is None  # no data arrives after an error
        and answer.late(prompt, completion, MOST_BEHIND)
        for completion in output.outputs
    ):
        if time.monotonic() >= limit:
            return False
        # Many requests can wait here for a worker. To save time, the inner loop calls only
        # `outdated`.
        while time.monotonic() < limit and not outdated(output):
            await asyncio.sleep(wait)
            wait = min(1.5 * wait, _LATE_POLL_MOST_S)
        _take(answer, prompt, settle(output))
    return True


def _admitted(
    original: Callable[..., object],
    self: OutputProcessor,
    request: EngineCoreRequest,
    *args: object,
    **kwargs: object,
) -> None:
    """OutputProcessor.add_request. `original` is the wrapper of engine.frontend, which can refuse
    the request."""
    original(self, request, *args, **kwargs)
    answer = current.get()
    if isinstance(answer, Answer):
        known = runs.of(self.request_states[request.request_id])
        forget = None if known is None else partial(inbox().forget, known.pending)
        # Until the first token arrives, EngineCore can still refuse a request with a spec. The
        # reason can be that the tables of vectors, or the sums of Moments, are full. EngineCore can
        # also refuse a request that only reads, because server-wide edits need room in the tables.
        answer.open_one(forget, sure=known is None)


def _create_elsewhere(
    path: str,
    original: Callable[..., T],
    self: object,
    request: Any,
    *args: object,
    **kwargs: object,
) -> T:
    """Refuse a scope before the first chunk, on a path whose answers have no field for a scope."""
    if _asks_us(request):
        raise refusal()(_no_place(path))
    return original(self, request, *args, **kwargs)


def _create_speech(
    original: Callable[..., T],
    self: object,
    audio_data: bytes,
    request: Any,
    raw_request: Request,
    *args: object,
    **kwargs: object,
) -> T:
    """SpeechToTextBaseServing._create_speech_to_text. Refuses a scope. Without this wrapper, a beam
    search on these paths would ignore the scope."""
    if _asks_us(request):
        raise refusal()(_no_place(raw_request.url.path))
    return original(self, audio_data, request, raw_request, *args, **kwargs)


# The app


def _attach(original: Callable[..., object], app: FastAPI) -> None:
    from vllm_scope.compat import register_http
    from vllm_scope.server.routes import attach

    _check_root_path(app.root_path)
    original(app)
    _wrap_serving()
    register_http()
    attach(app, lambda: _engine_of(app))
    share(Shared(app.state.scope.store.folder))
    lifespan = app.router.lifespan_context
    app.router.lifespan_context = partial(_controlled, lifespan)


@asynccontextmanager
async def _controlled(
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[Any]], app: FastAPI
) -> AsyncIterator[Any]:
    """The app's lifespan. The configured controller runs until the lifespan ends."""
    engine = getattr(app.state, "engine_client", None)
    found = None if engine is None else control.configured(engine.vllm_config)
    async with lifespan(app) as state:
        if found is None:
            yield state
        else:
            await found.on(engine).__aenter__()
            try:
                yield state
            finally:
                # The earlier server-wide edits are not restored, because the engine ends together
                # with the server.
                await asyncio.to_thread(found.close, keep=True)


def _check_root_path(root: str | None) -> None:
    """Check the option --root-path. vLLM's authentication removes the root path from the start of a
    path's text. If the rest begins with /v1, the authentication requires an API key. The router
    removes only whole segments of a path. For example, with the root path /v, the authentication
    sees 1/models in place of /v1/models, and the router sees /v1/models.

    Raises:
        ConfigError: with the given root path, requests could reach paths below /v1 without an API
            key.
    """
    if root and (root.endswith("/") or root.startswith("/v1/") or root == "/v"):
        raise ConfigError(
            f"--root-path is {shown(root)}, with which vLLM asks for no API key at paths below "
            "/v1. It must be a path that does not end in '/' and is not below /v1, such as '/api'."
        )


def _engine_of(app: FastAPI) -> EngineCalls | None:
    engine = getattr(app.state, "engine_client", None)
    if engine is None or config_of(engine.vllm_config) is None:
        return None
    return EngineCalls(engine)


_serving_wrapped = False


def _wrap_serving() -> None:
    """Wrap the methods of vLLM's serving classes, only once. The server calls this function when it
    starts, after vLLM has loaded the modules of these classes."""
    global _serving_wrapped
    if _serving_wrapped:
        return
    _serving_wrapped = True
    wrapping.wrap("OpenAIServingCompletion.create_completion", _create)
    wrapping.wrap("OpenAIServingChat.create_chat_completion", _create)
    responses = partial(_create_elsewhere, "/v1/responses")
    wrapping.wrap("OpenAIServingResponses.create_responses", responses)
    batch = partial(_create_elsewhere, "/v1/chat/completions/batch")
    wrapping.wrap("OpenAIServingChatBatch.create_batch_chat_completion", batch)
    wrapping.wrap("SpeechToTextBaseServing._create_speech_to_text", _create_speech)
    wrapping.wrap("BeamSearchOnlineMixin.beam_search", _beam_search)
    wrapping.wrap("AsyncLLM.generate", _generate)
    wrapping.wrap("OutputProcessor.add_request", _admitted)


def wrap() -> None:
    if RUN not in os.environ:
        # The first process that runs this code is the parent of the API servers. When the parent
        # ends, it removes the folders of the API servers.
        run = os.environ[RUN] = secrets.token_hex(16)
        atexit.register(end_run, run, os.getpid(), os.environ.get("VLLM_SCOPE_RESULTS_DIR"))
    wrapping.wrap("register_vllm_serve_api_routers", _attach)
