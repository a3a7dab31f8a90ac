"""Limits the number of bytes that one API key may send to a sink.

Owns:  Quota (bytes per day, for all threads of a sink), KeyedBytes (memory of one thread).
Runs:  Quota on the drain thread. KeyedBytes on the sink's thread; for the rows in a queue also on
       the drain thread, under the queue's lock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from vllm_scope.results.budget import fits
from vllm_scope.sinks.options import SinkOptions

#: For each request, this number of bytes is added to the bytes of its rows, because a request may
#: make two small files.
REQUEST_BYTES = 1 << 13
WINDOW_HOURS = 24


def hours() -> float:
    return time.monotonic() / 3600


class Quota:
    """The number of bytes that each key has sent within WINDOW_HOURS, counted by the hour.

    Args:
        name: the sink's name.
        options: the options of the sink. If `key_mib` is None, there is no limit.

    Attributes:
        reason: the error text for a key that has reached the limit.
    """

    def __init__(self, name: str, options: SinkOptions) -> None:
        self._most_bytes = None if options.key_mib is None else int(options.key_mib * 2**20)
        self._lock = threading.Lock()
        #: The number of bytes that each key sent in each hour of the window, by hour and key.
        self._given: dict[int, Counter[str]] = {}
        self.reason = (
            f"with this request, this key would send sink {name!r} more than the "
            f"{options.key_mib or 0:.3g} MiB that a key may send in {WINDOW_HOURS} hours "
            "(key_mib); send the request again later, or read less"
        )

    def take(self, owner: str, num_bytes: int) -> bool:
        """If the API key may send these bytes, count the bytes and return True. Else return False.
        Without an API key (`owner` is ""), always return True."""
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
    """The bytes in the memory of one sink thread, in total and by API key. Not thread-safe.

    An API key may hold at most three times the bytes that are free. Therefore some bytes are always
    free for other keys. Requests without an API key may use the whole memory.
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
