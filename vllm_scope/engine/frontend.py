"""Requests in, results out: the seams on LLMEngine, AsyncLLM and their outputs.

Owns:  the request's handle, and the wait for rows that are still on their way when a
       request ends.
Runs:  in the front-end process, on its main thread or event loop.
From:  connection (is the spec possible here).   To: inbox, core (the handle).

Promise: a caller's SamplingParams are never changed. A plain request takes the
original path. A finished output is given to the caller when its rows are here;
others are not held up by it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import aclosing, suppress
from typing import Any

from vllm_scope.actions import MEMORY
from vllm_scope.engine import functions, translators
from vllm_scope.engine.connection import Connection, connect_async, connect_sync, needs_connection
from vllm_scope.engine.core import HANDLE, with_handle
from vllm_scope.engine.prepared import NO_TAPS, Prepared, aside, is_small, prepare_aside, taken
from vllm_scope.engine.refusals import refusing, told
from vllm_scope.engine.seams import wrap_method
from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.inbox import inbox
from vllm_scope.pending import Pending
from vllm_scope.spec import Spec

#: How long a synchronous step waits for rows before it looks again.
POLL_S = 0.05
#: Rows that are due and do not come for so long may have nobody who sends them.
LONG_S = 5.0


def asks(params: Any) -> bool:
    extra = getattr(params, "extra_args", None)
    return extra is not None and "scope" in extra


def params_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str = "params"
) -> Any:
    return kwargs[name] if name in kwargs else args[place]


def _concerns(params: Any, engine: Any) -> bool:
    """The request has a spec, in our words or in others."""
    return asks(params) or translators.concerned(params, engine.vllm_config)


# Requests in


def _open(
    connection: Connection, prepared: Prepared, request: Any, parent: Any, child: int
) -> Pending:
    """Let a request in and give it a handle.

    Args:
        parent, child: of a completion of n > 1: what vLLM makes one for all, and which.
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
    }
    params = with_handle(params, handle)
    params.extra_args.pop(translators.DECORATORS, None)
    request.sampling_params = params
    return pending


def _uid_of(parent: Any) -> str:
    if parent is None:
        return secrets.token_hex(16)
    return str(parent.__dict__.setdefault("scope_uid", secrets.token_hex(16)))


def _unknown_modules(engine: Any, params: Any) -> bool:
    """The spec names a steering module that this front-end has not heard of."""
    connection = getattr(engine.output_processor, "scope", None)
    text = params.extra_args["scope"] if asks(params) else None
    # Names are rare: most specs are not parsed for them.
    if connection is None or not isinstance(text, str) or '"module"' not in text:
        return False
    with suppress(SpecError):
        return not set(Spec.from_json(text).modules) <= set(connection.modules)
    return False  # it is refused with a reason later


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
    """OutputProcessor.add_request: the one place that sees every child request."""
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
        prepared = taken(self, request)
        pending = _open(self.scope, prepared, request, parent_req, request_index)
    functions.salt(request, request_index)
    original(self, request, *rest, **kwargs)
    self.request_states[request.request_id].scope = (pending, decorators)


def _translated(engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(params, args, kwargs) of a request whose foreign keys have become a spec."""
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
    if _concerns(params, self):
        if needs_connection(self):
            connect_sync(self)
        params, args, kwargs = _translated(self, args, kwargs)
        if _unknown_modules(self, params):
            self.output_processor.scope.learn_modules(self.collective_rpc("scope_modules")[0])
    try:
        return original(self, *args, **kwargs)
    except ScopeError:
        # EngineCore in this process refused what the front-end had let in.
        self.abort_request([kwargs["request_id"] if "request_id" in kwargs else args[0]])
        raise


def _add_async(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not _concerns(params_of(args, kwargs, 2), self):
        return original(self, *args, **kwargs)

    async def ask_first() -> Any:
        if needs_connection(self):
            await connect_async(self)
        params, positional, named = await aside(
            _translated, self, args, kwargs, if_large=params_of(args, kwargs, 2).extra_args
        )
        if _unknown_modules(self, params):
            modules = await self.collective_rpc("scope_modules")
            self.output_processor.scope.learn_modules(modules[0])
        return await original(self, *positional, **named)

    return ask_first()


async def _add_one_async(
    original: Any, self: Any, request: Any, prompt: Any, parent_req: Any, *args: Any, **kwargs: Any
) -> None:
    """AsyncLLM._add_request, whose output processor is called on the event loop."""
    params = request.sampling_params
    if not asks(params) or is_small((params.extra_args["scope"], request.prompt_token_ids)):
        await original(self, request, prompt, parent_req, *args, **kwargs)
        return
    with refusing(translators.decorators_of(params).paths):
        prepared = await prepare_aside(self.output_processor, request, parent_req)
    with prepared:
        await original(self, request, prompt, parent_req, *args, **kwargs)


# Results out


def _new_completion(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """RequestState._new_completion_output: tie the completion to its rows."""
    completion = original(self, *args, **kwargs)
    known = getattr(self, "scope", None)
    refused = told(completion)
    if refused is not None:
        completion.stop_reason, completion.scope_refusal = str(refused), refused
        if known is not None:
            known[0].error = str(refused)
    if known is not None:
        completion.scope_source = (*known, self.detokenizer)
    return completion


def _waiting_for(output: Any) -> list[Pending]:
    """The rows that a finished output still waits for."""
    found = []
    for completion in output.outputs:
        source = getattr(completion, "scope_source", None)
        ended = completion.finish_reason not in (None, "abort", "error")
        if source is not None and ended and not source[0].done.done():
            found.append(source[0])
    return found


def settle(output: Any) -> Any:
    """Give every completion a snapshot of its rows as of now."""
    for completion in output.outputs:
        source = getattr(completion, "scope_source", None)
        if source is not None:
            pending, decorators, detokenizer = source
            # Before the snapshot: what comes meanwhile may be in it, and counts as new.
            completion.scope_came = pending.num_came
            result = pending.snapshot(list(detokenizer.output_token_ids), completion.finish_reason)
            if completion.finish_reason is not None:
                del completion.scope_source, completion.scope_came
            completion.scope = result
            translators.decorate(decorators, output, completion)
    return output


def outdated(output: Any) -> bool:
    """Whether something came for a completion since it was settled."""
    return any(
        (source := getattr(completion, "scope_source", None)) is not None
        and source[0].num_came != completion.scope_came
        for completion in output.outputs
    )


def _generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    params = params_of(args, kwargs, 1, "sampling_params")
    stream = original(self, *args, **kwargs)
    return _settled(self, stream) if _concerns(params, self) else stream


async def _settled(engine: Any, stream: Any) -> Any:
    async with aclosing(stream):
        async for output in stream:
            for completion in output.outputs:
                if hasattr(completion, "scope_refusal"):
                    # Another front-end may have changed a name that this one knew.
                    engine.output_processor.scope.learn_modules({})
                    raise completion.scope_refusal
            for pending in _waiting_for(output):
                timeout = engine.output_processor.scope.deliver_timeout_s
                await _arrival(pending, timeout)
            yield settle(output)


async def _arrival(pending: Pending, timeout: float) -> None:
    """Wait for a request's last row; what takes long may be a worker that has given up."""
    limit = time.monotonic() + min(timeout, LONG_S)
    try:
        await asyncio.wait([asyncio.wrap_future(pending.done)], timeout=timeout)
    finally:
        if not pending.done.done() and time.monotonic() >= limit:
            inbox().renew()


def _step(original: Any, self: Any) -> list[Any]:
    """LLMEngine.step: a finished output whose rows are not here comes in a later step."""
    waiting: list[tuple[Any, float]] = self.__dict__.setdefault("scope_waiting", [])
    if not waiting:
        outputs = original(self)
    elif self.output_processor.has_unfinished_requests() or not _multiprocess(self):
        # In one process the engine must step on: the workers learn of a request's
        # end in the step after.
        outputs = original(self)
        if not outputs and not self.output_processor.has_unfinished_requests():
            time.sleep(POLL_S / 10)
    else:
        outputs = []
        pending = _waiting_for(waiting[0][0])
        if pending:
            _wait(pending[0], POLL_S)
    if getattr(self.output_processor, "scope", None) is None:
        return outputs
    now = time.monotonic()
    limit = now + self.output_processor.scope.deliver_timeout_s
    queue = [*waiting, *((output, limit) for output in outputs)]
    if any(now >= t and _waiting_for(o) for o, t in queue):
        inbox().renew()
    ready = [(o, t) for o, t in queue if now >= t or not _waiting_for(o)]
    done = {id(o) for o, _ in ready}
    waiting[:] = [(o, t) for o, t in queue if id(o) not in done]
    return [settle(o) if hasattr(o, "outputs") else o for o, _ in ready]


def _wait(pending: Pending, timeout: float) -> None:
    with suppress(TimeoutError):
        pending.done.result(timeout)


def _multiprocess(engine: Any) -> bool:
    return not hasattr(engine.engine_core, "engine_core")


def _has_unfinished(original: Any, self: Any) -> bool:
    return bool(original(self)) or bool(self.__dict__.get("scope_waiting"))


def _scope_of(self: Any) -> Any:
    """RequestOutput.scope: the result of a request with one completion."""
    if len(self.outputs) != 1:
        raise ScopeError(
            f"this output has {len(self.outputs)} completions; use output.outputs[i].scope."
        )
    return self.outputs[0].scope


def wrap() -> None:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    wrap_method(LLMEngine, "add_request", ["request_id", "prompt", "params"], _add_sync)
    wrap_method(LLMEngine, "step", [], _step)
    wrap_method(LLMEngine, "has_unfinished_requests", [], _has_unfinished)
    wrap_method(AsyncLLM, "add_request", ["request_id", "prompt", "params"], _add_async)
    wrap_method(AsyncLLM, "_add_request", ["request", "prompt", "parent_req"], _add_one_async)
    wrap_method(AsyncLLM, "generate", ["prompt", "sampling_params"], _generate)
    wrap_method(
        OutputProcessor, "add_request", ["request", "prompt", "parent_req", "request_index"],
        _add_to_processor,
    )  # fmt: skip
    wrap_method(RequestState, "_new_completion_output", ["finish_reason"], _new_completion)
    CompletionOutput.scope = None
    RequestOutput.scope = property(_scope_of)
