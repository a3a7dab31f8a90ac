"""Resolves edits for one engine: vectors, gates, and the gate values and doses that taps write.

Owns:  `resolve_edits`, `module_rows`.
Runs:  in the same processes as resolve. numpy, no torch.
From:  actions.   To: resolve.

If a gate or a dose has a name, its value at each token is delivered like a probe's score. The tap
that computes the value also writes it to the arena. The values at one `Place` are a bank (Told).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import (
    Add,
    Clamp,
    Edit,
    FeatureRows,
    Gate,
    Module,
    Probe,
    Replace,
    ScaleFeature,
    SetFeature,
)
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Told
from vllm_scope.request.resolved import (
    MAX_EDITED,
    Cell,
    Resolved,
    ResolvedEdit,
    ResolvedGate,
    ResolvedProbe,
    ToldAt,
    Vectors,
)
from vllm_scope.request.selectors import Except, Selector, Word
from vllm_scope.request.sites import INNER_SITES, MLP_SITE, ROUTER_SITE, Place, Sites
from vllm_scope.vectors.module import TIERS


def resolve_edits(
    edits: Sequence[Edit], sites: Sites, modules: Mapping[str, Vectors]
) -> tuple[tuple[ResolvedEdit, ...], tuple[ResolvedProbe, ...]]:
    """The resolved edits in their order, and a ResolvedProbe for each value that the edits deliver.
    Such a value is the value of a named gate, or a named dose.

    Raises:
        SpecError: the same errors as Spec.resolve.
    """
    found: list[ResolvedEdit] = []
    told = _Telling()
    for i, edit in enumerate(edits):
        where = f"edits[{i}]"
        gate = None if edit.gate is None else _resolve_gate(edit.gate, sites, f"{where}.gate")
        if gate is not None and gate.state is not None and edit.tokens not in _FROM_FIRST:
            raise SpecError(
                f"{where}.tokens is {shown(edit.tokens.to_json())}, and the edit's gate has a "
                "state, which follows all generated tokens; take 'all' or 'generated'."
            )
        for one in _resolve_edit(edit, sites, modules, where):
            one = replace(one, number=i, gate=gate)
            if gate is not None:
                check_order(gate, one.stream, f"{where}.gate")
            if edit.dose is not None:
                told.add(edit.dose, one.stream, _of_dose(one), one.tokens)
            found.append(one)
        if gate is not None and edit.gate.name is not None:
            told.add_gate(edit.gate.name, gate, found[-1].stream, edit.tokens)
        if len(found) > MAX_EDITED:
            raise SpecError(
                f"the edits have more than {MAX_EDITED:,} layers together; name fewer layers, or "
                "send several requests."
            )
    return tuple(map(told.of, found)), told.scores()


#: If the gate of an edit has a state, the edit must have one of these selectors, because the state
#: needs the scores of all generated tokens.
_FROM_FIRST = (Word("all"), Word("generated"))


def _of_dose(edit: ResolvedEdit) -> bytes:
    """The key of an edit's dose. Two equal edits of one spec have different keys."""
    return edit.digest + edit.number.to_bytes(2, "little")


class _Telling:
    """Collects the values of gates and the doses that taps write to the arena. Assigns to each
    number its index in a bank."""

    def __init__(self) -> None:
        #: By the name of a gate or a dose, three values: the `Place` whose tap writes the number;
        #: the digest of the gate, or the key of the dose; and the tokens.
        self._named: dict[str, tuple[Place, bytes, Selector]] = {}
        #: The index of each number in its bank, by `Place`, and then by the digest of the gate or
        #: the key of the dose.
        self._banks: dict[Place, dict[bytes, int]] = {}
        self._gates: dict[bytes, ResolvedGate] = {}
        #: The `Place` whose tap writes the value of a gate with a state, by the digest of the gate:
        #: the last `Place` of the edit that has the gate. If several edits have this gate and give
        #: it a name, the first of these edits counts.
        self._firsts: dict[bytes, Place] = {}

    def add_gate(self, name: str, gate: ResolvedGate, edited: Place, tokens: Selector) -> None:
        place = gate.place
        if gate.state is not None:
            place = self._firsts.setdefault(gate.digest, edited)
        self.add(name, place, gate.digest, tokens)

    def add(self, name: str, place: Place, digest: bytes, tokens: Selector) -> None:
        """Add a number that taps write. Raises SpecError if another number has the same name."""
        new = place, digest, tokens
        if self._named.setdefault(name, new) != new:
            raise SpecError(
                f"two gates or doses are called {shown(name)}; a name is for one gate, one edit "
                "and one set of tokens."
            )
        some = self._banks.setdefault(place, {})
        some.setdefault(digest, len(some))

    def _at(self, place: Place, digest: bytes) -> ToldAt | None:
        """Where a tap writes a number, or None if no tap writes it. Call this method after the last
        call of `add`."""
        index = self._banks.get(place, {}).get(digest)
        return None if index is None else (place, self._told[place], index)

    @cached_property
    def _told(self) -> dict[Place, Told]:
        return {place: Told.of(some, len(some), place.group) for place, some in self._banks.items()}

    def of(self, edit: ResolvedEdit) -> ResolvedEdit:
        """The edit, with the places where taps write its gate's value and its dose."""
        if not self._named:
            return edit
        gate = edit.gate
        if gate is not None:
            if gate.digest not in self._gates:
                place = self._firsts.get(gate.digest, gate.place)
                told = self._at(place, gate.digest)
                self._gates[gate.digest] = replace(gate, told=told)
            gate = self._gates[gate.digest]
        return replace(edit, gate=gate, dose=self._at(edit.stream, _of_dose(edit)))

    def scores(self) -> tuple[ResolvedProbe, ...]:
        found = []
        for name, (place, digest, tokens) in self._named.items():
            at = self._at(place, digest)
            assert at is not None
            found.append(ResolvedProbe(name, tokens, (Cell(place, None, *at[1:]),)))
        return tuple(found)


def _resolve_gate(gate: Gate, sites: Sites, where: str) -> ResolvedGate:
    (place,) = sites.find(gate.site, gate.layers, where)
    _check_size(gate.vector, sites.hidden_size, gate.site, f"{where}.vector")
    assert gate.threshold is not None  # Gate.__post_init__ sets the threshold
    return ResolvedGate(
        place, gate.vector, gate.kind, gate.threshold, gate.sharpness, gate.bias, gate.above,
        state=gate.state,
    )  # fmt: skip


def check_order(gate: ResolvedGate, edited: Place, where: str) -> None:
    if _on_stream(gate.place) > _on_stream(edited):
        raise SpecError(
            f"{where} reads {gate.place.site!r} {gate.place.layer}, which comes after the edited "
            f"{edited.site!r} {edited.layer}; a gate must be at or before its edit."
        )
    if gate.state is not None and gate.place.boundary == edited.boundary:
        raise SpecError(
            f"{where} reads {gate.place.site!r} {gate.place.layer}, which is the place of its edit "
            f"({edited.site!r} {edited.layer}); a gate with a state must be at an earlier place."
        )


def check_stages(asked: Resolved, num_stages: int) -> None:
    """Raises SpecError if an edit on one pipeline stage could need the value of a gate on another
    stage."""
    apart = [e for e in asked.edits if e.gate is not None and e.gate.place != e.stream]
    states = [e for e in apart if e.gate is not None and e.gate.state is not None]
    if states and num_stages > 1:
        raise SpecError(
            f"edits[{states[0].number}].gate has a state, and this engine has {num_stages} "
            "pipeline stages; leave the state out, or start with pipeline_parallel_size 1."
        )
    if apart and num_stages > 1:
        raise SpecError(
            f"edits[{apart[0].number}].gate reads another place than its edit changes, and this "
            f"engine has {num_stages} pipeline stages; name the same site and layer, or start with "
            "pipeline_parallel_size 1."
        )


def _on_stream(place: Place) -> tuple[int, int]:
    """A sort key for the order of places in a forward: (boundary on the stream, group). For a site
    inside a layer, the key is the last boundary of the stream before the site, and group 1."""
    if place.site in INNER_SITES:
        late = ("mlp_in", "mlp_out", MLP_SITE, ROUTER_SITE)
        return 2 * place.layer + (place.site in late), 1
    return place.boundary, place.group


def _check_size(values: Array, size: int, site: str, where: str) -> None:
    if values.shape[-1] != size:
        raise SpecError(f"{where} has {values.shape[-1]} numbers; rows of {site!r} have {size}.")


def _resolve_edit(
    edit: Edit, sites: Sites, modules: Mapping[str, Vectors], where: str
) -> list[ResolvedEdit]:
    key = edit.fields[0]
    values = getattr(edit, key)
    if isinstance(edit, SetFeature | ScaleFeature):
        return _resolve_features(edit, sites, where)
    rows: list[tuple[Place, Array, str | None]]
    if isinstance(values, Module):
        rows = module_rows(edit, values, sites, modules, where)
    else:
        streams = sites.find(edit.site, edit.layer_numbers, where)
        own = len(values.shape) == (3 if isinstance(edit, Replace) else 2)
        rows = [(s, _row(values, i) if own else values, None) for i, s in enumerate(streams)]
    found = []
    for stream, row, tier in rows:
        _check_size(row, sites.row_size(stream.site), stream.site, f"{where}.{key}")
        tokens = _within(edit.tokens, tier)
        if tokens is not None:
            found.append(_one_edit(edit, stream, row, tokens))
    return found


def _resolve_features(
    edit: SetFeature | ScaleFeature, sites: Sites, where: str
) -> list[ResolvedEdit]:
    if isinstance(edit.sae, str):
        raise SpecError(
            f"{where}.sae is {shown(edit.sae)}; server-wide edits take the rows of features, not "
            "the name of an SAE."
        )
    rows: FeatureRows = edit.sae
    size = sites.row_size(edit.site)
    _check_size(rows.decoder, size, edit.site, f"{where}.sae")
    each = zip(rows.bias, rows.threshold, edit.changes, strict=True)
    numbers = tuple(
        float(one) for bias, threshold, change in each for one in (bias, threshold, *change)
    )
    return [
        ResolvedEdit(edit.kind, place, edit.tokens, rows.decoder, numbers, reads=rows.encoder)
        for place in sites.find(edit.site, edit.layer_numbers, where)
    ]


def _within(tokens: Selector, tier: str | None) -> Selector | None:
    """Limit a selector to a tier, which is "prompt" or "generated". If the tier is None, returns
    `tokens` itself. Returns None if no token can be selected."""
    if tier is None:
        return tokens
    word = Word(tier)
    if tokens in (Word("all"), word):
        return word
    if any(tokens == Word(other) for other in TIERS):
        return None
    (other,) = set(TIERS) - {tier}  # every token belongs to one of two tiers
    return Except(tokens, Word(other))


def _row(values: Array, index: int) -> Array:
    size = len(values.data) // values.shape[0]
    return Array(values.shape[1:], values.data[index * size : (index + 1) * size])


def module_rows(
    action: Edit | Probe,
    module: Module,
    sites: Sites,
    modules: Mapping[str, Vectors],
    where: str,
) -> list[tuple[Place, Array, str | None]]:
    if module.name not in modules:
        known = ", ".join(sorted(modules)[:8]) or "none"
        raise SpecError(
            f"{where} names the steering module {shown(module.name)}, which this engine does not "
            f"hold. It holds: {known}. Register it first."
        )
    vectors = modules[module.name]
    layers = action.layer_numbers
    places = [p for p in vectors if layers is None or (p[0] == action.site and p[1] in layers)]
    if isinstance(action, Probe):
        # A probe has one weight for all tokens, and therefore uses no vector of a tier.
        places = [place for place in places if len(place) == 2]
    if layers is not None and not {place[1] for place in places} >= set(layers):
        has = ", ".join(" ".join(map(str, place)) for place in sorted(vectors))
        raise SpecError(
            f"{where}.layers names a layer of {action.site!r} for which the steering module "
            f"{shown(module.name)} has no vector; it has {has}."
        )
    for place in places:
        sites.find(place[0], (place[1],) if place[0] != "embed" else (0,), where)
    needs_direction = isinstance(action, Edit) and action.needs_direction
    if needs_direction and not all(vectors[place].numpy.any() for place in places):
        raise SpecError(f"{where}: a vector of {shown(module.name)} is zero; it has no direction.")
    return [
        (Place(place[0], place[1]), vectors[place], place[2] if len(place) == 3 else None)
        for place in places
    ]


def _one_edit(edit: Edit, stream: Place, values: Array, tokens: Selector) -> ResolvedEdit:
    numbers: tuple[float, ...] = ()
    norm_match, limit = False, None
    if isinstance(edit, Add):
        numbers = (edit.scale,)
        norm_match, limit = edit.norm_match, edit.max_relative_norm
    elif isinstance(edit, Clamp):
        lo = -math.inf if edit.lo is None else edit.lo
        numbers = (lo, math.inf if edit.hi is None else edit.hi, edit.strength)
    positions = edit.positions if isinstance(edit, Replace) else ()
    name = edit.name if isinstance(edit, Add) else None
    return ResolvedEdit(
        edit.kind, stream, tokens, values, numbers, positions, norm_match, limit, name=name
    )
