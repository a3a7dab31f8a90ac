"""Memory for rows that wait for a file, and for batches. The memory is used again and again.

Owns:  Buffers.
Runs:  one thread at a time calls `empty`. The thread that drops the last view of a tensor returns
       the memory of the tensor.

The first write to a new page of memory costs more than the copy of the rows. Copies were measured
at 1.3 GB/s into new memory and at 13 GB/s into reused memory. malloc returns large freed blocks to
the system at once. Therefore each large block from malloc is new memory.
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

#: Tensors with fewer bytes than this number get memory from malloc, which keeps small freed blocks
#: for reuse.
SMALL_BYTES = 1 << 16


class Buffers:
    """Makes tensors. After the last view of a large tensor is gone, later tensors can use the
    tensor's memory.

    Args:
        most_bytes: largest number of bytes that are kept for reuse. Further memory is freed.
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
        # The garbage collector may call `_put` at any time, also between two of these lines. A
        # deque stays correct during such calls.
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

    With such pages, the first writes to 2 MiB of memory cause one page fault. With pages of 4 KiB,
    they cause 512. By default, Python's mmap makes shared memory, which has pages of 4 KiB.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # without huge pages in the kernel, the call fails
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _size_class(num_bytes: int) -> int:
    """The size of the block for `num_bytes` bytes: `num_bytes`, rounded up. There are at most four
    sizes from one power of two to the next.

    Tensors of similar sizes can then use the same memory, one after the other.
    """
    step = 1 << max(num_bytes.bit_length() - 3, 12)
    return -(-num_bytes // step) * step


def copy_rows(into: Tensor, rows: Tensor) -> None:
    """Copy rows [n, hidden_size]. If the numbers of each row lie side by side in host memory, numpy
    copies the rows on this thread, without the GIL.

    torch would copy with a pool of threads. If the engine uses the cores, the threads of the pool
    wait for each other.
    """
    if rows.device.type == "cpu" and rows.stride(-1) == 1:
        np.copyto(into.view(torch.uint8).numpy(), rows.detach().view(torch.uint8).numpy())
    else:
        into.copy_(rows.detach())


def cat_rows(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces, joined along the first axis. A single piece is returned without a copy."""
    return pieces[0] if len(pieces) == 1 else joined_rows(pieces)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a CPU tensor, uint8 [num_bytes]. The result is a view if the tensor is
    contiguous, else a copy."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # empty tensors and tensors of one element can have any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()
