"""One part of a result that the server encodes: a stream, probe, Features, or layer of a lens.

Owns:  Column.
From:  result, cursor.   To: server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.sparse import SparseRows
from vllm_scope.codecs.packed import EncodedRows, decoded


@dataclass(frozen=True)
class Column:
    """One stream, probe or Features of a result, or one layer of a lens.

    Attributes:
        label: (site, layer, "before" or "after") of a stream, or the name of a probe or features.
        source: the values: EncodedRows for a read with a codec, SparseRows for features or a lens.
        positions: int64 [n], ascending.
        row_shape: the shape of one row. `()` for scores.
        aggregates: float32 [n] if the probe has an aggregate, else None.
    """

    label: tuple[str, int, str] | str
    source: Tensor | EncodedRows | SparseRows
    positions: np.ndarray
    row_shape: tuple[int, ...] = ()
    aggregates: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The rows [n, *row_shape], or the scores (float32 [n]), on the CPU. Each access decodes
        encoded rows again. A column of features or of a lens has no `values`."""
        assert not isinstance(self.source, SparseRows)
        return shaped(decoded(self.source), self.row_shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of `values`. For features and a lens, the bytes of the indices do not
        count."""
        return math.prod(self.source.shape) * self.source.dtype.itemsize

    def at(self, places: np.ndarray) -> Column:
        """The column with only the values at `places`. `places` are indices into this column, int64
        [m], ascending."""
        first, last = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
        # A slice is a view. For a view, torch copies no values and wakes no threads.
        some = slice(first, last) if last - first == len(places) else torch.from_numpy(places)
        aggregates = None if self.aggregates is None else self.aggregates[some]
        return replace(
            self, source=self.source[some], positions=self.positions[places], aggregates=aggregates
        )


def shaped(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of the rows with the shape [n, *shape]."""
    return rows if rows.shape[1:] == shape else rows.view(len(rows), *shape)
