"""The steering fork's HTTP interface: keys in bodies, results in answers, and `/v1/steering`.

Owns:  HTTP (the registration of this face with the server), the routers, and the types of the
       routes' bodies and answers.
Runs:  in each API server process, behind vLLM's authentication.
From:  tiers (server-wide edits), vllm_scope.vectors.hooks (steering modules).

A response has the `capture_results` of its first choice. If there are several choices (n > 1, or
several prompts), each choice also has its own `capture_results`.

Promise: these routes and the routes below /v1/scope set and show the same edits and steering
modules. A request with a wrong body changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from vllm_scope.compat import KEYS
from vllm_scope.compat.bounds import Room
from vllm_scope.compat.steering_http.tiers import Wanted, merged, status
from vllm_scope.compat.steering_http.vectors import bounded
from vllm_scope.errors import shown
from vllm_scope.request.actions import MAX_NAME
from vllm_scope.request.sites import ALIASES, Place, Sites
from vllm_scope.server.access import RefusalError, Route, asked, engine_of, errors, in_turn
from vllm_scope.server.faces import FirstReply, HttpFace
from vllm_scope.vectors import to_bytes
from vllm_scope.vectors.hooks import MODULE_TIERS, parse_module

if TYPE_CHECKING:
    from vllm import CompletionOutput

_VECTORS = (
    "For each hook, an object that maps layers to a list of numbers or to {vector, scale}. An "
    "object with base64 {dtype, shape, layer_indices, data, scales} is also possible. "
)
_CLAMPS = (
    "For each hook, an object that maps layers to a list of {vector, min, max, strength} or "
    "{vector, value}. An object with base64 {dtype, shape, layer_indices, data, bounds, strengths} "
    "is also possible. "
)
Hooks = dict[str, object] | None


class _Tiers(BaseModel):
    model_config = ConfigDict(extra="forbid")

    vectors: Hooks = Field(default=None, description=_VECTORS + "For every token.")
    prefill_vectors: Hooks = Field(default=None, description="Likewise, for the prompt's tokens.")
    decode_vectors: Hooks = Field(default=None, description="Likewise, for generated tokens.")
    clamps: Hooks = Field(default=None, description=_CLAMPS + "For every token.")
    prefill_clamps: Hooks = Field(default=None, description="Likewise, for the prompt's tokens.")
    decode_clamps: Hooks = Field(default=None, description="Likewise, for generated tokens.")

    def tiers(self) -> dict[str, object]:
        """The tiers in the body, without a copy. (`model_dump` would copy the tiers.)"""
        values = {name: getattr(self, name) for name in _Tiers.model_fields}
        return {name: value for name, value in values.items() if value is not None}


class SetSteering(_Tiers):
    """Vectors and clamps for every request that the engine receives from now on."""

    replace: bool = Field(
        default=False,
        description="Whether all server-wide edits end first. If False, only hooks and layers that "
        "the body names in a tier get new vectors or clamps.",
    )
    target: str | None = Field(default=None, description="main, or left out.")


class ClearSteering(BaseModel):
    """The body of `/v1/steering/clear`."""

    model_config = ConfigDict(extra="forbid")

    target: str | None = Field(default=None, description="main, or left out.")


class SteeringSet(BaseModel):
    """The hooks and layers that `/v1/steering/set` has changed."""

    status: str = "ok"
    hook_points: list[str] = Field(description="Hooks that the body named.")
    layers_updated: list[int] = Field(description="Layers that the body named.")


class SteeringStatus(BaseModel):
    """The steering of every request."""

    active_layers: dict[str, dict[str, dict[str, int | float]]] = Field(
        description="Numbers for each layer and hook. norm, prefill_norm and decode_norm are the "
        "lengths of the sums of the vectors. clamps, prefill_clamps and decode_clamps count clamps."
    )
    other_edits: int = Field(
        description="Number of server-wide edits that belong to no tier. GET /v1/scope/edits shows "
        "all edits."
    )


class Cleared(BaseModel):
    """The answer of `/v1/steering/clear`, after which no server-wide edits are left."""

    status: str = "ok"


class HookPoints(BaseModel):
    """The hooks at which requests can steer a layer."""

    hook_points: list[str]


class SteerableLayers(BaseModel):
    """The layers and hooks that the engine taps."""

    layers: dict[str, HookPoints]


class RegisterModule(_Tiers):
    """A steering module, with a name and with vectors of up to three tiers."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    kind: str = Field(default="additive", description="additive.")
    sae_manifest: object = Field(default=None, description="Refused.")
    clamps: Hooks = Field(default=None, description="Refused. A module has only vectors.")
    prefill_clamps: Hooks = Field(default=None, description="Refused, too.")
    decode_clamps: Hooks = Field(default=None, description="Refused, too.")


class UnregisterModule(BaseModel):
    """The name of a steering module that the engine forgets."""

    model_config = ConfigDict(extra="forbid")

    name: str


class Modules(BaseModel):
    """The names of steering modules that requests can use."""

    modules: list[str]
    count: int


class ModuleChanged(BaseModel):
    """The steering module that was registered or forgotten, and all present steering modules."""

    status: str = "ok"
    name: str
    modules: list[str] = Field(description="The names of all modules.")


reading = APIRouter(prefix="/v1/steering", tags=["steering"], route_class=Route)
changing = APIRouter(prefix="/v1/steering", tags=["steering operator"], route_class=Route)
Target = Annotated[str | None, Query(description="main, or left out.")]


def _check_target(target: str | None) -> None:
    if target not in (None, "main"):
        raise RefusalError(
            400, f"target is {shown(target)}; this server steers 'main' alone: drafts of "
            "speculative decoding are not tapped.",
        )  # fmt: skip


async def _names(request: Request) -> list[str]:
    return sorted(await asked(engine_of(request).modules()))


async def _sites(request: Request) -> Sites:
    told = (await asked(engine_of(request).describe()))["sites"]
    return Sites.from_body(told, told["boundaries"])


@reading.get("", summary="The steering of every request", responses=errors(400))
async def get_steering(request: Request, target: Target = None) -> SteeringStatus:
    """Lengths of vectors and numbers of clamps. Edits from other routes are included."""
    _check_target(target)
    text = await asked(engine_of(request).edits())
    return SteeringStatus.model_validate(await run_in_threadpool(status, text))


@reading.get("/layers", summary="What can be steered", responses=errors(400))
async def get_layers(request: Request, target: Target = None) -> SteerableLayers:
    """For each layer, the hooks (the steering fork's names of sites) that the engine taps. They
    stay the same while the engine runs."""
    _check_target(target)
    sites = await _sites(request)
    found: dict[str, HookPoints] = {}
    for layer in range(sites.num_layers):
        hooks = [h for h, s in ALIASES.items() if Place(s, layer).boundary in sites.readable]
        if hooks:
            found[str(layer)] = HookPoints(hook_points=sorted(hooks))
    return SteerableLayers(layers=found)


@reading.get("/modules", summary="The names of steering modules")
async def get_modules(request: Request) -> Modules:
    """Only the names. GET /v1/scope/modules also shows the digest and streams of each module."""
    names = await _names(request)
    return Modules(modules=names, count=len(names))


@changing.post("/set", summary="Steer every request")
async def set_steering(request: Request, body: SetSteering) -> SteeringSet:
    """At each token, the vectors of these tiers and of the request's own tiers are added together.
    Running requests keep their steering."""
    _check_target(body.target)
    engine = engine_of(request)
    sites = await _sites(request)
    wanted = await asked(run_in_threadpool(Wanted.parse, body.tiers(), sites))
    async with in_turn(request):
        text = await asked(engine.edits())
        text = await asked(run_in_threadpool(merged, text, wanted, body.replace))
        await asked(engine.set_edits(text))
    return SteeringSet(hook_points=wanted.hooks, layers_updated=wanted.layers)


@changing.post("/clear", summary="End the steering of every request")
async def clear_steering(request: Request, body: ClearSteering | None = None) -> Cleared:
    """Ends all server-wide edits, also edits that other routes have set. Running requests keep
    these edits."""
    _check_target(body.target if body is not None else None)
    async with in_turn(request, clearing=True):
        await asked(engine_of(request).set_edits(None))
    return Cleared()


@changing.post("/modules/register", summary="Register a steering module")
async def register_module(request: Request, body: RegisterModule) -> ModuleChanged:
    """Later requests that name the steering module get these vectors. Running requests keep the old
    vectors."""
    if body.kind != "additive" or body.sae_manifest is not None:
        raise RefusalError(
            400, f"kind is {shown(body.kind)}; it must be 'additive', without sae_manifest. A "
            "request cannot name a path, so the operator names sparse autoencoders when the engine "
            "starts: additional_config={'scope': {'saes': {NAME: PATH}}}.",
        )  # fmt: skip
    sites = await _sites(request)
    data = await asked(run_in_threadpool(_module, body.tiers(), sites))
    async with in_turn(request):
        await asked(engine_of(request).register(body.name, data))
    return ModuleChanged(name=body.name, modules=await _names(request))


def _module(tiers: dict[str, object], sites: Sites) -> bytes:
    """The bytes of a module. Raises SpecError if a tier is malformed or does not fit this model."""
    room = Room()
    fields = {
        name: bounded(value, sites, room, f"the body[{name!r}]")
        if name in MODULE_TIERS else value
        for name, value in tiers.items()
    }  # fmt: skip
    return to_bytes(parse_module(fields, "the body"))


@changing.post("/modules/unregister", summary="Forget a steering module", responses=errors(404))
async def unregister_module(request: Request, body: UnregisterModule) -> ModuleChanged:
    """Later requests cannot use the steering module. Running requests keep its vectors."""
    async with in_turn(request):
        known = await asked(engine_of(request).unregister(body.name))
    names = await _names(request)
    if not known:
        raise RefusalError(
            404, f"no steering module is called {shown(body.name)}; there are "
            f"{', '.join(names) or 'none'}.",
        )  # fmt: skip
    return ModuleChanged(name=body.name, modules=names)


class CaptureReply(FirstReply):
    """The field `capture_results`, which maps each consumer to {status, error, payload}."""

    name = "capture_results"

    def value(self, completion: CompletionOutput) -> dict[str, object] | None:
        found = getattr(completion, "capture_results", None)
        return None if found is None else {name: one.to_json() for name, one in found.items()}


_KEYS = frozenset(KEYS["steering_http"])
HTTP = HttpFace(
    "steering_http", _KEYS, _KEYS, lambda values, keep: CaptureReply(), (reading,), (changing,),
    bearer=True,
)  # fmt: skip
