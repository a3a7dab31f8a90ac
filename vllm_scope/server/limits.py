"""Bodies that are refused before they are read, and which path a request came by.

Owns:  Door, an ASGI middleware. Inside of vLLM's authentication.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette._utils import get_route_path

from vllm_scope.server.answer import current

_Asgi = Callable[..., Awaitable[None]]


class Door:
    """Refuses bodies over a limit with 413, by their announced or their true length.

    Args:
        limits: path's beginning -> bytes; the longest that fits holds.
    """

    def __init__(self, app: _Asgi, limits: Mapping[str, int]) -> None:
        self._app = app
        self._limits = sorted(limits.items(), key=lambda item: -len(item[0]))

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = get_route_path(scope)
        token = current.set(path)
        most = next((most for start, most in self._limits if path.startswith(start)), None)
        try:
            if most is None:
                await self._app(scope, receive, send)
            elif _announced(scope) > most:
                body = {"error": _error(f"the body has {_announced(scope):,} bytes", most)}
                await JSONResponse(body, 413, {"Connection": "close"})(scope, receive, send)
            else:
                await self._app(scope, _bounded(receive, most), send)
        finally:
            current.reset(token)


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
            raise HTTPException(413, _error("the body goes on after the limit", most)["message"])
        return message

    return bounded


def _error(what: str, most: int) -> dict[str, Any]:
    message = (
        f"{what}; this server takes at most {most:,}. Upload large vectors once as a steering "
        "module and name it."
    )
    return {"message": message, "type": "PayloadTooLarge", "param": None, "code": 413}
