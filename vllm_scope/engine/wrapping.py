"""Replaces symbols of vLLM by wrappers, after a check that each symbol fits its wrapper.

Owns:  `wrap`, `exists`, `require`, `owners`, `check_version`.
Runs:  in every process of an engine, once, before the engine is created. In a worker with Model
       Runner V1, the sampler is wrapped later, when the runner gets its taps.
From:  seams.CONTRACT.

Promise: an engine does not start in three cases: a wrapped symbol is missing; or the symbol lacks a
parameter that its wrapper reads; or the symbol has a new parameter that its wrapper does not
accept. The error names the symbol. If supported versions of vLLM differ in a feature, our code
tests whether the feature exists, and does not test the version.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from vllm_scope.engine.seams import CONTRACT, Seam
from vllm_scope.errors import CompatError

#: The first and the last minor version of vLLM with which this vllm-scope was tested.
FIRST, LAST = (0, 30), (0, 33)


def wrap(name: str, wrapper: Callable[..., object]) -> None:
    """Replace a symbol of CONTRACT by a function that calls `wrapper(original, ...)`.

    Args:
        name: the symbol's name in CONTRACT.
        wrapper: a function that gets the original function, then `self` for a method, then the
            arguments of the call.

    Raises:
        CompatError: the symbol is missing or lacks a parameter that CONTRACT names, or the wrapper
            does not accept one of the symbol's parameters.
    """
    replace_in(owners(name), name.rpartition(".")[2], _find(name).parameters, wrapper)


def exists(name: str) -> bool:
    """True if the installed vLLM has this symbol of CONTRACT. This function imports the symbol's
    module."""
    return _exists(_find(name))


def require(*names: str) -> None:
    """Raises CompatError if the installed vLLM does not have one of these symbols of CONTRACT."""
    for name in names:
        _original(owners(name)[0], name.rpartition(".")[2])


def owners(name: str) -> list[type | ModuleType]:
    """The objects in which `wrap` replaces a symbol of CONTRACT. For a method, this is the class of
    the method. For a function, these are all modules that contain the function.

    Raises:
        CompatError: one of these objects is missing.
    """
    seam, above = _find(name), name.rpartition(".")[0]
    try:
        if above:
            return [pkgutil.resolve_name(f"{seam.module}:{above}")]
        return [pkgutil.resolve_name(module) for module in (seam.module, *seam.holders)]
    except (ImportError, AttributeError) as error:
        raise CompatError(f"this vLLM has no {seam.module}.{name}; {_known()}") from error


def _find(name: str) -> Seam:
    declared = [seam for seam in CONTRACT if seam.name == name]
    return next(filter(_exists, declared), declared[-1])


def _exists(seam: Seam) -> bool:
    try:
        pkgutil.resolve_name(f"{seam.module}:{seam.name}")
    except (ImportError, AttributeError):
        return False
    return True


def replace_in(
    owners: Sequence[type | ModuleType],
    name: str,
    parameters: Sequence[str],
    wrapper: Callable[..., object],
) -> None:
    """Replace a function in all its owners by the same wrapped function.

    Args:
        owners: for a method, the class of the method. Else the modules that contain the function.
        parameters: names of parameters that the function must have.
        wrapper: the argument `wrapper` of `wrap`.

    Raises:
        CompatError: an owner has no such function, or the function lacks one of `parameters`, or
            the wrapper does not accept one of the function's parameters.
    """
    for owner in owners:
        _original(owner, name)
    wrapped = _wrapped(owners[0], name, parameters, wrapper)
    for owner in owners:
        setattr(owner, name, wrapped)


def _original(owner: type | ModuleType, name: str) -> Any:
    if not hasattr(owner, name):
        raise CompatError(f"this vLLM has no {owner.__name__}.{name}; {_known()}")
    return getattr(owner, name)


def _wrapped(
    owner: type | ModuleType, name: str, parameters: Sequence[str], wrapper: Callable[..., object]
) -> Callable[..., object]:
    original = _original(owner, name)
    signature = inspect.signature(original)
    missing = set(parameters) - set(signature.parameters)
    if missing:
        raise CompatError(
            f"{owner.__name__}.{name} of this vLLM has no parameter "
            f"{', '.join(sorted(missing))}; {_known()}"
        )
    # If the symbol is a class method, `getattr` has bound the method to its class. The signature
    # then lacks the first parameter, but the wrapper gets an argument for this parameter.
    given = [original, owner] if inspect.ismethod(original) else [original]
    refused = _refused_parameter(signature, wrapper, given)
    if refused is not None:
        raise CompatError(
            f"{owner.__name__}.{name} of this vLLM takes {refused}, which vllm-scope does not "
            f"pass on; {_known()}"
        )

    @functools.wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        return wrapper(original, *args, **kwargs)

    return wrapped


def _refused_parameter(
    original: inspect.Signature, wrapper: Callable[..., object], given: list[object]
) -> str | None:
    """The first parameter of the original function that the wrapper does not accept, or None.

    Args:
        given: the arguments that the wrapper gets before the arguments of the call.
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


def check_version(version: str) -> None:
    """Raises CompatError if this version of vLLM is not between FIRST and LAST.

    Args:
        version: the text of `vllm.__version__`.
    """
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(version).release[:2]
    except InvalidVersion:
        release = (0, 0)
    if not FIRST <= release <= LAST:
        raise CompatError(f"vllm-scope was not tested with this vLLM: {_known(version)}")


def _known(version: str | None = None) -> str:
    import vllm

    first, last = (".".join(map(str, number)) for number in (FIRST, LAST))
    return (
        f"vllm-scope supports vLLM {first} to {last}; this is {version or vllm.__version__}. "
        "Set VLLM_SCOPE=0 to serve without it."
    )
