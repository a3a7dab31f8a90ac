"""A codec that projects each row to k numbers of one byte, by a random matrix.

The projection changes squared lengths and squared distances by a relative error of about sqrt(2/k).
The projection changes an inner product by at most about sqrt(2/k) times the product of the two
lengths. The single values of a row cannot be recovered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, StrictInt, model_validator
from torch import Tensor

from vllm_scope.codecs.base import KeepsK, RowPart
from vllm_scope.codecs.scaled import dequantise, quantise, quantised_parts

DEFAULT_K = 512
#: The largest number of elements of a random matrix. A matrix of this size has 32 MiB, and is made
#: in less than half a second. The limit also protects against a file whose metadata name a huge
#: matrix.
MAX_PROJECTION = 1 << 23
#: The largest number of random matrices that a process keeps in memory.
MOST_KEPT = 16


@lru_cache(maxsize=MOST_KEPT)
def projection(hidden_size: int, k: int, seed: int, device: torch.device) -> Tensor:
    """The random matrix R = randn(hidden_size, k) / sqrt(k), float32. R is equal on every device.
    The numbers come from numpy's RandomState, because its numbers never change (NEP 19). The random
    numbers of torch can change with a release, and differ between CPU and CUDA.
    """
    numbers = np.random.RandomState(seed).standard_normal((hidden_size, k)) / np.sqrt(k)
    return torch.from_numpy(numbers.astype(np.float32)).to(device)


@lru_cache(maxsize=4)
def inverse(hidden_size: int, k: int, seed: int, device: torch.device) -> Tensor:
    """The pseudo-inverse of the random matrix R, float32 [k, hidden_size]. The columns of R are
    linearly independent."""
    forward = projection(hidden_size, k, seed, torch.device("cpu")).double()
    found: Tensor = torch.linalg.pinv(forward)
    return found.float().to(device)


class RandomProjection8(KeepsK):
    """Stores rows @ R, where R is a random matrix. The results (projections) are quantised as in
    `full8`. `decode` multiplies the projections by the pseudo-inverse of R. Of all rows with the
    same projections, the decoded row is the shortest. The relative error of a decoded row is about
    sqrt(1 - k/hidden_size). The transpose of R in place of the pseudo-inverse would give an
    unbiased row. But the relative error of this row would be about sqrt(hidden_size/k): the error
    would be longer than the row.

    The first call of `prepare` or `encode` with a device makes R on this device.

    Attributes:
        k: the number of projections of each row. The default is the least of 512, hidden_size // 2
            and MAX_PROJECTION // hidden_size, but at least 1. If k is near hidden_size, the
            pseudo-inverse magnifies the rounding error. For such a k, the codec `full8` is better.
        seed: the seed of the random matrix R.
    """

    codec: Literal["rp8"] = "rp8"
    seed: StrictInt = Field(default=0, ge=0, lt=1 << 32)

    @classmethod
    def usual_k(cls, hidden_size: int) -> int:
        most = MAX_PROJECTION // max(hidden_size, 1)
        return max(1, min(DEFAULT_K, hidden_size // 2, most))

    @model_validator(mode="after")
    def _at_most_a_projection(self) -> Self:
        most = MAX_PROJECTION // self.hidden_size
        if self.k > most:
            raise ValueError(
                f"k is {self.k}; for rows of {self.hidden_size} values it must be at most {most}, "
                "take a smaller k"
            )
        return self

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return quantised_parts("q", self.k)

    def prepare(self, device: torch.device) -> None:
        projection(self.hidden_size, self.k, self.seed, device)

    def projections(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The projections rows @ R, float32 [num_rows, k], with an error of at most half a step of
        the quantisation. Use these numbers to compute distances and inner products of rows."""
        return dequantise(parts)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return quantise(rows.float() @ projection(self.hidden_size, self.k, self.seed, rows.device))

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        projected = self.projections(parts)
        back = inverse(self.hidden_size, self.k, self.seed, projected.device)
        return self._cast(projected @ back)
