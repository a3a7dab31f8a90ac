"""Stores rows on a local disk while a sink's queue is full.

Owns:  SpillFile.
Runs:  `put` on the drain thread, `take` on the sink's thread. Both threads hold the queue's lock.

The spill file has no name. Therefore the system removes the file when the worker ends or is killed.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import ConfigError
from vllm_scope.sinks.options import SinkOptions

Bytes = NDArray[np.uint8]


class SpillFile:
    """A ring of spans in a file. The span that was put first is taken first.

    Args:
        folder: the folder of the file. If None, the system's folder for temporary files.
        most_bytes: largest size of the file, in bytes.

    Attributes:
        num_bytes: number of bytes of the rows in the file.
    """

    def __init__(self, folder: str | None, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._file = tempfile.TemporaryFile(prefix="vllm-scope-spill-", dir=folder)  # noqa: SIM115
        self._spans: deque[tuple[int, int]] = deque()
        self.num_bytes = 0

    @staticmethod
    def open(name: str, options: SinkOptions) -> SpillFile:
        """A new file for one thread of a sink. Raises ConfigError if the file cannot be made."""
        try:
            return SpillFile(options.spill_folder, options.share(options.spill_mib))
        except OSError as error:
            raise ConfigError(
                f"sink {name!r} cannot spill: {error}. spill_folder must be a folder of the "
                "worker's host, and the worker must be allowed to write to it."
            ) from None

    def __len__(self) -> int:
        return len(self._spans)

    def put(self, data: Bytes) -> bool:
        """Append data. Returns False if the ring is full or the disk does not accept the data."""
        start = self._room(data.nbytes)
        if start is None:
            return False
        view = np.ascontiguousarray(data).data.cast("B")
        at = start
        try:
            while view:
                written = os.pwrite(self._file.fileno(), view, at)
                view, at = view[written:], at + written
        except OSError:
            return False
        self._spans.append((start, start + data.nbytes))
        self.num_bytes += data.nbytes
        return True

    def take(self) -> Bytes:
        """Remove and return the oldest data. Raises OSError if the disk fails."""
        start, stop = self._spans.popleft()
        self.num_bytes -= stop - start
        data = np.empty(stop - start, np.uint8)
        view = data.data
        at = start
        while at < stop:
            num_read = os.preadv(self._file.fileno(), [view[at - start :]], at)
            if num_read == 0:
                raise OSError("the spill file lacks the end of these rows")
            at += num_read
        if not self._spans:
            os.ftruncate(self._file.fileno(), 0)
        return data

    def _room(self, num_bytes: int) -> int | None:
        """The offset in the file at which the next span of `num_bytes` bytes begins. None if there
        is no room for the span."""
        if not self._spans:
            return 0 if num_bytes <= self._most_bytes else None
        first, last = self._spans[0][0], self._spans[-1][1]
        wrapped = self._spans[-1][0] < first
        if wrapped:
            return last if last + num_bytes <= first else None
        if last + num_bytes <= self._most_bytes:
            return last
        return 0 if num_bytes <= first else None

    def close(self) -> None:
        self._file.close()
