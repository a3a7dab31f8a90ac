"""Our fields in a request's SamplingParams: the spec, keys of translators, the ticket.

Owns:  the key of the ticket in SamplingParams.
Runs:  in the front-end and in EngineCore.

Promise: a caller's SamplingParams never change. Changes are made in a copy.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from copy import copy
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

from msgspec.structs import astuple

from vllm_scope.engine.frontend import translators
from vllm_scope.engine.vllm_types import Engine, SamplingParams
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.ticket import Ticket

Params = TypeVar("Params", bound=SamplingParams)

#: The key of `extra_args` that holds the Ticket of a request with taps, as bytes. The front-end
#: puts the Ticket there in place of the spec.
TICKET = "scope_ticket"


def has_ticket(sampling_params: object) -> bool:
    extra = getattr(sampling_params, "extra_args", None)
    return extra is not None and TICKET in extra


def ticket_of(sampling_params: Any) -> Ticket | None:
    """The ticket of a request with taps; None for a request without taps."""
    if not has_ticket(sampling_params):
        return None
    return Ticket.decode(sampling_params.extra_args[TICKET])


def with_ticket(sampling_params: Params, ticket: Ticket, without: Collection[str]) -> Params:
    """A copy of the parameters with a ticket, and without some keys of `extra_args`."""
    params = copy(sampling_params)
    kept = {key: value for key, value in params.extra_args.items() if key not in without}
    params.extra_args = {**kept, TICKET: ticket.encode()}
    return params


def without_ticket(sampling_params: Any) -> Any:
    """A copy of the parameters without their ticket. Without a ticket: the same object."""
    if not has_ticket(sampling_params):
        return sampling_params
    params = copy(sampling_params)
    params.extra_args = {k: value for k, value in params.extra_args.items() if k != TICKET}
    return params


#: Types whose values are immutable. `dedicated` adds the types of enumerations that it finds.
_FIXED: set[type] = {type(None), bool, int, float, str, bytes, translators.Decorators}


def dedicated(sampling_params: Params) -> Params:
    """A copy of the parameters for one request alone. vLLM does not copy this object again.

    vLLM's own copy is deep and takes 20 us: a third of the front-end's time for a plain request.
    This function's copy has its own lists, sets and dicts of plain values. Parameters with other
    values are returned unchanged, and vLLM copies such parameters.
    """
    if sampling_params.skip_clone:
        return sampling_params
    made = copy(sampling_params)
    fields: Any = made
    for name, value in zip(fields.__struct_fields__, astuple(fields), strict=True):
        kind = type(value)
        if kind in _FIXED:
            continue
        if isinstance(value, Enum):
            _FIXED.add(kind)
            continue
        if kind not in (dict, list, set):
            return sampling_params
        items = value.values() if kind is dict else value
        if not _FIXED.issuperset(map(type, items)):
            return sampling_params
        setattr(made, name, value.copy())
    made.skip_clone = True
    return made


def asks(params: object) -> bool:
    """True if a request has a spec. Raises SpecError if `extra_args` is not a mapping."""
    extra = getattr(params, "extra_args", None)
    if extra is None:
        return False
    if not isinstance(extra, Mapping):
        raise SpecError(
            f"extra_args is {shown(extra)}; it must be a dict, as scope(Read(...)) makes it."
        )
    return "scope" in extra


def names_module(text: object) -> bool:
    """False if a spec surely names no steering module. The spec's text is searched, not parsed."""
    return isinstance(text, str) and _has_name(text)


@lru_cache(maxsize=8)  # monitors give the same long text to every request
def _has_name(text: str) -> bool:
    return _NAME.search(text) is not None


#: Matches a field `module`. Also matches a string in place of numbers, which names a module.
_NAME = re.compile(r'"module"|"(?:vector|direction|values|weight)"\s*:\s*"')


def params_of(
    args: tuple[object, ...], kwargs: Mapping[str, object], place: int, name: str = "params"
) -> Any:
    return kwargs[name] if name in kwargs else args[place]


def concerns(params: object, engine: Engine) -> bool:
    """True if the request has a spec, or keys of a translator."""
    return asks(params) or bool(translators.applying(params, engine.vllm_config))
