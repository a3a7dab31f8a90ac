"""Actions that change rows.

Owns:  Edit, Add, Ablate, Clamp, Replace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from vllm_scope.errors import SpecError, checked_flag, shown
from vllm_scope.request.actions.base import (
    Action,
    Module,
    checked_name,
    number,
    vector_or_module,
)
from vllm_scope.request.actions.gates import Gate
from vllm_scope.request.arrays import Array
from vllm_scope.request.selectors import Positions, as_numbers, parse_selector
from vllm_scope.request.sites import EDIT_SITES, MODEL_SITES

#: The fields that all classes of edits have.
COMMON = ("gate", "dose")


@dataclass(frozen=True, kw_only=True)
class Edit(Action):
    """The base class of actions that change a row. `fields[0]` is the name of the field with the
    edit's vector, direction, rows or SAE."""

    gate: Any = None
    dose: str | None = None

    @property
    def needs_direction(self) -> bool:
        """True if the vector is used as a direction. A direction must not be zero."""
        return self.fields[0] == "direction"

    @property
    def num_named(self) -> int:
        """How many features of an SAE the edit names. 0 if the edit does not name an SAE."""
        return 0

    def of_engine(self, saes: Mapping[str, Any]) -> Edit:
        """If the edit names an SAE of the engine, returns an edit with the encoder and decoder rows
        of the features in place of the SAE's name. Otherwise returns the edit itself.

        Args:
            saes: the SAEs that the engine has loaded, by name.

        Raises:
            SpecError: the engine has not loaded the SAE, or the edit cannot use the SAE.
        """
        return self

    def _place_edit(self) -> None:
        """Check and set the gate, the site and the layers. Check the dose."""
        kind, module = type(self).__name__, isinstance(getattr(self, self.fields[0]), Module)
        self._set(gate=Gate.parse(self.gate, f"{kind}.gate"))
        if not module and self.site not in MODEL_SITES and self._given_layers() is None:
            raise SpecError(f"{kind} has no layer; name one, a list, or 'all'.")
        self._place()
        if self.site not in EDIT_SITES:
            raise SpecError(
                f"{kind}.site is {shown(self.site)}, which can be read and probed, not edited; "
                f"edits take {', '.join(EDIT_SITES)}."
            )
        if self.gate is not None:
            self.gate.check_tokens(self.tokens, kind)
        if self.dose is not None:
            checked_name(self.dose, f"{kind}.dose")
            if module or len(self.layer_numbers or ()) != 1:
                layers = "those of a module" if module else shown(self.layers)
                raise SpecError(
                    f"{kind}.dose is {shown(self.dose)}, and the layers are {layers}; a dose needs "
                    "one named layer. Leave the dose out, or send one edit for each layer."
                )
        if module and self.gate is not None and self.gate.name is not None:
            raise SpecError(
                f"{kind}.gate.name is {shown(self.gate.name)}, and {kind} names a module, which "
                "may have vectors for some of the tokens only. Leave the name out."
            )

    def _place_vector(self, value: Array | Module, most_dims: int = 2) -> None:
        """Set the vector, site and layers.

        Args:
            value: one vector for all layers, [width of a row], or one vector for each layer,
                [num_layers, width of a row]. For Replace (`most_dims` is 3), a block of n rows
                takes the place of a vector: [n, width of a row] for all layers, or [num_layers, n,
                width of a row].
        """
        name, kind = self.fields[0], type(self).__name__
        self._set(**{name: value})
        self._place_edit()
        if isinstance(value, Array):
            _check_rows(value, self.layer_numbers, f"{kind}.{name}", most_dims)
            if self.needs_direction and not value.numpy.any(axis=-1).all():
                raise SpecError(f"{kind}.{name} is zero; a direction must have a length above 0.")


def _check_rows(value: Array, layers: tuple[int, ...] | None, where: str, most_dims: int) -> None:
    """Raise SpecError if `value` has more than `most_dims` dimensions, or does not have one row (or
    block of rows) for each layer. A value for all layers, which has fewer dimensions, is accepted.
    """
    if len(value.shape) < most_dims:
        return
    if len(value.shape) > most_dims:
        raise SpecError(f"{where} has shape {value.shape}; it has at most {most_dims} dimensions.")
    if layers is None:
        raise SpecError(
            f"{where} has one row or block for each layer, so name the layers, not 'all'."
        )
    if value.shape[0] != len(layers):
        raise SpecError(
            f"{where} has {value.shape[0]} rows or blocks for {len(layers)} layers; the vector of "
            "one layer has one dimension, also at sites with heads (heads * head_size numbers)."
        )


@dataclass(frozen=True)
class Add(Edit):
    """Add a vector: `x + scale * v`.

    Args:
        vector: one vector for all layers, [width of a row]; one vector for each layer, [num_layers,
            width of a row]; or the name of a steering module that is registered in the engine.
        site, layer: the `Place` of the edit. If no layer is given, a module applies at every
            `Place` for which the module has a vector.
        scale: a number. The vector is not normalised.
        tokens: a selector of the tokens. "generated" selects the tokens that the model has sampled.
        norm_match: if True, the edit adds `scale * ||x|| * v / ||v||`.
        max_relative_norm: upper bound of `||change|| / ||x||`. If `max_relative_norm` is None, the
            change has no bound.
        name: a name with which the request's `Policy` can set `scale`. Without a name, `scale` is
            fixed.
        gate: a condition on the token's rows. The change is multiplied by the gate's value, which
            is from 0 to 1.
        dose: a name under which the result has the edit's dose at each token, the actual
            `||change|| / ||x||`. Without this name, doses are not delivered.

    Raises:
        SpecError: a wrong type or shape, a number that is not finite, no layer, or a zero vector
            with norm_match.
    """

    kind: ClassVar[str] = "add"
    fields: ClassVar[tuple[str, ...]] = (
        "vector", "scale", "norm_match", "max_relative_norm", "name", *COMMON,
    )  # fmt: skip

    vector: Any
    _: KW_ONLY
    scale: float = 1.0
    norm_match: bool = False
    max_relative_norm: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        self._set(scale=number(self.scale, "Add.scale"))
        if self.max_relative_norm is not None:
            most = number(self.max_relative_norm, "Add.max_relative_norm")
            if most < 0:
                raise SpecError(f"Add.max_relative_norm is {most:g}; it must be 0 or more.")
            self._set(max_relative_norm=most)
        if self.name is not None:
            checked_name(self.name, "Add.name")
        checked_flag(self.norm_match, "Add.norm_match")
        self._place_vector(vector_or_module(self.vector, "Add.vector"))

    @property
    def needs_direction(self) -> bool:
        return self.norm_match


@dataclass(frozen=True)
class Ablate(Edit):
    """Remove a direction: `x - (x.d) * d`, with d of length 1.

    Args:
        direction: as `Add.vector`. This action normalises the direction to length 1.
        site, layer, tokens, gate, dose: the same arguments as in `Add`.
    """

    kind: ClassVar[str] = "ablate"
    fields: ClassVar[tuple[str, ...]] = ("direction", *COMMON)

    direction: Any

    def __post_init__(self) -> None:
        self._place_vector(vector_or_module(self.direction, "Ablate.direction"))


@dataclass(frozen=True)
class Clamp(Edit):
    """Keep the component along a direction between two bounds, or on one side of one bound.

    Args:
        direction: as `Add.vector`. This action normalises the direction to length 1.
        lo, hi: the lower and the upper bound of `x.d`, with lo <= hi. If lo is None or -inf, or if
            hi is None or inf, there is no such bound. At least one bound must be given.
        site, layer, tokens, gate, dose: the same arguments as in `Add`.
        strength: a number from 0 to 1. With 1, the component along the direction moves to the
            bound. With 0.5, the component moves half of the way to the bound.
    """

    kind: ClassVar[str] = "clamp"
    fields: ClassVar[tuple[str, ...]] = ("direction", "lo", "hi", "strength", *COMMON)

    direction: Any
    _: KW_ONLY
    lo: float | None = None
    hi: float | None = None
    strength: float = 1.0

    def __post_init__(self) -> None:
        self._set(strength=number(self.strength, "Clamp.strength"))
        for name, unbounded in (("lo", -math.inf), ("hi", math.inf)):
            value = getattr(self, name)
            if value is not None:
                one = value.tolist() if getattr(value, "shape", None) == () else value
                infinite = isinstance(one, float) and one == unbounded
                self._set(**{name: None if infinite else number(value, f"Clamp.{name}")})
        if self.lo is None and self.hi is None:
            raise SpecError("Clamp.lo and hi are missing; there is no bound. Give lo, hi or both.")
        if self.lo is not None and self.hi is not None and self.lo > self.hi:
            raise SpecError(f"Clamp.lo is {self.lo:g} and hi {self.hi:g}; lo must be at most hi.")
        if not 0 <= self.strength <= 1:
            raise SpecError(f"Clamp.strength is {self.strength:g}; it must be from 0 to 1.")
        self._place_vector(vector_or_module(self.direction, "Clamp.direction"))


@dataclass(frozen=True)
class Replace(Edit):
    """Replace (patch) the rows at some positions with given rows.

    Args:
        values: the new rows. The shape is [num_positions, width of a row] for the same rows at
            every layer, [num_layers, num_positions, width of a row] for different rows at each
            layer, or [width of a row] for one position.
        positions: distinct positions, one for each row. Negative positions count from the prompt's
            end.
        site, layer: the `Place` of the edit.
        gate, dose: the same arguments as in `Add`. If the gate's value is 0.5, the new row is the
            mean of the old row and the given row.

    Raises:
        SpecError: a wrong type or shape, a repeated position, or no layer.
    """

    kind: ClassVar[str] = "replace"
    fields: ClassVar[tuple[str, ...]] = ("values", "positions", *COMMON)

    values: Any
    _: KW_ONLY
    positions: Any
    tokens: Any = field(default="all", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = self.positions
        positions = as_numbers(given.given if isinstance(given, Positions) else given)
        positions = [positions] if isinstance(positions, int) else positions
        chosen = parse_selector(positions, "Replace.positions")
        if not isinstance(chosen, Positions):
            raise SpecError(
                f"Replace.positions is {shown(self.positions)}; it must be a list of positions."
            )
        if len(chosen.positions) != len(positions):
            raise SpecError("Replace.positions names a position twice.")
        values = Array.parse(self.values, "Replace.values")
        if len(values.shape) == 1:
            values = Array((1, *values.shape), values.data)
        if values.shape[-2] != len(positions):
            raise SpecError(
                f"Replace.values has {values.shape[-2]} rows for {len(positions)} positions."
            )
        self._set(positions=tuple(positions), tokens=chosen)
        self._place_vector(values, most_dims=3)

    def to_json(self) -> dict[str, object]:
        body = super().to_json()
        body.pop("tokens", None)
        return body
