"""What of a request's SamplingParams is ours: a spec, a face's words, a handle.

Owns:  the handle's place beside the spec.
Runs:  in the front-end, EngineCore and the workers.

Promise: a caller's SamplingParams are never changed; what needs others gets a copy.
"""

from __future__ import annotations

import re
from copy import copy
from typing import Any

from vllm_scope.engine.frontend import translators

#: Where the handle of a request with taps is, beside `scope` in `extra_args`. Made by
#: the front-end: `key`, `frontend`, `first_position` (None reads nothing), `vectors`
#: (it edits or probes), `follows` (its caller sees outputs before the last). EngineCore
#: adds `modules` (name -> digest) and `server` (digest of the server-wide edits); for a plain
#: request too, where the server edits all, and `sinks` where rows go elsewhere than to memory.
#: `owner` is whose API key asked, as a digest.
HANDLE = "scope_handle"


def handle_of(sampling_params: Any) -> dict[str, Any] | None:
    """The handle of a request with taps; None for a plain one."""
    extra = getattr(sampling_params, "extra_args", None)
    handle = extra.get(HANDLE) if extra else None
    return handle if isinstance(handle, dict) else None


def with_handle(sampling_params: Any, handle: dict[str, Any] | None) -> Any:
    """The same parameters with another handle, or none; the caller's own stay as they are."""
    params = copy(sampling_params)
    params.extra_args = dict(params.extra_args or {})
    if handle is None:
        params.extra_args.pop(HANDLE, None)
    else:
        params.extra_args[HANDLE] = handle
    return params


def asks(params: Any) -> bool:
    extra = getattr(params, "extra_args", None)
    return extra is not None and "scope" in extra


def names_module(text: object) -> bool:
    """False for a spec that surely names no steering module, without parsing it."""
    return isinstance(text, str) and _NAME.search(text) is not None


#: A module, or a string in place of numbers, which is its name.
_NAME = re.compile(r'"module"|"(?:vector|direction|values|weight)"\s*:\s*"')


def params_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str = "params"
) -> Any:
    return kwargs[name] if name in kwargs else args[place]


def concerns(params: Any, engine: Any) -> bool:
    """The request has a spec, in our words or in others."""
    return asks(params) or translators.concerned(params, engine.vllm_config)
