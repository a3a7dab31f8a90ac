"""How a seam of vLLM is wrapped: only where it is as it was when it was read.

Owns:  `check_version`, `wrap_method`, `wrap_function`, and `config_of` an engine.
Runs:  in every process of an engine, once, before the engine is made.

Promise: a seam that moved is an error at start that names it: a function that is gone, one
that lost a parameter which the wrapper reads, or one that gained a parameter which the wrapper
cannot pass on. Inside the supported versions the code asks for features, not for numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_scope.config import KEY, ScopeConfig
from vllm_scope.errors import CompatError

#: The first and the last minor version of vLLM that this version was tried with.
FIRST, LAST = (0, 30), (0, 33)


def check_version(version: str) -> None:
    """Raises CompatError for a vLLM outside of FIRST to LAST.

    Args:
        version: as `vllm.__version__` has it.
    """
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(version).release[:2]
    except InvalidVersion:
        release = (0, 0)
    if not FIRST <= release <= LAST:
        raise CompatError(
            f"this is not a vLLM that vllm-scope was tried with: {_supported(version)}"
        )


def wrap_method(owner: type, name: str, parameters: list[str], wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by `wrapper(original, self, ...)`.

    Args:
        owner: a vLLM class.
        name: the method.
        parameters: names that its signature must hold, `self` left out.
        wrapper: called with the original function first.

    Raises:
        CompatError: the method is gone, or its parameters and the wrapper's do not agree.
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
    signature = inspect.signature(original)
    missing = set(parameters) - set(signature.parameters)
    if missing:
        raise CompatError(
            f"{owner.__name__}.{name} of this vLLM has no parameter "
            f"{', '.join(sorted(missing))}; {_supported()}"
        )
    # Of a class method, `getattr` gives one without its first parameter.
    given = [original, owner] if inspect.ismethod(original) else [original]
    refused = _refused_parameter(signature, wrapper, given)
    if refused is not None:
        raise CompatError(
            f"{owner.__name__}.{name} of this vLLM takes {refused}, which vllm-scope does not "
            f"pass on; {_supported()}"
        )

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return wrapped


def _refused_parameter(
    original: inspect.Signature, wrapper: Callable[..., Any], given: list[Any]
) -> str | None:
    """A parameter that callers may give to the original and the wrapper cannot take, or None.

    Args:
        given: what the wrapper gets before the original's parameters.
    """
    kinds = inspect.Parameter
    taken = inspect.signature(wrapper)
    positional = list(given)
    named: dict[str, object] = {}
    for parameter in original.parameters.values():
        if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            continue
        if parameter.kind is kinds.KEYWORD_ONLY:
            named[parameter.name] = parameter
        else:
            positional.append(parameter)
        try:
            taken.bind_partial(*positional, **named)
        except TypeError:
            return parameter.name
    return None


def _supported(version: str | None = None) -> str:
    import vllm

    first, last = (".".join(map(str, number)) for number in (FIRST, LAST))
    return (
        f"vllm-scope knows vLLM {first} to {last}, this is {version or vllm.__version__}. "
        "Set VLLM_SCOPE=0 to serve without it."
    )


def config_of(vllm_config: Any) -> ScopeConfig | None:
    """The configuration that this engine was started with, or None without one."""
    additional = vllm_config.additional_config
    body = additional.get(KEY) if isinstance(additional, dict) else None
    return None if body is None else ScopeConfig.parse(body)
