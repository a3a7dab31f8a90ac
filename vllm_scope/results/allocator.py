"""Memory for rows that is used again, because the first write to new memory costs more than a copy.

Owns:  CachingAllocator, `reuse_bytes` (the largest number of bytes of free segments).
Runs:  in the front-end. `empty` runs on the receiver's thread. Any thread may free an array.
To:    table.

If the program frees a large block, glibc gives the block back to the system. When rows are copied
to a new block, the kernel must find each page of the block and fill the page with zeros. In this
allocator a block is a segment, that is, a private mapping. A segment is free when no view of the
segment exists. A large segment has huge pages. The kernel can take the pages of a free large
segment at any time (madvise with MADV_FREE). If the kernel takes no pages, this madvise call is
almost free. For a segment with small pages, this call costs more than a copy of the rows. Therefore
the allocator makes the call for large segments only.

Promise: a segment is used again only after the last array, tensor or buffer of the segment is gone.
Free segments take at most `most_bytes`. If free segments would take more bytes, the allocator
unmaps segments at once.
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

#: numpy allocates arrays that have fewer bytes than this number, because malloc keeps freed small
#: blocks for reuse.
LEAST_BYTES = 256 << 10
#: Segments of this size or more are large and have huge pages. In a smaller segment, the unused
#: part of the last huge page would waste too much memory. numpy has the same limit for huge pages.
LARGE_BYTES = 4 << 20
#: The size of a small segment is a multiple of the first number. The size of a large segment is a
#: multiple of the second number, which is the size of a huge page.
SMALL_STEP_BYTES, LARGE_STEP_BYTES = 64 << 10, 2 << 20
#: Largest number of bytes of small free segments, whose pages the kernel cannot take. An allocator
#: uses at most a quarter of its `most_bytes` for small free segments.
MOST_SMALL_BYTES = 256 << 20
#: The environment variable that sets the largest size of all free segments, in MiB.
VARIABLE = "VLLM_SCOPE_REUSE_MIB"


class AllocatorStats(NamedTuple):
    """Bytes of segments.

    Attributes:
        lent: bytes of the segments in use.
        free: bytes of the free segments.
        reused: bytes of the free segments that all calls of `empty` took.
        new: bytes of the new segments that all calls of `empty` mapped.
    """

    lent: int
    free: int
    reused: int
    new: int


class CachingAllocator:
    """Makes arrays in memory that is used again. Thread-safe.

    Args:
        most_bytes: largest number of bytes of free segments. If `most_bytes` is 0, numpy allocates
            every array.
    """

    def __init__(self, most_bytes: int) -> None:
        self._small, self._large = _FreeSegments(), _FreeSegments()
        self._lent = self._reused = self._new = 0
        self._told = False
        #: Segments whose last view is gone. Threads add segments without the lock. With the lock, a
        #: thread could wait for itself, because the garbage collector may free a view on the thread
        #: that holds the lock.
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
        """An uninitialised uint8 array of this shape. When the last view of the array is gone, the
        allocator uses the memory again.

        Raises:
            MemoryError: the system has no free memory.
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
            except OSError:  # the system has no memory, or this process has too many mappings
                self._settle()
                return np.empty(shape, np.uint8)
        with self._lock:
            self._lent += len(segment)
            if known:
                self._reused += len(segment)
            else:
                self._new += len(segment)
        # The base of a numpy view is the first array in the chain of views. Here this array is
        # `whole`. Therefore every view, by numpy or by torch, keeps a reference to `whole`.
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
        # A forked process takes no segments back, because another thread may have held the lock
        # when the process was forked.
        if os.getpid() == self._pid:
            self._returned.append(segment)
            self._settle()

    def _settle(self) -> None:
        """Add returned segments to the free segments. If another thread holds the lock, this call
        does nothing, because the other thread calls `_settle` after it has released the lock."""
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
            "vllm-scope: this process keeps %d MiB of results, and can reuse at most %d MiB of "
            "memory (%s). While results are kept, further rows are copied to new memory, which is "
            "slower; drop results that are not needed.",
            self._lent >> 20, self.most_bytes >> 20, VARIABLE,
        )  # fmt: skip


class _FreeSegments:
    """The free segments of one kind: small or large.

    Attributes:
        num_bytes: number of bytes of all free segments of this kind.
        most_bytes: largest allowed value of `num_bytes`.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        #: Maps a size to the segments of this size, in the order in which they were returned. Each
        #: segment comes with the value that `_num_returns` had when the segment was returned.
        self._by_size: dict[int, deque[tuple[int, mmap.mmap]]] = {}
        self._num_returns = self.num_bytes = 0

    def take(self, size: int) -> mmap.mmap | None:
        """Remove and return the smallest segment of `size` to 2 * `size` bytes, or None."""
        sizes = [known for known in self._by_size if size <= known <= 2 * size]
        if not sizes:
            return None
        # Take the segment that was returned last, because a CPU may still have a part in its cache.
        return self._removed(min(sizes), -1)

    def put(self, segment: mmap.mmap) -> None:
        self._num_returns += 1
        self._by_size.setdefault(len(segment), deque()).append((self._num_returns, segment))
        self.num_bytes += len(segment)
        if len(segment) >= LARGE_BYTES:
            with suppress(OSError):  # without MADV_FREE, the kernel keeps the pages
                segment.madvise(mmap.MADV_FREE)
        self.trim()

    def trim(self) -> None:
        """Unmap segments until `num_bytes` is at most `most_bytes`. The segment that was returned
        first is unmapped first."""
        while self.num_bytes > self.most_bytes:
            # Python unmaps the removed segment, because no other reference to the segment exists.
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
    """The largest number of bytes of free segments in this process, from VLLM_SCOPE_REUSE_MIB. If
    the variable is not set, `num_processes` processes share a quarter of the memory equally.

    Raises:
        ConfigError: the variable is not a number from 0 to below 1e9.
    """
    text = environ.get(VARIABLE)
    if not text:
        return memory_bytes() // (4 * num_processes)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ConfigError(f"{VARIABLE} is {shown(text)}; it must be a number from 0 to below 1e9.")
    return int(value * 2**20)


@cache
def memory_bytes() -> int:
    """The memory of this machine, or the memory limit of this container, in bytes."""
    most: int = psutil.virtual_memory().total
    for group in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # the control group's file is missing or contains "max"
            most = min(most, int((Path("/sys/fs/cgroup") / group).read_text()))
    return most


def size_class(num_bytes: int) -> int:
    """`num_bytes`, rounded up to the size of a segment. At most a quarter of `num_bytes` is added,
    or one step (SMALL_STEP_BYTES or LARGE_STEP_BYTES). Arrays of similar sizes can then use the
    same segment, one after the other."""
    step = SMALL_STEP_BYTES if num_bytes < LARGE_BYTES else LARGE_STEP_BYTES
    step = max(step, 1 << (num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step


def _mapped(size: int) -> mmap.mmap:
    segment = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= LARGE_BYTES:
        with suppress(OSError):  # the kernel has no huge pages
            segment.madvise(mmap.MADV_HUGEPAGE)
    return segment


#: An allocator that keeps no segments. With this allocator, numpy allocates every array.
PLAIN = CachingAllocator(0)
