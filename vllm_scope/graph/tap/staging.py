"""Host memory from which a step's token table is uploaded.

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

#: How many steps can be in flight before a buffer is written again.
UPLOADS_IN_FLIGHT = 8


@dataclass
class Buffer:
    """Host memory of one upload.

    Attributes:
        tensor, array: the same memory, int32 [max_rows, number of columns].
        holds: the program ids that were last written to the buffer; compared by identity.
        to_host: the value of the TO_HOST column in its rows.
        rows: the indices of its rows with a program.
        num_rows: rows with this index or a larger one have no program.
        first: a slice of `tensor`: as many of its first rows as the last upload had.
        num_first: the number of these rows. torch takes longer to tell it.
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
    """A ring of host buffers for uploads; for a GPU pinned, and fenced by events.

    Under async scheduling several steps are in flight. A buffer written again before its copy
    ran would change the plan of an earlier step. Each half of the ring has one event, recorded
    when the half is used up.
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
        #: The target, and a slice of it: as many of its first rows as the last upload had.
        self._to, self._to_first, self._num_first = to, to, len(to)

    def next(self) -> Buffer:
        self._at = (self._at + 1) % len(self._buffers)
        if self._cuda and self._at % self._half == 0:
            half = self._at // self._half
            self._events[1 - half].record()
            self._events[half].synchronize()
        return self._buffers[self._at]

    def upload(self, buffer: Buffer, num_rows: int) -> None:
        """Enqueue the copy of the first `num_rows` rows. The slices are kept for the next upload:
        decode steps mostly have one size, and to slice a tensor takes a third as long as to enqueue
        the copy."""
        if buffer.first is None or buffer.num_first != num_rows:
            buffer.first, buffer.num_first = buffer.tensor[:num_rows], num_rows
        if self._num_first != num_rows:
            self._to_first, self._num_first = self._to[:num_rows], num_rows
        self._to_first.copy_(buffer.first, non_blocking=True)
