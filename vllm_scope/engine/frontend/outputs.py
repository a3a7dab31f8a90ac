"""Results out: the seams on outputs, and on the calls that return them.

Owns:  the wait for rows that are still on their way when a request ends; Running.
Runs:  in the front-end process, on its main thread or event loop.
From:  requests, results.buffer.   To: the caller; http.

Promise: a finished output waits for its own rows, and no other output waits for it. The cost of
an output does not grow with its prompt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing, suppress
from typing import Any

from vllm_scope.engine import wrapping
from vllm_scope.engine.frontend.translators import Decorators, in_words
from vllm_scope.engine.params import concerns, names_module, params_of
from vllm_scope.engine.refusals import refusal, refusal_in
from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.results.buffer import Pending
from vllm_scope.results.inbox import inbox

logger = logging.getLogger("vllm.vllm_scope")

#: How long a synchronous step waits for rows before it looks again.
POLL_S = 0.05
#: If due rows have not arrived after so long, their worker may have disconnected.
LONG_S = 5.0


class Running:
    """A request that has entered, and what its outputs get.

    Attributes:
        text: the spec.
        texts: the text that each generated token added to the answer; empty without probes. A
            stop token that is not shown has none.
    """

    def __init__(
        self, pending: Pending, decorators: Decorators, detokenizer: Any, text: str
    ) -> None:
        self.pending, self.decorators, self.text = pending, decorators, text
        self._detokenizer = detokenizer
        self._output_ids: list[int] = []
        self.texts: list[str] = []
        decode = getattr(detokenizer, "decode_next", None)
        if pending.asked.probes and decode is not None:
            detokenizer.decode_next = self._following(decode)

    def _following(self, decode: Any) -> Any:
        def decode_next(*args: Any, **kwargs: Any) -> str:
            text: str = decode(*args, **kwargs)
            self.texts.append(text)
            return text

        return decode_next

    def output_ids(self) -> list[int]:
        """All generated tokens so far: one list that is extended, which snapshots share."""
        every, known = self._detokenizer.token_ids, self._output_ids
        count = self._detokenizer.num_output_tokens()
        if count < len(known):  # a stop string removed some
            known = self._output_ids = known[:count]
        known.extend(every[len(every) - count + len(known) :])
        return known

    def give(self, output: Any, completion: Any) -> None:
        """Set the completion's result so far."""
        ended = completion.finish_reason is not None
        # Before the snapshot: what arrives in between counts as new.
        completion.scope_came = self.pending.num_came
        completion.scope = self.pending.snapshot(self.output_ids(), completion.finish_reason)
        completion.scope_texts = self.texts
        if ended:
            del completion.scope_source, completion.scope_came
        for decorate in self.decorators:
            try:
                decorate(output, completion)
            except Exception as error:
                # Only this request fails; the step's other outputs go on.
                logger.exception("vllm-scope: output %s was not decorated", output.request_id)
                self.pending.error = self.pending.error or (
                    "what this output was to have beside its rows could not be made "
                    f"({type(error).__name__}); the server's log has the traceback."
                )
                completion.scope = self.pending.snapshot(
                    self.output_ids(), completion.finish_reason
                )


def _new_completion(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """RequestState._new_completion_output: connect the completion with its rows."""
    completion = original(self, *args, **kwargs)
    known: Running | None = getattr(self, "scope", None)
    refused = refusal_in(completion)
    if isinstance(refused, SpecError) and known is not None:
        refused = refusal()(in_words(str(refused), known.decorators.paths))
    if refused is not None:
        completion.stop_reason, completion.scope_refusal = str(refused), refused
        if known is not None:
            known.pending.error = str(refused)
    if known is not None:
        completion.scope_source = known
    return completion


def _waiting_for(output: Any) -> list[Pending]:
    """The rows that a finished output still waits for."""
    found = []
    for completion in output.outputs:
        source = getattr(completion, "scope_source", None)
        ended = completion.finish_reason not in (None, "abort", "error")
        if source is not None and ended and not source.pending.done.done():
            found.append(source.pending)
    return found


def settle(output: Any) -> Any:
    """Give every completion a snapshot of its rows as of now."""
    for completion in output.outputs:
        source: Running | None = getattr(completion, "scope_source", None)
        if source is not None:
            source.give(output, completion)
    return output


def outdated(output: Any) -> bool:
    """True if something has arrived for a completion since `settle`."""
    return any(
        (source := getattr(completion, "scope_source", None)) is not None
        and source.pending.num_came != completion.scope_came
        for completion in output.outputs
    )


def _generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    params = params_of(args, kwargs, 1, "sampling_params")
    stream = original(self, *args, **kwargs)
    return _settled(self, stream) if concerns(params, self) else stream


async def _settled(engine: Any, stream: Any) -> Any:
    async with aclosing(stream):
        async for output in stream:
            for completion in output.outputs:
                if hasattr(completion, "scope_refusal"):
                    if names_module(completion.scope_source.text):
                        # Another front-end may have changed a name that this one knew.
                        engine.output_processor.scope.doubt_modules()
                    raise completion.scope_refusal
            for pending in _waiting_for(output):
                timeout = engine.output_processor.scope.deliver_timeout_s
                await _arrival(pending, timeout)
            yield settle(output)


async def _arrival(pending: Pending, timeout: float) -> None:
    """Wait for a request's last row. After LONG_S, have the engine connect again."""
    limit = time.monotonic() + min(timeout, LONG_S)
    try:
        await asyncio.wait([asyncio.wrap_future(pending.done)], timeout=timeout)
    finally:
        if not pending.done.done() and time.monotonic() >= limit:
            inbox().renew()


def _step(original: Any, self: Any) -> list[Any]:
    """LLMEngine.step: a finished output whose rows are missing is returned by a later step."""
    waiting: list[tuple[Any, float]] = self.__dict__.setdefault("scope_waiting", [])
    outputs: list[Any]
    if not waiting:
        outputs = original(self)
    elif self.output_processor.has_unfinished_requests() or not _multiprocess(self):
        # In one process the engine must step: the workers learn of a request's end in the
        # next step.
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

    wrapping.wrap("LLMEngine.step", _step)
    wrapping.wrap("LLMEngine.has_unfinished_requests", _has_unfinished)
    wrapping.wrap("AsyncLLM.generate", _generate)
    wrapping.wrap("RequestState._new_completion_output", _new_completion)
    CompletionOutput.scope = None
    RequestOutput.scope = property(_scope_of)
