"""A random projection of each row to k numbers, in bytes.

Inner products and distances survive within about sqrt(2/k); a single value does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, StrictInt, model_validator
from torch import Tensor

from vllm_scope.codecs.base import CodecModel, RowPart
from vllm_scope.codecs.full8 import dequantise, quantise, quantised_parts

DEFAULT_K = 512
#: A projection has at most this many numbers, whoever asks for it, a file too: making it
#: takes 0.2 s and 32 MiB at most.
MAX_PROJECTION = 1 << 23
#: Projections that a process keeps: of its requests (packer), and one that it writes with.
MOST_KEPT = 16


@lru_cache(maxsize=MOST_KEPT)
def projection(hidden_size: int, k: int, seed: int, device: torch.device) -> Tensor:
    """R = randn(hidden_size, k) / sqrt(k), float32, the same on every device.

    From numpy's RandomState, whose stream is frozen for good (NEP 19); torch promises
    none across releases, nor between CPU and CUDA.
    """
    numbers = np.random.RandomState(seed).standard_normal((hidden_size, k)) / np.sqrt(k)
    return torch.from_numpy(numbers.astype(np.float32)).to(device)


@lru_cache(maxsize=4)
def inverse(hidden_size: int, k: int, seed: int, device: torch.device) -> Tensor:
    """The pseudo-inverse of R, float32 [k, hidden_size]; its columns are independent."""
    forward = projection(hidden_size, k, seed, torch.device("cpu")).double()
    return torch.linalg.pinv(forward).float().to(device)


class RandomProjection8(CodecModel):
    """rows @ R, quantised as `full8`.

    Decoding multiplies with the pseudo-inverse, not with R's transpose. It gives the
    shortest row that has these projections, with a relative error of about
    sqrt(1 - k/hidden_size); the transpose is unbiased, but its error is about
    sqrt(hidden_size/k), larger than the row itself.

    The first encode on a device makes R there; later ones touch the host no more.

    Attributes:
        k: numbers per row; 512, or half of hidden_size or what MAX_PROJECTION allows, where
            that is less. Near hidden_size the inverse magnifies the rounding: there,
            `full8` is better.
        seed: of R.
    """

    part_names: ClassVar[tuple[str, ...]] = ("q", "scale", "zero")

    codec: Literal["rp8"] = "rp8"
    k: StrictInt = Field(ge=1)
    seed: StrictInt = Field(default=0, ge=0, lt=1 << 32)

    @model_validator(mode="before")
    @classmethod
    def _default_k(cls, body: Any) -> Any:
        if isinstance(body, dict) and "k" not in body and type(body.get("hidden_size")) is int:
            width = body["hidden_size"]
            most = min(DEFAULT_K, width // 2, MAX_PROJECTION // max(width, 1))
            return {**body, "k": max(1, most)}
        return body

    @model_validator(mode="after")
    def _sane_k(self) -> RandomProjection8:
        if self.k > self.hidden_size:
            raise ValueError(f"k is {self.k}; a row has {self.hidden_size} values")
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
        """float32 [num_rows, k]: rows @ R, to half a step. What to compare."""
        return dequantise(parts["q"], parts["scale"], parts["zero"])

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return quantise(rows.float() @ projection(self.hidden_size, self.k, self.seed, rows.device))

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        projected = self.projections(parts)
        back = inverse(self.hidden_size, self.k, self.seed, projected.device)
        return self._cast(projected @ back)
