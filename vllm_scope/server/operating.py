"""Operators' routes of `/v1/scope`: modules, server-wide edits, monitors, sums of rows.

Owns:  the router of these routes, which all need the operator's key.
Runs:  in each API server process, if VLLM_SCOPE_ADMIN_KEY is set.
To:    routes, which adds the router to the app.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor

from vllm_scope.request.actions import MAX_NAME
from vllm_scope.server import edits, schemas
from vllm_scope.server.access import (
    A_FILE,
    RefusalError,
    Route,
    asked,
    engine_of,
    errors,
    in_turn,
    json_answer,
    state_of,
    takes,
)
from vllm_scope.vectors import from_bytes

router = APIRouter(prefix="/v1/scope", tags=["scope operator"], route_class=Route)


class _AnyName(Convertor[str]):
    """The name in a path, which can contain slashes and newlines. Starlette's convertor `path` does
    not match newlines."""

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("scope_name", _AnyName())
Name = Annotated[
    str, Path(min_length=1, max_length=MAX_NAME, description="The name of the module or sums.")
]


@router.get("/monitors", summary="The operator's probes on every request")
async def get_monitors(request: Request) -> dict[str, dict[str, object]]:
    """The fields `site`, `layers`, `tokens`, `activation`, `aggregate`, `threshold`, `action` and
    `after` of each monitor, by the monitor's name."""
    found = await asked(engine_of(request).monitors())
    return {name: dict(monitor) for name, monitor in found.items()}


@router.get("/moments/{name:scope_name}", summary="The sums under one name")
async def get_moments(request: Request, name: Name) -> schemas.MomentsInfo:
    """The site, the layer and the label of each of the sums."""
    found = await asked(engine_of(request).moments(name))
    every = [schemas.SumsAt(site=site, layer=layer, label=label) for site, layer, label in found]
    return schemas.MomentsInfo(name=name, sums=every)


@router.get(
    "/sums/{name:scope_name}",
    summary="The sums at one place with one label",
    response_class=Response,
    responses=A_FILE,
)
async def get_sums(
    request: Request, name: Name, site: str, layer: int, label: str = "all"
) -> Response:
    """A safetensors file of float64 tensors: `count`, `missing`, `x`, `y` and `yy`. The file also
    has `xx` and `xy`, if the requests have asked for these sums."""
    async with state_of(request).showing:
        data = await asked(engine_of(request).moments_at(name, site, layer, label))
    return Response(data, media_type="application/octet-stream")


@router.delete(
    "/moments/{name:scope_name}",
    status_code=204,
    summary="Forget the sums of a name",
    responses=errors(404),
)
async def delete_moments(request: Request, name: Name) -> Response:
    """Free the memory of the sums. Running requests add nothing more to the sums."""
    if not await asked(engine_of(request).drop_moments(name)):
        raise RefusalError(404, f"there are no sums called {name!r}.")
    return Response(status_code=204)


@router.put(
    "/modules/{name:scope_name}",
    summary="Register a steering module",
    openapi_extra=takes(
        "application/octet-stream",
        {"type": "string", "format": "binary"},
        "The content of a safetensors file. The tensors' names are `direction.{layer}` or "
        "`{site}.{layer}`.",
    ),
)
async def put_module(request: Request, name: Name) -> schemas.ModuleInfo:
    """From now on, the module's name means the vectors in the body. Running requests keep the
    vectors that the name meant before."""
    data = await request.body()
    module = await asked(run_in_threadpool(from_bytes, data))
    async with in_turn(request) as engine:
        digest = await asked(engine.register(name, data))
    streams = [place for place, _ in module.placed()]
    return schemas.ModuleInfo(name=name, digest=digest, streams=streams)


@router.delete(
    "/modules/{name:scope_name}",
    status_code=204,
    summary="Forget a steering module",
    responses=errors(404),
)
async def delete_module(request: Request, name: Name) -> Response:
    """Delete a steering module. Running requests can still use the module."""
    async with in_turn(request) as engine:
        known = await asked(engine.unregister(name))
    if not known:
        raise RefusalError(404, f"no steering module is called {name!r}.")
    return Response(status_code=204)


@router.put(
    "/edits",
    response_model=schemas.EditsInfo,
    summary="Edit every request",
    openapi_extra=takes("application/json", schemas.Edits.model_json_schema()),
)
async def put_edits(request: Request) -> Response:
    """Replaces all server-wide edits. Running requests keep the earlier edits. The answer is the
    same as the answer of GET, with a digest of the edits."""
    text = await asked(run_in_threadpool(edits.checked, await request.body()))
    async with in_turn(request) as engine:
        digest = await asked(engine.set_edits(text))
    return json_answer(await run_in_threadpool(edits.shown, text, digest))


@router.put(
    "/monitors",
    summary="Probe every request",
    openapi_extra=takes("application/json", schemas.Monitors.model_json_schema()),
)
async def put_monitors(request: Request) -> dict[str, dict[str, object]]:
    """Replaces all monitors, for requests that enter from now on. `{"monitors": {}}` ends all
    monitors. The answer is the same as the answer of GET."""
    found = await asked(run_in_threadpool(edits.monitors, await request.body()))
    async with in_turn(request) as engine:
        await asked(engine.set_monitors(found))
        return {name: dict(body) for name, body in (await asked(engine.monitors())).items()}


@router.delete("/edits", status_code=204, summary="End all server-wide edits")
async def delete_edits(request: Request) -> Response:
    """Running requests keep the edits that were in force when the requests entered."""
    async with in_turn(request, clearing=True) as engine:
        await asked(engine.set_edits(None))
    return Response(status_code=204)
