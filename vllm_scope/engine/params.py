"""Handles this package's fields in SamplingParams: the spec, the keys of translators, the ticket.

Owns:  the name of the key that holds the ticket in SamplingParams.
Runs:  in the front-end and in EngineCore.

A translator (frontend.translators) makes a spec from the keys of another system.

Promise: the SamplingParams object of a caller never changes. All changes are made in a copy.
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
#: replaces the spec by the Ticket.
TICKET = "scope_ticket"


def has_ticket(sampling_params: object) -> bool:
    extra = getattr(sampling_params, "extra_args", None)
    return extra is not None and TICKET in extra


def ticket_of(sampling_params: Any) -> Ticket | None:
    """The ticket in the parameters of a request; None if the parameters contain no ticket."""
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
    """A copy of the parameters without their ticket. If there is no ticket, the result is the same
    object."""
    if not has_ticket(sampling_params):
        return sampling_params
    params = copy(sampling_params)
    params.extra_args = {k: value for k, value in params.extra_args.items() if k != TICKET}
    return params


#: Types whose values cannot change. `dedicated` adds the class of each Enum member that it finds.
_FIXED: set[type] = {type(None), bool, int, float, str, bytes, translators.Decorators}


def dedicated(sampling_params: Params) -> Params:
    """A copy of the parameters for only one request. vLLM does not copy this copy again.

    vLLM's deep copy takes 20 us, a third of the front-end's time for a request without a scope.

    The copy has its own lists, sets and dicts. All other values, and all items of these lists, sets
    and dicts, must have a type in `_FIXED`. Otherwise the parameters are returned unchanged, and
    vLLM copies them. Parameters that vLLM does not copy (`skip_clone`) are also returned unchanged.
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
    """True if the text of a spec can name a steering module. To save time, this function searches
    the text and does not parse it. Therefore the result can also be True for a spec that names no
    module. False if `text` is not a string."""
    return isinstance(text, str) and _has_name(text)


@lru_cache(maxsize=8)  # monitors give the same long text to every request
def _has_name(text: str) -> bool:
    return _NAME.search(text) is not None


#: Matches the field `module`. Also matches a string in a field for numbers, because such a string
#: names a steering module.
_NAME = re.compile(r'"module"|"(?:vector|direction|values|weight)"\s*:\s*"')


def params_of(
    args: tuple[object, ...], kwargs: Mapping[str, object], place: int, name: str = "params"
) -> Any:
    return kwargs[name] if name in kwargs else args[place]


def used_by_vllm(
    args: tuple[object, ...], kwargs: Mapping[str, object], place: int, name: str = "params"
) -> Any:
    """The parameters with which vLLM runs the request of a call. The prompt is the argument before
    the parameters. If the prompt is a whole EngineCoreRequest, vLLM uses the parameters in this
    EngineCoreRequest, and ignores the parameters of the call.
    vllm 0.30 to 0.33, v1/engine/async_llm.py, AsyncLLM.add_request"""
    params = params_of(args, kwargs, place, name)
    return getattr(params_of(args, kwargs, place - 1, "prompt"), "sampling_params", None) or params


def concerns(params: object, engine: Engine) -> bool:
    """True if the request has a spec or keys of a translator, or if a translator now applies to
    every request. For example, while monitors are set, their translator applies to every
    request."""
    return asks(params) or bool(translators.applying(params, engine.vllm_config))
