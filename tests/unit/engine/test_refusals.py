"""What EngineCore refuses, on its way to the caller."""

from __future__ import annotations

import queue
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_scope import CapacityError, SpecError
from vllm_scope.engine import refusals
from vllm_scope.errors import UnheldError


class _Proc(SimpleNamespace):
    """The part of vLLM's EngineCoreProc that answers for a request that did not enter."""

    def __init__(self):
        self.output_queue: queue.Queue = queue.Queue()


def _told(error: Exception) -> Any:
    """What the front-end makes of what EngineCore sends for an error."""
    proc, request = _Proc(), SimpleNamespace(request_id="r", client_index=3)

    def original(self, came):
        return "vLLM's way"

    try:
        raise error
    except Exception:
        refusals._refuse(original, proc, request)
    if proc.output_queue.empty():
        return None
    client, outputs = proc.output_queue.get()
    assert (client, outputs.finished_requests) == (3, {"r"})
    (output,) = outputs.outputs
    completion = SimpleNamespace(
        finish_reason=str(output.finish_reason), stop_reason=output.stop_reason
    )
    return refusals.refusal_in(completion)


def test_an_error_of_enginecore_reaches_the_caller_unchanged():
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    for error, code in ((SpecError("no: such name"), 400), (CapacityError("no room"), 429)):
        found = _told(error)
        assert isinstance(found, type(error))
        assert str(found) == str(error)
        body = create_error_response(found).error
        assert (body.code, body.message) == (code, str(error))
    assert _told(RuntimeError("another fault")) is None


def test_a_refusal_for_want_of_vectors_is_known_as_one():
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    found = _told(UnheldError("send it again"))
    assert isinstance(found, UnheldError)
    assert isinstance(found, CapacityError)
    body = create_error_response(found).error
    assert (body.code, body.message) == (429, "send it again")
    assert body.type == create_error_response(_told(CapacityError("no room"))).error.type
    assert not isinstance(_told(CapacityError("no room")), UnheldError)


@pytest.mark.parametrize(
    ("reason", "stop"), [("stop", "vllm-scope refuses CapacityError: x"), ("error", None)]
)
def test_only_a_refusal_of_enginecore_is_read_as_one(reason, stop):
    """A stop string of the caller's may say what it likes."""
    assert refusals.refusal_in(SimpleNamespace(finish_reason=reason, stop_reason=stop)) is None


def test_a_refusal_has_the_callers_words():
    with (
        pytest.raises(SpecError, match=r"^my_key is wrong$") as caught,
        refusals.Refusing({"reads[0]": "my_key"}),
    ):
        raise SpecError("reads[0] is wrong")
    assert isinstance(caught.value, ValueError), "vLLM answers with HTTP 400"


def test_a_want_of_room_is_told_as_one():
    with pytest.raises(CapacityError, match="later") as caught, refusals.Refusing():
        raise CapacityError("send it again later")
    assert caught.value.http_status == HTTPStatus.TOO_MANY_REQUESTS


def test_other_errors_pass():
    with pytest.raises(KeyError), refusals.Refusing():
        raise KeyError("x")
