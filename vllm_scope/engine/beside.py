"""What this package keeps about objects of vLLM's.

Owns:  Beside.
Runs:  in every process.

Promise: vLLM's objects get no attributes of ours, and what is kept about one goes with it.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

State = TypeVar("State")


class Beside(Generic[State]):
    """One State for each of some objects, while these live.

    By identity: some of vLLM's objects are equal to others, or have no hash.
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
