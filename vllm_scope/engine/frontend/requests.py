"""Requests in: the seams on LLMEngine, AsyncLLM and their output processor.

Owns:  the request's handle.
Runs:  in the front-end process, on its main thread or event loop.
From:  prepared (the checked spec).   To: results.inbox, engine.core (the handle), outputs.

Promise: a caller's SamplingParams are never changed. A plain request takes the original path.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from vllm_scope.engine import functions, wrapping
from vllm_scope.engine.frontend import translators
from vllm_scope.engine.frontend.connection import (
    Connection,
    connect_async,
    connect_sync,
    needs_connection,
)
from vllm_scope.engine.frontend.outputs import Running
from vllm_scope.engine.frontend.prepared import (
    NO_TAPS,
    Prepared,
    aside,
    is_small,
    prepare,
)  # fmt: skip
from vllm_scope.engine.params import HANDLE, asks, concerns, names_module, params_of, with_handle
from vllm_scope.engine.refusals import refusing
from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.request.actions import MEMORY
from vllm_scope.request.spec import Spec
from vllm_scope.results.budget import asking
from vllm_scope.results.buffer import Pending
from vllm_scope.results.inbox import inbox

#: What was prepared for the request that the running code adds to the engine.
_ahead: ContextVar[Prepared | None] = ContextVar("vllm_scope_ahead", default=None)


def _open(
    connection: Connection, prepared: Prepared, request: Any, parent: Any, child: int
) -> Pending:
    """Make a request's buffer and its handle.

    Args:
        parent: vLLM's ParentRequest of an n > 1, or None.
        child: the completion's index in it.
    """
    box, asked, params = inbox(), prepared.asked, request.sampling_params
    pending = box.open(
        prepared.own, connection.sites, prepared.prompt_ids, prepared.max_tokens,
        connection.num_stages, prepared.num_bytes,
        parent.sampling_params.n if parent is not None else 1,
    )  # fmt: skip
    handle = {
        "key": pending.key,
        "frontend": box.address.frontend,
        "first_position": prepared.first_position,
        "vectors": bool(asked.probes or asked.edits),
        "sinks": any(to != MEMORY for to in asked.destinations),
        "follows": params.output_kind.name != "FINAL_ONLY",
        "request_id": getattr(request, "external_req_id", None) or request.request_id,
        "uid": _uid_of(parent),
        "child": child,
        "owner": asking.get().owner,
    }
    params = with_handle(params, handle)
    params.extra_args.pop(translators.DECORATORS, None)
    request.sampling_params = params
    return pending


def _uid_of(parent: Any) -> str:
    if parent is None:
        return secrets.token_hex(16)
    return str(parent.__dict__.setdefault("scope_uid", secrets.token_hex(16)))


def _prepared_of(processor: Any, request: Any, parent: Any) -> Prepared:
    """The checked request; the same object for all completions of an n > 1.

    Raises:
        SpecError: as `prepare`.
    """
    found: Prepared | None = None if parent is None else parent.__dict__.get("scope_prepared")
    if found is None:
        found = _ahead.get()
        if found is None or not _is_of(found, request):
            found = prepare(getattr(processor, "scope", None), request)
        if parent is not None:
            parent.scope_prepared = found
    return found


def _is_of(found: Prepared, request: Any) -> bool:
    """True if the request has the prompt and the length that were prepared."""
    same_length = found.max_tokens == (request.sampling_params.max_tokens or 1)
    return same_length and found.prompt_ids == request.prompt_token_ids


async def _prepare_ahead(engine: Any, params: Any, prompt: Any) -> Prepared | None:
    """Prepare a large request of several completions in a thread; None for any other.

    vLLM adds all completions without an await, so this is the last point where the event loop
    can go on meanwhile. vllm 0.31 to 0.33, v1/engine/async_llm.py, AsyncLLM.add_request

    Raises:
        SpecError: as `prepare`.
    """
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if ids is None or not asks(params) or getattr(params, "n", 1) == 1:
        return None
    if is_small((params.extra_args["scope"], ids)):
        return None
    connection = getattr(engine.output_processor, "scope", None)
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=ids, resumable=False)
    with refusing(translators.decorators_of(params).paths):
        return await asyncio.to_thread(prepare, connection, request)


def _unknown_modules(engine: Any, params: Any) -> bool:
    """True if the spec names a steering module that this front-end must ask about."""
    connection = getattr(engine.output_processor, "scope", None)
    text = params.extra_args["scope"] if asks(params) else None
    if connection is None or not names_module(text):
        return False
    with suppress(SpecError):
        return bool(connection.lacks(Spec.from_json(text).modules))
    return False  # a malformed spec is refused later, with the reason


def _add_to_processor(
    original: Any,
    self: Any,
    request: Any,
    prompt: Any,
    parent_req: Any = None,
    request_index: int = 0,
    *args: Any,
    **kwargs: Any,
) -> None:
    """OutputProcessor.add_request: every child request of an n > 1 comes here."""
    rest = (prompt, parent_req, request_index, *args)
    extra = getattr(request.sampling_params, "extra_args", None)
    if extra and HANDLE in extra:
        with refusing():
            raise SpecError(
                f"extra_args has {HANDLE!r}, which vllm-scope makes itself; leave it out."
            )
    if not asks(request.sampling_params):
        original(self, request, *rest, **kwargs)
        return
    decorators = translators.decorators_of(request.sampling_params)
    with refusing(decorators.paths):
        prepared = _prepared_of(self, request, parent_req)
        pending = _open(self.scope, prepared, request, parent_req, request_index)
    functions.salt(request, request_index)
    original(self, request, *rest, **kwargs)
    state = self.request_states[request.request_id]
    state.scope = Running(
        pending, decorators, state.detokenizer, request.sampling_params.extra_args["scope"]
    )


def _translated(engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(params, args, kwargs), with a spec in place of other systems' keys."""
    params = params_of(args, kwargs, 2)
    if not translators.concerned(params, engine.vllm_config):
        return params, args, kwargs
    connection = getattr(engine.output_processor, "scope", None)
    with refusing():
        if connection is None:
            raise SpecError(NO_TAPS)
        params = translators.translated(params, engine.vllm_config, connection.sites)
        functions.check(params, engine)
    if "params" in kwargs:
        return params, args, kwargs | {"params": params}
    return params, (*args[:2], params, *args[3:]), kwargs


def _add_sync(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    params = params_of(args, kwargs, 2)
    if concerns(params, self):
        if needs_connection(self):
            connect_sync(self)
        params, args, kwargs = _translated(self, args, kwargs)
        if _unknown_modules(self, params):
            connection = self.output_processor.scope
            doubts = connection.num_doubts
            connection.learn_modules(self.collective_rpc("scope_modules")[0], doubts)
    try:
        return original(self, *args, **kwargs)
    except ScopeError:
        # EngineCore runs in this process and refused the request.
        self.abort_request([kwargs["request_id"] if "request_id" in kwargs else args[0]])
        raise


def _add_async(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not concerns(params_of(args, kwargs, 2), self):
        return original(self, *args, **kwargs)

    async def ask_first() -> Any:
        if needs_connection(self):
            await connect_async(self)
        params, positional, named = await aside(
            _translated, self, args, kwargs, if_large=params_of(args, kwargs, 2).extra_args
        )
        if await aside(_unknown_modules, self, params, if_large=params.extra_args):
            connection = self.output_processor.scope
            doubts = connection.num_doubts
            connection.learn_modules((await self.collective_rpc("scope_modules"))[0], doubts)
        prompt = params_of(positional, named, 1, "prompt")
        token = _ahead.set(await _prepare_ahead(self, params, prompt))
        try:
            return await original(self, *positional, **named)
        finally:
            _ahead.reset(token)

    return ask_first()


async def _add_one_async(
    original: Any, self: Any, request: Any, prompt: Any, parent_req: Any, *args: Any, **kwargs: Any
) -> None:
    """AsyncLLM._add_request, whose output processor is called on the event loop."""
    params = request.sampling_params
    found = _ahead.get()
    if (
        asks(params)
        and found is None
        and not is_small((params.extra_args["scope"], request.prompt_token_ids))
    ):
        found = getattr(parent_req, "scope_prepared", None)
        if found is None:
            connection = getattr(self.output_processor, "scope", None)
            with refusing(translators.decorators_of(params).paths):
                found = await asyncio.to_thread(prepare, connection, request)
    token = _ahead.set(found)
    try:
        await original(self, request, prompt, parent_req, *args, **kwargs)
    finally:
        _ahead.reset(token)


def wrap() -> None:
    wrapping.wrap("LLMEngine.add_request", _add_sync)
    wrapping.wrap("AsyncLLM.add_request", _add_async)
    wrapping.wrap("AsyncLLM._add_request", _add_one_async)
    wrapping.wrap("OutputProcessor.add_request", _add_to_processor)
