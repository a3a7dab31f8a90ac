"""Codecs with 8 bits per value: x = q * scale, or x = (q - zero) * scale. `scale` and `zero` are
one float32 number each per row.

Owns:  Fp8, Int8, Full8; `quantise` and `dequantise`, which rp8 and topk8 use too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vllm_scope.codecs.base import Codec, RowPart

#: The smallest normal float32. A smaller scale would lose bits, or be flushed to zero.
_TINY = torch.finfo(torch.float32).tiny
#: The least step, as a share of the largest value. float32 has no smaller steps. The number is a
#: power of two, and therefore a constant row is decoded exactly.
_FINEST = 2.0**-23
#: A range is multiplied by this number instead of divided by 255. Then GPU and CPU compute the same
#: scale (see `_Scaled._encode`).
_STEP = 1 / 255


def _finite_scale(scale: Tensor) -> Tensor:
    """A row's scale, or NaN if the row has NaN or infinity. With a NaN scale, a row decodes to
    NaN."""
    return torch.where(scale.isfinite(), scale, torch.nan)


class _Scaled(Codec):
    """A codec that scales the largest absolute value of each row to `limit`."""

    limit: ClassVar[float]
    q_dtype: ClassVar[torch.dtype]

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        q = RowPart("q", self.q_dtype, self.hidden_size)
        return q, RowPart("scale", torch.float32, 1)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        values = rows.float()
        # Multiply by the inverse of `limit`, because a GPU divides by a constant in this way. If
        # the scales of GPU and CPU differed in the last bit, ties would round differently.
        scale = (values.abs().amax(-1, keepdim=True) * (1 / self.limit)).clamp(min=_TINY)
        q = self._rounded(values / scale).clamp(-self.limit, self.limit)
        return {"q": q.to(self.q_dtype), "scale": _finite_scale(scale)}

    def _rounded(self, values: Tensor) -> Tensor:
        return values

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return self._cast(parts["q"].float() * parts["scale"])


class Fp8(_Scaled):
    """float8_e4m3fn. Small values in a row with large values keep their relative precision."""

    limit: ClassVar[float] = torch.finfo(torch.float8_e4m3fn).max
    q_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    codec: Literal["fp8"] = "fp8"


class Int8(_Scaled):
    """int8 from -127 to 127. The scale is the same as in vLLM's own int8 kernels."""

    limit: ClassVar[float] = 127
    q_dtype: ClassVar[torch.dtype] = torch.int8

    codec: Literal["int8"] = "int8"

    def _rounded(self, values: Tensor) -> Tensor:
        # An integer cannot be NaN. If the row had NaN, the row's scale is NaN.
        return values.round().nan_to_num(0.0)


def quantise(values: Tensor) -> dict[str, Tensor]:
    """Quantise float32 [n, m] to uint8 `q` [n, m], with float32 `scale` and `zero` [n, 1].

    A constant row has no range. The scale of such a row is a tiny share of the constant, and (0 -
    zero) * scale is the constant.
    """
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    largest = torch.maximum(low.abs(), high.abs())
    # Multiply before the subtraction, because `high - low` can be too large for float32.
    scale = torch.maximum(high * _STEP - low * _STEP, largest * _FINEST).clamp(min=_TINY)
    zero = -low / scale
    q = (values / scale + zero).round().clamp(0, 255).nan_to_num(0.0)
    return {"q": q.to(torch.uint8), "scale": _finite_scale(scale), "zero": zero.nan_to_num(0.0)}


def dequantise(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The values, float32 [n, m]. If a row had NaN or infinity, the whole row is NaN."""
    return (q.float() - zero) * scale


def quantised_parts(name: str, size: int) -> tuple[RowPart, ...]:
    """The parts of a row of `size` numbers after `quantise`. `name` is the name of the part `q`."""
    of_row = (RowPart(part, torch.float32, 1) for part in ("scale", "zero"))
    return RowPart(name, torch.uint8, size), *of_row


class Full8(Codec):
    """Stores uint8 values, and a float32 scale and zero per row: x = (q - zero) * scale."""

    codec: Literal["full8"] = "full8"

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return quantised_parts("q", self.hidden_size)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return quantise(rows.float())

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return self._cast(dequantise(parts["q"], parts["scale"], parts["zero"]))
