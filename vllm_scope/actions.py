"""What one request may ask of a tap: reads, probes and edits, and their JSON.

Owns:  Read, Probe, Add, Ablate, Clamp, Replace.
Runs:  everywhere. numpy, no torch.
To:    spec (puts them together), program (compiles them).

Every edit is one update of a token's row x of the residual stream:

    Add       x + scale * v            norm_match: x + scale * ||x|| * v / ||v||
    Ablate    x - (x.d) * d            d of unit length
    Clamp     x + strength * (clip(x.d, lo, hi) - x.d) * d
    Replace   v, another row for each position

Edits of one site apply in the order in which they are given. A read or probe looks
at the row after the edits of its own site, or before them with `when="before"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from vllm_scope.arrays import Array
from vllm_scope.encoding import CodecChoice
from vllm_scope.errors import SpecError, shown
from vllm_scope.selectors import Positions, Selector, as_numbers, parse_selector
from vllm_scope.sites import SITES, STREAM_SITES, canonical_site, parse_layers

When = Literal["after", "before"]
Layers = Sequence[int] | str | int | None

MAX_NAME = 200
MAX_FLOAT32 = float(np.finfo(np.float32).max)
#: Back to the caller; the destination where none is named.
MEMORY = "memory"


@dataclass(frozen=True)
class Module:
    """The name of a steering module that the engine holds."""

    name: str


def _number(value: object, where: str) -> float:
    if getattr(value, "shape", None) == ():  # of numpy or torch
        value = value.tolist()  # type: ignore[attr-defined]
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise SpecError(f"{where} is {shown(value)}; it is a number.")
    # As the device will have it, which computes in float32.
    if not -MAX_FLOAT32 <= value <= MAX_FLOAT32:
        raise SpecError(f"{where} is {shown(value)}; it must be finite in float32.")
    return float(value)


def _name(value: object, where: str) -> str:
    if not isinstance(value, str) or not value or len(value) > MAX_NAME:
        raise SpecError(
            f"{where} is {shown(value)}; a name is a string of 1 to {MAX_NAME} characters."
        )
    return value


def _values(value: object, where: str) -> Array | Module:
    """Numbers, or the name of a module that has them."""
    if isinstance(value, Module):
        return value
    if isinstance(value, str):
        return Module(_name(value, where))
    if isinstance(value, Mapping) and set(value) == {"module"}:
        return Module(_name(value["module"], f"{where}.module"))
    return Array.parse(value, where)


def _one_of(value: object, allowed: tuple[str, ...], where: str) -> str:
    if value not in allowed:
        raise SpecError(f"{where} is {shown(value)}; it is one of {', '.join(allowed)}.")
    return str(value)


class Action:
    """Base of reads, probes and edits: a site, layers, and tokens.

    `layer` and `layers` are the same argument: a number, a list of numbers, or
    "all" for every tapped layer. Layers count from 0.
    """

    kind: ClassVar[str]
    site: str
    layers: Any
    tokens: Any
    #: Where it may be.
    sites: ClassVar[tuple[str, ...]] = STREAM_SITES
    #: Fields of the JSON form, beside site, layers and tokens.
    fields: ClassVar[tuple[str, ...]] = ()

    def _place(self, layer: Layers = None) -> None:
        """Check and normalise site, layers and tokens."""
        name = type(self).__name__
        object.__setattr__(self, "site", canonical_site(self.site, f"{name}.site"))
        if self.site not in self.sites:
            raise SpecError(
                f"{name}.site is {shown(self.site)}, which can be read alone: its rows are of "
                f"another width than the stream's. Edits and probes take {', '.join(self.sites)}."
            )
        if layer is not None and self.layers is not None:
            raise SpecError(f"{name} has layer and layers; give one of them.")
        object.__setattr__(self, "layers", layer if self.layers is None else self.layers)
        found = parse_layers(self.layers, self.site, f"{name}.layers")
        object.__setattr__(self, "layers", "all" if found is None else found)
        object.__setattr__(self, "tokens", parse_selector(self.tokens, f"{name}.tokens"))

    @property
    def layer_numbers(self) -> tuple[int, ...] | None:
        """None for every tapped layer."""
        return None if isinstance(self.layers, str) else tuple(self.layers)

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"site": self.site}
        if self.site != "embed":
            body["layers"] = self.layers if isinstance(self.layers, str) else list(self.layers)
        if self.tokens != parse_selector("all", ""):
            body["tokens"] = self.tokens.to_json()
        for name in self.fields:
            value = getattr(self, name)
            if value is None or (name == "to" and value == MEMORY):
                continue
            if isinstance(value, Module):
                value = {"module": value.name}
            body[name] = value.to_json() if isinstance(value, Array | CodecChoice) else value
        return body


@dataclass(frozen=True)
class Read(Action):
    """Return the rows of a site, at some layers, of some tokens.

    Args:
        site: `resid_pre`, `resid_mid`, `resid_post` (aliases `pre_attn`, `post_attn`,
            `post_block`) or `embed`. `resid_post` at layer k is Hugging Face's
            `hidden_states[k + 1]`; the last layer's is the stream before the final norm.
            Where the engine taps them, `q`, `k` (after norms and rotary embedding), `v`
            and `z` (what comes out, before its projection), per head.
        layers: layer numbers from 0, or "all" for every tapped layer.
            `embed` takes none.
        tokens: which tokens, see `vllm_scope.selectors`. "all" by default.
        when: "after" the edits of its own site, or "before" them.
        to: "memory" (the rows come back with the request's result), or a sink that the
            engine was started with: "filesystem", or a plugin's name.
        tag, name: what a sink may call the request: a folder for requests that belong
            together, and the request's own name. Not for "memory".
        codec: how the rows are encoded on the device, before they are copied anywhere:
            a name, or an object such as {"name": "rp8", "k": 128, "seed": 3}. They come
            back decoded; what each codec loses: docs/codecs.md.

    Raises:
        SpecError: a wrong type, an unknown site, an empty or negative layer list, an
            unknown codec or option.
    """

    kind: ClassVar[str] = "read"
    sites: ClassVar[tuple[str, ...]] = SITES
    fields: ClassVar[tuple[str, ...]] = ("when", "to", "tag", "name", "codec")

    site: str
    layers: Layers = None
    tokens: Any = "all"
    when: When = "after"
    layer: Layers = field(default=None, repr=False, compare=False, kw_only=True)
    to: str = field(default=MEMORY, kw_only=True)
    tag: str | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    codec: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._place(self.layer)
        object.__setattr__(self, "layer", None)
        object.__setattr__(self, "codec", CodecChoice.parse(self.codec, "Read.codec"))
        if not isinstance(self.layers, str):
            object.__setattr__(self, "layers", tuple(sorted(self.layers)))  # type: ignore[arg-type]
        _one_of(self.when, ("after", "before"), "Read.when")
        _name(self.to, "Read.to")
        for word in ("tag", "name"):
            value = getattr(self, word)
            if value is None:
                continue
            _name(value, f"Read.{word}")
            if self.to == MEMORY:
                raise SpecError(
                    f"Read.{word} is {shown(value)}, and the rows go to memory; it is for "
                    "sinks, such as to='filesystem'."
                )


@dataclass(frozen=True)
class Probe(Action):
    """Score each token's row: `x.weight + bias`, computed on the device.

    Args:
        weight: [hidden_size], or the name of a steering module that the engine holds,
            which has a vector there.
        bias: added to each score.
        site, layer: where; one layer.
        name: of the scores in the result.
        tokens: which tokens.
        to: as for `Read`; only some sinks take scores, "filesystem" does not.

    Raises:
        SpecError: a wrong type or shape, no name, or not exactly one layer.
    """

    kind: ClassVar[str] = "probe"
    fields: ClassVar[tuple[str, ...]] = ("weight", "bias", "name", "to")

    weight: Any
    bias: float = 0.0
    site: str = "resid_post"
    layer: Layers = field(default=None, repr=False)
    name: str = ""
    tokens: Any = "all"
    layers: Layers = field(default=None, kw_only=True)
    to: str = field(default=MEMORY, kw_only=True)

    def __post_init__(self) -> None:
        _name(self.to, "Probe.to")
        object.__setattr__(self, "weight", _values(self.weight, "Probe.weight"))
        if isinstance(self.weight, Array) and len(self.weight.shape) != 1:
            raise SpecError(
                f"Probe.weight has shape {self.weight.shape}; it is one vector, [hidden_size]."
            )
        object.__setattr__(self, "bias", _number(self.bias, "Probe.bias"))
        _name(self.name, "Probe.name")
        given = self.layer if self.layers is None else self.layers
        self._place(self.layer)
        if self.layer_numbers is None or len(self.layer_numbers) != 1:
            raise SpecError(f"Probe.layers is {shown(given)}; a probe has one layer.")
        object.__setattr__(self, "layer", None)


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
        value = _values(getattr(self, name), where)
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
        object.__setattr__(self, "scale", _number(self.scale, "Add.scale"))
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
    """Hold the component along a direction between two bounds.

    Args:
        direction: as `Add.vector`; normalised here.
        lo, hi: bounds of `x.d`, lo <= hi.
        site, layer, tokens: as for `Add`.
        strength: from 0 to 1: which part of the way to the bound it goes.
    """

    kind: ClassVar[str] = "clamp"
    fields: ClassVar[tuple[str, ...]] = ("direction", "lo", "hi", "strength")

    direction: Any
    lo: float
    hi: float
    site: str = "resid_post"
    layer: Layers = field(default=None, repr=False)
    tokens: Any = "all"
    strength: float = 1.0
    layers: Layers = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("lo", "hi", "strength"):
            object.__setattr__(self, name, _number(getattr(self, name), f"Clamp.{name}"))
        if self.lo > self.hi:
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


#: kind -> class, of everything that the JSON form may name.
KINDS: dict[str, type[Any]] = {
    action.kind: action for action in (Read, Probe, Add, Ablate, Clamp, Replace)
}


def action_from_json(cls: type[Any], body: object, where: str) -> Any:
    """One action from its JSON form.

    Raises:
        SpecError: with `where` and the field, what came and what is allowed.
    """
    if not isinstance(body, dict):
        raise SpecError(f"{where} is {shown(body)}; it is an object.")
    known = {"site", "layers", "tokens", *cls.fields} - ({"tokens"} if cls is Replace else set())
    unknown = sorted(set(body) - known, key=str)
    if unknown:
        raise SpecError(
            f"{where} has {shown(unknown[0])}; the fields are {', '.join(sorted(known))}."
        )
    if "site" not in body:
        raise SpecError(f"{where} has no 'site'; sites are {', '.join(SITES)}.")
    try:
        return cls(**body)
    except TypeError:
        # Nothing but a missing argument is left: the names were checked above.
        raise SpecError(f"{where} needs {', '.join(cls.fields)}.") from None
    except SpecError as error:
        raise SpecError(str(error).replace(f"{cls.__name__}.", f"{where}.", 1)) from None


def tokens_of(action: Action) -> Selector:
    tokens = action.tokens
    assert isinstance(tokens, Selector)
    return tokens
