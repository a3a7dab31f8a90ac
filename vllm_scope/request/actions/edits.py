"""What changes rows.

Owns:  Add, Ablate, Clamp, Replace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import Action, Layers, number, vector_or_module
from vllm_scope.request.arrays import Array
from vllm_scope.request.selectors import Positions, as_numbers, parse_selector


class Edit(Action):
    """Base of what changes a row."""

    #: [hidden_size] for all layers, or [num_layers, hidden_size], one for each.
    vector: Any
    norm_match: bool = False

    @property
    def needs_direction(self) -> bool:
        """The vector is used as a direction, so it may not be zero."""
        return self.norm_match or self.fields[0] == "direction"

    def _set_vector(self, name: str, layer: Layers) -> None:
        """Check the vector against the layers."""
        where = f"{type(self).__name__}.{name}"
        value = vector_or_module(getattr(self, name), where)
        inline, placed = isinstance(value, Array), layer is not None or self.layers is not None
        if inline and not placed and self.site != "embed":
            raise SpecError(f"{type(self).__name__} has no layer; name one, a list, or 'all'.")
        object.__setattr__(self, name, value)
        self._place(layer)
        object.__setattr__(self, "layer", None)
        if isinstance(value, Array):
            _check_rows(value, self.layer_numbers, where, 2)
            if self.needs_direction and not value.numpy.any(axis=-1).all():
                raise SpecError(f"{where} is zero; a direction has a length.")


def _check_rows(value: Array, layers: tuple[int, ...] | None, where: str, most: int) -> None:
    """One row (or block of rows) for all layers, or one for each layer."""
    if len(value.shape) < most:
        return
    if len(value.shape) > most:
        raise SpecError(f"{where} has shape {value.shape}; it has at most {most} dimensions.")
    if layers is None:
        raise SpecError(f"{where} has one row for each layer, so name the layers, not 'all'.")
    if value.shape[0] != len(layers):
        raise SpecError(f"{where} has {value.shape[0]} rows for {len(layers)} layers.")


@dataclass(frozen=True)
class Add(Edit):
    """Add a vector: `x + scale * v`.

    Args:
        vector: [hidden_size] for every layer, [num_layers, hidden_size] for one each,
            or the name of a steering module that the engine holds.
        site, layer: where. A module without layers applies wherever it has vectors.
        scale: a number; the vector is not normalised.
        tokens: which tokens; "generated" for what the model writes itself.
        norm_match: add `scale * ||x||` times the vector's direction instead.

    Raises:
        SpecError: wrong types or shapes, numbers that are not finite, a zero vector
            with norm_match, or no layer.
    """

    kind: ClassVar[str] = "add"
    fields: ClassVar[tuple[str, ...]] = ("vector", "scale", "norm_match")

    vector: Any
    site: str = "resid_post"
    layer: Layers = field(default=None, repr=False)
    scale: float = 1.0
    tokens: Any = "all"
    norm_match: bool = False
    layers: Layers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", number(self.scale, "Add.scale"))
        if not isinstance(self.norm_match, bool):
            raise SpecError(f"Add.norm_match is {shown(self.norm_match)}; it is true or false.")
        self._set_vector("vector", self.layer)


@dataclass(frozen=True)
class Ablate(Edit):
    """Take a direction out: `x - (x.d) * d`, with d of unit length.

    Args:
        direction: as `Add.vector`; normalised here.
        site, layer, tokens: as for `Add`.
    """

    kind: ClassVar[str] = "ablate"
    fields: ClassVar[tuple[str, ...]] = ("direction",)

    direction: Any
    site: str = "resid_post"
    layer: Layers = field(default=None, repr=False)
    tokens: Any = "all"
    layers: Layers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._set_vector("direction", self.layer)


@dataclass(frozen=True)
class Clamp(Edit):
    """Hold the component along a direction between two bounds, or on one side of one.

    Args:
        direction: as `Add.vector`; normalised here.
        lo, hi: bounds of `x.d`, lo <= hi. None, or an infinite one, for no bound; one of the
            two must be given.
        site, layer, tokens: as for `Add`.
        strength: from 0 to 1: which part of the way to the bound it goes.
    """

    kind: ClassVar[str] = "clamp"
    fields: ClassVar[tuple[str, ...]] = ("direction", "lo", "hi", "strength")

    direction: Any
    lo: float | None = None
    hi: float | None = None
    site: str = "resid_post"
    layer: Layers = field(default=None, repr=False)
    tokens: Any = "all"
    strength: float = 1.0
    layers: Layers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", number(self.strength, "Clamp.strength"))
        for name, nowhere in (("lo", -math.inf), ("hi", math.inf)):
            value = getattr(self, name)
            if value is not None:
                bound = None if value == nowhere else number(value, f"Clamp.{name}")
                object.__setattr__(self, name, bound)
        if self.lo is None and self.hi is None:
            raise SpecError("Clamp.lo and hi are missing: it has no bound. Give lo, hi or both.")
        if self.lo is not None and self.hi is not None and self.lo > self.hi:
            raise SpecError(f"Clamp.lo is {self.lo:g} and hi {self.hi:g}; lo is not above hi.")
        if not 0 <= self.strength <= 1:
            raise SpecError(f"Clamp.strength is {self.strength:g}; it is from 0 to 1.")
        self._set_vector("direction", self.layer)


@dataclass(frozen=True)
class Replace(Edit):
    """Patch: at these positions the row becomes another one.

    Args:
        values: [num_positions, hidden_size] (or [hidden_size] for one position), for
            every layer; [num_layers, num_positions, hidden_size] for rows of their own.
        positions: absolute positions, distinct; negative ones count from the
            prompt's end. One for each row.
        site, layer: where.

    Raises:
        SpecError: wrong types or shapes, repeated positions, or no layer.
    """

    kind: ClassVar[str] = "replace"
    fields: ClassVar[tuple[str, ...]] = ("values", "positions")

    values: Any
    positions: Any
    site: str = "resid_post"
    layer: Layers = field(default=None, repr=False)
    layers: Layers = field(default=None, kw_only=True)
    tokens: Any = field(default="all", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        positions = as_numbers(self.positions)
        positions = [positions] if isinstance(positions, int) else positions
        chosen = parse_selector(positions, "Replace.positions")
        if not isinstance(chosen, Positions):
            raise SpecError(
                f"Replace.positions is {shown(self.positions)}; it is a list of positions."
            )
        if len(chosen.positions) != len(positions):
            raise SpecError("Replace.positions names a position twice.")
        object.__setattr__(self, "positions", tuple(positions))
        object.__setattr__(self, "tokens", chosen)
        values = Array.parse(self.values, "Replace.values")
        if len(values.shape) == 1:
            values = Array((1, *values.shape), values.data)
        if values.shape[-2] != len(positions):
            raise SpecError(
                f"Replace.values has {values.shape[-2]} rows for {len(positions)} positions."
            )
        object.__setattr__(self, "values", values)
        if self.layer is None and self.layers is None and self.site != "embed":
            raise SpecError("Replace has no layer; name one, a list, or 'all'.")
        self._place(self.layer)
        object.__setattr__(self, "layer", None)
        _check_rows(values, self.layer_numbers, "Replace.values", 3)

    def to_json(self) -> dict[str, Any]:
        body = super().to_json()
        body.pop("tokens", None)
        return body | {"positions": list(self.positions)}
