"""A middleware for every request: limits the body's size, and records the sender and path.

Owns:  Door, an ASGI middleware that runs after vLLM's authentication.
To:    exchange, answer; rpc (the check of vLLM's development routes).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from fastapi import HTTPException
from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_scope.results.budget import asking
from vllm_scope.server import rpc
from vllm_scope.server.access import refusal
from vllm_scope.server.answer import current
from vllm_scope.server.body import body_for
from vllm_scope.server.exchange import Exchange
from vllm_scope.server.settings import ADMIN_KEY, ServerSettings
from vllm_scope.server.store import owner_of


class Door:
    """Refuses a request with status 413 if the body's announced or real length is above the limit.

    Args:
        limits: maps the prefix of a path to the largest number of bytes of a body. If several
            prefixes match a path, the longest prefix is used.
        timed: prefixes of paths. For these paths, the client must read each piece of the answer
            within `settings.write_timeout_s` seconds.
    """

    def __init__(
        self, app: ASGIApp, limits: Mapping[str, int], settings: ServerSettings,
        timed: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._app, self._settings, self._timed = app, settings, tuple(timed)
        self._limits = sorted(limits.items(), key=lambda item: -len(item[0]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = get_route_path(scope), Headers(scope=scope)
        exchange = Exchange(
            owner_of(headers.get("authorization")),
            operator=self._settings.is_operators(headers.get(ADMIN_KEY, "")),
            timed=path.startswith(self._timed),
            body=body_for(", ".join(headers.getlist("accept"))),
        )
        tokens = current.set(path), asking.set(exchange)
        try:
            sending = exchange.sender(scope, receive, send, self._settings.write_timeout_s)
            await self._enter(path, scope, receive, sending)
        finally:
            await exchange.close()
            current.reset(tokens[0])
            asking.reset(tokens[1])

    async def _enter(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not asking.get().operator:
                receive = await _guarded(path.rstrip("/"), receive)
            most = next((most for start, most in self._limits if path.startswith(start)), None)
            if most is not None:
                announced = Headers(scope=scope).get("content-length", "")
                size = int(announced[:20]) if announced.isdecimal() else 0
                if size > most:
                    raise HTTPException(413, _too_long(f"the body has {size:,} bytes", most))
        except HTTPException as error:
            answer = refusal(error.status_code, str(error.detail), Connection="close")
            await answer(scope, receive, send)
            return
        await self._app(scope, receive if most is None else _bounded(receive, most), send)


async def _guarded(path: str, receive: Receive) -> Receive:
    """Check a request to vLLM's development routes. Returns the ASGI `receive` to use afterwards.

    Raises:
        HTTPException: the request needs the operator's key, or its body is too long.
    """
    if path == rpc.INFO:
        raise HTTPException(403, rpc.INFO_REFUSAL)
    if path == rpc.PATH:
        body, receive = await rpc.whole_body(_bounded(receive, rpc.MAX_BYTES))
        if await asyncio.to_thread(rpc.names_ours, body):
            raise HTTPException(403, rpc.REFUSAL)
    return receive


def _bounded(receive: Receive, most: int) -> Receive:
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            raise HTTPException(413, _too_long("the body has more bytes than the limit", most))
        return message

    return bounded


def _too_long(what: str, most: int) -> str:
    return (
        f"{what}; this server takes at most {most:,}. Upload large vectors as a steering "
        "module, and give the module's name in requests."
    )
