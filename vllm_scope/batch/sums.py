"""Sums of rows by label, as a worker returns them, and the size of the sums on the device.

Owns:  Sums, Packed, `bytes_of`, `upper_blocks`.
Runs:  in workers (create the sums), in EngineCore (counts their bytes), in front-ends.
From:  worker.summing.   To: core.sums_room, analysis.moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Bounds of `num_waiting`. If more rows wait, the products x x^T take less time for each row, but
#: the waiting rows take more memory.
LEAST_ROWS, MOST_ROWS = 256, 4096
#: The number of rows of the matrix x x^T that one product computes. If x x^T has 4,096 columns,
#: these rows need 32 MiB.
BLOCK = 1024


def upper_blocks(width: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, columns) of each block of the matrix x x^T on or above the diagonal."""
    for first in range(0, width, BLOCK):
        yield slice(first, min(first + BLOCK, width)), slice(first, width)


def num_waiting(width: int) -> int:
    """The largest number of rows of this width that wait on the device for their products x x^T."""
    # The float64 sums lie behind these rows in memory. If the number of rows is a multiple of 8,
    # the sums are aligned for every width.
    return min(max(-(-width // 8) * 8, LEAST_ROWS), MOST_ROWS)


def bytes_of(width: int, itemsize: int, covariance: bool, targets: bool) -> int:
    """The number of bytes of device memory for the sums of one name, place and label.

    Args:
        width: How many numbers a row has.
        itemsize: The number of bytes of one number of a row.
        covariance: True if there is a sum of x x^T.
        targets: True if there is a sum of x y.
    """
    products = width * (8 * width + num_waiting(width) * itemsize) if covariance else 0
    return 8 * width * (1 + targets) + products


class Packed(msgspec.Struct, frozen=True):
    """The form in which Sums travel between processes.

    Attributes:
        count, missing, target, target_squared: `count`, `missing`, `y` and `yy` of Sums.
        arrays: the float64 numbers of three sums as bytes: the sum of x, the sum of x y, and the
            `upper_blocks` of the sum of x x^T. If a sum does not exist, its bytes are empty.
    """

    count: int
    missing: int
    target: float
    target_squared: float
    arrays: tuple[bytes, bytes, bytes]


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over the rows x of one name, site, layer and label, in float64.

    Requests can have a target: a number y that belongs to all rows of the request.

    Attributes:
        count: number of rows.
        x: [width], the sum of the rows.
        xx: [width, width], the sum of x x^T; None without covariance.
        xy: [width], the sum of x y; None without targets.
        y, yy: the sum of the targets, and the sum of their squares; 0 without targets.
        missing: How many selected rows are missing from at least one of the sums. There are three
            causes: the device had no room, an error occurred, or a request's options differ from
            the options of the sums.
    """

    count: int
    x: Floats
    xx: Floats | None = None
    xy: Floats | None = None
    y: float = 0.0
    yy: float = 0.0
    missing: int = 0

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether the sum of x x^T exists, and whether the sum of x y exists."""
        return self.xx is not None, self.xy is not None

    @property
    def mean(self) -> Floats:
        """The mean of the rows, [width]; NaN without rows."""
        with np.errstate(invalid="ignore"):
            found: Floats = self.x / np.float64(self.count)
        return found

    @property
    def scatter(self) -> Floats:
        """[width, width], the sum of (x - mean)(x - mean)^T.

        Raises:
            ValueError: the sum of x x^T does not exist.
        """
        if self.xx is None:
            raise ValueError(
                "these sums have no covariance; send the requests with Moments(covariance=True)."
            )
        found: Floats = self.xx - np.outer(self.x, self.mean)
        return found

    @property
    def covariance(self) -> Floats:
        """[width, width], `scatter` divided by the number of rows. Raises the same ValueError as
        `scatter`."""
        return self.scatter / self.count

    def __add__(self, other: Sums) -> Sums:
        """The sums over the rows of `self` and of `other`.

        Raises:
            ValueError: the widths differ; or both operands have rows, but only one operand has the
                sum of x x^T, or only one has the sum of x y.
        """
        if self.x.shape != other.x.shape:
            raise ValueError(
                f"sums of rows of {len(self.x)} and of {len(other.x)} numbers cannot be added."
            )
        if not other.count:
            return replace(self, missing=self.missing + other.missing)
        if not self.count:
            return other + self
        if self.kind != other.kind:
            raise ValueError(
                "sums can be added only if all or none have covariance, and all or none have "
                "targets."
            )
        return Sums(
            self.count + other.count, self.x + other.x, _both(self.xx, other.xx),
            _both(self.xy, other.xy), self.y + other.y, self.yy + other.yy,
            self.missing + other.missing,
        )  # fmt: skip

    @staticmethod
    def total(some: Sequence[Sums]) -> Sums:
        """The sums over the rows of all items of `some`. `some` has at least one item."""
        found = some[0]
        for one in some[1:]:
            found = found + one
        return found

    def to_bytes(self) -> bytes:
        """The bytes of a safetensors file. Each attribute that is not None is a float64 tensor with
        the attribute's name."""
        from safetensors.numpy import save

        numbers = {name: getattr(self, name) for name in ("count", "missing", "y", "yy")}
        arrays = {"x": self.x, "xx": self.xx, "xy": self.xy}
        found = {name: np.array([n], np.float64) for name, n in numbers.items()}
        return save(found | {name: one for name, one in arrays.items() if one is not None})

    @staticmethod
    def from_bytes(data: bytes) -> Sums:
        """The Sums that `to_bytes` has written as `data`."""
        from safetensors.numpy import load

        found = load(data)
        count, missing, y, yy = (float(found[n][0]) for n in ("count", "missing", "y", "yy"))
        return Sums(int(count), found["x"], found.get("xx"), found.get("xy"), y, yy, int(missing))

    @staticmethod
    def of_packed(found: Packed) -> Sums:
        x, xy, xx = (np.frombuffer(one, np.float64) if one else None for one in found.arrays)
        assert x is not None
        return Sums(
            found.count, x, None if xx is None else _mirrored(xx, len(x)), xy,
            found.target, found.target_squared, found.missing,
        )  # fmt: skip


def _mirrored(numbers: Floats, width: int) -> Floats:
    """The symmetric matrix [width, width] whose `upper_blocks` have these numbers, block after
    block."""
    whole, first = np.empty((width, width)), 0
    for rows, columns in upper_blocks(width):
        shape = rows.stop - rows.start, columns.stop - columns.start
        block = numbers[first : first + shape[0] * shape[1]].reshape(shape)
        first += block.size
        whole[rows, columns], whole[columns, rows] = block, block.T
        upper = np.triu(block[:, : shape[0]])
        whole[rows, rows] = upper + np.triu(upper, 1).T
    return whole


def _both(one: Floats | None, other: Floats | None) -> Floats | None:
    return None if one is None or other is None else one + other
