"""The types of a worker's answers to the remote calls `scope_describe` and `scope_connect`.

Owns:  the classes `Described`, `Connected` and `Module` (EngineCore adds Modules to answers).
From:  worker (makes the answers).   To: core.entry, frontend.connection.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from vllm_scope.transport.senders.base import Road


class Module(TypedDict):
    """A steering module. For each vector, `streams` has a list [site, layer]. If the vector applies
    only to some tokens, the list is [site, layer, tier] (vectors.module.TIERS)."""

    digest: str
    streams: list[Any]


class Described(TypedDict):
    """The answer to `scope_describe`.

    Attributes:
        reason: why the model cannot be tapped; None if it can be tapped.
        runner: "V1" or "V2".
        stage, num_stages: the number of this pipeline stage, and the number of stages.
        drains: True if the worker delivers rows.
        sites: the fields of request.sites.Sites, from which Sites.from_body makes the object.
        taps_here: boundaries with a tap on this worker.
        limits: the fields of worker.sizes.Limits, by name.
        sinks: maps the name of each sink to the kinds of actions whose results the sink takes.
        lens: why the model's lens cannot be applied on this worker; None if it can be applied.
        lenses: maps the name of each configured lens to the boundaries of this worker for which the
            lens has a map. Empty on a worker that holds no lens.
        modules: the engine's steering modules, by name.
    """

    reason: str | None
    runner: str
    stage: int
    num_stages: int
    drains: bool
    sites: dict[str, Any]
    taps_here: list[int]
    arena_mib: float
    limits: object
    sinks: dict[str, list[str]]
    lens: str | None
    lenses: dict[str, list[int]]
    modules: NotRequired[dict[str, Module]]


class Connected(Described):
    """The answer to `scope_connect`.

    Attributes:
        reason: why the model cannot be tapped, or why the worker cannot connect to the front-end.
        road: the transport of the worker's rows; None without rows or without a connection.
        needs_tcp: True if the front-end must call again with a TCP address.
    """

    road: Road | None
    needs_tcp: bool
