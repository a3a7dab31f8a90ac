"""The memory that a feeder and a trainer share: slots of rows, and two counters.

Owns:  Field, SharedRows.
Runs:  the feeder writes rows and `num_written`; the trainer reads rows and writes `num_taken`.

The memory is a memfd: it has no name in any file system, and is gone with the two processes. The
trainer makes it, without a size, and the feeder's process inherits it.

Promise: a row is in its slot before `num_written` counts it, and the trainer has copied it before
`num_taken` counts its batch. Rows and counters are written by plain stores, whose order the
processors in ORDERED keep.
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

#: Makes a tensor of a shape and dtype, uninitialised.
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
#: `platform.machine()` of processors on which other cores see stores in the order of the program.
ORDERED = ("x86_64", "AMD64")
#: Bytes before the rows, and the index of each counter in them, as int64. Each counter has a cache
#: line of its own.
_HEADER_BYTES, _WRITTEN, _TAKEN = 4096, 0, 8


class Field(msgspec.Struct, frozen=True):
    """A field that the memory holds for each row.

    Attributes:
        name: a stream such as `resid_post.5`, or `token_ids` or `positions`.
        dtype, shape: torch's name of the dtype, and the shape that the field has in one row.
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
    """One side's view of the memory. The first side that maps the memory sets its size.

    Args:
        fd: file descriptor of the memfd.
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
        #: For each field an array uint8 [num_slots, num_bytes].
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
        """Put rows into slots, int64 [n].

        Args:
            values: a tensor [n, *shape] for each field, in the fields' order.
        """
        for field, column, rows in zip(self.fields, self._columns, values, strict=True):
            flat = rows.to(field.torch_dtype).reshape(len(slots), -1)
            if flat.stride(1) != 1:
                flat = flat.contiguous()
            # Other layers' rows may lie between the rows. numpy copies such rows on this thread;
            # torch would wake its thread pool.
            column[slots] = flat.view(torch.uint8).numpy()

    def read(self, slots: np.ndarray, empty: Empty) -> list[Tensor]:
        """A copy of the rows in some slots: a tensor [n, *shape] for each field.

        Args:
            empty: makes the tensors that the rows are copied into.
        """
        found = []
        for field, column in zip(self.fields, self._columns, strict=True):
            into = empty((len(slots), field.num_bytes), torch.uint8)
            # numpy copies on this thread alone, without the GIL. torch's threads would wait for
            # each other while the engine uses the cores.
            np.take(column, slots, axis=0, out=into.numpy(), mode="clip")
            found.append(into.view(field.torch_dtype).view(len(slots), *field.shape))
        return found


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
