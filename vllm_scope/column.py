"""One stream or probe of a result, for those who pass it on.

Owns:  Column.
From:  result.   To: server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from vllm_scope.codecs.packed import EncodedRows, decoded


@dataclass(frozen=True)
class Column:
    """One stream or probe of a result, for those who pass it on.

    Attributes:
        label: site, layer and "before" or "after" of a stream; a probe's name.
        source: the values, or rows as their read's codec left them.
        positions: int64 [n], ascending.
        wanted: int64, ascending: the positions that were asked for, of the tokens
            processed so far; those that are not among `positions` are on their way,
            or lost.
        row_shape: of a row, `()` for scores.
    """

    label: tuple[str, int, str] | str
    source: Tensor | EncodedRows
    positions: np.ndarray
    wanted: np.ndarray
    row_shape: tuple[int, ...] = ()

    @property
    def values(self) -> Tensor:
        """[n, *row_shape] rows, or float32 [n] scores, CPU. Decoded each time."""
        return shaped(decoded(self.source), self.row_shape)

    @property
    def nbytes(self) -> int:
        """Of `values`."""
        return math.prod(self.source.shape) * self.source.dtype.itemsize

    def part(self, first: int, last: int) -> Column:
        """Its values `first` to `last - 1`."""
        some = slice(first, last)
        return replace(self, source=self.source[some], positions=self.positions[some])

    @property
    def num_settled(self) -> int:
        """How many values come before the first that is still missing."""
        n = min(len(self.positions), len(self.wanted))
        differ = np.flatnonzero(self.positions[:n] != self.wanted[:n])
        return int(differ[0]) if len(differ) else n


def shaped(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[n, *shape]; a view."""
    return rows if rows.shape[1:] == shape else rows.view(len(rows), *shape)
