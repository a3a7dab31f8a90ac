"""The body of an answer: the JSON that vLLM makes, and the tensors that are sent with the JSON.

Owns:  JsonBody, BinaryBody, `body_for`.
Runs:  in an API server process. `values` runs on any thread. All other methods run on the event
       loop.
From:  choice (columns), exchange (the messages of vLLM's response).   To: exchange.

vLLM's JSON encoder takes 3 ms for a megabyte of base64. To save this time, base64 is inserted into
the JSON after vLLM has encoded the JSON. Tensors of a binary answer never become text.

Promise: a JSON answer without tensors has exactly the bytes of vLLM's answer. An answer whose
status is not 200 is JSON. In a binary answer, a contiguous tensor is copied only when it is sent.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Protocol

import pybase64
from starlette.datastructures import MutableHeaders
from starlette.types import Message
from torch import Tensor

from vllm_scope.files.tensors import CODE_OF, head_of
from vllm_scope.request.media import ANSWER, BINARY, prefix_of
from vllm_scope.results.column import Column
from vllm_scope.server import encode
from vllm_scope.server.encode import Buffer, Json

#: If a tensor has fewer bytes than this, vLLM encodes the tensor's base64 together with the JSON.
#: For few bytes, vLLM's encoding takes less time than the insertion of base64 into the JSON.
SMALL_BYTES = 4 << 10
#: Buffers with fewer bytes than this are joined, because a copy of the bytes costs less time than
#: one more system call.
JOINED_BYTES = 64 << 10


class Body(Protocol):
    """Decides how the tensors of an answer are sent.

    Attributes:
        binary: True if the answer has the media type BINARY.
    """

    binary: bool

    def begin(self) -> None:
        """The Answer calls this method one time, if the answer has a scope."""

    def values(self, choice: int, column: Column) -> Json:
        """Add a column's values to the answer. Returns JSON fields that say where the values
        are."""

    def messages(self, message: Message) -> Iterator[Message]:
        """The messages that the server sends instead of a message of vLLM's response."""


class _Messages:
    """Makes the ASGI messages of one response. If the response is not a stream, its first message
    is held back until the length of the body with the tensors is known."""

    def __init__(self) -> None:
        self._start: Message | None = None
        self._content: list[bytes] = []
        self._passive = False

    def messages(self, message: Message) -> Iterator[Message]:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message["headers"]))
            changes = self._changes("content-length" not in headers)
            self._passive = message["status"] != 200 or not changes
            if not self._passive:
                self._head(headers)
                message = {**message, "headers": headers.raw}
                if "content-length" in headers:
                    self._start = message
                    return
            yield message
        elif self._passive or message["type"] != "http.response.body":
            yield message
        elif self._start is None:
            yield from _bodies(self._buffers(message.get("body", b"")), message)
        else:
            self._content.append(message.get("body", b""))
            if not message.get("more_body", False):
                buffers = list(self._buffers(b"".join(self._content)))
                headers = MutableHeaders(raw=self._start["headers"])
                headers["content-length"] = str(sum(map(len, buffers)))
                yield self._start
                yield from _bodies(buffers, message)

    def _changes(self, streams: bool) -> bool:
        """True if tensors can be added to the response. If False, the server sends the messages of
        vLLM's response unchanged. `messages` calls this method when the response starts."""
        raise NotImplementedError

    def _head(self, headers: MutableHeaders) -> None:
        """Change the headers of a response."""

    def _buffers(self, content: bytes) -> Iterator[Buffer]:
        """The whole body of a response or the next bytes of a stream, together with tensors."""
        raise NotImplementedError


def _bodies(buffers: Iterator[Buffer] | list[Buffer], message: Message) -> Iterator[Message]:
    """Divide a body into messages. Each large buffer becomes one message. All small buffers between
    two large buffers become one message together."""
    small: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) < JOINED_BYTES:
            small.append(buffer)
            continue
        if small:
            yield {**message, "body": b"".join(small), "more_body": True}
            small = []
        yield {**message, "body": buffer, "more_body": True}
    if small or not message.get("more_body", False):
        yield {**message, "body": b"".join(small)}


class JsonBody(_Messages):
    """A body that is JSON, and contains the tensors as base64.

    Args:
        sent: True if the answer goes through `messages`, which inserts the base64. If False, vLLM
            encodes the base64 together with the rest of the JSON.
    """

    binary = False

    def __init__(self, sent: bool = False) -> None:
        super().__init__()
        self._sent = sent
        #: Marks the places in the JSON at which base64 is inserted. The mark is random, so that no
        #: text of a model contains the mark.
        self._mark = secrets.token_hex(16) if sent else ""
        self._kept: dict[int, bytes] = {}
        self._num_kept = 0

    def begin(self) -> None:
        pass

    def values(self, choice: int, column: Column) -> Json:
        data = encode.buffer_of(column.values)
        if not self._sent or data.nbytes < SMALL_BYTES:
            return {"data": pybase64.b64encode_as_string(data)}
        number, self._num_kept = self._num_kept, self._num_kept + 1
        self._kept[number] = pybase64.b64encode(data)
        return {"data": f"{self._mark}{number}"}

    def _changes(self, streams: bool) -> bool:
        return streams or bool(self._kept)

    def _buffers(self, content: bytes) -> Iterator[Buffer]:
        if not self._kept:
            yield content
            return
        at = 0
        for found in re.finditer(rb"%b(\d+)" % self._mark.encode(), content):
            yield content[at : found.start()]
            yield self._kept.pop(int(found[1]))
            at = found.end()
        yield content[at:]


class BinaryBody(_Messages):
    """A body that is a safetensors file with the JSON and the tensors. In a stream, each event is
    one such file."""

    binary = True

    def __init__(self) -> None:
        super().__init__()
        self._begun = self._streams = False
        self._tensors: dict[str, Tensor] = {}

    def begin(self) -> None:
        self._begun = True

    def values(self, choice: int, column: Column) -> Json:
        start = prefix_of(choice)
        self._tensors |= {start + name: one for name, one in encode.tensors_of(column).items()}
        return {"tensor": start + encode.tensor_name(column)}

    def _changes(self, streams: bool) -> bool:
        return self._begun

    def _head(self, headers: MutableHeaders) -> None:
        self._streams = headers["content-type"].startswith("text/event-stream")
        headers["content-type"] = BINARY

    def _buffers(self, content: bytes) -> Iterator[Buffer]:
        if not self._streams:
            yield from self._file(content)
            return
        for event in content.split(b"\n\n"):
            if event.startswith(b"data: "):
                yield from self._file(event.removeprefix(b"data: "))
            elif event:  # vLLM sends comments to keep the connection alive
                yield head_of(())

    def _file(self, answer: bytes) -> Iterator[Buffer]:
        # Tensors with wide dtypes come first in the file, so that each tensor is aligned. The JSON
        # of the answer comes last.
        found = sorted(self._tensors.items(), key=lambda item: -item[1].dtype.itemsize)
        self._tensors = {}
        shapes = [(name, CODE_OF[t.dtype], list(t.shape), t.nbytes) for name, t in found]
        yield head_of([*shapes, (ANSWER, "U8", [len(answer)], len(answer))])
        for _, tensor in found:
            yield encode.buffer_of(tensor)
        yield answer


def body_for(accept: str) -> Body:
    """The body of the answer to a request. The body is a BinaryBody if the request's header
    `Accept` names BINARY (without `q=0`), otherwise a JsonBody."""
    for one in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in one.split(";"))
        if kind == BINARY:
            refused = any(re.fullmatch(r"q=0(\.0*)?", each) for each in parameters)
            return JsonBody(sent=True) if refused else BinaryBody()
    return JsonBody(sent=True)
