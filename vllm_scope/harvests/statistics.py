"""Computes figures of a stream's rows, such as mean and variance, and adds the figures of shards.

Owns:  Statistics, `compiled_count`.
Runs:  on the threads that write shards (`of_rows`), and in each process that reads shards (`+`).
To:    shards (each shard has the figures of its rows), manifest, views.

Promise: apart from rounding, the figures do not depend on how the rows are divided among shards.
All sums are in float64. The figures describe the decoded rows, which a reader of the shard gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.errors import FileError

#: A value is an outlier if its absolute value is more than this many times the root mean square of
#: its row.
OUTLIER = 6.0
#: The tensor with a stream's figures has the name `STREAM.statistics` in a shard.
KEY = "statistics"
#: The most dimensions that `to_json` lists. It lists the dimensions with the most outliers.
_LISTED = 8
_SCALARS = 7
#: The number of float32 numbers in the buffer of `_Sums`. The buffer fits into the cache of one CPU
#: core.
_NUMBERS = 1 << 18
#: A row with a larger squared norm counts as broken, because float32 cannot store this square.
_MOST_SQUARED = float(np.finfo(np.float32).max)


@dataclass
class Statistics:
    """Counts and sums over the rows of one stream.

    Attributes:
        counts: float64 [7]. The first three numbers count the rows that are not broken, the broken
            rows, and the rows with an outlier. The next two are the sum of the norms, and the sum
            of the squared norms. The last two are the smallest and the largest norm. A row is
            broken if it has NaN or infinity, or if float32 cannot store its squared norm. Only the
            second number includes broken rows.
        values: the sum, the sum of squares and the number of outliers of each dimension, as float64
            [3, hidden_size].
    """

    counts: NDArray[np.float64]
    values: NDArray[np.float64]

    @staticmethod
    def of_rows(blocks: Iterator[Tensor]) -> Statistics:
        """Compute the Statistics of the rows of all blocks.

        Args:
            blocks: at least one block of rows. A block has the shape [num_rows, hidden_size] and
                the dtype bfloat16, float16 or float32.
        """
        sums: _Sums | None = None
        for block in blocks:
            sums = sums or _Sums(block.shape[1])
            sums.add(block)
        assert sums is not None
        return sums.found()

    def __add__(self, other: Statistics) -> Statistics:
        a, b = self.counts, other.counts
        counts = np.concatenate([a[:5] + b[:5], [min(a[5], b[5]), max(a[6], b[6])]])
        return Statistics(counts, self.values + other.values)

    @staticmethod
    def summary(blocks: Iterator[Tensor]) -> dict[str, Tensor]:
        """Make the tensor in which a shard stores a stream's figures. The key of the result is KEY.

        This function has the type `Summary`, which files.sharded defines.
        """
        found = Statistics.of_rows(blocks)
        return {KEY: torch.from_numpy(np.concatenate([found.counts, found.values.ravel()]))}

    @staticmethod
    def parse(numbers: NDArray[np.float64], where: str) -> Statistics:
        """Make Statistics from a tensor of `summary`. Raises FileError if the shape is wrong."""
        if numbers.ndim != 1 or (len(numbers) - _SCALARS) % 3 or len(numbers) <= _SCALARS:
            raise FileError(
                f"{where}: its statistics are of shape {list(numbers.shape)}; it is damaged."
            )
        return Statistics(numbers[:_SCALARS], numbers[_SCALARS:].reshape(3, -1))

    @property
    def mean(self) -> NDArray[np.float64]:
        """The mean of each dimension over all rows that are not broken, [hidden_size]."""
        found: NDArray[np.float64] = self.values[0] / max(self.counts[0], 1)
        return found

    @property
    def variance(self) -> NDArray[np.float64]:
        """The variance of each dimension over all rows that are not broken, [hidden_size]."""
        found: NDArray[np.float64] = np.maximum(
            self.values[1] / max(self.counts[0], 1) - self.mean**2, 0
        )
        return found

    def to_json(self) -> dict[str, object]:
        """The figures for `harvest.json`.

        harvest-statistics.safetensors has the mean and the variance of each dimension.
        """
        rows, broken, with_outlier, total, squares, least, most = self.counts.tolist()
        count = max(rows, 1)
        mean, variance, outliers = self.mean, self.variance, self.values[2]
        order = np.argsort(-outliers, kind="stable")[:_LISTED]
        low, middle, high = np.quantile(variance, [0, 0.5, 1]).tolist()
        return {
            "rows": int(rows),
            "rows_not_finite": int(broken),
            "norm": {
                "mean": total / count,
                "sd": math.sqrt(max(squares / count - (total / count) ** 2, 0.0)),
                "min": least if rows else 0.0,
                "max": most if rows else 0.0,
            },
            "norm_of_mean": float(np.linalg.norm(mean)),
            "variance": {
                "total": float(variance.sum()), "min": low, "median": middle, "max": high,
            },
            "outliers": {
                "values": int(outliers.sum()),
                "rows": int(with_outlier),
                "dimensions": {str(i): int(outliers[i]) for i in order.tolist() if outliers[i]},
            },
        }  # fmt: skip


class _Sums:
    """Sums over rows that have the same width."""

    def __init__(self, width: int) -> None:
        #: A buffer for rows as float32, which `add` uses again and again.
        self._rows = np.empty((max(_NUMBERS // width, 1), width), np.float32)
        self._counts = np.array([0, 0, 0, 0, 0, math.inf, -math.inf])
        self._values = np.zeros((3, width))

    def add(self, rows: Tensor) -> None:
        """Add rows [num_rows, width] to the sums. `of_rows` says which dtypes are possible."""
        count = compiled_count()
        for some in rows.split(len(self._rows)):
            into = self._rows[: len(some)]
            if some.dtype == torch.bfloat16:  # a bfloat16 has the upper 16 bits of a float32
                bits = some.view(torch.uint16).numpy()
                np.left_shift(bits, np.uint32(16), out=into.view(np.uint32), dtype=np.uint32)
            else:
                np.copyto(into, some.numpy())
            count(into, OUTLIER**2 / rows.shape[1], self._counts, self._values)

    def found(self) -> Statistics:
        return Statistics(self._counts, self._values)


def _count(
    rows: NDArray[np.float32], limit: float, counts: NDArray[np.float64],
    values: NDArray[np.float64],
) -> None:  # fmt: skip
    """Add rows to `Statistics.counts` and `Statistics.values`.

    Args:
        limit: a value is an outlier if its square is more than `limit` times the squared norm of
            its row.
    """
    for i in range(rows.shape[0]):
        row = rows[i]
        squared_norm = 0.0
        for j in range(row.shape[0]):
            squared_norm += np.float64(row[j]) * np.float64(row[j])
        if not squared_norm <= _MOST_SQUARED:  # the condition is also true for NaN
            counts[1] += 1
            continue
        most, num_outliers = limit * squared_norm, 0
        for j in range(row.shape[0]):
            value = np.float64(row[j])
            is_outlier = int(value * value > most)
            values[0, j] += value
            values[1, j] += value * value
            values[2, j] += is_outlier
            num_outliers += is_outlier
        norm = math.sqrt(squared_norm)
        counts[0] += 1
        counts[2] += num_outliers > 0
        counts[3] += norm
        counts[4] += squared_norm
        counts[5] = min(counts[5], norm)
        counts[6] = max(counts[6], norm)


@cache
def compiled_count() -> Callable[..., None]:
    """The function `_count`, which numba compiles in half a second.

    The function runs without Python's GIL. numpy takes and releases the GIL for each short step.
    With numpy, two threads were slower than one thread.
    """
    import numba  # vLLM installs numba

    signature = "void(float32[:, ::1], float64, float64[::1], float64[:, ::1])"
    return numba.njit(signature, nogil=True, fastmath={"reassoc"})(_count)  # type: ignore[no-any-return]
