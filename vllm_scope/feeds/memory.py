"""The memory that a feeder and a trainer share. The memory has slots for rows, and two counters.

Owns:  Field, SharedRows.
Runs:  the feeder writes rows and `num_written`. The trainer reads rows and writes `num_taken`.

The memory is a memfd, which has no name in a file system. The kernel frees the memory when no
process has the memfd open or mapped. The trainer makes the memfd with size 0. The feeder inherits
the file descriptor.

Promise: the feeder writes a row into its slot before `num_written` counts the row. The trainer
copies a batch before `num_taken` counts the batch. The promise holds only on the processors in
ORDERED, because the two processes write rows and counters with plain store instructions. On these
processors, other cores see stores in the order in which the program makes them.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec
import numpy as np
import torch
from torch import Tensor

#: A function that makes an uninitialised tensor of a shape and dtype.
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
#: The values of `platform.machine()` for processors on which other cores see stores in program
#: order.
ORDERED = ("x86_64", "AMD64")
#: The memory begins with a header of _HEADER_BYTES bytes, which are int64 numbers. _WRITTEN and
#: _TAKEN are the indices of the counters among these numbers. Each counter has its own cache line.
_HEADER_BYTES, _WRITTEN, _TAKEN = 4096, 0, 8


class Field(msgspec.Struct, frozen=True):
    """One field of the rows in the memory. Each row has a value of this field.

    Attributes:
        name: `token_ids`, `positions`, or a stream such as `resid_post.5`.
        dtype, shape: the name of the dtype in torch, and the shape of the field's value in one row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


TOKENS, POSITIONS = Field("token_ids", "int32"), Field("positions", "int32")


class SharedRows:
    """The shared memory, mapped into the feeder's or the trainer's process. The process that maps
    the memory first sets the size of the memory.

    Args:
        fd: the file descriptor of the memfd.
        fields: the fields of each row.
    """

    def __init__(self, fd: int, num_slots: int, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        counts = [num_slots * field.num_bytes for field in fields]
        *starts, size = accumulate((_aligned(n) for n in counts), initial=_HEADER_BYTES)
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        self._counters = np.frombuffer(memory, np.int64, _HEADER_BYTES // 8)
        #: The bytes of each field in all slots, uint8 [num_slots, num_bytes].
        self._columns = [
            np.frombuffer(memory, np.uint8, count, at).reshape(num_slots, -1)
            for at, count in zip(starts, counts, strict=True)
        ]

    @property
    def num_written(self) -> int:
        """Number of rows that the feeder has written so far."""
        return int(self._counters[_WRITTEN])

    @num_written.setter
    def num_written(self, count: int) -> None:
        self._counters[_WRITTEN] = count

    @property
    def num_taken(self) -> int:
        """Number of batches that the trainer has copied so far."""
        return int(self._counters[_TAKEN])

    @num_taken.setter
    def num_taken(self, count: int) -> None:
        self._counters[_TAKEN] = count

    def write(self, slots: np.ndarray, values: Sequence[Tensor]) -> None:
        """Write n rows into the slots with the numbers `slots`, int64 [n].

        Args:
            values: a tensor [n, *shape] for each field, in the fields' order.
        """
        for field, column, rows in zip(self.fields, self._columns, values, strict=True):
            flat = rows.to(field.torch_dtype).reshape(len(slots), -1)
            if flat.stride(1) != 1:
                flat = flat.contiguous()
            # In memory, rows of other layers may lie between the rows. numpy copies such rows on
            # this thread. torch would wake its thread pool.
            column[slots] = flat.view(torch.uint8).numpy()

    def read(self, slots: np.ndarray, empty: Empty) -> list[Tensor]:
        """A copy of the rows in some slots: a tensor [n, *shape] for each field.

        Args:
            empty: the function that makes the tensors into which the rows are copied.
        """
        found = []
        for field, column in zip(self.fields, self._columns, strict=True):
            into = empty((len(slots), field.num_bytes), torch.uint8)
            # numpy copies the rows on this thread alone, without the GIL. If the engine uses the
            # cores, torch's threads would wait for each other.
            np.take(column, slots, axis=0, out=into.numpy(), mode="clip")
            found.append(into.view(field.torch_dtype).view(len(slots), *field.shape))
        return found


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
