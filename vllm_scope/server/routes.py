"""`/v1/scope`: what the model can be asked, results to fetch, and operators' changes.

Owns:  the routes, and `attach`, which adds them, those of sweeps and pages and compat's to an app.
Runs:  in each API server process, behind vLLM's authentication: if vLLM has an API key, every
       route needs it.

Promise: the routes that change anything exist only if VLLM_SCOPE_ADMIN_KEY is set. They need
it in the header `X-Scope-Admin-Key`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor

from vllm_scope import __version__
from vllm_scope.request.actions import MAX_NAME
from vllm_scope.request.media import BINARY
from vllm_scope.request.sites import MODEL_SITES, SITES, Place
from vllm_scope.server import edits, faces, pages, schemas, sweeps
from vllm_scope.server.access import (
    Engine,
    RefusalError,
    Route,
    ScopeState,
    admin,
    admin_or_bearer,
    asked,
    engine_of,
    errors,
    in_turn,
    refused,
    state_of,
)
from vllm_scope.server.changes import Changes
from vllm_scope.server.limits import Door
from vllm_scope.server.settings import MAX_OPERATOR_BYTES, ServerSettings
from vllm_scope.server.store import Store
from vllm_scope.transport.folders import RUN
from vllm_scope.vectors import from_bytes

_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")


def attach(app: FastAPI, engine: Callable[[], Engine | None]) -> None:
    """Add the routes and the middleware to an app.

    Args:
        engine: returns the app's engine; None if there is none with taps (yet).

    Raises:
        ConfigError: a setting in the environment is wrong; the server does not start.
    """
    settings = ServerSettings.from_environment()
    run = os.environ.get(RUN) or secrets.token_hex(16)
    store = Store(settings.results_dir, run, settings.results_bytes, settings.results_ttl_s)
    app.state.scope = ScopeState(settings, store, engine, Changes(store.folder))
    limits = dict.fromkeys(_COMPLETIONS, settings.body_bytes)
    reading, changing = [_reading, sweeps.router], [(_changing, admin), (pages.data, admin)]
    for face in faces.registered():
        reading += face.reading
        changing += [(r, admin_or_bearer if face.bearer else admin) for r in face.changing]
    routers = [*reading, *(router for router, _ in changing)]
    prefixes = [router.prefix for router in routers]
    limits |= dict.fromkeys(prefixes, MAX_OPERATOR_BYTES)
    app.add_middleware(Door, limits=limits, settings=settings, timed=prefixes)
    app.add_exception_handler(RefusalError, refused)
    app.openapi = partial(_described, app.openapi)  # type: ignore[method-assign]
    for router in reading:
        app.include_router(router, responses=errors(400, 404))
    if settings.admin_key is None:
        return
    app.include_router(pages.page)
    for router, guard in changing:
        app.include_router(
            router, dependencies=[Depends(guard)], responses=errors(400, 401, 403, 413, 503)
        )


def _described(original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The app's OpenAPI description, with the media type of binary answers."""
    found = original()
    for path in _COMPLETIONS:
        answers = found["paths"].get(path, {}).get("post", {}).get("responses", {})
        if "200" in answers:
            binary = {"schema": {"type": "string", "format": "binary"}}
            answers["200"].setdefault("content", {}).setdefault(BINARY, binary)
    return found


_reading = APIRouter(prefix="/v1/scope", tags=["scope"], route_class=Route)
_changing = APIRouter(prefix="/v1/scope", tags=["scope operator"], route_class=Route)


class _AnyName(Convertor[str]):
    """Text, also with slashes and newlines, which Starlette's `path` does not match."""

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("scope_name", _AnyName())
Name = Annotated[str, Path(min_length=1, max_length=MAX_NAME, description="Of the module or sums.")]


@_reading.get("", summary="What this server's model can be asked")
async def get_info(request: Request) -> schemas.ServerInfo:
    """Sites and layers with a tap, and the limits of requests, answers and bodies."""
    engine, state = engine_of(request), state_of(request)
    told = await asked(engine.describe())
    num_requests, num_pending = await asked(engine.load())
    await run_in_threadpool(state.store.forget_deleted)
    settings, sites = state.settings, told["sites"]
    return schemas.ServerInfo(
        version=__version__,
        runner=told["runner"],
        reason=told["reason"],
        num_layers=sites["num_layers"],
        hidden_size=sites["hidden_size"],
        dtype=sites["dtype"],
        sites=_sites(sites["num_layers"], set(sites["boundaries"]) - {sites.get("guard")}),
        attention=sites["kernels"],
        limits=told["limits"],
        http=schemas.HttpLimits(
            inline_bytes=settings.inline_bytes,
            binary_bytes=settings.binary_bytes,
            results_bytes=settings.results_bytes,
            results_ttl_s=settings.results_ttl_s,
            body_bytes=settings.body_bytes,
            module_bytes=MAX_OPERATOR_BYTES,
            sweep_cells=settings.sweep_cells,
        ),
        load=schemas.Load(
            requests=num_requests,
            pending=num_pending,
            results=len(state.store),
            results_bytes=state.store.num_bytes,
        ),
        operator=settings.admin_key is not None,
    )


def _sites(num_layers: int, boundaries: set[int]) -> list[schemas.SiteInfo]:
    found = []
    for site in SITES:
        every = range(1 if site in MODEL_SITES else num_layers)
        layers = [k for k in every if Place(site, k).boundary in boundaries]
        if layers:
            found.append(schemas.SiteInfo(site=site, layers=layers))
    return found


@_reading.get(
    "/results/{result_id}",
    summary="The tensors of a choice",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "A safetensors file."}
    },
)
async def get_result(
    request: Request,
    result_id: Annotated[str, Path(description="`result.id` of a choice's `scope`.")],
    delete: Annotated[bool, Query(description="Delete it once it was read.")] = False,
) -> StreamingResponse:
    """A safetensors file: `{site}.{layer}` and `{site}.{layer}.positions` (with `.before`
    after the layer for rows that were read before edits), `scores.{name}` likewise.

    It needs the Authorization header of the request that made it.
    """
    state = state_of(request)
    owner = state.owner_of(request)
    file = await run_in_threadpool(state.store.open, result_id, owner)
    if file is None:
        raise RefusalError(404, "there is no such result, or not any more, or it is not yours.")
    return state.store.sent(file, result_id, owner, delete)


@_reading.get("/modules", summary="The steering modules")
async def get_modules(request: Request) -> schemas.ModuleList:
    """The name, the digest and the streams of every module that a spec can name."""
    found = await asked(engine_of(request).modules())
    return schemas.ModuleList(
        modules=[schemas.ModuleInfo.model_validate({"name": n, **found[n]}) for n in sorted(found)]
    )


@_reading.get("/edits", response_model=schemas.EditsInfo, summary="The edits of every request")
async def get_edits(request: Request) -> Response:
    """What PUT has set. Vectors come back as they were sent, or, if all edits take more than
    8 MiB, as dtype and shape alone."""
    async with state_of(request).showing:
        text = await asked(engine_of(request).edits())
        return _json(await run_in_threadpool(edits.shown, text))


@_changing.get("/monitors", summary="The operator's probes on every request")
async def get_monitors(request: Request) -> dict[str, dict[str, object]]:
    """Name to site, layers, tokens, activation, aggregate, threshold, action and after."""
    found = await asked(engine_of(request).monitors())
    return {name: dict(monitor) for name, monitor in found.items()}


@_changing.get("/moments/{name:scope_name}", summary="Which sums of a name there are")
async def get_moments(request: Request, name: Name) -> schemas.MomentsInfo:
    """Site, layer and label of each."""
    found = await asked(engine_of(request).moments(name))
    every = [schemas.SumsAt(site=site, layer=layer, label=label) for site, layer, label in found]
    return schemas.MomentsInfo(name=name, sums=every)


@_changing.get(
    "/sums/{name:scope_name}",
    summary="The sums at one place with one label",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "A safetensors file."}
    },
)
async def get_sums(
    request: Request, name: Name, site: str, layer: int, label: str = "all"
) -> Response:
    """A safetensors file of float64 tensors: `count`, `missing`, `x`, and where there are such sums
    `xx`, `xy`, `y` and `yy`."""
    async with state_of(request).showing:
        data = await asked(engine_of(request).moments_at(name, site, layer, label))
    return Response(data, media_type="application/octet-stream")


@_changing.delete(
    "/moments/{name:scope_name}",
    status_code=204,
    summary="Forget the sums of a name",
    responses=errors(404),
)
async def delete_moments(request: Request, name: Name) -> Response:
    """Their memory is free again. Running requests add nothing more to them."""
    if not await asked(engine_of(request).drop_moments(name)):
        raise RefusalError(404, f"there are no sums called {name!r}.")
    return Response(status_code=204)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


@_changing.put(
    "/modules/{name:scope_name}",
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
async def put_module(request: Request, name: Name) -> schemas.ModuleInfo:
    """From now on the name means these vectors. Running requests keep the earlier ones."""
    data = await request.body()
    module = await asked(run_in_threadpool(from_bytes, data))
    async with in_turn(request) as engine:
        digest = await asked(engine.register(name, data))
    streams = [place for place, _ in module.placed()]
    return schemas.ModuleInfo(name=name, digest=digest, streams=streams)


@_changing.delete(
    "/modules/{name:scope_name}",
    status_code=204,
    summary="Forget a steering module",
    responses=errors(404),
)
async def delete_module(request: Request, name: Name) -> Response:
    """Running requests keep it."""
    async with in_turn(request) as engine:
        known = await asked(engine.unregister(name))
    if not known:
        raise RefusalError(404, f"no steering module is called {name!r}.")
    return Response(status_code=204)


@_changing.put(
    "/edits",
    response_model=schemas.EditsInfo,
    summary="Edit every request",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schemas.Edits.model_json_schema()}},
        }
    },
)
async def put_edits(request: Request) -> Response:
    """Replaces all server-wide edits. Running requests keep the earlier ones. The answer is what
    GET shows."""
    text = await asked(run_in_threadpool(edits.checked, await request.body()))
    async with in_turn(request) as engine:
        digest = await asked(engine.set_edits(text))
    return _json(await run_in_threadpool(edits.shown, text, digest))


@_changing.put(
    "/monitors",
    summary="Probe every request",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schemas.Monitors.model_json_schema()}},
        }
    },
)
async def put_monitors(request: Request) -> dict[str, dict[str, object]]:
    """Replaces all monitors, for requests that enter from now on; `{"monitors": {}}` ends them. The
    answer is what GET shows."""
    found = await asked(run_in_threadpool(edits.monitors, await request.body()))
    async with in_turn(request) as engine:
        await asked(engine.set_monitors(found))
        return {name: dict(body) for name, body in (await asked(engine.monitors())).items()}


@_changing.delete("/edits", status_code=204, summary="End all server-wide edits")
async def delete_edits(request: Request) -> Response:
    """Running requests keep the edits that they entered with."""
    async with in_turn(request, clearing=True) as engine:
        await asked(engine.set_edits(None))
    return Response(status_code=204)
