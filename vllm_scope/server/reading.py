"""Every client's GET routes of `/v1/scope`: sites and limits, results, modules and edits.

Owns:  the router of these routes, which need no operator's key.
Runs:  in each API server process.
To:    routes, which adds the router to the app.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from vllm_scope import __version__
from vllm_scope.request.sites import MODEL_SITES, SITES, Place
from vllm_scope.server import edits, schemas
from vllm_scope.server.access import (
    A_FILE,
    RefusalError,
    Route,
    asked,
    engine_of,
    json_answer,
    state_of,
)
from vllm_scope.server.settings import MAX_OPERATOR_BYTES

router = APIRouter(prefix="/v1/scope", tags=["scope"], route_class=Route)


@router.get("", summary="The sites, layers and limits of this server")
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


@router.get(
    "/results/{result_id}",
    summary="The tensors of a choice",
    response_class=StreamingResponse,
    responses=A_FILE,
)
async def get_result(
    request: Request,
    result_id: Annotated[str, Path(description="`result.id` of a choice's `scope`.")],
    delete: Annotated[bool, Query(description="Delete the file after this answer.")] = False,
) -> StreamingResponse:
    """A safetensors file with the rows as the tensor `{site}.{layer}`, the scores of a probe as
    `scores.{name}`, and the positions of both with the ending `.positions`. docs/http.md lists the
    other tensors. If rows were read before edits, `.before` follows the layer in the names.

    The request must have the same Authorization header as the request that made the file.
    """
    state = state_of(request)
    owner = state.owner_of(request)
    file = await run_in_threadpool(state.store.open, result_id, owner)
    if file is None:
        raise RefusalError(
            404, "your key has no result with this id: the result was deleted, or the id is wrong."
        )
    return state.store.sent(file, result_id, owner, delete)


@router.get("/modules", summary="The steering modules")
async def get_modules(request: Request) -> schemas.ModuleList:
    """The name, the digest and the streams of every module that a spec can name."""
    found = await asked(engine_of(request).modules())
    return schemas.ModuleList(
        modules=[schemas.ModuleInfo.model_validate({"name": n, **found[n]}) for n in sorted(found)]
    )


@router.get("/edits", response_model=schemas.EditsInfo, summary="The edits of every request")
async def get_edits(request: Request) -> Response:
    """The server-wide edits that apply to new requests, with the vectors that the operator sent. If
    all edits together take more than 8 MiB, the answer has only the shapes of long vectors."""
    async with state_of(request).showing:
        text = await asked(engine_of(request).edits())
        return json_answer(await run_in_threadpool(edits.shown, text))
