"""Wraps vLLM's calls that make outputs and return outputs to the caller.

Owns:  the code that waits for rows that arrive after the end of a request.
Runs:  in the front-end process, on its main thread or event loop.
From:  running, results.buffer.   To: the caller, http.

Promise: a finished output waits only for its own rows, and delays no other output. The time to make
an output does not grow with the length of the prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing, suppress

from vllm_scope.engine import wrapping
from vllm_scope.engine.beside import Beside
from vllm_scope.engine.frontend import ahead
from vllm_scope.engine.frontend.connection import connection_of, connections
from vllm_scope.engine.frontend.running import Live, lives, refusal_of, running_of, runs
from vllm_scope.engine.frontend.translators import in_words
from vllm_scope.engine.params import concerns, names_module, used_by_vllm
from vllm_scope.engine.refusals import refusal, refusal_in
from vllm_scope.engine.vllm_types import (
    AsyncLLM,
    CompletionOutput,
    LLMEngine,
    RequestOutput,
    RequestState,
)
from vllm_scope.errors import ScopeError, SpecError, UnheldError
from vllm_scope.results.buffer import Pending
from vllm_scope.results.inbox import inbox

#: The type of AsyncLLM.generate's result.
Outputs = AsyncGenerator[RequestOutput, None]
#: The longest time in seconds for which one LLMEngine.step waits for rows.
POLL_S = 0.05
#: After this time in seconds without rows, a worker has possibly disconnected.
LONG_S = 5.0


def _new_completion(
    original: Callable[..., CompletionOutput], self: RequestState, *args: object, **kwargs: object
) -> CompletionOutput:
    """RequestState._new_completion_output. The wrapper connects the completion with its rows."""
    completion = original(self, *args, **kwargs)
    known, refused = runs.of(self), refusal_in(completion)
    if known is not None and completion.finish_reason is not None:
        _fill_prompt_logprobs(self)
    if isinstance(refused, SpecError) and known is not None:
        refused = refusal()(in_words(str(refused), known.decorators.paths))
    if refused is not None:
        completion.stop_reason = str(refused)
        if known is not None:
            known.pending.error, known.refusal = str(refused), refused
    if known is not None or refused is not None:
        lives.put(completion, Live(known, refusal=refused))
    return completion


def _fill_prompt_logprobs(state: RequestState) -> None:
    """If a verdict ended a request before its whole prompt was computed, add None for each prompt
    token that has no log-probability. vLLM's server expects one item for each prompt token.
    vllm 0.32, entrypoints/openai/completion/serving.py, _create_completion_logprobs"""
    found = state.logprobs_processor.prompt_logprobs
    # The list is empty if an earlier output of a stream had the log-probabilities.
    while found and len(found) < len(state.prompt_token_ids):
        found.append(None)


def _waiting_for(output: RequestOutput) -> list[Pending]:
    """The buffers of an output's ended completions whose last rows have not arrived yet. No output
    waits for the rows of a completion that was aborted or that failed."""
    found = []
    for completion in output.outputs:
        running = running_of(completion)
        ended = completion.finish_reason not in (None, "abort", "error")
        if running is not None and ended and not running.pending.done.done():
            found.append(running.pending)
    return found


def settle(output: RequestOutput) -> RequestOutput:
    """Give every completion a snapshot of its current rows, and return the output."""
    for completion in output.outputs:
        running = running_of(completion)
        if running is not None:
            running.give(output, completion)
    return output


def outdated(output: RequestOutput) -> bool:
    """True if data for a completion of this output has arrived after the last `settle`."""
    return any(
        live is not None and live.running is not None
        and live.running.pending.num_came != live.num_seen
        for live in map(lives.of, output.outputs)
    )  # fmt: skip


def _generate(
    original: Callable[..., Outputs], self: AsyncLLM, *args: object, **kwargs: object
) -> Outputs:
    params = used_by_vllm(args, kwargs, 1, "sampling_params")
    stream = original(self, *args, **kwargs)
    return _settled(self, stream) if concerns(params, self) else stream


async def _settled(engine: AsyncLLM, stream: Outputs) -> Outputs:
    async with aclosing(stream):
        async for output in stream:
            for completion in output.outputs:
                refused = _taken_refusal(engine, completion)
                if refused is not None:
                    raise refused
            for pending in _waiting_for(output):
                connection = connection_of(engine.output_processor)
                await _arrival(pending, connection.deliver_timeout_s)
            yield settle(output)


def _taken_refusal(engine: AsyncLLM, completion: object) -> ScopeError | None:
    """The error with which EngineCore refused or ended the request of a completion, or None.

    If there is an error, the package no longer holds it after this call. The caller raises the
    error. Its traceback then holds the caller's frames, and these frames hold the request's
    completions. If the package still held the error, the completions and the request's rows would
    stay in memory.
    """
    refused, running = refusal_of(completion), running_of(completion)
    if refused is None:
        return None
    if isinstance(refused, UnheldError):
        ahead.doubt(engine.output_processor)
    connection = connections.of(engine.output_processor)
    if connection and running and names_module(running.text):
        # Another front-end can have changed the names of steering modules.
        connection.doubt_modules()
    if running is not None:
        running.refusal = None
    lives.pop(completion)
    return refused


async def _arrival(pending: Pending, timeout: float) -> None:
    """Wait for a request's last row, at most `timeout` seconds. A wait is long if it takes at least
    LONG_S or `timeout` seconds, whichever is less. If the row is still missing after a long wait,
    the front-end connects to the workers again before its next request with a spec."""
    limit = time.monotonic() + min(timeout, LONG_S)
    try:
        await asyncio.wait([asyncio.wrap_future(pending.done)], timeout=timeout)
    finally:
        if not pending.done.done() and time.monotonic() >= limit:
            inbox().renew()


#: Maps an LLMEngine to the finished outputs whose rows are missing. Each output is stored with the
#: time at which the wait for its rows ends.
_waiting: Beside[list[tuple[RequestOutput, float]]] = Beside()


def _step(original: Callable[..., list[RequestOutput]], self: LLMEngine) -> list[RequestOutput]:
    """LLMEngine.step. An output that lacks rows is returned by a later step."""
    waiting = _waiting.of(self)
    if waiting is None:
        waiting = _waiting.put(self, [])
    outputs: list[RequestOutput]
    if not waiting:
        outputs = original(self)
    elif self.output_processor.has_unfinished_requests() or not _multiprocess(self):
        # If EngineCore is in this process, the engine must make a step, because the workers learn
        # the end of a request only from the next step.
        outputs = original(self)
        if not outputs and not self.output_processor.has_unfinished_requests():
            time.sleep(POLL_S / 10)
    else:
        outputs = []
        pending = _waiting_for(waiting[0][0])
        if pending:
            with suppress(TimeoutError):
                pending[0].done.result(POLL_S)
    if not (outputs or waiting):
        return outputs
    connection = connections.of(self.output_processor)
    if connection is None:
        return outputs
    now = time.monotonic()
    limit = now + connection.deliver_timeout_s
    queue = [*waiting, *((output, limit) for output in outputs)]
    if any(now >= t and _waiting_for(o) for o, t in queue):
        inbox().renew()
    ready = [(o, t) for o, t in queue if now >= t or not _waiting_for(o)]
    done = {id(o) for o, _ in ready}
    waiting[:] = [(o, t) for o, t in queue if id(o) not in done]
    return [settle(o) if hasattr(o, "outputs") else o for o, _ in ready]


def _multiprocess(engine: LLMEngine) -> bool:
    return not hasattr(engine.engine_core, "engine_core")


def drop(engine: LLMEngine, request_ids: Collection[str]) -> None:
    """End requests whose outputs the caller does not want. Drop the outputs of these requests that
    still wait for rows."""
    engine.abort_request(list(request_ids))
    waiting = _waiting.of(engine) or []
    waiting[:] = [(output, t) for output, t in waiting if output.request_id not in request_ids]
    if not _multiprocess(engine):
        engine.step()  # the workers learn only from the next step that the requests ended


def _has_unfinished(original: Callable[..., bool], self: object) -> bool:
    return bool(original(self)) or bool(_waiting.of(self))


def _scope_of(self: RequestOutput) -> object:
    """The value of RequestOutput.scope: the result of the only completion."""
    if len(self.outputs) != 1:
        raise ScopeError(
            f"this output has {len(self.outputs)} completions; use output.outputs[i].scope."
        )
    return self.outputs[0].scope


def wrap() -> None:
    from vllm.outputs import CompletionOutput, RequestOutput

    wrapping.wrap("LLMEngine.step", _step)
    wrapping.wrap("LLMEngine.has_unfinished_requests", _has_unfinished)
    wrapping.wrap("AsyncLLM.generate", _generate)
    wrapping.wrap("RequestState._new_completion_output", _new_completion)
    CompletionOutput.scope = None
    RequestOutput.scope = property(_scope_of)
