"""Specs that differ in the layers and the vectors of their edits alone, such as cells of a sweep.

Owns:  Outline.
Runs:  in EngineCore, when a request enters. numpy, no torch.
From:  packed (their bodies are equal).   To: spec (Meanings); what depends on neither layers nor
       vectors is then made once for all of them (Resolved.shared).

Promise: a spec that is fitted equals what Spec.resolve makes of it, and is refused if that refuses
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

from vllm_scope.request.arrays import Array
from vllm_scope.request.packed import Packed
from vllm_scope.request.resolved import Resolved, ResolvedEdit
from vllm_scope.request.sites import Place, Sites

#: Cached properties of a Resolved that depend on neither layers nor vectors.
_ALIKE: Final = (
    "num_bytes", "uniform", "read_selectors", "_always", "scores_alone", "score_bytes",
    "num_states", "stopping", "firsts", "watched", "scaled", "destinations", "shared",
)  # fmt: skip


@dataclass(frozen=True)
class Outline:
    """A spec of edits that was resolved, and how others are made of it.

    Attributes:
        array_of: of each edit, the index of its vector among the arrays of a Packed.
    """

    first: Resolved
    array_of: tuple[int, ...]
    sites: Sites

    @staticmethod
    def of(packed: Packed, asked: Resolved, sites: Sites) -> Outline | None:
        """None unless the spec is of edits without gates, each of one layer, with a vector or rows
        of its own."""
        edits = asked.edits
        array_of = [edit.values.digest for edit in edits]
        alone = not (asked.taking or asked.policy is not None)
        plain = all(e.gate is None and e.dose is None and e.reads is None for e in edits)
        if not (edits and alone and plain and set(array_of) <= set(packed.arrays)):
            return None
        if [(edit.stream.layer,) for edit in edits] != [tuple(one) for one in packed.layers]:
            return None
        return Outline(asked, tuple(map(packed.arrays.index, array_of)), sites)

    def fitted(self, packed: Packed, arrays: Mapping[bytes, Array]) -> Resolved | None:
        """Another spec with the same body; None if it has vectors of other shapes, or an edit of
        several layers.

        Raises:
            SpecError: it edits where the engine has no tap.
            KeyError: an Array is not among `arrays`.
        """
        if set(map(len, packed.layers)) != {1}:
            return None
        edits = []
        for i, (at, content) in enumerate(zip(self.array_of, self._contents, strict=True)):
            values = arrays[packed.arrays[at]]
            if values.shape != content["values"].shape:
                return None
            one = object.__new__(ResolvedEdit)
            one.__dict__.update(content, stream=self._place(i, packed.layers[i]), values=values)
            edits.append(one)
        found = object.__new__(Resolved)
        found.__dict__.update(self._whole, edits=tuple(edits))
        return found

    @cached_property
    def _contents(self) -> list[dict[str, Any]]:
        """The fields of each edit."""
        names = [each.name for each in fields(ResolvedEdit)]
        return [{name: getattr(edit, name) for name in names} for edit in self.first.edits]

    @cached_property
    def _whole(self) -> dict[str, Any]:
        """What a Resolved of this outline has, beside its edits."""
        names = [each.name for each in fields(Resolved)]
        return {name: getattr(self.first, name) for name in (*names, *_ALIKE)}

    @cached_property
    def _places(self) -> dict[tuple[int, tuple[int, ...]], Place]:
        return {}

    def _place(self, number: int, layers: tuple[int, ...]) -> Place:
        """Where an edit is at its layer."""
        known = self._places.get((number, layers))
        if known is None:
            site = self.first.edits[number].stream.site
            (known,) = self.sites.find(site, layers, f"edits[{number}]")
            self._places[number, layers] = known
        return known
