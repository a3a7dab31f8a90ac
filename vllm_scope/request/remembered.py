"""A cache with a limit in bytes.

Owns:  Remembered.
Runs:  in every process, on any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """Values by key. If the limit is exceeded, the least recently used values are dropped first.
    The value of the last `put` always stays, even if it alone exceeds the limit.

    Args:
        most_bytes: limit of the sum of all values' sizes.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """The sum of the `num_bytes` of all stored values."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: Key) -> Value | None:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def use(self, keys: Iterable[Key]) -> None:
        """Mark the values of these keys as used now, in this order. Each key must have a value."""
        with self._lock:
            for key in keys:
                self._values.move_to_end(key)

    def put(self, key: Key, value: Value, num_bytes: int) -> list[tuple[Key, Value]]:
        """Store a value. If the key has a value already, replace that value.

        Returns:
            The pair (key, value) of each value that was dropped because of the limit.
        """
        with self._lock:
            before = self._values.pop(key, None)
            self._values[key] = (value, num_bytes)
            self._num_bytes += num_bytes - (before[1] if before is not None else 0)
            return self._trim()

    def _trim(self) -> list[tuple[Key, Value]]:
        gone = []
        while self._num_bytes > self.most_bytes and len(self._values) > 1:
            key, (value, num_bytes) = self._values.popitem(last=False)
            self._num_bytes -= num_bytes
            gone.append((key, value))
        return gone

    def clear(self) -> list[tuple[Key, Value]]:
        """Drop all values. Returns the pair (key, value) of each dropped value."""
        with self._lock:
            gone = [(key, value) for key, (value, _) in self._values.items()]
            self._values.clear()
            self._num_bytes = 0
            return gone

    def discard(self, keys: Iterable[Key]) -> None:
        """Drop the values of these keys. Unlike `drop`, this method does not look at all values."""
        with self._lock:
            for key in keys:
                if key in self._values:
                    self._num_bytes -= self._values.pop(key)[1]

    def drop(self, which: Callable[[Key, Value], bool]) -> None:
        """Drop every value for which `which(key, value)` is true."""
        with self._lock:
            for key in [key for key, (value, _) in self._values.items() if which(key, value)]:
                self._num_bytes -= self._values.pop(key)[1]
