"""Host memory for the uploads of a step's tables.

Owns:  Buffer, Staging.
Runs:  in every worker, on its main thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.program.operations import NO_PROGRAM

#: Up to this many steps can be in flight before the worker must wait for a buffer.
UPLOADS_IN_FLIGHT = 8


@dataclass
class Buffer:
    """The host memory from which one upload is copied.

    Attributes:
        tensor, array: the same memory, int32 [max_rows, number of columns].
        holds: the last array of program ids that was written to the buffer. Tables.load_step tests
            whether the next array is the same object.
        to_host: the value of the TO_HOST column in the buffer's rows.
        rows: the indices of those rows of the buffer that have a program.
        num_rows: the rows from this index on have no program.
        first: a slice of `tensor` with the rows of the last upload.
        num_first: the number of rows of `first`. It is stored, because a call of `len(first)` takes
            longer.
    """

    tensor: Tensor
    array: NDArray[np.int32]
    holds: NDArray[np.int32] | None = None
    to_host: bool = False
    rows: slice | NDArray[np.int64] | None = None
    num_rows: int = 0
    first: Tensor | None = None
    num_first: int = -1


class Staging:
    """A ring of host buffers for uploads. For a GPU, the memory is pinned and guarded by events.

    Under async scheduling several steps are in flight. If the worker wrote to a buffer too early,
    before the upload of the buffer's last content, the plan of an earlier step would change. Each
    half of the ring has one event, which is recorded after the last upload from this half. Before
    the worker uses the half again, it waits for this event.
    """

    def __init__(self, to: Tensor) -> None:
        self._cuda = to.is_cuda
        self._half = UPLOADS_IN_FLIGHT if self._cuda else 1
        self._buffers = []
        for _ in range(2 * self._half):
            tensor = torch.full(to.shape, NO_PROGRAM, dtype=torch.int32, pin_memory=self._cuda)
            self._buffers.append(Buffer(tensor, tensor.numpy()))
        self._events = [torch.cuda.Event() for _ in range(2)] if self._cuda else []
        self._at = -1
        #: `_to`: the device tensor to which buffers are copied. `_to_first`: a slice of `_to` with
        #: the rows of the last upload. `_num_first`: the number of these rows.
        self._to, self._to_first, self._num_first = to, to, len(to)

    def next(self) -> Buffer:
        self._at = (self._at + 1) % len(self._buffers)
        if self._cuda and self._at % self._half == 0:
            half = self._at // self._half
            self._events[1 - half].record()
            self._events[half].synchronize()
        return self._buffers[self._at]

    def upload(self, buffer: Buffer, num_rows: int) -> None:
        """Enqueue the copy of the buffer's first `num_rows` rows. This method keeps its slices of
        tensors for the next upload, because most decode steps have the same number of rows. One new
        slice takes a third of the time of one enqueued copy."""
        if buffer.first is None or buffer.num_first != num_rows:
            buffer.first, buffer.num_first = buffer.tensor[:num_rows], num_rows
        if self._num_first != num_rows:
            self._to_first, self._num_first = self._to[:num_rows], num_rows
        self._to_first.copy_(buffer.first, non_blocking=True)
