"""The `vllm.general_plugins` entry point, and the seams it wraps.

Runs:  `register` in the front-end, in EngineCore and in every worker process, maybe
       more than once. Light and idempotent.

Promise: with VLLM_SCOPE=0, nothing at all. Otherwise a vLLM whose seams moved is
refused with a sentence that names the seam.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_scope.config import KEY, ScopeConfig
from vllm_scope.errors import CompatError

logger = logging.getLogger("vllm.vllm_scope")

_registered = False


def enabled() -> bool:
    """False where VLLM_SCOPE is 0, false, off or no."""
    return os.environ.get("VLLM_SCOPE", "1").lower() not in ("0", "false", "off", "no")


def register() -> None:
    """Wrap vLLM's seams, once per process."""
    global _registered
    if _registered or not enabled():
        return
    _registered = True
    from vllm_scope import faces
    from vllm_scope.engine import core, frontend, http, refusals, worker

    wrap_engine_args()
    frontend.wrap()
    core.wrap()
    refusals.wrap()
    worker.wrap()
    http.wrap()
    faces.register()


def wrap_method(owner: type, name: str, parameters: list[str], wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by `wrapper(original, self, ...)`.

    Args:
        owner: a vLLM class.
        name: the method.
        parameters: names that its signature must hold, `self` left out.
        wrapper: called with the original function first.

    Raises:
        CompatError: the method is gone or its parameters are others.
    """
    setattr(owner, name, _wrapped(owner, name, parameters, wrapper))


def wrap_function(
    modules: list[ModuleType], name: str, parameters: list[str], wrapper: Callable[..., Any]
) -> None:
    """Replace a function in every module that holds it by name; as `wrap_method`."""
    wrapped = _wrapped(modules[0], name, parameters, wrapper)
    for module in modules:
        if not hasattr(module, name):
            raise CompatError(f"this vLLM has no {module.__name__}.{name}; {_supported()}")
        setattr(module, name, wrapped)


def _wrapped(
    owner: type | ModuleType, name: str, parameters: list[str], wrapper: Callable[..., Any]
) -> Callable[..., Any]:
    original = getattr(owner, name, None)
    if original is None:
        raise CompatError(f"this vLLM has no {owner.__name__}.{name}; {_supported()}")
    missing = set(parameters) - set(inspect.signature(original).parameters)
    if missing:
        raise CompatError(
            f"{owner.__name__}.{name} of this vLLM has no parameter "
            f"{', '.join(sorted(missing))}; {_supported()}"
        )

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return wrapped


def _supported() -> str:
    import vllm

    return (
        f"vllm-scope knows vLLM 0.32, this is {vllm.__version__}. "
        "Set VLLM_SCOPE=0 to serve without it."
    )


def wrap_engine_args() -> None:
    """Put the configuration, with defaults, where workers and the compile key see it."""
    from vllm.engine.arg_utils import EngineArgs

    def create_engine_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        additional = dict(self.additional_config or {})
        additional[KEY] = ScopeConfig.parse(additional.get(KEY, {})).with_graph_key()
        self.additional_config = additional
        return original(self, *args, **kwargs)

    wrap_method(EngineArgs, "create_engine_config", [], create_engine_config)


def config_of(vllm_config: Any) -> ScopeConfig | None:
    """The configuration that this engine was started with, or None without one."""
    additional = vllm_config.additional_config
    body = additional.get(KEY) if isinstance(additional, dict) else None
    return None if body is None else ScopeConfig.parse(body)
