"""The fields that all actions share (site, layers, tokens), and their JSON.

Owns:  Action, Module (the name of a steering module), and checks of single values.
To:    the other files of this folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import numpy as np

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.arrays import Array
from vllm_scope.request.selectors import Word, check_size, parse_selector
from vllm_scope.request.sites import EMBEDDING, MODEL_SITES, canonical_site, parse_layers

T = TypeVar("T")
Layers = Sequence[int] | str | int | None

MAX_NAME = 200
#: The number of a feature is below this limit, because feature numbers are delivered as int32.
MOST_FEATURES = 1 << 31
MAX_FLOAT32 = float(np.finfo(np.float32).max)
#: The default of `to`: the rows and scores go into the request's result.
MEMORY = "memory"


@dataclass(frozen=True)
class Module:
    """The name of a steering module that is registered in the engine."""

    name: str


def number(value: object, where: str) -> float:
    """Convert a number to a float. Raises SpecError if the value is not a number, or is not finite
    in float32."""
    if getattr(value, "shape", None) == ():  # numpy or torch made this scalar
        value = value.tolist()  # type: ignore[attr-defined]
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise SpecError(f"{where} is {shown(value)}; it must be a number.")
    # The device computes in float32.
    if not -MAX_FLOAT32 <= value <= MAX_FLOAT32:
        raise SpecError(f"{where} is {shown(value)}; it must be finite in float32.")
    return float(value)


def without(cls: type[Any], given: Mapping[str, object], where: str) -> SpecError:
    """Make the error for a JSON object that lacks required arguments of a class."""
    needed = [one for one in fields(cls) if one.default is one.default_factory is MISSING]
    missing = [one.name for one in needed if one.name not in given]
    return SpecError(f"{where} has no {' and no '.join(missing)}.")


def checked_name(value: object, where: str) -> str:
    """Return the name. Raises SpecError if it is not a string of 1 to MAX_NAME characters, or
    cannot be encoded in UTF-8."""
    if not isinstance(value, str) or not value or len(value) > MAX_NAME:
        raise SpecError(
            f"{where} is {shown(value)}; a name is a string of 1 to {MAX_NAME} characters."
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SpecError(
            f"{where} is {shown(value)}, which has half of a surrogate pair; names are UTF-8."
        ) from None
    return value


def vector_or_module(value: object, where: str) -> Array | Module:
    """Parse a string or `{"module": name}` as a Module, and any other value as an Array."""
    if isinstance(value, Module):
        return value
    if isinstance(value, str):
        return Module(checked_name(value, where))
    if isinstance(value, Mapping) and set(value) == {"module"}:
        return Module(checked_name(value["module"], f"{where}.module"))
    return Array.parse(value, where)


def feature_numbers(value: Any, where: str, most: int, limit: str) -> tuple[int, ...]:
    """Convert one feature number, or a list of 1 to `most` feature numbers, to a tuple. Raises
    SpecError for any other value. If there are no features or too many, the text of the error ends
    with `limit`."""
    given = value.tolist() if hasattr(value, "tolist") else value
    found = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not 1 <= len(found) <= most:
        raise SpecError(f"{where} has {len(found)} features; {limit}")
    known = all(type(i) is int and 0 <= i < MOST_FEATURES for i in found)
    if not known or len(set(found)) < len(found):
        raise SpecError(
            f"{where} is {shown(given)}; it must name each feature one time, by its number, which "
            f"must be below {MOST_FEATURES:,}."
        )
    return found


def sae_rows(cls: type[T], value: object, where: str, allowed: str) -> T:
    """Parse a JSON object with the fields of `cls`, which is FeatureRows or EncoderRows. An object
    of `cls` is returned without changes. For any other value, raises SpecError with a text that has
    `allowed` and the names of the fields.
    """
    if isinstance(value, cls):
        return value
    names = [one.name for one in fields(cls)]  # type: ignore[arg-type]
    if not isinstance(value, Mapping) or set(value) != set(names):
        raise SpecError(f"{where} is {shown(value)}; it must be {allowed} {', '.join(names)}.")
    try:
        return cls(**value)
    except SpecError as error:
        raise SpecError(str(error).replace("sae.", f"{where}.", 1)) from None


def held(name: str, there: Mapping[str, T], where: str, what: str, option: str) -> T:
    """The engine's SAE or lens with this name. Raises SpecError if the engine has none.

    Args:
        there: all SAEs or all lenses of the engine, by name.
        what: "SAE" or "lens", for the error's text.
        option: the engine's option that names the SAEs or lenses, for the error's text.
    """
    if name not in there:
        known = ", ".join(sorted(there)[:8]) or "none"
        raise SpecError(
            f"{where} is {shown(name)}, which this engine does not hold; it holds: {known}. Name "
            f"the {what} in additional_config={{'scope': {{'{option}': ...}}}}."
        )
    return there[name]


@dataclass(frozen=True, kw_only=True)
class Action:
    """The base class of all actions.

    `layer` and `layers` are two names of one argument: a number, a list of numbers, or "all" for
    every tapped layer. Layers count from 0. After construction, `layers` is a tuple or "all". If
    the action has exactly one layer, `layer` is the number of this layer. In all other cases,
    `layer` equals `layers`. If a named SAE determines the `Place` of the action, `layer` and
    `layers` are None.
    """

    kind: ClassVar[str]
    #: The fields of the JSON form, except site, layers and tokens. The first field of an edit is
    #: the edit's vector, direction, rows or SAE.
    fields: ClassVar[tuple[str, ...]] = ()
    #: How this class names the embedding output (the argument `embedding` of `parse_layers`).
    embedding: ClassVar[str] = EMBEDDING

    site: str = "resid_post"
    layer: Layers = field(default=None, repr=False, compare=False)
    layers: Layers = None
    tokens: Any = "all"

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _given(self, name: str, default: str) -> str:
        """The value of a field, or `default` if the field is None or "". A wrong value that also
        counts as false, such as 0, is returned, so that a later check refuses it."""
        value = getattr(self, name)
        return default if value is None or value == "" else value

    def _place(self) -> None:
        """Check and normalise site, layers and tokens."""
        name = type(self).__name__
        site = canonical_site(self.site, f"{name}.site")
        found = parse_layers(self._given_layers(), site, f"{name}.layers", self.embedding)
        layers = "all" if found is None else found
        one = found[0] if found is not None and len(found) == 1 else layers
        tokens = parse_selector(self.tokens, f"{name}.tokens")
        check_size(tokens, f"{name}.tokens")
        self._set(site=site, layer=one, layers=layers, tokens=tokens)

    def _given_layers(self) -> Layers:
        layer, layers = self.layer, self.layers
        if layer is None or layers is None:
            return layers if layer is None else layer
        # dataclasses.replace passes `layer` and `layers`, with the values that `_place` has set.
        if isinstance(layers, str | tuple) and layers in (layer, (layer,)):
            return layers
        raise SpecError(f"{type(self).__name__} has layer and layers; give one of them.")

    def _sort_layers(self) -> None:
        if self.layer_numbers is not None and len(self.layer_numbers) > 1:
            layers = tuple(sorted(self.layer_numbers))
            self._set(layer=layers, layers=layers)

    @property
    def layer_numbers(self) -> tuple[int, ...] | None:
        """The layers as a tuple. None if the action applies to every tapped layer, or if a named
        SAE determines the layer."""
        return self.layers if isinstance(self.layers, tuple) else None

    def to_json(self) -> dict[str, object]:
        body: dict[str, object] = {}
        # If an action names an SAE, the action can leave out site and layers.
        if self.site:
            body["site"] = self.site
        if self.site not in MODEL_SITES and self.layers is not None:
            body["layers"] = self.layers
        if self.tokens != Word("all"):
            body["tokens"] = self.tokens.to_json()
        for name in self.fields:
            value = getattr(self, name)
            if value is None or (name == "to" and value == MEMORY):
                continue
            if isinstance(value, Module):
                value = {"module": value.name}
            to_json = getattr(value, "to_json", None)
            body[name] = value if to_json is None else to_json()
        return body
