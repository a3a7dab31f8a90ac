"""What reads, probes and edits have in common: a place, tokens, and their JSON.

Owns:  Action, Module (a name in place of a vector), and checks of single values.
To:    delivering, edits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.arrays import Array
from vllm_scope.request.encoding import CodecChoice
from vllm_scope.request.selectors import Selector, check_size, parse_selector
from vllm_scope.request.sites import STREAM_SITES, canonical_site, parse_layers

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


def number(value: object, where: str) -> float:
    if getattr(value, "shape", None) == ():  # of numpy or torch
        value = value.tolist()  # type: ignore[attr-defined]
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise SpecError(f"{where} is {shown(value)}; it is a number.")
    # As the device will have it, which computes in float32.
    if not -MAX_FLOAT32 <= value <= MAX_FLOAT32:
        raise SpecError(f"{where} is {shown(value)}; it must be finite in float32.")
    return float(value)


def checked_name(value: object, where: str) -> str:
    """A name that can be written as UTF-8.

    Raises:
        SpecError: another type, a wrong length, or half of a pair of surrogates.
    """
    if not isinstance(value, str) or not value or len(value) > MAX_NAME:
        raise SpecError(
            f"{where} is {shown(value)}; a name is a string of 1 to {MAX_NAME} characters."
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SpecError(
            f"{where} is {shown(value)}, which has half of a character; names are UTF-8."
        ) from None
    return value


def vector_or_module(value: object, where: str) -> Array | Module:
    """Numbers, or the name of a module that has them."""
    if isinstance(value, Module):
        return value
    if isinstance(value, str):
        return Module(checked_name(value, where))
    if isinstance(value, Mapping) and set(value) == {"module"}:
        return Module(checked_name(value["module"], f"{where}.module"))
    return Array.parse(value, where)


def one_of(value: object, allowed: tuple[str, ...], where: str) -> str:
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
                f"{name}.site is {shown(self.site)}, which can be read alone; edits and "
                f"probes take {', '.join(self.sites)}."
            )
        if layer is not None and self.layers is not None:
            raise SpecError(f"{name} has layer and layers; give one of them.")
        object.__setattr__(self, "layers", layer if self.layers is None else self.layers)
        found = parse_layers(self.layers, self.site, f"{name}.layers")
        object.__setattr__(self, "layers", "all" if found is None else found)
        object.__setattr__(self, "tokens", parse_selector(self.tokens, f"{name}.tokens"))
        check_size(self.tokens, f"{name}.tokens")

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


def tokens_of(action: Action) -> Selector:
    tokens = action.tokens
    assert isinstance(tokens, Selector)
    return tokens
