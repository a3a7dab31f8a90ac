"""Makes features from the numbers that a bank or a Strongest delivered.

Owns:  SparseRows, `sparse_rows`.
Runs:  in the front-end (results), and in the worker (sinks.request), on the CPU.
From:  request.resolved (the request's action).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_scope.request.heads import Likeliest, Strongest
from vllm_scope.request.read_features import NOT_KNOWN, ReadFeatures
from vllm_scope.request.resolved import ResolvedFeatures


@dataclass(frozen=True)
class SparseRows:
    """Features, or tokens of a lens, at n positions, with `places` entries for each position.

    Attributes:
        indices: int32 [n, places]; -1 in an unused entry.
        values: float32 [n, places]; 0 in an unused entry.
        lens: (name, layer) of the lens that computed the tokens; None for features.
        read: the features that the result can have; NOT_KNOWN for a lens.
    """

    indices: Tensor
    values: Tensor
    lens: tuple[str, int] | None = None
    read: ReadFeatures = NOT_KNOWN

    dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, some: slice | Tensor) -> SparseRows:
        return replace(self, indices=self.indices[some], values=self.values[some])

    @property
    def counts(self) -> Tensor:
        """int64 [n]: the number of features, or of tokens of the lens, at each position."""
        return (self.indices >= 0).sum(1)


def sparse_rows(asked: ResolvedFeatures, words: Tensor) -> SparseRows:
    """The features, or the tokens of a lens, in the numbers that a worker delivered.

    Args:
        words: float32 [n, num_values]. If a head Strongest or Likeliest computed the numbers, the
            first half of each row contains the bits of int32 indices.
    """
    (cell,) = asked.cells
    if isinstance(cell.bank, Strongest):
        count = cell.bank.count
        indices, values = words[:, :count].view(torch.int32), words[:, count:]
        indices, values = indices[:, : asked.top_k], values[:, : asked.top_k]
        # NaN stays, because it is not <= 0.
        kept = indices >= 0 if isinstance(cell.bank, Likeliest) else ~(values <= 0)
        if asked.indices is not None:
            kept &= torch.isin(indices, torch.tensor(asked.indices, dtype=torch.int32))
    else:
        assert asked.indices is not None
        assert asked.thresholds is not None
        values = words
        indices = torch.tensor(asked.indices, dtype=torch.int32).expand(words.shape)
        kept = ~(values <= torch.from_numpy(asked.thresholds.numpy.copy()))
    if asked.threshold is not None:
        kept &= ~(values < asked.threshold)
    lens = None if asked.lens is None else (asked.lens[0], cell.place.layer)
    indices, values = torch.where(kept, indices, -1), torch.where(kept, values, 0.0)
    return SparseRows(indices, values, lens, asked.read)
