"""The queue of the items that wait for one sink. An item is rows, the end of a request, or a flush.

Owns:  SinkQueue (keeps rows in memory, and further rows in a spill file), and the classes of items.
Runs:  on the drain thread and on the sink's thread.
From:  sink_thread (adds and removes items).   To: spill.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from vllm_scope.request.heads import Bank, Head, Strongest
from vllm_scope.sinks.options import SinkOptions
from vllm_scope.sinks.quota import KeyedBytes
from vllm_scope.sinks.reports import Log, failure
from vllm_scope.sinks.request import Arrival, Delivery, Ended
from vllm_scope.sinks.spill import SpillFile


@dataclass
class QueuedRows:
    """Rows in the queue. The bytes of the rows are in memory, or in the spill file."""

    delivery: Delivery
    arrival: Arrival
    spilled: bool = False

    @property
    def owner(self) -> str:
        return self.delivery.info.owner

    @property
    def num_bytes(self) -> int:
        return self.arrival.data.nbytes

    @property
    def num_values(self) -> int:
        layout = self.arrival.layout
        encoded = sum(
            len(points) * (head.row_bytes // 4 if _is_scores(head) else 1)
            for head, points in layout.encoded
        )
        return len(self.arrival.positions) * (len(layout.points) + encoded)


@dataclass(frozen=True)
class QueuedEnd:
    delivery: Delivery
    ended: Ended


def _is_scores(head: Head) -> bool:
    return isinstance(head, Bank) and not isinstance(head, Strongest)


class QueuedFlush:
    """A call of `SinkThread.flush`. The caller waits for `done`."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: str | None = None


QueueItem = QueuedRows | QueuedEnd | QueuedFlush


class SinkQueue:
    """The items of one sink thread. Callers must hold `changed`, except in `close`.

    Attributes:
        changed: a condition that is notified when an item is added or memory becomes free.
        spilled_bytes: total number of bytes that have waited on disk.

    Raises:
        ConfigError: the spill file cannot be made.
    """

    def __init__(self, name: str, options: SinkOptions, log: Log) -> None:
        self.changed = threading.Condition()
        self.spilled_bytes = 0
        self._name, self._log = name, log
        # The share of an API key in the memory is limited only under the policy `drop`. Under the
        # other policies, the engine waits for room. If the share of one key were full, the requests
        # of all keys would wait.
        self._has_shares = options.on_overload == "drop"
        self._items: deque[QueueItem] = deque()
        self._memory = KeyedBytes(options.share(options.queue_mib))
        self._spill = SpillFile.open(name, options) if options.on_overload == "spill" else None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the rows that wait in memory."""
        return self._memory.num_bytes

    @property
    def disk_bytes(self) -> int:
        return self._spill.num_bytes if self._spill is not None else 0

    def append(self, item: QueueItem) -> None:
        self._items.append(item)
        self.changed.notify_all()

    def accept(self, rows: QueuedRows) -> bool:
        """Append rows, in memory or on disk. Returns False if there is room neither in memory nor
        on disk."""
        # New rows must stay behind rows that are in the spill file. Rows that are larger than the
        # queue's memory are accepted when the memory is empty.
        first = self._spill is None or not len(self._spill)
        owner = rows.owner if self._has_shares else ""
        if first and (not self.num_bytes or self._memory.fits(owner, rows.num_bytes)):
            self._memory.take(rows.owner, rows.num_bytes)
        elif self._spill is not None and self._spill.put(rows.arrival.data):
            self.spilled_bytes += rows.num_bytes
            rows.spilled = True
            rows.arrival = replace(rows.arrival, data=np.empty((0, 0), np.uint8))
        else:
            return False
        rows.delivery.entered = True
        self.append(rows)
        return True

    def pop(self) -> QueueItem:
        """Remove and return the oldest item. If the item is rows, the bytes of the rows are in
        memory. If the rows cannot be read from the disk, `pop` sets the error of their Delivery."""
        item = self._items.popleft()
        if not isinstance(item, QueuedRows):
            return item
        self.changed.notify_all()
        if not item.spilled:
            self._memory.give(item.owner, item.num_bytes)
            return item
        assert self._spill is not None
        try:
            data = self._spill.take()
        except (OSError, MemoryError) as error:
            item.delivery.error = f"spilled rows of sink {self._name!r} were lost: {failure(error)}"
            self._log.failure(error)
            return item
        item.arrival = replace(item.arrival, data=data.reshape(len(item.arrival.positions), -1))
        return item

    def close(self) -> None:
        if self._spill is not None:
            self._spill.close()
