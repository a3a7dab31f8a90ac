"""Figures of the rows of one stream, which add up over shards.

Owns:  Statistics.
Runs:  `of_rows` on the threads that write shards; the sums wherever shards are read.
To:    shards (each holds the figures of its own rows), manifest, views.

Promise: the figures of some rows do not depend on which shard has them, but for rounding: blocks of
rows are summed in float32, and their sums in float64. They are of decoded rows, which readers get.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.errors import FileError

#: A value is an outlier if it is more than this many times the root mean square of its row.
OUTLIER = 6.0
#: Name of the tensor in a shard, behind the stream's.
KEY = "statistics"
#: Of the dimensions with the most outliers, how many are listed.
_LISTED = 8
_SCALARS = 7
#: Numbers and rows that are worked on at once: few enough for a core's cache, and for sums in
#: float32.
_NUMBERS, _ROWS = 1 << 18, 256


@dataclass
class Statistics:
    """Sums over rows.

    Attributes:
        counts: float64 [7]: finite rows, rows with NaN or infinity (left out of all other
            figures), rows with an outlier, sum of norms, sum of squared norms, least and greatest
            norm.
        values: float64 [3, hidden_size]: sum, sum of squares, number of outliers.
    """

    counts: NDArray[np.float64]
    values: NDArray[np.float64]

    @staticmethod
    def of_rows(blocks: Iterator[Tensor]) -> Statistics:
        """Args: blocks: [some, hidden_size] each, any float dtype; at least one."""
        found: Statistics | None = None
        for block in blocks:
            for some in block.split(min(max(_NUMBERS // block.shape[1], 1), _ROWS)):
                one = _of_block(some.float())
                found = one if found is None else found + one
        assert found is not None
        return found

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


def _of_block(rows: Tensor) -> Statistics:
    """Of float32 rows."""
    squared_norms = torch.linalg.vector_norm(rows, dim=1).square()
    finite = torch.isfinite(squared_norms)
    num_broken = len(rows) - int(finite.sum())
    if num_broken:
        rows, squared_norms = rows[finite], squared_norms[finite]
    # Sums over rows as matrix products: three times as fast as `sum(0)`.
    ones = torch.ones(len(rows))
    total = ones @ rows
    squares = rows * rows
    limits = squared_norms * (OUTLIER**2 / rows.shape[1])
    outliers = (squares > limits[:, None]).view(torch.uint8).sum(0, dtype=torch.int32)
    with_outlier = (squares.amax(1) > limits).sum() if len(rows) else 0
    norms = squared_norms.double().sqrt()
    counts = [
        len(rows), num_broken, int(with_outlier),
        float(norms.sum()), float(squared_norms.double().sum()),
        float(norms.min()) if len(norms) else math.inf,
        float(norms.max()) if len(norms) else -math.inf,
    ]  # fmt: skip
    sums = [each.double() for each in (total, ones @ squares, outliers)]
    return Statistics(np.array(counts), torch.stack(sums).numpy())
