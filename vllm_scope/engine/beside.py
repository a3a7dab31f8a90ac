"""Keeps this package's state about vLLM's objects, in a table beside them.

Owns:  Beside.
Runs:  in every process.

Promise: this state needs no attribute on vLLM's object, and is dropped when that object is freed.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

State = TypeVar("State")


class Beside(Generic[State]):
    """Maps objects to one State each. A State is dropped when its object is freed.

    Objects are compared by identity: some of vLLM's objects are equal to others, or have no hash.

    A State must not refer to its object, directly or through a traceback: else neither is freed.
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[weakref.ref[object], State]] = {}

    def of(self, owner: object) -> State | None:
        found = self._states.get(id(owner))
        return None if found is None else found[1]

    def put(self, owner: object, state: State) -> State:
        key = id(owner)
        # The callback runs before another object can get the id.
        gone = weakref.ref(owner, lambda _: self._states.pop(key, None))
        self._states[key] = gone, state
        return state

    def pop(self, owner: object) -> State | None:
        found = self._states.pop(id(owner), None)
        return None if found is None else found[1]

    def __len__(self) -> int:
        return len(self._states)
