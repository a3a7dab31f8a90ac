"""What every request passes first: bodies are bounded, and it is known who asks, by which path.

Owns:  Door, an ASGI middleware. Inside of vLLM's authentication.
To:    exchange, answer; rpc (what vLLM's own route to all methods may call).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette._utils import get_route_path
from starlette.datastructures import Headers

from vllm_scope.results.budget import asking
from vllm_scope.server import rpc
from vllm_scope.server.answer import current
from vllm_scope.server.exchange import Exchange
from vllm_scope.server.settings import ADMIN_KEY, Settings
from vllm_scope.server.store import owner_of

_Asgi = Callable[..., Awaitable[None]]


class Door:
    """Refuses bodies over a limit with 413, by their announced or their true length.

    Args:
        limits: path's beginning -> bytes; the longest that fits holds.
        timed: beginnings of the paths whose answers a client has to take in time, whatever
            they are.
    """

    def __init__(
        self, app: _Asgi, limits: Mapping[str, int], settings: Settings, timed: Sequence[str] = ()
    ) -> None:
        self._app, self._settings, self._timed = app, settings, tuple(timed)
        self._limits = sorted(limits.items(), key=lambda item: -len(item[0]))

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = get_route_path(scope), Headers(scope=scope)
        exchange = Exchange(
            owner_of(headers.get("authorization")),
            operator=self._settings.is_operators(headers.get(ADMIN_KEY, "")),
            timed=path.startswith(self._timed),
        )
        tokens = current.set(path), asking.set(exchange)
        try:
            sending = exchange.sender(scope, receive, send, self._settings.write_timeout_s)
            await self._enter(path, scope, receive, sending)
        finally:
            await exchange.close()
            current.reset(tokens[0])
            asking.reset(tokens[1])

    async def _enter(self, path: str, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if path.rstrip("/") == rpc.INFO and not asking.get().operator:
            await _refuse(403, rpc.INFO_REFUSAL, scope, receive, send)
            return
        if path.rstrip("/") == rpc.PATH and not asking.get().operator:
            try:
                body, receive = await rpc.whole_body(_bounded(receive, rpc.MAX_BYTES))
            except HTTPException as error:
                await _refuse(error.status_code, str(error.detail), scope, receive, send)
                return
            if await asyncio.to_thread(rpc.names_ours, body):
                await _refuse(403, rpc.REFUSAL, scope, receive, send)
                return
        most = next((most for start, most in self._limits if path.startswith(start)), None)
        if most is None:
            await self._app(scope, receive, send)
        elif _announced(scope) > most:
            await _refuse(413, _too_long(f"the body has {_announced(scope):,} bytes", most),
                          scope, receive, send)  # fmt: skip
        else:
            await self._app(scope, _bounded(receive, most), send)


def _announced(scope: dict[str, Any]) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def _bounded(receive: Any, most: int) -> Any:
    size = 0

    async def bounded() -> Any:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            raise HTTPException(413, _too_long("the body goes on after the limit", most))
        return message

    return bounded


def _too_long(what: str, most: int) -> str:
    return (
        f"{what}; this server takes at most {most:,}. Upload large vectors once as a steering "
        "module and name it."
    )


async def _refuse(
    status: int, message: str, scope: dict[str, Any], receive: Any, send: Any
) -> None:
    kind = {403: "Forbidden", 413: "PayloadTooLarge"}[status]
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    await JSONResponse(body, status, {"Connection": "close"})(scope, receive, send)
