"""Bytes between a row's smallest and largest value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from vllm_scope.codecs.base import Codec, RowPart
from vllm_scope.codecs.scaled import TINY, finite_scale

#: A step finer than this share of the largest value is finer than float32 itself. A
#: power of two, so that a constant row comes back exactly.
_FINEST = 2.0**-23
#: Multiplied with, for the same scale on a GPU as on a CPU (see scaled.py).
_STEP = 1 / 255


def quantise(values: Tensor) -> dict[str, Tensor]:
    """float32 [n, m] -> uint8 `q` [n, m]; float32 `scale` and `zero` [n, 1].

    A constant row has no range. Its scale is then a tiny share of the constant, and
    (0 - zero) * scale is the constant.
    """
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    largest = torch.maximum(low.abs(), high.abs())
    # Divided before the subtraction: the width of float32's range is no float32.
    scale = torch.maximum(high * _STEP - low * _STEP, largest * _FINEST).clamp(min=TINY)
    zero = -low / scale
    q = (values / scale + zero).round().clamp(0, 255).nan_to_num(0.0)
    return {"q": q.to(torch.uint8), "scale": finite_scale(scale), "zero": zero.nan_to_num(0.0)}


def dequantise(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """float32 [n, m]; a row that held NaN or infinity is NaN throughout."""
    return (q.float() - zero) * scale


def quantised_parts(name: str, size: int) -> tuple[RowPart, ...]:
    """What `quantise` makes of a row of `size` numbers; `name` is that of its `q`."""
    of_row = (RowPart(part, torch.float32, 1) for part in ("scale", "zero"))
    return RowPart(name, torch.uint8, size), *of_row


class Full8(Codec):
    """uint8 values, and a float32 scale and zero per row: x = (q - zero) * scale."""

    codec: Literal["full8"] = "full8"

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return quantised_parts("q", self.hidden_size)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return quantise(rows.float())

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return self._cast(dequantise(parts["q"], parts["scale"], parts["zero"]))
