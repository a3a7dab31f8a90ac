"""The actions of a spec on one engine.

Owns:  `resolve`, which makes a Resolved.
Runs:  in the front-end (to check a request) and in EngineCore; workers get what it returns. numpy,
       no torch, no vLLM.
From:  spec.   To: resolved.

Promise: checks that need an engine (its layers, its sizes, its steering modules) are made here. The
error names the action.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import Edit, Module, Probe, Read
from vllm_scope.request.heads import Bank, Encoding
from vllm_scope.request.nets import Net, net_of
from vllm_scope.request.resolve_edits import module_rows, resolve_edits
from vllm_scope.request.resolved import Cell, Resolved, ResolvedProbe, ResolvedRead, Vectors
from vllm_scope.request.sites import Phase, Place, Sites


def resolve(
    reads: tuple[Read, ...],
    probes: tuple[Probe, ...],
    edits: tuple[Edit, ...],
    sites: Sites,
    modules: Mapping[str, Vectors],
) -> Resolved:
    """The actions on this engine. `Spec.resolve` caches the result and says what is raised."""
    found = tuple(
        ResolvedRead(
            sites.find(read.site, read.layer_numbers, f"reads[{i}]"),
            read.tokens, read.when, read.to, (read.tag, read.name),
            _encoding(read, sites, f"reads[{i}].codec"),
        )
        for i, read in enumerate(reads)
    )  # fmt: skip
    _check_encodings(found)
    scored = _resolve_probes(probes, sites, modules)
    edited, told = resolve_edits(edits, sites, modules)
    twice = {probe.name for probe in scored} & {one.name for one in told}
    if twice:
        raise SpecError(
            f"a probe and a gate or dose are called {shown(min(twice))}; their scores share a dict."
        )
    return Resolved(found, (*scored, *told), edited)


def _resolve_probes(
    probes: tuple[Probe, ...], sites: Sites, modules: Mapping[str, Vectors]
) -> tuple[ResolvedProbe, ...]:
    nets = [
        _nets_of(probe, sites, modules, f"probes[{i}]") for i, probe in enumerate(probes)
    ]  # fmt: skip
    at_place: dict[Place, list[Net]] = {}
    for some in nets:
        for place, net in some:
            at_place.setdefault(place, []).append(net)
    banks = {
        place: Bank.of(
            (net.digest for net in some), sum(net.num_values for net in some), place.group
        )
        for place, some in at_place.items()
    }
    firsts = dict.fromkeys(banks, 0)
    found = []
    for probe, some in zip(probes, nets, strict=True):
        cells = []
        for place, net in some:
            cells.append(Cell(place, net, banks[place], firsts[place]))
            firsts[place] += net.num_values
        found.append(
            ResolvedProbe(
                probe.name, probe.tokens, tuple(cells), probe.bias, probe.activation, probe.pools,
                probe.aggregate, probe.to, probe.threshold, probe.action == "stop",
            )
        )  # fmt: skip
    return tuple(found)


def _nets_of(
    probe: Probe, sites: Sites, modules: Mapping[str, Vectors], where: str
) -> list[tuple[Place, Net]]:
    """What a probe computes at each of its layers."""
    places = sites.find(probe.site, probe.layer_numbers, where)
    if isinstance(probe.weight, Module):
        named = {p: row for p, row, _ in module_rows(probe, probe.weight, sites, modules, where)}
        nets = [net_of(named[place]) for place in places]
    else:
        nets = [net_of(weight) for weight in probe.weights()]
    width = sites.row_size(probe.site)
    for net in nets:
        if net.width != width:
            raise SpecError(
                f"{where}.weight has {net.width} numbers; rows of {probe.site!r} have {width}."
            )
    return list(zip(places, nets, strict=True))


def _encoding(read: Read, sites: Sites, where: str) -> Encoding | None:
    if read.codec is None:
        return None
    from vllm_scope.codecs.packed import encoding_of  # torch, which a caller may not have

    return encoding_of(read.codec, sites.row_size(read.site), sites.dtype, where)


def _check_encodings(reads: tuple[ResolvedRead, ...]) -> None:
    known: dict[tuple[str, Place, Phase], Encoding | None] = {}
    for i, read in enumerate(reads):
        for stream in read.streams:
            one = known.setdefault((read.to, stream, read.when), read.encoding)
            if one != read.encoding:
                names = [e.metadata["codec"] if e else "none" for e in (one, read.encoding)]
                raise SpecError(
                    f"reads[{i}].codec makes {stream[0]!r} {stream[1]} come to {shown(read.to)} "
                    f"as {names[0]} and as {names[1]}; rows of one stream have one codec, and the "
                    "same options, at one destination."
                )
