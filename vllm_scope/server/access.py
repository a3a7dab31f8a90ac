"""The guards of routes, and the engine's methods that routes call. The routes in the folder compat
use this file too.

Owns:  Engine, RunningSweep, ScopeState (`app.state.scope`), RefusalError, Route, `admin`,
       `in_turn`.
Runs:  in each API server process, after vLLM's authentication.

Promise: a given key is compared with the operator's key in constant time. Every refusal has the
format of OpenAI's errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Header, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from vllm_scope.control.activity import Activity
from vllm_scope.errors import CapacityError, ScopeError, SpecError
from vllm_scope.server.changes import Changes, NoTurnError
from vllm_scope.server.edits import decoded
from vllm_scope.server.schemas import Refusal
from vllm_scope.server.settings import ADMIN_KEY, ServerSettings
from vllm_scope.server.store import Store, owner_of
from vllm_scope.sinks.reports import plain
from vllm_scope.sweeps.plan import Cell
from vllm_scope.sweeps.table import SweepTable
from vllm_scope.sweeps.wire import AskedSweep

T = TypeVar("T")
#: The limit of the numbers in the body of a request, in all its lists together. A 70B model has 80
#: layers and rows of 8,192 numbers. A body with one vector for each of these layers is below the
#: limit.
MOST_NUMBERS = 1 << 20
#: The largest number of characters in the message of a refusal.
MOST_MESSAGE = 2000
_STATUS = {
    400: "SpecError", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound",
    413: "PayloadTooLarge", 429: "CapacityError", 500: "InternalError", 503: "Unavailable",
}  # fmt: skip


class Engine(Protocol):
    """The engine's methods that routes call. A method raises SpecError if the request is wrong."""

    async def describe(self) -> dict[str, Any]: ...
    async def load(self) -> tuple[int, int]: ...
    async def modules(self) -> Mapping[str, Mapping[str, object]]: ...
    async def register(self, name: str, data: bytes) -> str: ...
    async def unregister(self, name: str) -> bool: ...
    async def set_edits(self, text: str | None) -> str | None: ...
    async def edits(self) -> str | None: ...
    async def set_monitors(self, bodies: object) -> None: ...
    async def monitors(self) -> Mapping[str, Mapping[str, object]]: ...
    async def activity(self, settings: ServerSettings) -> Activity: ...
    async def moments(self, name: str) -> list[tuple[str, int, str]]: ...
    async def moments_at(self, name: str, site: str, layer: int, label: str) -> bytes: ...
    async def drop_moments(self, name: str) -> bool: ...
    async def sweep(self, asked: AskedSweep, settings: ServerSettings) -> RunningSweep: ...


class RunningSweep(Protocol):
    """A sweep that a request has started. The server runs a limited number of sweeps at a time.
    After a call of `close`, the server can start another sweep.

    Attributes:
        table: the sweep's values, which arrive while the sweep runs.
    """

    table: SweepTable
    num_cells: int

    async def run(self, tell: Callable[[Cell], object]) -> None:
        """Call `tell` with each cell as soon as the cell arrives, and close the sweep at the end.
        The caller runs this method in a separate task. If the task is cancelled, all requests of
        the sweep end. Raises ScopeError if the request that reads a prompt has failed."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class ScopeState:
    """The objects that all routes of an app share. The app has a ScopeState as `app.state.scope`.

    Attributes:
        engine: a function that returns the engine, or None if the server has no engine with taps.
        showing: a lock for routes whose answers contain edits (up to 8 MiB) or sums of rows. With
            the lock, this process builds only one answer with edits or sums at a time.
    """

    settings: ServerSettings
    store: Store
    engine: Callable[[], Engine | None]
    changes: Changes
    showing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def owner_of(self, request: Request) -> str:
        return owner_of(request.headers.get("authorization"))


class RefusalError(Exception):
    """A route raises this exception to refuse a request. The answer to the request has the
    exception's status and message, in the format of OpenAI's errors."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def refusal(status: int, message: str, **headers: str) -> JSONResponse:
    """The answer to a refused request, in the format of OpenAI's errors."""
    return JSONResponse(error_body(status, message), status, headers)


def error_body(status: int, message: str) -> dict[str, object]:
    error = {
        "message": plain(message, MOST_MESSAGE), "type": _STATUS.get(status, "Error"),
        "param": None, "code": status,
    }  # fmt: skip
    return {"error": error}


async def refused(request: Request, error: Exception) -> Response:
    """The answer to a request for which a route has raised a RefusalError."""
    assert isinstance(error, RefusalError)
    return refusal(error.status, str(error))


class _Bounded(Request):
    """A request whose body is parsed as JSON in a thread, after the JSON's items were counted."""

    async def json(self) -> object:
        body = await self.body()
        try:
            return (await asyncio.to_thread(decoded, body, MOST_NUMBERS))[1]
        except SpecError as error:
            raise HTTPException(400, str(error)) from None


class Route(APIRoute):
    """A route whose error answers all have OpenAI's format, also for errors that FastAPI raises.

    If a route needs the operator's key, the key is checked before the body is read. Without this
    class, FastAPI would read the body first, and check the route's dependencies afterwards.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
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
    """The ScopeState of the app that received a request."""
    state = request.app.state.scope
    assert isinstance(state, ScopeState)
    return state


def engine_of(request: Request) -> Engine:
    """The app's engine. Raises RefusalError if the app has no engine with taps."""
    engine = state_of(request).engine()
    if engine is None:
        raise RefusalError(404, "this server has no engine with taps.")
    return engine


async def asked(call: Awaitable[T]) -> T:
    """The result of a call of an engine's method. A CapacityError becomes a refusal with status
    429. Any other ScopeError becomes a refusal with status 400."""
    try:
        return await call
    except CapacityError as error:
        raise RefusalError(429, str(error)) from None
    except ScopeError as error:
        raise RefusalError(400, str(error)) from None


@asynccontextmanager
async def in_turn(request: Request, clearing: bool = False) -> AsyncIterator[Engine]:
    """Wait until no other change by an operator is running, then yield the engine. Other changes by
    operators wait until the `async with` block ends. Raises RefusalError if the app has no engine
    with taps, or if another change does not end in time.

    Args:
        clearing: True if the change ends edits. A change that ends edits also works when the disk
            is full.
    """
    engine = engine_of(request)
    try:
        async with state_of(request).changes.one(clearing):
            yield engine
    except NoTurnError as error:
        raise RefusalError(503, str(error)) from None


AdminKey = Annotated[
    str | None, Header(alias=ADMIN_KEY, description="The server's VLLM_SCOPE_ADMIN_KEY.")
]
AdminKeyOrBearer = Annotated[
    str | None,
    Header(
        alias=ADMIN_KEY,
        description="The server's VLLM_SCOPE_ADMIN_KEY. The key can also be the bearer token.",
    ),
]


def admin(request: Request, key: AdminKey = None) -> None:
    """Raises RefusalError for a request without the operator's key. Routes that need the key have
    this function as a dependency."""
    if key is None:
        raise RefusalError(
            401, "this route needs the operator's key in the header X-Scope-Admin-Key."
        )
    if not state_of(request).settings.is_operators(key):
        raise RefusalError(403, "X-Scope-Admin-Key is not this server's operator's key.")


def admin_or_bearer(request: Request, key: AdminKeyOrBearer = None) -> None:
    """Like `admin`, but the operator's key can also be the request's bearer token. On a server with
    API keys, vLLM first refuses a bearer token that is not an API key."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    operators = scheme.lower() == "bearer" and state_of(request).settings.is_operators(bearer)
    if key is not None or not operators:
        admin(request, key)


#: The OpenAPI description of the answer of a route that sends a file.
A_FILE: dict[int | str, dict[str, object]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "A safetensors file."}
}


def takes(media: str, schema: Mapping[str, object], description: str = "") -> dict[str, object]:
    """The OpenAPI description of a request's body, for a route that parses the body itself."""
    told = {"description": description} if description else {}
    return {"requestBody": {"required": True, **told, "content": {media: {"schema": schema}}}}


def json_answer(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def errors(*statuses: int) -> dict[int | str, dict[str, object]]:
    """The OpenAPI description of a route's refusals: one Refusal for each of the given statuses."""
    return {status: {"model": Refusal} for status in statuses}
