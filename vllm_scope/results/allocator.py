"""Memory for rows that is used again, because the first touch of new memory costs more than a copy.

Owns:  CachingAllocator, and how much memory it may keep (`reuse_bytes`).
Runs:  in the front-end: `empty` on the receiver's thread; memory comes back on any thread.
To:    table.

glibc gives a large block back to the system when it is freed. The next block is new: the kernel
finds and zeroes each of its pages while rows are copied into it. In this allocator a block is a
segment: a private mapping. A segment is free when its last view is gone. A large segment has huge
pages, and the kernel may take the pages of a free large segment at any time (madvise with
MADV_FREE). If the kernel takes no pages, the call costs next to nothing. For small pages the call
costs more than a copy, so small free segments keep their pages.

Promise: a segment is used again only when no array, tensor or buffer refers to it any more. Free
segments take at most `most_bytes`; segments beyond this bound go back to the system at once.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from vllm_scope.errors import ConfigError, shown
from vllm_scope.sinks.metrics import count_memory

logger = logging.getLogger("vllm.vllm_scope")

#: Smaller blocks come from numpy, because malloc keeps them for the next use.
LEAST_BYTES = 256 << 10
#: Segments of this size or more are large. In a smaller segment, the unused half of a huge page
#: would be too large a part. numpy, too, takes huge pages from this size on.
LARGE_BYTES = 4 << 20
#: The sizes of small segments are multiples of the first number; those of large segments, multiples
#: of the second. The second number is the size of a huge page.
SMALL_STEP_BYTES, LARGE_STEP_BYTES = 64 << 10, 2 << 20
#: Bound of small free segments, whose pages the kernel cannot take; at most a quarter of the
#: allocator's bound.
MOST_SMALL_BYTES = 256 << 20
#: The environment variable with the bound of free segments, in MiB.
VARIABLE = "VLLM_SCOPE_REUSE_MIB"


class AllocatorStats(NamedTuple):
    """Bytes of segments.

    Attributes:
        lent: in use.
        free: kept for the next use.
        reused: of the free segments that calls of `empty` have taken so far.
        new: of the segments that calls of `empty` have mapped so far, as none was free.
    """

    lent: int
    free: int
    reused: int
    new: int


class CachingAllocator:
    """Makes arrays in memory that is used again. On any thread.

    Args:
        most_bytes: bound of the bytes of free segments; if 0, numpy allocates every array.
    """

    def __init__(self, most_bytes: int) -> None:
        self._small, self._large = _FreeSegments(), _FreeSegments()
        self._lent = self._reused = self._new = 0
        self._told = False
        #: Segments whose last view is gone. They are added without the lock, because the garbage
        #: collector may end a view on a thread that holds the lock.
        self._returned: deque[mmap.mmap] = deque()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.bound(most_bytes)

    def bound(self, most_bytes: int) -> None:
        """Keep at most `most_bytes` bytes of free segments from now on."""
        with self._lock:
            self.most_bytes = most_bytes
            self._small.most_bytes = min(MOST_SMALL_BYTES, most_bytes // 4)
            self._large.most_bytes = most_bytes - self._small.most_bytes
            self._small.trim()
            self._large.trim()
        self._settle()

    def empty(self, *shape: int) -> np.ndarray:
        """An uninitialised uint8 array, as np.empty returns it. Its memory is used again when the
        last view of the array is gone.

        Raises:
            MemoryError: there is no memory.
        """
        num_bytes = math.prod(shape)
        if num_bytes < LEAST_BYTES or not self.most_bytes:
            return np.empty(shape, np.uint8)
        size = size_class(num_bytes)
        with self._lock:
            segment = self._of(size).take(size)
            known = segment is not None
        if segment is None:
            try:
                segment = _mapped(size)
            except OSError:  # no memory, or too many mappings
                return np.empty(shape, np.uint8)
        with self._lock:
            self._lent += len(segment)
            if known:
                self._reused += len(segment)
            else:
                self._new += len(segment)
        # Every view of the memory, numpy's or torch's, refers to this array, because the base of
        # this array is not an array.
        whole = np.frombuffer(segment, np.uint8)
        weakref.finalize(whole, self._give_back, segment).atexit = False
        self._settle()
        self._tell()
        count_memory("reused" if known else "new", len(segment))
        return whole[:num_bytes].reshape(shape)

    @property
    def stats(self) -> AllocatorStats:
        self._settle()
        with self._lock:
            free = self._small.num_bytes + self._large.num_bytes
            found = AllocatorStats(self._lent, free, self._reused, self._new)
        self._settle()
        return found

    def _of(self, size: int) -> _FreeSegments:
        return self._small if size < LARGE_BYTES else self._large

    def _give_back(self, segment: mmap.mmap) -> None:
        # A forked process takes no segment back: another thread may have held the lock when the
        # process was forked.
        if os.getpid() == self._pid:
            self._returned.append(segment)
            self._settle()

    def _settle(self) -> None:
        """Put returned segments among the free ones. If another thread holds the lock, that thread
        calls this method after it has released the lock."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    segment = self._returned.popleft()
                    self._lent -= len(segment)
                    self._of(len(segment)).put(segment)
            finally:
                self._lock.release()

    def _tell(self) -> None:
        if self._told or self._lent <= self.most_bytes:
            return
        self._told = True
        logger.warning(
            "vllm-scope: this process keeps %d MiB of results, and at most %d MiB of memory are "
            "used again (%s). If results are kept, rows of further ones are copied to new memory, "
            "which is slower; drop results that are not needed.",
            self._lent >> 20, self.most_bytes >> 20, VARIABLE,
        )  # fmt: skip


class _FreeSegments:
    """The small or the large free segments.

    Attributes:
        num_bytes: bytes of all these segments.
        most_bytes: bound of `num_bytes`.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        #: Size -> (the number of the segment's return, the segment), in the order of return.
        self._by_size: dict[int, deque[tuple[int, mmap.mmap]]] = {}
        self._num_returns = self.num_bytes = 0

    def take(self, size: int) -> mmap.mmap | None:
        """Remove and return the smallest segment of `size` to 2 * `size` bytes, or None."""
        sizes = [known for known in self._by_size if size <= known <= 2 * size]
        if not sizes:
            return None
        # Take the segment that was returned last: a part of it may still be in a CPU's cache.
        return self._removed(min(sizes), -1)

    def put(self, segment: mmap.mmap) -> None:
        self._num_returns += 1
        self._by_size.setdefault(len(segment), deque()).append((self._num_returns, segment))
        self.num_bytes += len(segment)
        if len(segment) >= LARGE_BYTES:
            with suppress(OSError):  # a kernel without MADV_FREE keeps the pages
                segment.madvise(mmap.MADV_FREE)
        self.trim()

    def trim(self) -> None:
        """Give segments back to the system until the bound is kept, beginning with those that were
        returned first."""
        while self.num_bytes > self.most_bytes:
            # Nothing else refers to the segment, so it is unmapped now.
            self._removed(min(self._by_size, key=lambda size: self._by_size[size][0][0]), 0)

    def _removed(self, size: int, at: int) -> mmap.mmap:
        same = self._by_size[size]
        segment = same[at][1]
        del same[at]
        if not same:
            del self._by_size[size]
        self.num_bytes -= size
        return segment


def reuse_bytes(environ: Mapping[str, str] = os.environ, num_processes: int = 1) -> int:
    """The bound of free segments in this process, in bytes: the value of VLLM_SCOPE_REUSE_MIB. If
    this is not set: this process's equal share (one of `num_processes`) of a quarter of the memory.

    Raises:
        ConfigError: the variable is not a number from 0 on.
    """
    text = environ.get(VARIABLE)
    if not text:
        return memory_bytes() // (4 * num_processes)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ConfigError(f"{VARIABLE} is {shown(text)}; it must be a number from 0 on.")
    return int(value * 2**20)


@cache
def memory_bytes() -> int:
    """Memory of this machine or of this container, in bytes."""
    most: int = psutil.virtual_memory().total
    for group in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such group, or "max"
            most = min(most, int((Path("/sys/fs/cgroup") / group).read_text()))
    return most


def size_class(num_bytes: int) -> int:
    """The bytes of a new segment: at most a quarter, or one step, more than `num_bytes`. Requests
    of similar lengths then use the same segments."""
    step = SMALL_STEP_BYTES if num_bytes < LARGE_BYTES else LARGE_STEP_BYTES
    step = max(step, 1 << (num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step


def _mapped(size: int) -> mmap.mmap:
    segment = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= LARGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            segment.madvise(mmap.MADV_HUGEPAGE)
    return segment


#: Takes all memory from numpy.
PLAIN = CachingAllocator(0)
