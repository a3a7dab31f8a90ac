"""How a seam of vLLM is wrapped: only where it is as it was when it was read.

Owns:  `wrap_method`, `wrap_function`, and `config_of` an engine.
Runs:  in every process of an engine, once, before the engine is made.

Promise: a seam that moved is an error that names it, never a wrapper that does nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_scope.config import KEY, ScopeConfig
from vllm_scope.errors import CompatError


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


def config_of(vllm_config: Any) -> ScopeConfig | None:
    """The configuration that this engine was started with, or None without one."""
    additional = vllm_config.additional_config
    body = additional.get(KEY) if isinstance(additional, dict) else None
    return None if body is None else ScopeConfig.parse(body)
