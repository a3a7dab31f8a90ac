"""Limits on what one API key may give a sink.

Owns:  Quota (bytes per day, for all threads of a sink), KeyedBytes (the memory of one thread).
Runs:  on the drain thread; the KeyedBytes of held rows on the sink's thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from vllm_scope.results.budget import fits
from vllm_scope.sinks.options import SinkOptions

#: Bytes counted for each request beside its rows: a request may make two small files.
REQUEST_BYTES = 1 << 13
WINDOW_HOURS = 24


def hours() -> float:
    return time.monotonic() / 3600


class Quota:
    """Bytes that each key gave within WINDOW_HOURS, counted by the hour.

    Args:
        name: the sink's name.
        options: if `key_mib` is None, nothing is counted.

    Attributes:
        reason: the error text for a key that has reached the limit.
    """

    def __init__(self, name: str, options: SinkOptions) -> None:
        self._most_bytes = None if options.key_mib is None else int(options.key_mib * 2**20)
        self._lock = threading.Lock()
        #: hour -> key -> bytes, for the hours in the window.
        self._given: dict[int, Counter[str]] = {}
        self.reason = (
            f"this key has given sink {name!r} the {options.key_mib or 0:.3g} MiB that it may in "
            f"{WINDOW_HOURS} hours (key_mib); send it again later, or read less"
        )

    def take(self, owner: str, num_bytes: int) -> bool:
        """Count the bytes and return True if the key may give them, else False. Always True for
        the operator, who has no key."""
        if self._most_bytes is None or not owner:
            return True
        hour = int(hours())
        with self._lock:
            for old in [h for h in self._given if h <= hour - WINDOW_HOURS]:
                del self._given[old]
            if sum(some[owner] for some in self._given.values()) + num_bytes > self._most_bytes:
                return False
            self._given.setdefault(hour, Counter())[owner] += num_bytes
            return True


class KeyedBytes:
    """Bytes in the memory of one sink thread, in all and by API key. Used by one thread at a time.

    A key may hold three times the free bytes, so that other keys find some room. The operator,
    who has no key, may fill the memory.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._held: Counter[str] = Counter()

    def fits(self, owner: str, num_bytes: int) -> bool:
        if not owner:
            return self.num_bytes + num_bytes <= self.most_bytes
        return fits(self._held[owner], self.num_bytes, num_bytes, self.most_bytes)

    def take(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._held[owner] += num_bytes
        if not self._held[owner]:
            del self._held[owner]

    def give(self, owner: str, num_bytes: int) -> None:
        self.take(owner, -num_bytes)
