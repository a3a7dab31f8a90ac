"""Memory for rows that wait for a file, used again and again.

Owns:  Buffers.
Runs:  `empty` on one thread; memory comes back on whichever thread lets go of it last.

A page that no one has touched yet costs more than the copy into it (measured: 1.3 GB/s
into fresh memory, 13 GB/s into used), and malloc gives large blocks back at once.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

#: Below it malloc keeps what is freed, and does better.
SMALL_BYTES = 1 << 16


class Buffers:
    """Tensors whose memory returns here when the last view of them is gone.

    Args:
        most_bytes: kept for reuse; what comes back beyond it is freed.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._free: dict[int, deque[mmap.mmap]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, on the CPU."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < SMALL_BYTES:
            return torch.empty(shape, dtype=dtype)
        size = _size_class(num_bytes)
        # Only deques are touched: a collector may run `_put` in the middle of this.
        free = self._free.setdefault(size, deque())
        try:
            memory = free.pop()
        except IndexError:
            memory = mmap.mmap(-1, size)
        array = np.frombuffer(memory, np.uint8, num_bytes)
        weakref.finalize(array, self._put, memory).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def _put(self, memory: mmap.mmap) -> None:
        kept = sum(size * len(free) for size, free in list(self._free.items()))
        if kept + len(memory) <= self._most_bytes:
            self._free[len(memory)].append(memory)


def _size_class(num_bytes: int) -> int:
    """The next of four sizes per power of two, so that blocks of like size share."""
    step = 1 << max(num_bytes.bit_length() - 3, 12)
    return -(-num_bytes // step) * step


def copy_rows(into: Tensor, rows: Tensor) -> None:
    """Copy [n, hidden_size]; by this thread alone where the rows are on the host.

    torch would spread it over its threads, which wait for each other where the engine
    has the cores; numpy lets go of Python's lock meanwhile.
    """
    if rows.device.type == "cpu" and rows.stride(-1) == 1:
        np.copyto(into.view(torch.uint8).numpy(), rows.detach().view(torch.uint8).numpy())
    else:
        into.copy_(rows.detach())
