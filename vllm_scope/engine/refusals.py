"""Turns our errors into errors that vLLM sends over HTTP, or from EngineCore to the caller.

Owns:  `refusal`, `busy` and `named` (make errors that vLLM's server turns into HTTP answers); the
       code that carries an error from EngineCore to the caller.
Runs:  in EngineCore and in the front-end. `_refuse` runs on EngineCore's input thread.

If EngineCore refuses a request, vLLM's output says only that the request ended with an error.
This file puts the error's text into the output's `stop_reason`, which vLLM leaves empty for errors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from http import HTTPStatus

from vllm_scope.engine import wrapping
from vllm_scope.engine.vllm_types import CompletionOutput, EngineCoreProc, EngineCoreRequest
from vllm_scope.engine.vllm_types import EngineCoreOutput as Last
from vllm_scope.errors import CapacityError, ScopeError, SpecError, UnheldError

_MARK = "vllm-scope refuses "
NO_PATHS: Mapping[str, str] = {}


@cache
def refusal() -> type[SpecError]:
    """A subclass of SpecError that vLLM's server answers with HTTP status 400."""
    from vllm.exceptions import VLLMValidationError

    return type("SpecError", (VLLMValidationError, SpecError), {})


@cache
def _busy(kind: type[CapacityError]) -> type[CapacityError]:
    from vllm.exceptions import GracefulHTTPError

    return type("CapacityError", (GracefulHTTPError, kind), {})


def busy(sentence: str, kind: type[CapacityError] = CapacityError) -> CapacityError:
    """An error of the class `kind` that vLLM's server answers with HTTP status 429."""
    # mypy does not know that a class of exceptions is hashable.
    return _busy(kind)(sentence, HTTPStatus.TOO_MANY_REQUESTS)  # type: ignore[arg-type]


class Refusing(AbstractContextManager[None]):
    """In the `with` block, a SpecError becomes an error of the class `refusal()`, and a
    CapacityError becomes an error that `busy` makes.

    Args:
        paths: the caller's words for the parts of the spec (translators.in_words).
    """

    def __init__(self, paths: Mapping[str, str] = NO_PATHS) -> None:
        self._paths = paths

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SpecError):
            from vllm_scope.engine.frontend.translators import in_words

            raise refusal()(in_words(str(error), self._paths)) from None
        if isinstance(error, CapacityError):
            raise busy(str(error)) from None


def named(error: ScopeError, where: str) -> ScopeError:
    """A SpecError or CapacityError with `where` at the beginning of the text. `where` names the
    prompt, such as "prompts[3]". Other errors are returned unchanged."""
    sentence = f"{where}: {error}"
    if isinstance(error, SpecError):
        return refusal()(sentence)
    if isinstance(error, CapacityError):
        return busy(sentence, UnheldError if isinstance(error, UnheldError) else CapacityError)
    return error


def refusal_in(completion: CompletionOutput) -> ScopeError | None:
    """The error with which EngineCore refused a completion's request, or None."""
    if completion.finish_reason != "error" or not str(completion.stop_reason).startswith(_MARK):
        return None
    kind, sentence = _parts(completion.stop_reason)
    busies = {one.__name__: one for one in (CapacityError, UnheldError)}
    return busy(sentence, busies[kind]) if kind in busies else refusal()(sentence)


def _parts(text: str) -> tuple[str, str]:
    """The name of an error's class, and the error's text, from the stop_reason that `refused` has
    made."""
    kind, sentence = text.removeprefix(_MARK).split(": ", 1)
    return kind, sentence


def sentence_in(stop_reason: object) -> str:
    """The reason why a request failed.

    Args:
        stop_reason: the stop_reason of the request's last output.
    """
    text = str(stop_reason)
    return _parts(text)[1] if text.startswith(_MARK) else "the request failed"


def refused(request_id: str, error: ScopeError) -> Last:
    """The last output for a request that EngineCore refuses. The front-end reads the error with
    `refusal_in`."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    text = f"{_MARK}{type(error).__name__}: {error}"
    last: Last = EngineCoreOutput(
        request_id, [], finish_reason=FinishReason.ERROR, stop_reason=text
    )
    return last


def _refuse(
    original: Callable[..., object], self: EngineCoreProc, request: EngineCoreRequest
) -> None:
    """EngineCoreProc._handle_request_preproc_error. For an error of this package, the wrapper also
    sends the error's text."""
    error = sys.exception()
    if not isinstance(error, ScopeError):
        original(self, request)
        return
    from vllm.v1.engine import EngineCoreOutputs

    output = refused(request.request_id, error)
    outputs = EngineCoreOutputs(outputs=[output], finished_requests={request.request_id})
    self.output_queue.put_nowait((request.client_index, outputs))


def wrap() -> None:
    wrapping.wrap("EngineCoreProc._handle_request_preproc_error", _refuse)
