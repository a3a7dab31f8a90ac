"""Bytes between a row's smallest and largest value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vllm_scope.codecs.base import TINY, CodecModel, RowPart, finite_scale

#: A step finer than this share of the largest value is finer than float32 itself. A
#: power of two, so that a constant row comes back exactly.
_FINEST = 2.0**-23
#: As in fp8: multiplied with, for the same scale on a GPU as on a CPU.
_STEP = 1 / 255


def quantise(values: Tensor) -> dict[str, Tensor]:
    """float32 [n, m] -> uint8 `q` [n, m]; float32 `scale` and `zero` [n, 1].

    A constant row has no range. Its scale is then a tiny share of the constant, so that
    the zero holds it: (0 - zero) * scale is the constant.
    """
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    largest = torch.maximum(low.abs(), high.abs())
    # Each divided by itself, because float32's range does not hold its own width.
    scale = torch.maximum(high * _STEP - low * _STEP, largest * _FINEST).clamp(min=TINY)
    zero = -low / scale
    q = (values / scale + zero).round().clamp(0, 255).nan_to_num(0.0)
    return {"q": q.to(torch.uint8), "scale": finite_scale(scale), "zero": zero.nan_to_num(0.0)}


def dequantise(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """float32 [n, m]; NaN throughout a row that held NaN or infinity."""
    return (q.float() - zero) * scale


def quantised_parts(name: str, size: int) -> tuple[RowPart, ...]:
    """What `quantise` makes of a row of `size` numbers, `q` under a name."""
    return (
        RowPart(name, torch.uint8, size),
        RowPart("scale", torch.float32, 1),
        RowPart("zero", torch.float32, 1),
    )


class Full8(CodecModel):
    """uint8 values, and a float32 scale and zero per row: x = (q - zero) * scale."""

    part_names: ClassVar[tuple[str, ...]] = ("q", "scale", "zero")

    codec: Literal["full8"] = "full8"

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return quantised_parts("q", self.hidden_size)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return quantise(rows.float())

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return self._cast(dequantise(parts["q"], parts["scale"], parts["zero"]))
