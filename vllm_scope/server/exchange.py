"""One HTTP request on its way through a server: who asks, and how its answer goes out.

Owns:  Exchange, and the hanging up on clients that do not read.
Runs:  in each API server process, on its event loop.
From:  limits.Door, which makes one for each request.   To: answer; inbox, as `budget.asking`.

Promise: a client that does not take what it is sent within the timeout is treated as one that
has left. What an answer tells of (a file) is undone where the answer did not go out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm_scope.results.budget import Asker, asking

logger = logging.getLogger("vllm.vllm_scope")

#: What is sent at once: a client has the timeout for each such piece, not for a whole answer.
_PIECE_BYTES = 1 << 18

Message = dict[str, Any]


@dataclass(eq=False)
class Exchange(Asker):
    """A request and its answer.

    Attributes:
        timed: the client has `write_timeout_s` to take each piece of the answer. Plain
            requests are not timed.
        untold: undoes what the answer tells of. What was appended before a part of the body
            was sent is told by it.
        closing: awaited when the request is over, the last one first. A generator whose chunk
            goes out when its client leaves is else closed by the garbage collector.
    """

    operator: bool = False
    timed: bool = False
    untold: list[Callable[[], None]] = field(default_factory=list)
    closing: list[Callable[[], Awaitable[Any]]] = field(default_factory=list)
    #: The client has left, or was hung up on.
    _gone: bool = False

    def sender(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
        timeout_s: float,
    ) -> Callable[[Message], Awaitable[None]]:
        """ASGI's `send`, with this request's promise."""

        async def sending(message: Message) -> None:
            if not (self.timed or self.untold or self._gone):
                await send(message)
                return
            telling = len(self.untold) if message["type"] == "http.response.body" else 0
            if telling and await _has_left(receive):
                self._gone = True
            for piece in _pieces(message) if self.timed else (message,):
                if self._gone:
                    return  # as uvicorn: what is sent to nobody is dropped
                await self._send(scope, send, piece, timeout_s if self.timed else None)
            if not self._gone:
                del self.untold[:telling]

        return sending

    async def _send(self, scope: Message, send: Any, piece: Message, most_s: float | None) -> None:
        try:
            async with asyncio.timeout(most_s):
                await send(piece)
        except TimeoutError:
            self._gone = True
            if not _hang_up(scope):
                raise

    async def close(self) -> None:
        """The request is over, and its client has what it will get."""
        while self.closing:
            with _logged():
                await self.closing.pop()()
        while self.untold:
            with _logged():
                self.untold.pop()()


@contextmanager
def _logged() -> Iterator[None]:
    """Keep an error from those that are to be closed after this one."""
    try:
        yield
    except Exception:
        logger.exception("vllm-scope: something of a request that is over could not be let go")


def running(owner: str) -> Exchange:
    """The exchange of the request that runs now; outside of a server a fresh one."""
    found = asking.get()
    return found if isinstance(found, Exchange) else Exchange(owner)


def _pieces(message: Message) -> Iterator[Message]:
    body = memoryview(message.get("body", b""))
    while len(body) > _PIECE_BYTES:
        yield message | {"body": bytes(body[:_PIECE_BYTES]), "more_body": True}
        body = body[_PIECE_BYTES:]
    yield message | {"body": bytes(body)} if "body" in message else message


async def _has_left(receive: Callable[[], Awaitable[Message]]) -> bool:
    """Whether the client is known to be gone. Once the request's body was read, the only
    message to come is that of its leaving."""
    message = asyncio.ensure_future(receive())
    await asyncio.sleep(0)
    if message.done():
        return message.result()["type"] == "http.disconnect"
    message.cancel()
    return False


def _hang_up(scope: Message) -> bool:
    """Let go of a connection with all that waits to be sent on it: a server that closes it
    waits until its client has read. False where the server is none that is known.

    Source: uvicorn 0.54, protocols/http/httptools_impl.py, HttpToolsProtocol; vLLM 0.32,
    entrypoints/launchers/launcher.py: `app.state.server`.
    """
    server = getattr(scope["app"].state, "server", None)
    connections = list(getattr(getattr(server, "server_state", None), "connections", ()))
    found = [one for one in connections if getattr(one, "scope", None) is scope]
    if not found and _is_peer(scope):
        # A connection has one scope at a time. If a client has sent two requests, it is the
        # second one's.
        found = [one for one in connections if getattr(one, "client", None) == scope["client"]]
    for connection in found:
        connection.transport.abort()
    return bool(found)


def _is_peer(scope: Message) -> bool:
    """True if the scope's client is the connection's address: unix sockets have none, and behind
    a proxy the client says in a header which one it is."""
    forwarded = any(name == b"x-forwarded-for" for name, _ in scope["headers"])
    return scope["client"] is not None and not forwarded
