"""A property that is computed at its first use.

Owns:  cached_property, and the state without them.
Runs:  everywhere, on any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801  (its namesake)
    """As functools.cached_property, without its lock, which Python 3.12 has dropped too: a request
    computes about forty of them on its way in. Two threads may compute the value at once.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Self | Value:
        if instance is None:
            return self
        found = instance.__dict__[self._name] = self._compute(instance)
        return found


def fields_alone(self: Any) -> dict[str, object]:
    """The `__getstate__` of a dataclass whose cached properties are not pickled."""
    names = self.__dataclass_fields__
    return {name: value for name, value in self.__dict__.items() if name in names}
