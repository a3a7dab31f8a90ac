"""How much of one API key's rows a sink takes.

Owns:  Quota.
Runs:  on the drain thread, for all lanes of a sink.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from vllm_scope.sinks.options import SinkOptions

#: What is counted for a request beside its rows: two small files, say.
REQUEST_BYTES = 1 << 13
WINDOW_HOURS = 24


def hours() -> float:
    return time.monotonic() / 3600


class Quota:
    """Bytes of each key within a day, by the hour.

    Args:
        name: of the sink.
        options: `key_mib` None counts nothing.

    Attributes:
        reason: what a key that has no more left is told.
    """

    def __init__(self, name: str, options: SinkOptions) -> None:
        self._most_bytes = None if options.key_mib is None else int(options.key_mib * 2**20)
        self._lock = threading.Lock()
        #: hour -> key -> bytes, of hours that still count.
        self._given: dict[int, Counter[str]] = {}
        self.reason = (
            f"this key has given sink {name!r} the {options.key_mib or 0:.3g} MiB that it may in "
            f"{WINDOW_HOURS} hours (key_mib); send it again later, or read less"
        )

    def take(self, owner: str, num_bytes: int) -> bool:
        """Whether the key may give so many more. The operator, who has no key, always may."""
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
