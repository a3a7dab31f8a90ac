"""Makes specs that differ only in the layers, vectors and numbers of their edits.

The cells of a sweep have such specs. Requests that have one edit each, at different places, can
also have such specs. Their packed forms have equal bodies: the body has all of a spec except the
layers, vectors and numbers of its edits (packed.py). An outline is the first resolved spec with a
body. From the outline, `fitted` makes the resolved specs of all other specs with this body.

Owns:  Outline.
Runs:  in the front-end and in EngineCore, when a request enters, with numpy and without torch.
From:  packed (specs of one outline have equal bodies).   To: spec (Meanings).

Promise: a Resolved that `fitted` returns equals the result of Spec.resolve. If Spec.resolve refuses
a spec, `fitted` returns no Resolved. Values that do not depend on layers, vectors or numbers are
computed one time for all specs of an outline (Resolved.shared).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

from vllm_scope.request.arrays import Array
from vllm_scope.request.packed import Packed
from vllm_scope.request.resolve_edits import check_order
from vllm_scope.request.resolved import Resolved, ResolvedEdit, ResolvedGate
from vllm_scope.request.sites import Place, Sites

#: Cached properties of a Resolved that do not depend on layers, vectors or numbers.
_ALIKE: Final = (
    "num_bytes", "uniform", "banked", "delivering", "taking", "read_selectors", "_always",
    "scores_alone", "score_bytes", "num_states", "stopping", "firsts", "watched", "scaled",
    "destinations", "shared",
)  # fmt: skip
#: The measured memory of an outline, of each edit, and of each `Place`, in bytes. The numbers
#: include the caches in an outline, and do not include the first spec.
_OUTLINE_BYTES, _EDIT_BYTES, _PLACE_BYTES = 6144, 2560, 384


@dataclass(frozen=True)
class Outline:
    """A resolved spec of edits. From this spec, `fitted` makes other specs with the same body.

    In place of Arrays and numbers, a body has indices. Equal values have the same index. Therefore,
    if two Arrays or two numbers of the first spec are equal, they are also equal in each other spec
    with this body.

    Attributes:
        first: the resolved spec.
        packed: the same spec, in the packed form that processes send to each other.
    """

    first: Resolved
    packed: Packed
    sites: Sites

    @staticmethod
    def of(packed: Packed, asked: Resolved, sites: Sites) -> Outline | None:
        """The outline of a resolved spec. None if the spec cannot have an outline.

        A spec with an outline has only edits, and no policy. Each edit has one layer, names no
        module, and is not a SetFeature or ScaleFeature. The spec delivers no values of gates and no
        doses.
        """
        edits = asked.edits
        arrays = {edit.values.digest for edit in edits}
        arrays |= {edit.gate.vector.digest for edit in edits if edit.gate is not None}
        alone = not (asked.taking or asked.policy is not None)
        plain = all(edit.dose is None and edit.reads is None for edit in edits)
        if not (edits and alone and plain and arrays == set(packed.arrays)):
            return None
        if [(edit.stream.layer,) for edit in edits] != [tuple(one) for one in packed.layers]:
            return None
        return Outline(asked, packed, sites)

    def fitted(self, packed: Packed, arrays: Mapping[bytes, Array]) -> Resolved | None:
        """The resolved spec of another Packed with the same body. None if the other Packed has
        vectors of other shapes, or an edit of several layers.

        Raises:
            SpecError: the engine has no tap at an edit's `Place`, or the edit's gate does not allow
                this `Place` (`check_order`).
            KeyError: an Array is not among `arrays`.
        """
        given = [arrays[digest] for digest in packed.arrays]
        if [one.shape for one in given] != self._shapes or set(map(len, packed.layers)) != {1}:
            return None
        numbers = (*packed.numbers, *_BOUNDS)
        edits = []
        for i, (form, gate) in enumerate(self._forms):
            content = form.filled(given, numbers)
            content["stream"] = self._place(i, packed.layers[i])
            if gate is not None:
                content["gate"] = _made(ResolvedGate, gate.filled(given, numbers))
            edits.append(_made(ResolvedEdit, content))
        found: Resolved = _made(Resolved, self._whole | {"edits": tuple(edits)})
        return found

    @property
    def num_bytes(self) -> int:
        """Estimated memory."""
        edits = self.first.edits
        places = _PLACE_BYTES * self.sites.num_layers * len({one.stream.site for one in edits})
        return self.first.num_bytes + _OUTLINE_BYTES + _EDIT_BYTES * len(edits) + places

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the first spec's Arrays, in the order of their indices."""
        gates = [edit.gate for edit in self.first.edits if edit.gate is not None]
        arrays = [*(edit.values for edit in self.first.edits), *(gate.vector for gate in gates)]
        shapes = {one.digest: one.shape for one in arrays}
        return [shapes[digest] for digest in self.packed.arrays]

    @cached_property
    def _forms(self) -> list[tuple[_Form, _Form | None]]:
        """The _Form of each edit, and of its gate."""
        arrays = {digest: i for i, digest in enumerate(self.packed.arrays)}
        numbers = {repr(x): i for i, x in enumerate((*self.packed.numbers, *_BOUNDS))}

        def form(one: ResolvedEdit | ResolvedGate) -> _Form:
            return _Form.of(one, arrays, numbers)

        return [
            (form(one), None if one.gate is None else form(one.gate)) for one in self.first.edits
        ]

    @cached_property
    def _whole(self) -> dict[str, Any]:
        """The fields of the first Resolved, and the cached attributes that all Resolved of this
        outline share. `fitted` replaces the field `edits`."""
        names = [each.name for each in fields(Resolved)]
        return {name: getattr(self.first, name) for name in (*names, *_ALIKE)}

    @cached_property
    def _places(self) -> dict[tuple[str, tuple[int, ...]], Place]:
        return {}

    def _place(self, number: int, layers: tuple[int, ...]) -> Place:
        """The `Place` of an edit that has one layer."""
        edit = self.first.edits[number]
        known = self._places.get((edit.stream.site, layers))
        if known is None:
            (known,) = self.sites.find(edit.stream.site, layers, f"edits[{number}]")
            self._places[edit.stream.site, layers] = known
        if edit.gate is not None:
            check_order(edit.gate, known, f"edits[{number}].gate")
        return known


#: A Clamp without a lower or upper bound has one of these numbers in its ResolvedEdit. The packed
#: spec does not contain them.
_BOUNDS: Final = (math.inf, -math.inf)


@dataclass(frozen=True)
class _Form:
    """An edit or a gate of the first spec, and the fields that other specs replace.

    Attributes:
        content: the values of all fields in the first spec.
        arrays: each field that is an Array, with the index of the Array.
        numbers: each field that is a float, with the index of the number.
        several: each field that is a tuple of numbers, with the indices of the numbers.
    """

    content: dict[str, Any]
    arrays: list[tuple[str, int]]
    numbers: list[tuple[str, int]]
    several: list[tuple[str, tuple[int, ...]]]

    @staticmethod
    def of(
        one: ResolvedEdit | ResolvedGate, index_of: Mapping[bytes, int], index: Mapping[str, int]
    ) -> _Form:
        """The form of an edit or a gate of the first spec.

        Args:
            index_of: the index of each Array, by the digest of the Array.
            index: the index of each number, by the `repr` of the number. (0.0 and -0.0 must
                differ.)
        """
        content = {each.name: getattr(one, each.name) for each in fields(one)}
        arrays, numbers, several = [], [], []
        for name, value in content.items():
            if isinstance(value, Array):
                arrays.append((name, index_of[value.digest]))
            elif isinstance(value, float):
                numbers.append((name, index[repr(value)]))
            elif name == "numbers":
                several.append((name, tuple(index[repr(x)] for x in value)))
        return _Form(content, arrays, numbers, several)

    def filled(self, arrays: Sequence[Array], numbers: Sequence[float]) -> dict[str, Any]:
        """The values of all fields in another spec, which has these Arrays and numbers."""
        found = self.content.copy()
        for name, at in self.arrays:
            found[name] = arrays[at]
        for name, at in self.numbers:
            found[name] = numbers[at]
        for name, some in self.several:
            found[name] = tuple([numbers[at] for at in some])
        return found


def _made(cls: type[Any], content: dict[str, Any]) -> Any:
    """Make an object of a frozen class with these fields. The fields are not checked again."""
    found = object.__new__(cls)
    found.__dict__.update(content)
    return found
