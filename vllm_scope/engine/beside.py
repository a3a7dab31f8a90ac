"""Stores this package's data about vLLM's objects in tables, not in attributes of these objects.

Owns:  Beside.
Runs:  in every process.

Promise: if Python frees an object of vLLM, this package's data about the object is freed too.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

State = TypeVar("State")


class Beside(Generic[State]):
    """A table that maps each object to one State. When Python frees an object, the table drops the
    object's State.

    The table compares objects by identity, because some of vLLM's objects have no hash, and some
    are equal to other objects. A State must not refer to its object, directly or through a
    traceback. Otherwise Python would never free the object and the State.
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[weakref.ref[object], State]] = {}

    def of(self, owner: object) -> State | None:
        found = self._states.get(id(owner))
        return None if found is None else found[1]

    def put(self, owner: object, state: State) -> State:
        key = id(owner)
        # Python runs this callback before a new object can get the id of the freed object.
        gone = weakref.ref(owner, lambda _: self._states.pop(key, None))
        self._states[key] = gone, state
        return state

    def pop(self, owner: object) -> State | None:
        found = self._states.pop(id(owner), None)
        return None if found is None else found[1]

    def __len__(self) -> int:
        return len(self._states)
