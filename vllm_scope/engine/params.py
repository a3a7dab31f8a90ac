"""Our fields in a request's SamplingParams: the spec, keys of translators, the handle.

Owns:  the handle's place beside the spec.
Runs:  in the front-end, EngineCore and the workers.

Promise: a caller's SamplingParams are never changed; a change is made in a copy.
"""

from __future__ import annotations

import re
from copy import copy
from typing import Any

from vllm_scope.engine.frontend import translators

#: Where the handle of a request with taps is, beside `scope` in `extra_args`. The front-end sets:
#:   key, frontend   the request's rows at its front-end; uid, child: at sinks
#:   first_position  the first that delivers something; None if none does
#:   vectors         it edits or probes
#:   sinks           some rows go elsewhere than to memory
#:   follows         its caller sees outputs before the last
#:   owner           digest of the API key
#: EngineCore adds `modules` (name -> digest) and `server` (digest of the server-wide edits). It
#: makes a handle for plain requests too, if server-wide edits or global sinks apply to them.
HANDLE = "scope_handle"


def handle_of(sampling_params: Any) -> dict[str, Any] | None:
    """The handle of a request with taps; None for a plain one."""
    extra = getattr(sampling_params, "extra_args", None)
    handle = extra.get(HANDLE) if extra else None
    return handle if isinstance(handle, dict) else None


def with_handle(sampling_params: Any, handle: dict[str, Any] | None) -> Any:
    """A copy of the parameters with this handle, or without one."""
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
    """False for a spec that certainly names no steering module. Does not parse it."""
    return isinstance(text, str) and _NAME.search(text) is not None


#: A module's field, or a string (a module's name) where numbers may stand.
_NAME = re.compile(r'"module"|"(?:vector|direction|values|weight)"\s*:\s*"')


def params_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str = "params"
) -> Any:
    return kwargs[name] if name in kwargs else args[place]


def concerns(params: Any, engine: Any) -> bool:
    """True if the request has a spec, or keys of a translator."""
    return asks(params) or translators.concerned(params, engine.vllm_config)
