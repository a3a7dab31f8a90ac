"""The sums of one name, place and label, on the device.

Owns:  DeviceSums.
Runs:  on the threads of worker.summing.   To: batch.sums.

Promise: sums are float64. The product of two 16-bit numbers is exact in float32. Therefore, for
16-bit rows on a GPU, worker.squares adds products in float32. After at most MOST_AT_ONCE rows,
worker.squares adds the result to the float64 sums. All other products are computed in float64.
Because the matrix x x^T is symmetric, most numbers below its diagonal are not computed. All sums
are in the memory `room`, an argument of the constructor. The methods `add` and `read` run in
torch's inference mode, which vLLM also uses for its steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.batch.sums import Packed, bytes_of, num_waiting, upper_blocks

logger = logging.getLogger("vllm.vllm_scope")

#: A float64 copy of rows has at most this many bytes.
COPY_BYTES = 32 << 20
#: On a GPU, one call of `add_squares` gets at most this many 16-bit rows, and adds their products
#: in float32.
MOST_AT_ONCE = 8192


def on_device(device: torch.device, numbers: NDArray[Any]) -> Tensor:
    """A tensor on the device with these numbers. The host does not wait for the copy."""
    found = torch.from_numpy(numbers)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


class DeviceSums:
    """Sums over rows. Each call of `add` adds some rows to the sums.

    Args:
        room: uint8 [bytes_of(width, ...)]. The constructor sets all bytes to 0.
        width: How many numbers a row has.
        dtype: The rows' dtype.
        covariance, targets: The same as for batch.sums.bytes_of.

    Attributes:
        kind: (covariance, targets).
        missing: the number of rows that are missing from at least one of these sums. Rows are
            missing if the device ran out of memory in `add` or `read`.
    """

    def __init__(
        self, room: Tensor, width: int, dtype: torch.dtype, covariance: bool, targets: bool
    ) -> None:
        self.kind, self.missing = (covariance, targets), 0
        self.num_bytes = bytes_of(width, dtype.itemsize, covariance, targets)
        self._width, self._dtype = width, dtype
        self.row_bytes = width * dtype.itemsize
        self._exact = dtype.itemsize == 2 and room.is_cuda
        #: The number of rows in `_rows`. The products of these rows are not in `_xx` yet.
        self._num_rows = 0
        self._count = 0
        self._y = self._yy = 0.0
        self.lie_in(room)
        room.zero_()

    def lie_in(self, room: Tensor) -> None:
        """From now on, use `room` as the memory of the sums and of `_rows`. This method does not
        change the bytes of `room`."""
        assert room.numel() == self.num_bytes
        covariance, targets = self.kind
        width, of_rows = self._width, num_waiting(self._width) * self.row_bytes * self.kind[0]
        self._rows = room[:of_rows].view(self._dtype).view(-1, width)
        sums = room[of_rows:].view(torch.float64).view(-1, width)
        num_squares = width * covariance
        self._xx = sums[:num_squares] if covariance else None
        self._x, self._xy = sums[num_squares], sums[num_squares + 1] if targets else None

    @torch.inference_mode()
    def add(
        self,
        rows_of: Callable[[NDArray[np.int64]], Tensor],
        at: NDArray[np.int64],
        targets: NDArray[np.float64],
    ) -> None:
        """Add rows. If the device runs out of memory, count the rows as missing.

        Args:
            rows_of: A function that returns the rows at some indices, [n, width].
            at: int64 [n], the indices of the rows to add.
            targets: [n], one target for each row; ignored if the sums have no targets.
        """
        try:
            rows = rows_of(at)
            x, xy = _sum_of(rows), None
            if self._xy is not None:
                xy = torch.zeros_like(self._xy)
                parts = on_device(rows.device, targets).split(self._num_copied)
                for some, y in zip(rows.split(self._num_copied), parts, strict=True):
                    xy += y @ some.double()
        except torch.OutOfMemoryError:
            logger.exception("vllm-scope: rows could not be added to their sums")
            self.missing += len(at)
            return
        self._x += x
        self._count += len(at)
        if self._xy is not None and xy is not None:
            self._xy += xy
            self._y += float(targets.sum())
            self._yy += float(targets @ targets)
        if self._xx is not None:
            self._keep(rows)

    @property
    def _num_copied(self) -> int:
        """The largest number of rows that are copied to float64 at a time."""
        return max(1, COPY_BYTES // (8 * self._width))

    def _keep(self, rows: Tensor) -> None:
        """If there are at least as many rows as `_rows` can hold, multiply the rows now. Otherwise
        copy the rows to `_rows`. When `_rows` is full, multiply the rows in `_rows`."""
        if len(rows) >= len(self._rows):
            self._multiply(rows)
            return
        while len(rows):
            num = min(len(rows), len(self._rows) - self._num_rows)
            self._rows[self._num_rows : self._num_rows + num] = rows[:num]
            self._num_rows += num
            rows = rows[num:]
            if self._num_rows == len(self._rows):
                self._multiply_waiting()

    def _multiply_waiting(self) -> None:
        self._multiply(self._rows[: self._num_rows])
        self._num_rows = 0

    def _multiply(self, rows: Tensor) -> None:
        """Add the products x x^T of some rows. If the device runs out of memory, count the rows as
        missing."""
        try:
            self._add_products(rows)
        except torch.OutOfMemoryError:
            logger.exception("vllm-scope: products of rows could not be added")
            self.missing += len(rows)

    def _add_products(self, rows: Tensor) -> None:
        assert self._xx is not None
        if self._exact:
            from vllm_scope.worker.squares import add_squares  # needs Triton

            for part in rows.split(MOST_AT_ONCE):
                add_squares(part, self._xx)
            return
        for part in rows.split(self._num_copied):
            some = part.double()
            for block in upper_blocks(self._width):
                self._xx[block].addmm_(some[:, block[0]].t(), some[:, block[1]])

    @torch.inference_mode()
    def read(self) -> Packed:
        """The sums of all rows so far, in host memory. The call waits for the device."""
        xx = b""
        if self._xx is not None:
            self._multiply_waiting()
            host = self._xx.cpu().numpy()
            xx = b"".join(host[block].tobytes() for block in upper_blocks(self._width))
        x, xy = (b"" if one is None else one.cpu().numpy().tobytes() for one in (self._x, self._xy))
        return Packed(self._count, self.missing, self._y, self._yy, (x, xy, xx))


def _sum_of(rows: Tensor) -> Tensor:
    """float64 [width], the sum of the rows [n, width]."""
    if not rows.is_cuda:
        return rows.sum(0, dtype=torch.float64)
    # On a GPU, torch's sum would first make a float64 copy of the rows.
    from vllm_scope.worker.squares import column_sums  # needs Triton

    return column_sums(rows)
