"""Translates the conditional vectors of the steering fork to Adds with a Gate.

    steering=[{
        "when": {"kind": "probe", "probe": SOURCE, "threshold": 2.0, "sharpness": 1.0},
        "scope": "this_token",
        "apply": {"kind": "add", "steer": SOURCE, "strength": 1.0},
    }]

A SOURCE is {"kind": "inline", "packed": a tier of vectors}. The SOURCE of `steer` can also be
{"kind": "name", "name": a steering module}. At each generated token, the Adds add g * strength
times the vectors. g is sigmoid(sharpness * (row . probe - threshold)), where `row` is the token's
own row at the probe's hook and layer, before the edits of this hook. g is 1 if the kind of `when`
is "always".

Owns:  `gated`.
Runs:  in the front-end. For HTTP requests, the event loop of the API server runs this code.
From:  vectors, in the same folder as this file.   To: keys.

Promise: if an Add with a Gate cannot express a gate of the fork, `gated` refuses this gate. The
error states the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllm_scope.compat.bounds import MOST, Room, check_fields, few, few_fields, parsed
from vllm_scope.compat.steering_http.vectors import stacked, vectors_of
from vllm_scope.engine.frontend.translators import called
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import Add, Gate
from vllm_scope.request.actions.base import checked_name
from vllm_scope.request.sites import Sites
from vllm_scope.vectors.hooks import number_of

KEY = "steering"
#: Maps each kind to its needed and its optional fields. A refused kind is mapped to the reason.
_Kinds = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]] | str]

_WHENS: _Kinds = {"always": ((), ()), "probe": (("probe", "threshold"), ("sharpness",))}
_APPLIES: _Kinds = {
    "add": (("steer",), ("strength",)),
    "attenuate": "it would weaken all steering of the request, the operator's too; send smaller "
    "scales",
    "clamp": "the steering fork refuses this kind too; vllm_scope.Clamp takes a gate",
}
_STEERS: _Kinds = {"inline": (("packed",), ()), "name": (("name",), ())}
_PROBES: _Kinds = {
    "inline": (("packed",), ()),
    "name": "a name stands for a steering module, which is not a probe; send the probe's numbers "
    "as kind 'inline'",
}
#: Maps each value of `scope` to "", or to the reason why this value is refused.
_SCOPES = {
    "this_token": "",
    "rest_of_request": "",
    "next_step": "the scheduler decides when a step ends, and a step can have several tokens; "
    "use this_token",
    "rest_of_conversation": "requests share no state; send the gate with each request",
}


def gated(body: object, sites: Sites, room: Room) -> Iterator[tuple[Add, dict[str, str]]]:
    """Yield the Adds of a request's gates. With each Add comes a dict for error texts, which maps
    the Add's fields to the names that the caller used.

    Args:
        room: counts the vectors and numbers of the request.

    Raises:
        SpecError: a value has a wrong form, or an Add with a Gate cannot express a gate.
    """
    gates = parsed(body, KEY)
    if gates is None:
        return
    if not isinstance(gates, list | tuple):
        raise SpecError(f"{KEY} is {shown(gates)}; it must be a list of gates.")
    few(gates, MOST["edits"], "gates", KEY)
    for i, one in enumerate(gates):
        where = f"{KEY}[{i}]"
        fields = few_fields(one, 3, "fields", where)
        check_fields(fields, ("when", "scope", "apply"), (), where)
        when = _of_kind(fields["when"], f"{where}.when", _WHENS)
        apply = _of_kind(fields["apply"], f"{where}.apply", _APPLIES)
        _check_scope(fields["scope"], when["kind"], f"{where}.scope")
        gate = _gate(when, f"{where}.when", sites, room) if when["kind"] == "probe" else None
        yield from _adds(apply, where, gate, sites, room)


def _of_kind(value: object, where: str, kinds: _Kinds) -> Mapping[object, object]:
    """The fields of `value`. Raises SpecError if the `kind` is refused or has other fields."""
    fields = few_fields(value, 4, "fields", where)
    kind = fields.get("kind")
    found = kinds.get(kind) if isinstance(kind, str) else None
    if found is None:
        allowed = [name for name, of in kinds.items() if not isinstance(of, str)]
        raise SpecError(f"{where}.kind is {shown(kind)}; it must be {' or '.join(allowed)}.")
    if isinstance(found, str):
        raise SpecError(f"{where}.kind is {shown(kind)}: {found}.")
    needed, others = found
    check_fields(fields, ("kind", *needed), others, where)
    return fields


def _check_scope(scope: object, when: object, where: str) -> None:
    if not isinstance(scope, str) or scope not in _SCOPES:
        allowed = [name for name, refused in _SCOPES.items() if not refused]
        raise SpecError(f"{where} is {shown(scope)}; it must be {' or '.join(allowed)}.")
    refused = _SCOPES[scope]
    if scope == "rest_of_request" and when == "probe":
        refused = "a sigmoid cannot stay open; use this_token, or vllm_scope.Gate with a Latch"
    if refused:
        raise SpecError(f"{where} is {shown(scope)}: {refused}.")


def _gate(when: Mapping[object, object], where: str, sites: Sites, room: Room) -> Gate:
    source, path = _of_kind(when["probe"], f"{where}.probe", _PROBES), f"{where}.probe.packed"
    vectors = vectors_of(source["packed"], path, sites, room)
    if len(vectors) != 1:
        raise SpecError(f"{path} has {len(vectors)} vectors; a probe is one vector of one layer.")
    (((site, layer), vector),) = vectors.items()
    words = {f"Gate.{name}": f"{where}.{name}" for name in ("threshold", "sharpness")}
    with called(words | {"Gate.vector": path}):
        return Gate(
            vector, layer, site=site, kind="sigmoid",
            threshold=number_of(when["threshold"], f"{where}.threshold"),
            sharpness=number_of(when.get("sharpness", 1.0), f"{where}.sharpness"),
        )  # fmt: skip


def _adds(
    apply: Mapping[object, object], where: str, gate: Gate | None, sites: Sites, room: Room
) -> Iterator[tuple[Add, dict[str, str]]]:
    path, strength = f"{where}.apply.steer", f"{where}.apply.strength"
    scale = number_of(apply.get("strength", 1.0), strength)
    source = _of_kind(apply["steer"], path, _STEERS)
    words = {"": path, ".scale": strength, ".gate": f"{where}.when.probe"}
    with called({"Add.scale": strength}):
        if source["kind"] == "name":
            room.take("edits", 1, path)
            name = checked_name(source["name"], f"{path}.name")
            adds = [Add(name, scale=scale, tokens="generated", gate=gate)]
        else:
            vectors = vectors_of(source["packed"], f"{path}.packed", sites, room)
            if not vectors:
                raise SpecError(f"{path}.packed has no vectors.")
            adds = stacked(vectors, "generated", scale=scale, gate=gate)
    yield from ((add, words) for add in adds)
