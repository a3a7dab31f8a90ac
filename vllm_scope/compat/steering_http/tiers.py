"""Translates the steering fork's global tiers, which steer every request, to server-wide edits.

Owns:  Wanted (the body of `/v1/steering/set`), `merged` and `status`.
Runs:  in an API server process.
To:    http.

Promise: only the engine has a list of server-wide edits. An Add or a Clamp of this list belongs to
a tier under four conditions: the edit contains vectors, lists its layers, is at one of the fork's
hooks, and applies to the tier's tokens. It does not matter which route has set the edit. Some edits
belong to no tier: an Add of a steering module by name, an ablation, or an edit with a gate, a dose,
`norm_match` or `max_relative_norm`. A `set` without `replace` does not change these edits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from vllm_scope.compat.bounds import Room
from vllm_scope.compat.steering_http.vectors import HOOKS, clamps_of, stacked, vectors_of
from vllm_scope.errors import SpecError
from vllm_scope.request.actions import Add, Clamp, Edit
from vllm_scope.request.arrays import Array
from vllm_scope.request.sites import SiteLayer, Sites
from vllm_scope.request.spec import Spec, scope
from vllm_scope.vectors.hooks import MODULE_TIERS, tiers

CLAMP_TIERS = tiers("clamps")
#: Names of fields in the result of `status`, by the tokens of a tier. A field of `_NORMS` has the
#: length of the sum of the tier's vectors. A field of `_COUNTS` has the number of its clamps.
_NORMS = {tokens: name for name, tokens in tiers("norm").items()}
_COUNTS = {tokens: name for name, tokens in CLAMP_TIERS.items()}

#: A kind of edit, the tokens of the edit, a site and a layer.
_Place = tuple[str, str, str, int]


@dataclass(frozen=True)
class Wanted:
    """The edits in the body of a `/v1/steering/set`.

    Attributes:
        edits: first the Adds, then the Clamps.
        places: each _Place whose earlier edits are removed when `edits` are set.
    """

    edits: tuple[Edit, ...]
    places: frozenset[_Place]

    @staticmethod
    def parse(body: Mapping[str, object], sites: Sites) -> Wanted:
        """Make a Wanted from the fields of a body.

        Raises:
            SpecError: a value is wrong. The error names the path of the value in the body.
        """
        edits: list[Edit] = []
        places: set[_Place] = set()
        room = Room()

        def take(kind: str, tokens: str, field: str, streams: Iterable[SiteLayer]) -> None:
            for site, layer in streams:
                sites.find(site, (layer,), f"{field}[{HOOKS[site]!r}]", embedding=None)
                places.add((kind, tokens, site, layer))

        for field, tokens in MODULE_TIERS.items():
            vectors = vectors_of(body.get(field), field, sites, room)
            take("add", tokens, field, vectors)
            # A vector of zeros removes the earlier vector at its place.
            edits += stacked({s: v for s, v in vectors.items() if v.any()}, tokens)
        for field, tokens in CLAMP_TIERS.items():
            clamps = clamps_of(body.get(field), tokens, field, sites, room)
            # An empty list removes the earlier clamps at its place.
            take("clamp", tokens, field, clamps)
            edits += chain.from_iterable(clamps.values())
        if not places:
            fields = ", ".join((*MODULE_TIERS, *CLAMP_TIERS))
            raise SpecError(f"the body sets nothing; give vectors or clamps in one of {fields}.")
        return Wanted(tuple(edits), frozenset(places))

    @property
    def hooks(self) -> list[str]:
        return sorted({HOOKS[site] for _, _, site, _ in self.places})

    @property
    def layers(self) -> list[int]:
        return sorted({layer for *_, layer in self.places})


def merged(text: str | None, wanted: Wanted, alone: bool) -> str | None:
    """The new server-wide edits as the JSON of a spec, or None if no edits are left.

    Args:
        text: the present server-wide edits as the JSON of a spec, or None if there are no edits.
        alone: whether all present edits end. If False, only the edits at `wanted.places` end.
    """
    held = [] if alone or text is None else Spec.from_json(text).edits
    left = [e for edit in held for e in _without(edit, wanted.places)]
    # As in a request, the new Adds apply before all Clamps, and the new Clamps apply last.
    first = next((i for i, edit in enumerate(left) if isinstance(edit, Clamp)), len(left))
    adds = [edit for edit in wanted.edits if isinstance(edit, Add)]
    clamps = [edit for edit in wanted.edits if isinstance(edit, Clamp)]
    edits = [*left[:first], *adds, *left[first:], *clamps]
    return scope(*edits)["scope"] if edits else None


def _places(edit: Edit) -> list[_Place]:
    """The _Place of an edit for each layer of the edit; [] if the edit belongs to no tier."""
    values = getattr(edit, edit.fields[0])
    tokens, layers = edit.tokens.to_json(), edit.layer_numbers
    plain = isinstance(edit, Add | Clamp) and edit.gate is None and edit.dose is None
    if isinstance(edit, Add):
        plain = plain and not edit.norm_match and edit.max_relative_norm is None
    if not plain or not isinstance(values, Array) or layers is None or edit.site not in HOOKS:
        return []
    if not isinstance(tokens, str) or tokens not in _NORMS:
        return []
    return [(edit.kind, tokens, edit.site, layer) for layer in layers]


def _rows(edit: Edit) -> Iterator[np.ndarray]:
    """Yield an edit's vector at each of its layers."""
    values = getattr(edit, edit.fields[0]).numpy
    for i in range(len(edit.layer_numbers or ())):
        yield values if values.ndim == 1 else values[i]


def _without(edit: Edit, places: Iterable[_Place]) -> list[Edit]:
    """Remove `places` from an edit. Returns a list with the edit, or [] if no place is left."""
    own = _places(edit)
    stays = [place not in places for place in own]
    if all(stays):
        return [edit]
    layers = [place[3] for place, stay in zip(own, stays, strict=True) if stay]
    rows = [row for row, stay in zip(_rows(edit), stays, strict=True) if stay]
    if not layers:
        return []
    if isinstance(edit, Add):
        return [replace(edit, vector=np.stack(rows), layer=None, layers=layers)]
    assert isinstance(edit, Clamp)
    return [replace(edit, direction=np.stack(rows), layer=None, layers=layers)]


def status(text: str | None) -> dict[str, object]:
    """Lengths of vectors and numbers of clamps by layer and hook, and the number of other edits."""
    sums: dict[_Place, np.ndarray] = {}
    active: dict[int, dict[str, dict[str, float]]] = {}
    others = 0

    def entry_of(place: _Place) -> dict[str, float]:
        return active.setdefault(place[3], {}).setdefault(HOOKS[place[2]], {})

    for edit in Spec.from_json(text).edits if text is not None else ():
        places = _places(edit)
        others += not places
        for place, row in zip(places, _rows(edit), strict=False):
            if isinstance(edit, Add):
                # The sum is in float64, where the length of every sum of float32 vectors is finite.
                sums[place] = sums.get(place, 0) + edit.scale * row.astype(np.float64)
            else:
                entry, name = entry_of(place), _COUNTS[place[1]]
                entry[name] = entry.get(name, 0) + 1
    for place, vector in sums.items():
        entry_of(place)[_NORMS[place[1]]] = float(np.linalg.norm(vector))
    layers = {str(layer): hooks for layer, hooks in sorted(active.items())}
    return {"active_layers": layers, "other_edits": others}
