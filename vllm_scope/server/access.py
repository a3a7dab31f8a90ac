"""Who may use a route, and what a route can ask: shared by our routes and the faces'.

Owns:  Engine, ScopeState (`app.state.scope`), RefusalError, Route, `admin`, `in_turn`.
Runs:  in each API server process, inside of vLLM's authentication.

Promise: the operator's key is compared in constant time; every refusal has OpenAI's shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from fastapi import Header, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.request.bounded_json import decode
from vllm_scope.server.changes import Changes, NoTurnError
from vllm_scope.server.schemas import Refusal
from vllm_scope.server.settings import ADMIN_KEY, Settings
from vllm_scope.server.store import Store, owner_of
from vllm_scope.sinks.reports import plain

#: In the lists of a body: all layers of 80 with 8,192 numbers each, and more.
MOST_NUMBERS = 1 << 20
#: Characters of a refusal's sentence.
MOST_MESSAGE = 2000
_STATUS = {
    400: "SpecError", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound",
    413: "PayloadTooLarge", 503: "Unavailable",
}  # fmt: skip


class Engine(Protocol):
    """What the routes ask of an engine; SpecErrors are the caller's fault."""

    async def describe(self) -> dict[str, Any]: ...
    async def load(self) -> tuple[int, int]: ...
    async def modules(self) -> dict[str, Any]: ...
    async def register(self, name: str, data: bytes) -> str: ...
    async def unregister(self, name: str) -> bool: ...
    async def set_edits(self, text: str | None) -> str | None: ...
    async def edits(self) -> str | None: ...


@dataclass(frozen=True)
class ScopeState:
    """What the server keeps for its routes; `app.state.scope`.

    Attributes:
        showing: held while edits are shown: a text of theirs may have 8 MiB.
    """

    settings: Settings
    store: Store
    engine: Callable[[], Engine | None]
    changes: Changes
    showing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def owner_of(self, request: Request) -> str:
        return owner_of(request.headers.get("authorization"))


class RefusalError(Exception):
    """Raised by a route: this status and this sentence, in OpenAI's shape."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def refused(request: Request, error: Exception) -> Response:
    """The handler of RefusalErrors."""
    assert isinstance(error, RefusalError)
    name = _STATUS.get(error.status, "Error")
    message = plain(str(error), MOST_MESSAGE)
    body = {"message": message, "type": name, "param": None, "code": error.status}
    return JSONResponse({"error": body}, error.status)


class _Bounded(Request):
    """Its JSON is counted before it is parsed, in a thread."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return await asyncio.to_thread(_parsed, body)
        except SpecError as error:
            raise HTTPException(400, str(error)) from None


def _parsed(body: bytes) -> Any:
    """Raises SpecError for what is no JSON, or says more than may be parsed."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"the body is not UTF-8: {error.reason} at {error.start}.") from None
    return decode(text, "the body", MOST_NUMBERS)


class Route(APIRoute):
    """What the framework refuses itself (a body that is no JSON, or too long) has the shape
    of our errors too, and a body is not read before the operator's key, where one is needed:
    the framework's dependencies come after it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handled(request: Request) -> Response:
            for guard in (admin, admin_or_bearer):
                if any(known.dependency is guard for known in self.dependencies):
                    guard(request, request.headers.get(ADMIN_KEY))
            try:
                return await handler(_Bounded(request.scope, request.receive))
            except HTTPException as error:
                raise RefusalError(error.status_code, str(error.detail)) from None

        return handled


def state_of(request: Request) -> ScopeState:
    """Settings, kept results and the engine of the app that a request came to."""
    state = request.app.state.scope
    assert isinstance(state, ScopeState)
    return state


def engine_of(request: Request) -> Engine:
    """Raises RefusalError where there is none with taps."""
    engine = state_of(request).engine()
    if engine is None:
        raise RefusalError(404, "this server has no engine with taps.")
    return engine


async def asked(call: Awaitable[Any]) -> Any:
    """What the engine answers; what it refuses is the caller's fault."""
    try:
        return await call
    except ScopeError as error:
        raise RefusalError(400, str(error)) from None


@asynccontextmanager
async def in_turn(request: Request, clearing: bool = False) -> AsyncIterator[None]:
    """One change of names or of server-wide edits at a time, in all of the server's processes.

    Args:
        clearing: it ends edits, which must be possible where the disk is full.
    """
    try:
        async with state_of(request).changes.one(clearing):
            yield
    except NoTurnError as error:
        raise RefusalError(503, str(error)) from None


def admin(
    request: Request,
    key: Annotated[
        str | None,
        Header(alias=ADMIN_KEY, description="The server's VLLM_SCOPE_ADMIN_KEY."),
    ] = None,
) -> None:
    """A dependency of routes that change anything: they need the operator's key."""
    if key is None:
        raise RefusalError(401, "this needs the operator's key in the header X-Scope-Admin-Key.")
    if not state_of(request).settings.is_operators(key):
        raise RefusalError(403, "X-Scope-Admin-Key is not this server's operator's key.")


def admin_or_bearer(
    request: Request,
    key: Annotated[
        str | None,
        Header(
            alias=ADMIN_KEY,
            description="The server's VLLM_SCOPE_ADMIN_KEY; it may be the bearer instead.",
        ),
    ] = None,
) -> None:
    """As `admin`, for routes whose users send the operator's key as the bearer. vLLM lets
    it in where it is one of the API keys, or where there are none."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    if (
        key is None
        and scheme.lower() == "bearer"
        and state_of(request).settings.is_operators(bearer)
    ):
        return
    admin(request, key)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For OpenAPI: a route's answers of these statuses are Refusals."""
    return {status: {"model": Refusal} for status in statuses}
