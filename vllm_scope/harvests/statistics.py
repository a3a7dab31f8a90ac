"""Figures of the rows of one stream, which add up over shards.

Owns:  Statistics.
Runs:  `of_rows` on the threads that write shards; the sums wherever shards are read.
To:    shards (each holds the figures of its own rows), manifest, views.

Promise: the figures of some rows do not depend on which shard has them, but for rounding: blocks of
rows, less one of them, are summed in float32, and their sums in float64. They are of decoded rows,
which readers get.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.batch.by_position import ONE_THREAD
from vllm_scope.errors import FileError

#: A value is an outlier if it is more than this many times the root mean square of its row.
OUTLIER = 6.0
#: Name of the tensor in a shard, behind the stream's.
KEY = "statistics"
#: Of the dimensions with the most outliers, how many are listed.
_LISTED = 8
_SCALARS = 7
#: Numbers and rows that are worked on at once: few enough for a core's cache, for sums in float32,
#: and for counts in a byte.
_NUMBERS, _ROWS = 1 << 18, 255


@dataclass
class Statistics:
    """Sums over rows.

    Attributes:
        counts: float64 [7]: finite rows, rows with NaN, infinity or a squared norm beyond float32
            (left out of all other figures), rows with an outlier, sum of norms, sum of squared
            norms, least and greatest norm.
        values: float64 [3, hidden_size]: sum, sum of squares, number of outliers.
    """

    counts: NDArray[np.float64]
    values: NDArray[np.float64]

    @staticmethod
    def of_rows(blocks: Iterator[Tensor]) -> Statistics:
        """Args: blocks: [some, hidden_size] each, any float dtype; at least one."""
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
        """What a shard holds of its rows' figures: a `Summary` of files.sharded."""
        found = Statistics.of_rows(blocks)
        return {KEY: torch.from_numpy(np.concatenate([found.counts, found.values.ravel()]))}

    @staticmethod
    def parse(numbers: NDArray[np.float64], where: str) -> Statistics:
        """Of what `summary` made. Raises FileError."""
        if numbers.ndim != 1 or (len(numbers) - _SCALARS) % 3 or len(numbers) <= _SCALARS:
            raise FileError(f"{where}: its statistics are {list(numbers.shape)}; it is damaged.")
        return Statistics(numbers[:_SCALARS], numbers[_SCALARS:].reshape(3, -1))

    @property
    def mean(self) -> NDArray[np.float64]:
        """[hidden_size]."""
        found: NDArray[np.float64] = self.values[0] / max(self.counts[0], 1)
        return found

    @property
    def variance(self) -> NDArray[np.float64]:
        """[hidden_size]: of each dimension, over all rows."""
        found: NDArray[np.float64] = np.maximum(
            self.values[1] / max(self.counts[0], 1) - self.mean**2, 0
        )
        return found

    def to_json(self) -> dict[str, object]:
        """The figures for people; each dimension's mean and variance are in a file of their own."""
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
    """Sums over rows of one width, in memory that is used again for every block of rows.

    By numpy, which works on this thread alone: torch would wake a thread on each core many times
    per shard, and the engine needs the cores.
    """

    def __init__(self, width: int) -> None:
        self._width, at_once = width, min(max(_NUMBERS // width, 1), _ROWS)
        #: Rows that wait until they are as many as are worked on at once.
        self._rows, self._num_rows = torch.empty(at_once, width, dtype=torch.float32), 0
        self._squares = np.empty((at_once, width), np.float32)
        # Eight are counted at once, as the bytes of an int64.
        self._above = np.zeros((at_once, -(-width // 8) * 8), np.bool_)
        self._counts = np.array([0, 0, 0, 0, 0, math.inf, -math.inf])
        self._values = np.zeros((3, width))

    def add(self, rows: Tensor) -> None:
        """Args: rows: [some, width], any float dtype."""
        while len(rows):
            into = self._rows[self._num_rows :]
            some, rows = rows[: len(into)], rows[len(into) :]
            _copy_few(into[: len(some)], some)
            self._num_rows += len(some)
            if self._num_rows == len(self._rows):
                self._count()

    def found(self) -> Statistics:
        self._count()
        return Statistics(self._counts, self._values)

    def _count(self) -> None:
        """Count the rows that wait."""
        rows = self._rows[: self._num_rows].numpy()
        self._num_rows = 0
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.multiply(rows, rows, out=self._squares[: len(rows)])
            squared_norms = np.einsum("ij->i", squares)  # three times as fast as `sum(1)`
            finite = np.isfinite(squared_norms)
            num_broken = len(rows) - int(finite.sum())
            self._counts[:2] += len(rows) - num_broken, num_broken
            if num_broken:
                rows, squares, squared_norms = rows[finite], squares[finite], squared_norms[finite]
            if len(rows):
                self._count_norms(squares, squared_norms)
                self._count_values(rows, squares)

    def _count_norms(self, squares: NDArray[np.float32], squared: NDArray[np.float32]) -> None:
        """Args: squared: norms, of finite rows."""
        above, counts = self._above[: len(squares)], self._counts
        limits = squared * np.float32(OUTLIER**2 / self._width)
        np.greater(squares, limits[:, None], out=above[:, : self._width])
        outliers = np.add.reduce(above.view(np.int64), axis=0).view(np.uint8)
        self._values[2] += outliers[: self._width]
        norms = np.sqrt(squared.astype(np.float64))
        counts[2:5] += int(above.any(1).sum()), norms.sum(), (norms**2).sum()
        counts[5], counts[6] = min(counts[5], norms.min()), max(counts[6], norms.max())

    def _count_values(self, rows: NDArray[np.float32], squares: NDArray[np.float32]) -> None:
        """Args: both are written to."""
        # Less the first row, in float32: a dimension's mean may be far larger than its variance.
        first = rows[0].astype(np.float64)
        np.subtract(rows, rows[0].copy(), out=rows)
        total = np.add.reduce(rows, axis=0).astype(np.float64)
        np.multiply(rows, rows, out=squares)
        self._values[0] += total + len(rows) * first
        self._values[1] += np.add.reduce(squares, axis=0) + first * (2 * total + len(rows) * first)


def _copy_few(into: Tensor, rows: Tensor) -> None:
    """Copy [n, width] to float32, few numbers at once: torch then does it on this thread."""
    width, most = rows.shape[1], ONE_THREAD - 1
    few = max(most // width, 1)
    for copied, some in zip(into.split(few), rows.split(few), strict=True):
        if width <= most:
            copied.copy_(some)
        else:
            for part, each in zip(copied.split(most, 1), some.split(most, 1), strict=True):
                part.copy_(each)
