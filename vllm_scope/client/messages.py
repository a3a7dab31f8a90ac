"""The client's messages: one HTTP request, one response, one event of a stream.

Owns:  Call, Response, ServerError, UnreachableError; `event_body` and `decoded` (JSON).
From:  transport (responses), frames (events).   To: calls.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from vllm_scope.client.frames import Frame
from vllm_scope.client.parsing import converted
from vllm_scope.errors import CapacityError, ScopeError, SpecError, shown
from vllm_scope.request.media import BINARY

Json = dict[str, object]

#: The advice to a caller whose key is missing or wrong.
KEYS = "give the server's key as api_key, and the operator's as admin_key"


class ServerError(ScopeError):
    """The server refused the request, or failed. `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(ScopeError):
    """The server did not answer, or stopped in the middle of an answer. Reasons are a missing
    connection, a timeout, or an answer that is not HTTP. `__cause__` is httpx's error."""


@dataclass(frozen=True)
class Call:
    """One HTTP request. If `admin` is True, the client sends the operator's key. If `binary` is
    True, the client requests a binary answer."""

    method: str
    path: str
    body: object = None
    content: bytes | None = None
    admin: bool = False
    binary: bool = False


@dataclass(frozen=True)
class Response:
    """A transport's response. `location` is a redirect's target, and `kind` is the media type."""

    status: int
    content: bytes
    location: str | None = None
    kind: str = ""

    def checked(self) -> Response:
        """The response itself.

        Raises:
            SpecError: the status is 400. CapacityError: the status is 429. ServerError: the status
                is any other status outside 200 to 299.
        """
        if 200 <= self.status < 300:
            return self
        if self.location is not None:
            raise ServerError(
                f"HTTP {self.status}: a redirect to {shown(self.location)}; give the server's own "
                "URL, because keys are not sent to another URL.", self.status,
            )  # fmt: skip
        message = error_message(self.content)
        if self.status == 400:
            raise SpecError(message)
        if self.status == 429:
            raise CapacityError(message)
        if self.status in (401, 403):
            message = f"{message.rstrip('.')}; {KEYS}."
        if self.status == 404 and message == "Not Found":
            message = "Not Found; give the URL of a vLLM server that has vllm-scope."
        raise ServerError(f"HTTP {self.status}: {message}", self.status)

    def json(self) -> Json:
        """The parsed content. Raises ServerError if the content is not JSON."""
        return decoded(self.content, self.status)

    @property
    def frame(self) -> Frame:
        """The answer with its tensors. A JSON answer has no separate tensors. Older servers send
        only JSON answers."""
        return Frame.parse(self.content) if self.kind == BINARY else Frame(self.content, {})


def error_message(content: bytes) -> str:
    """The text of an error in the body of a response. The body can have any of the forms in which
    vLLM sends errors."""
    try:
        body = json.loads(content)
        error = body.get("error", body.get("detail", body))
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, AttributeError, KeyError, RecursionError):
        return content[:200].decode("utf-8", "replace") or "no reason was given"


def decoded(content: bytes | str, status: int = 200) -> Json:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise ServerError(f"the answer is no JSON but {shown(content[:200])}.", status) from None
    return converted(found, Json, "answer")


def event_body(event: Frame) -> Json | None:
    """The JSON of a stream's event; None if the event has no JSON. Raises the errors of
    Response.checked if the event is an error."""
    answer = event.answer or b""
    if not answer.startswith(b"{"):
        return None
    body = decoded(answer)
    if "error" in body:
        error = body["error"]
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and code >= 400 else 500
        Response(status, answer).checked()
    return body
