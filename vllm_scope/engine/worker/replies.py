"""The types of a worker's answers to the remote calls `scope_describe` and `scope_connect`.

Owns:  Described, Connected; and Module, for the steering modules that EngineCore adds to answers.
From:  worker, which makes the answers.   To: core.entry, frontend.connection.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from vllm_scope.transport.senders.base import Road


class Module(TypedDict):
    """A steering module. `streams` has [site, layer] or [site, layer, tier] for each vector."""

    digest: str
    streams: list[Any]


class Described(TypedDict):
    """The answer to `scope_describe`.

    Attributes:
        reason: why the model cannot be tapped; None if it can be tapped.
        runner: "V1" or "V2".
        stage, num_stages: the number of this pipeline stage, and the number of stages.
        drains: True if the worker delivers rows.
        sites: fields of request.sites.Sites, for Sites.from_body.
        taps_here: boundaries with a tap on this worker.
        limits: fields of worker.sizes.Limits.
        sinks: sinks that requests can name -> the kinds of actions that can name each sink.
        lens: why the model's lens cannot be applied on this worker; None if it can be applied.
        lenses: name of a configured lens -> the boundaries of this worker for which the lens has a
            map. Empty on a worker that holds no lens.
        modules: steering modules, by name.
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
        road: the transport of the worker's rows; None without transport.
        needs_tcp: True if the front-end must call again with a TCP address.
    """

    road: Road | None
    needs_tcp: bool
