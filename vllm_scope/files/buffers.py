"""Reused memory for rows that wait for a file.

Owns:  Buffers.
Runs:  `empty` on one thread. The thread that drops a tensor's last view returns the memory.

The first write to a new page costs more than the copy. Copies were measured at 1.3 GB/s into new
memory and at 13 GB/s into reused memory. malloc returns large freed blocks to the system at once.
Therefore each large block from malloc is new memory.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.batch.by_position import ONE_THREAD, joined_rows

#: malloc allocates blocks below this size, because malloc keeps freed small blocks for reuse.
SMALL_BYTES = 1 << 16


class Buffers:
    """Makes tensors. When the last view of a tensor is gone, the memory can be reused.

    Args:
        most_bytes: limit of the bytes that are kept for reuse. Memory beyond the limit is freed.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._free: dict[int, deque[mmap.mmap]] = {}

    def copy(self, rows: Tensor) -> Tensor:
        """A copy of rows [n, hidden_size], on the CPU."""
        if rows.device.type == "cpu" and rows.numel() < ONE_THREAD and rows.nbytes < SMALL_BYTES:
            return rows.detach().clone(memory_format=torch.contiguous_format)
        copied = self.empty(tuple(rows.shape), rows.dtype)
        copy_rows(copied, rows)
        return copied

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor on the CPU."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < SMALL_BYTES:
            return torch.empty(shape, dtype=dtype)
        size = _size_class(num_bytes)
        # The garbage collector may call `_put` at any time here. Deques allow this.
        free = self._free.setdefault(size, deque())
        try:
            memory = free.pop()
        except IndexError:
            memory = _fresh(size)
        array = np.frombuffer(memory, np.uint8, num_bytes)
        weakref.finalize(array, self._put, memory).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def _put(self, memory: mmap.mmap) -> None:
        kept = sum(size * len(free) for size, free in list(self._free.items()))
        if kept + len(memory) <= self._most_bytes:
            self._free[len(memory)].append(memory)


def _fresh(num_bytes: int) -> mmap.mmap:
    """New private memory, in pages of 2 MiB if the kernel has pages of this size.

    The first write costs about as much for a page of 2 MiB as for a page of 4 KiB. Shared memory,
    the default of Python's mmap, has pages of 4 KiB.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _size_class(num_bytes: int) -> int:
    """`num_bytes`, rounded up to one of four sizes per power of two.

    Blocks of similar size can then reuse the same memory.
    """
    step = 1 << max(num_bytes.bit_length() - 3, 12)
    return -(-num_bytes // step) * step


def copy_rows(into: Tensor, rows: Tensor) -> None:
    """Copy rows [n, hidden_size]. Rows in host memory are copied on this thread alone.

    torch would use a thread pool. If the engine uses the cores, the pool's threads wait for each
    other. numpy releases the GIL during the copy.
    """
    if rows.device.type == "cpu" and rows.stride(-1) == 1:
        np.copyto(into.view(torch.uint8).numpy(), rows.detach().view(torch.uint8).numpy())
    else:
        into.copy_(rows.detach())


def cat_rows(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces, joined along the first axis. A single piece is returned without a copy."""
    return pieces[0] if len(pieces) == 1 else joined_rows(pieces)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a CPU tensor, uint8 [num_bytes]. A view if the tensor is contiguous, else a
    copy."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one-element and empty tensors can have any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()
