"""One HTTP request and its answer, while the server processes the request.

Owns:  Exchange, which also disconnects clients that do not read their answer.
Runs:  in each API server process, on its event loop.
From:  limits.Door, which creates an Exchange for each request.   To: answer, results.budget (the
       variable `asking`).

Promise: if a client does not read a piece of its answer within the timeout, the server disconnects
the client. If an answer names a file and could not be sent, the file is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import Message, Receive, Scope, Send

from vllm_scope.results.budget import Asker, asking
from vllm_scope.server.body import Body, JsonBody

logger = logging.getLogger("vllm.vllm_scope")

#: The largest number of bytes in one piece of an answer. The timeout applies to each piece, not to
#: a whole answer.
_PIECE_BYTES = 1 << 18


@dataclass(eq=False)
class Exchange(Asker):
    """A request and its answer.

    Attributes:
        timed: True if the client must read each piece of the answer within `write_timeout_s`.
            `timed` is False for requests that use nothing of this package.
        untold: functions that delete one file each. `close` calls the functions at the end of the
            request. After the server has sent the part of the body that names a file, the file's
            function is removed from the list.
        closing: functions that `close` calls and awaits at the end of the request, the last
            function first. The functions close objects that otherwise only the garbage collector
            would close. An example of such an object is the generator of a stream whose client left
            while a chunk was sent.
        body: the Body, which decides how the answer's tensors are sent.
        gone: True if the server has found that the client has left, or has disconnected the client.
    """

    operator: bool = False
    timed: bool = False
    untold: list[Callable[[], None]] = field(default_factory=list)
    closing: list[Callable[[], Awaitable[object]]] = field(default_factory=list)
    body: Body = field(default_factory=JsonBody)
    gone: bool = False

    def sender(self, scope: Scope, receive: Receive, send: Send, timeout_s: float) -> Send:
        """ASGI's `send` with a timeout for each piece. After a part of the body was sent, the
        functions for the files that this part has named are removed from `untold`."""

        async def sending(message: Message) -> None:
            if not (self.timed or self.untold or self.gone):
                await send(message)
                return
            telling = len(self.untold) if message["type"] == "http.response.body" else 0
            if telling and await _has_left(receive):
                self.gone = True
            for piece in self._pieces(message) if self.timed else (message,):
                if self.gone:
                    return  # like uvicorn, drop data for a client that has left
                await self._send(scope, send, piece, timeout_s if self.timed else None)
            if not self.gone:
                del self.untold[:telling]

        return sending

    def _pieces(self, message: Message) -> Iterator[Message]:
        for one in self.body.messages(message):
            yield from _pieces(one)

    async def _send(self, scope: Scope, send: Send, piece: Message, most_s: float | None) -> None:
        try:
            async with asyncio.timeout(most_s):
                await send(piece)
        except TimeoutError:
            self.gone = True
            if not _hang_up(scope):
                raise

    async def close(self) -> None:
        """Call the functions of `closing`, then the functions of `untold`. After this call, the
        server sends nothing more to the client."""
        while self.closing:
            with _logged():
                await self.closing.pop()()
        while self.untold:
            with _logged():
                self.untold.pop()()


@contextmanager
def _logged() -> Iterator[None]:
    """Log an error of the `with` block and do not raise the error, so that `close` calls the
    remaining functions too."""
    try:
        yield
    except Exception:
        logger.exception("vllm-scope: the end of a request could not close one of its objects")


def running(owner: str) -> Exchange:
    """The Exchange of the current request, or a new Exchange outside of a server."""
    found = asking.get()
    return found if isinstance(found, Exchange) else Exchange(owner)


def _pieces(message: Message) -> Iterator[Message]:
    body = memoryview(message.get("body", b""))
    if len(body) <= _PIECE_BYTES:
        yield message
        return
    while len(body) > _PIECE_BYTES:
        yield {**message, "body": bytes(body[:_PIECE_BYTES]), "more_body": True}
        body = body[_PIECE_BYTES:]
    yield {**message, "body": bytes(body)}


async def _has_left(receive: Receive) -> bool:
    """True if the server knows that the client has left. After the request's body, `receive`
    returns no other message than `http.disconnect`."""
    message = asyncio.ensure_future(receive())
    await asyncio.sleep(0)
    if message.done():
        return bool(message.result()["type"] == "http.disconnect")
    message.cancel()
    return False


def _hang_up(scope: Scope) -> bool:
    """Abort a connection and drop the connection's unsent data. A normal close of the connection
    would wait until the client has read the data. Returns False if no connection was found, for
    example with a server other than uvicorn.

    Source: uvicorn 0.54, protocols/http/httptools_impl.py, HttpToolsProtocol; vLLM 0.32,
    entrypoints/launchers/launcher.py: `app.state.server`.
    """
    server = getattr(scope["app"].state, "server", None)
    connections = list(getattr(getattr(server, "server_state", None), "connections", ()))
    found = [one for one in connections if getattr(one, "scope", None) is scope]
    if not found and _is_peer(scope):
        # A connection object of uvicorn has the ASGI scope of the connection's newest request. If
        # the client has already sent a second request, the connection is found by the client's
        # address.
        found = [one for one in connections if getattr(one, "client", None) == scope["client"]]
    for connection in found:
        connection.transport.abort()
    return bool(found)


def _is_peer(scope: Scope) -> bool:
    """True if `scope["client"]` is the address at the other end of the connection. A unix socket
    has no address. Behind a proxy, `scope["client"]` comes from a header."""
    forwarded = any(name == b"x-forwarded-for" for name, _ in scope["headers"])
    return scope["client"] is not None and not forwarded
