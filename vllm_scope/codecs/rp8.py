"""A codec that projects each row to k numbers of one byte, by a random matrix.

The projection changes inner products and distances by a relative error of about sqrt(2/k). Single
values are lost.
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
#: The largest number of elements of a projection, also for codecs from files. To make the largest
#: projection takes at most 0.2 s and 32 MiB.
MAX_PROJECTION = 1 << 23
#: The largest number of projections that a process keeps in memory.
MOST_KEPT = 16


@lru_cache(maxsize=MOST_KEPT)
def projection(hidden_size: int, k: int, seed: int, device: torch.device) -> Tensor:
    """R = randn(hidden_size, k) / sqrt(k), float32, equal on every device.

    numpy's RandomState gives the numbers, because RandomState never changes (NEP 19). Torch's
    numbers can change with a release, and differ between CPU and CUDA.
    """
    numbers = np.random.RandomState(seed).standard_normal((hidden_size, k)) / np.sqrt(k)
    return torch.from_numpy(numbers.astype(np.float32)).to(device)


@lru_cache(maxsize=4)
def inverse(hidden_size: int, k: int, seed: int, device: torch.device) -> Tensor:
    """The pseudo-inverse of R, float32 [k, hidden_size]. R's columns are independent."""
    forward = projection(hidden_size, k, seed, torch.device("cpu")).double()
    found: Tensor = torch.linalg.pinv(forward)
    return found.float().to(device)


class RandomProjection8(KeepsK):
    """Stores rows @ R, quantised as in `full8`.

    `decode` multiplies with R's pseudo-inverse. The result is the shortest row with the stored
    projections. The relative error of a row is about sqrt(1 - k/hidden_size). R's transpose would
    be unbiased, but the relative error would be about sqrt(hidden_size/k): larger than the row.

    `prepare` or the first `encode` on a device makes R on this device.

    Attributes:
        k: numbers per row. Default: the least of 512, hidden_size // 2 and MAX_PROJECTION //
            hidden_size. If k is near hidden_size, the inverse magnifies the rounding error. `full8`
            is then better.
        seed: the seed of R.
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
                f"k is {self.k}; for rows of {self.hidden_size} values it is at most {most}, "
                "take a smaller k"
            )
        return self

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return quantised_parts("q", self.k)

    def prepare(self, device: torch.device) -> None:
        projection(self.hidden_size, self.k, self.seed, device)

    def projections(self, parts: Mapping[str, Tensor]) -> Tensor:
        """rows @ R, float32 [num_rows, k], exact to half a step of the quantisation. Use these
        numbers to compute distances and inner products of rows."""
        return dequantise(parts["q"], parts["scale"], parts["zero"])

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return quantise(rows.float() @ projection(self.hidden_size, self.k, self.seed, rows.device))

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        projected = self.projections(parts)
        back = inverse(self.hidden_size, self.k, self.seed, projected.device)
        return self._cast(projected @ back)
