"""A random projection of each row to k numbers of one byte.

The projection keeps inner products and distances within about sqrt(2/k), but no single values.
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
#: The largest number of elements of a projection, also of a projection that a file names. Making
#: one takes at most 0.2 s and 32 MiB.
MAX_PROJECTION = 1 << 23
#: The largest number of projections that a process keeps, for its requests (packer) and for its
#: files (writer).
MOST_KEPT = 16


@lru_cache(maxsize=MOST_KEPT)
def projection(hidden_size: int, k: int, seed: int, device: torch.device) -> Tensor:
    """R = randn(hidden_size, k) / sqrt(k), float32, the same on every device.

    The numbers are those of numpy's RandomState, which never change (NEP 19). Torch's numbers may
    change with a release, and differ between CPU and CUDA.
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
    """rows @ R, quantised as in `full8`.

    Decoding multiplies with R's pseudo-inverse, which gives the shortest row that has the stored
    projections, with a relative error of about sqrt(1 - k/hidden_size). R's transpose would
    be unbiased, but its relative error would be about sqrt(hidden_size/k): an error larger than
    the row itself.

    `prepare`, or the first `encode` on a device, makes R on that device.

    Attributes:
        k: numbers per row. Default: 512, or less if hidden_size // 2 or
            MAX_PROJECTION // hidden_size is less. If k is near hidden_size, the inverse
            magnifies the rounding error, and `full8` is better.
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
        """float32 [num_rows, k]: rows @ R, exact to half a step of the quantisation. Distances and
        inner products of rows are best computed from these numbers."""
        return dequantise(parts["q"], parts["scale"], parts["zero"])

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return quantise(rows.float() @ projection(self.hidden_size, self.k, self.seed, rows.device))

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        projected = self.projections(parts)
        back = inverse(self.hidden_size, self.k, self.seed, projected.device)
        return self._cast(projected @ back)
