"""Named edits, and the bounds of the edits' scales.

Owns:  BoundedEdits.
To:    controller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions import Add, Edit
from vllm_scope.request.selectors import as_numbers


@dataclass(frozen=True)
class BoundedEdits:
    """Edits by name. The edits apply in the order of the mapping `edits`.

    Attributes:
        bounds: maps the name of an Add to the lowest and the highest scale.
        max_step: maps the name of an Add to the largest change of its scale by one call of `moved`.

    Raises:
        SpecError: a name in `bounds` is not the name of an Add, bounds are not finite, a scale is
            out of its bounds, a name in `max_step` has no bounds, or a step is not above 0.
    """

    edits: Mapping[str, Edit]
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    max_step: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (lo, hi) in self.bounds.items():
            edit = self.edits.get(name)
            if not isinstance(edit, Add):
                raise SpecError(f"bounds names {shown(name)}, which is not the name of an Add.")
            if not lo <= edit.scale <= hi or not math.isfinite(hi - lo):
                raise SpecError(
                    f"bounds[{name!r}] is {shown((lo, hi))}, and the scale is {edit.scale:g}; the "
                    "bounds must be finite numbers, and the scale must lie between them."
                )
        for name, step in self.max_step.items():
            if name not in self.bounds or not step > 0:
                raise SpecError(
                    f"max_step[{name!r}] is {shown(step)}; it must be above 0, and it needs bounds."
                )

    @property
    def scales(self) -> dict[str, float]:
        """The scales of the edits with bounds, by the name of the edit."""
        bounded = ((name, self.edits[name]) for name in self.bounds)
        return {name: edit.scale for name, edit in bounded if isinstance(edit, Add)}

    def moved(self, to: Mapping[str, Any]) -> BoundedEdits:
        """The edits after a change. Each scale with bounds stays within its bounds.

        Args:
            to: maps names of edits to new values. If the edit has bounds, the value is the new
                scale. If the edit has no bounds, the value is the new edit.

        Raises:
            SpecError: a name in `to` has no edit, or a value in `to` has the wrong type or is not
                finite.
        """
        return replace(self, edits={**self.edits, **{n: self._moved(n, to[n]) for n in to}})

    def _moved(self, name: str, wanted: Any) -> Edit:
        old = self.edits.get(name)
        if old is None:
            raise SpecError(f"the edit {shown(name)} does not exist; {', '.join(self.edits)} do.")
        if name not in self.bounds:
            if not isinstance(wanted, Edit):
                raise SpecError(f"{name!r} has no bounds: it takes an edit, not {shown(wanted)}.")
            return wanted
        wanted = as_numbers(wanted)  # a callback often computes a scale with numpy or torch
        number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
        if not number or not math.isfinite(wanted):
            raise SpecError(f"{name!r} has bounds, so it takes a scale, not {shown(wanted)}.")
        assert isinstance(old, Add)
        (lo, hi), step = self.bounds[name], self.max_step.get(name, math.inf)
        near = min(max(float(wanted), old.scale - step), old.scale + step)
        return replace(old, scale=min(max(near, lo), hi))
