"""Errors of ours that vLLM passes on: as HTTP's status, and from EngineCore to the caller.

Owns:  `refusal` and `busy`, our errors as vLLM's server knows them, and the road back of
       what EngineCore refuses after the front-end had let it in.
Runs:  in EngineCore (input thread) and in the front-end.

vLLM tells the front-end of such a request that it ended with an error, and no more. Its
outputs have one field of text, `stop_reason`, which an error leaves empty: the sentence
travels there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from typing import Any

from vllm_scope.engine import wrapping
from vllm_scope.errors import CapacityError, ScopeError, SpecError

_MARK = "vllm-scope refuses "
NO_PATHS: Mapping[str, str] = {}


@cache
def refusal() -> type[SpecError]:
    """SpecError that vLLM's server, too, knows as the client's fault (HTTP 400)."""
    from vllm.exceptions import VLLMValidationError

    return type("SpecError", (VLLMValidationError, SpecError), {})


@cache
def _busy() -> type[CapacityError]:
    from vllm.exceptions import GracefulHTTPError

    return type("CapacityError", (GracefulHTTPError, CapacityError), {})


def busy(sentence: str) -> CapacityError:
    """CapacityError that vLLM's server, too, knows as something to try again (HTTP 429)."""
    return _busy()(sentence, HTTPStatus.TOO_MANY_REQUESTS)


@contextmanager
def refusing(paths: Mapping[str, str] = NO_PATHS) -> Iterator[None]:
    """Errors of ours inside are vLLM's too.

    Args:
        paths: what the caller calls the parts of the spec (translators.in_words).
    """
    from vllm_scope.engine.frontend.translators import in_words

    try:
        yield
    except SpecError as error:
        raise refusal()(in_words(str(error), paths)) from None
    except CapacityError as error:
        raise busy(str(error)) from None


def told(completion: Any) -> ScopeError | None:
    """Why EngineCore refused a completion's request; None where it did not."""
    text = completion.stop_reason
    if completion.finish_reason != "error" or not str(text).startswith(_MARK):
        return None
    kind, sentence = text.removeprefix(_MARK).split(": ", 1)
    return busy(sentence) if kind == CapacityError.__name__ else refusal()(sentence)


def refused(request_id: str, error: ScopeError) -> Any:
    """EngineCore's last output of a request, with why it ends; `told` reads it."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    text = f"{_MARK}{type(error).__name__}: {error}"
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=text)


def _refuse(original: Any, self: Any, request: Any) -> None:
    """EngineCoreProc._handle_request_preproc_error: ours come with their sentence."""
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
