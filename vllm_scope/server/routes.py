"""`/v1/scope`: what the model can be asked, results to fetch, and operators' changes.

Owns:  the routes, who may use them, and what their errors look like.
Runs:  in each API server process, inside of vLLM's authentication: reading needs its
       API key, where it has one.

Promise: the routes that change anything do not exist without VLLM_SCOPE_ADMIN_KEY; with
it they need the header `X-Scope-Admin-Key`, compared in constant time.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Protocol

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor

from vllm_scope import __version__
from vllm_scope.actions import MAX_NAME
from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.server.limits import Door
from vllm_scope.server.schemas import (
    Edits,
    EditsInfo,
    HttpLimits,
    Load,
    ModuleInfo,
    ModuleList,
    Refusal,
    ServerInfo,
    SiteInfo,
)
from vllm_scope.server.settings import MAX_OPERATOR_BYTES, RUN, Settings
from vllm_scope.server.store import Store, owner_of
from vllm_scope.vectors import from_bytes

_CHUNK_BYTES = 1 << 20
_STATUS = {400: "SpecError", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound"}


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
    """What the server keeps for its routes; `app.state.scope`."""

    settings: Settings
    store: Store
    engine: Callable[[], Engine | None]

    def owner_of(self, request: Request) -> str:
        return owner_of(request.headers.get("authorization"))


class _RefusalError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def attach(app: FastAPI, engine: Callable[[], Engine | None]) -> None:
    """Add the routes and the door to an app.

    Args:
        engine: the app's, once it has one; None where it has none with taps.

    Raises:
        ConfigError: a setting in the environment is wrong; the server does not start.
    """
    settings = Settings.from_environment()
    run = os.environ.get(RUN) or secrets.token_hex(16)
    store = Store(settings.results_dir, run, settings.results_bytes, settings.results_ttl_s)
    app.state.scope = ScopeState(settings, store, engine)
    limits = {
        "/v1/scope": MAX_OPERATOR_BYTES,
        "/v1/completions": settings.body_bytes,
        "/v1/chat/completions": settings.body_bytes,
    }
    app.add_middleware(Door, limits=limits)
    app.add_exception_handler(_RefusalError, _refused)
    app.include_router(_reading)
    if settings.admin_key is not None:
        app.include_router(_changing)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, _RefusalError)
    name = _STATUS.get(error.status, "Error")
    body = {"message": str(error), "type": name, "param": None, "code": error.status}
    return JSONResponse({"error": body}, error.status)


def _state(request: Request) -> ScopeState:
    state = request.app.state.scope
    assert isinstance(state, ScopeState)
    return state


def _engine(request: Request) -> Engine:
    engine = _state(request).engine()
    if engine is None:
        raise _RefusalError(404, "this server has no engine with taps.")
    return engine


async def _asked(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except ScopeError as error:
        raise _RefusalError(400, str(error)) from None


def _admin(
    request: Request,
    key: Annotated[
        str | None,
        Header(alias="X-Scope-Admin-Key", description="The server's VLLM_SCOPE_ADMIN_KEY."),
    ] = None,
) -> None:
    if key is None:
        raise _RefusalError(401, "this needs the operator's key in the header X-Scope-Admin-Key.")
    # Of digests, so that the time tells nothing of the key's length either.
    expected = hashlib.sha256((_state(request).settings.admin_key or "").encode()).digest()
    given = hashlib.sha256(key.encode("latin-1", "replace")).digest()
    if not secrets.compare_digest(given, expected):
        raise _RefusalError(403, "X-Scope-Admin-Key is not this server's operator's key.")


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Refusal} for status in statuses}


_reading = APIRouter(prefix="/v1/scope", tags=["scope"])
_changing = APIRouter(
    prefix="/v1/scope",
    tags=["scope operator"],
    dependencies=[Depends(_admin)],
    responses=_errors(400, 401, 403, 413),
)


class _AnyName(Convertor[str]):
    """Any text, slashes and line ends among it; Starlette's `path` ends at a line's end."""

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("scope_name", _AnyName())
Name = Annotated[str, Path(min_length=1, max_length=MAX_NAME, description="Of the module.")]


@_reading.get("", response_model=ServerInfo, summary="What this server's model can be asked")
async def get_info(request: Request) -> ServerInfo:
    """Sites and layers with a tap, and the limits of requests, answers and bodies."""
    told = await _asked(_engine(request).describe())
    num_requests, num_pending = await _asked(_engine(request).load())
    state, sites = _state(request), told["sites"]
    settings = state.settings
    return ServerInfo(
        version=__version__,
        runner=told["runner"],
        reason=told["reason"],
        num_layers=sites["num_layers"],
        hidden_size=sites["hidden_size"],
        dtype=sites["dtype"],
        sites=_sites(sites["num_layers"], set(sites["boundaries"])),
        limits=told["limits"],
        http=HttpLimits(
            inline_bytes=settings.inline_bytes,
            results_bytes=settings.results_bytes,
            results_ttl_s=settings.results_ttl_s,
            body_bytes=settings.body_bytes,
            module_bytes=MAX_OPERATOR_BYTES,
        ),
        load=Load(
            requests=num_requests,
            pending=num_pending,
            results=len(state.store),
            results_bytes=state.store.num_bytes,
        ),
        operator=settings.admin_key is not None,
    )


def _sites(num_layers: int, boundaries: set[int]) -> list[SiteInfo]:
    found = [SiteInfo(site="embed", layers=[0])] if 0 in boundaries else []
    for shift, site in enumerate(("resid_pre", "resid_mid", "resid_post")):
        layers = [k for k in range(num_layers) if 2 * k + shift in boundaries]
        if layers:
            found.append(SiteInfo(site=site, layers=layers))
    return found


@_reading.get(
    "/results/{result_id}",
    summary="The tensors of a choice",
    response_class=StreamingResponse,
    responses=_errors(404)
    | {200: {"content": {"application/octet-stream": {}}, "description": "A safetensors file."}},
)
async def get_result(
    request: Request,
    result_id: Annotated[str, Path(description="`result.id` of a choice's `scope`.")],
    delete: Annotated[bool, Query(description="End it once it was read.")] = False,
) -> StreamingResponse:
    """A safetensors file: `{site}.{layer}` and `{site}.{layer}.positions` (with `.before`
    after the layer where rows were read before edits), `scores.{name}` likewise.

    Only who sends the Authorization header of the request that made it can fetch it.
    """
    state = _state(request)
    owner = state.owner_of(request)
    file = await run_in_threadpool(state.store.open, result_id, owner)
    if file is None:
        raise _RefusalError(404, "there is no such result, or not any more, or it is not yours.")
    size = os.fstat(file.fileno()).st_size
    done = (lambda: state.store.delete(result_id, owner)) if delete else (lambda: None)
    return StreamingResponse(
        _pieces(file, done),
        media_type="application/octet-stream",
        headers={"Content-Length": str(size)},
    )


def _pieces(file: BinaryIO, done: Callable[[], None]) -> Iterator[bytes]:
    with file:
        while piece := file.read(_CHUNK_BYTES):
            yield piece
    done()


@_reading.get("/modules", response_model=ModuleList, summary="The steering modules")
async def get_modules(request: Request) -> ModuleList:
    """Name, content's digest and streams of every module that a spec can name."""
    found = await _asked(_engine(request).modules())
    return ModuleList(
        modules=[ModuleInfo(name=name, **body) for name, body in sorted(found.items())]
    )


@_reading.get("/edits", response_model=EditsInfo, summary="The edits of every request")
async def get_edits(request: Request) -> EditsInfo:
    """What was set by PUT; vectors that came as numbers come back as numbers."""
    text = await _asked(_engine(request).edits())
    return EditsInfo(edits=json.loads(text)["edits"] if text is not None else [])


@_changing.put(
    "/modules/{name:scope_name}",
    response_model=ModuleInfo,
    summary="Register a steering module",
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "The content of a safetensors file, its tensors named "
            "`direction.{layer}` or `{site}.{layer}`.",
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
)
async def put_module(request: Request, name: Name) -> ModuleInfo:
    """From now on the name means these vectors; requests that run keep what it meant."""
    data = await request.body()
    try:
        module = await run_in_threadpool(from_bytes, data)
    except SpecError as error:
        raise _RefusalError(400, str(error)) from None
    digest = await _asked(_engine(request).register(name, data))
    return ModuleInfo(name=name, digest=digest, streams=list(module))


@_changing.delete(
    "/modules/{name:scope_name}",
    status_code=204,
    summary="Forget a steering module",
    responses=_errors(404),
)
async def delete_module(request: Request, name: Name) -> Response:
    """Requests that run keep it."""
    engine = _engine(request)
    if not await _asked(engine.unregister(name)):
        raise _RefusalError(404, f"no steering module is called {name!r}.")
    return Response(status_code=204)


@_changing.put("/edits", response_model=EditsInfo, summary="Edit every request")
async def put_edits(request: Request, edits: Edits) -> EditsInfo:
    """Replaces the edits that held until now. Requests that run keep theirs."""
    text = json.dumps({"edits": edits.edits})
    digest = await _asked(_engine(request).set_edits(text))
    return EditsInfo(edits=edits.edits, digest=digest)


@_changing.delete("/edits", status_code=204, summary="Edit requests no longer")
async def delete_edits(request: Request) -> Response:
    """Requests that run keep the edits that they entered with."""
    await _asked(_engine(request).set_edits(None))
    return Response(status_code=204)
