"""Codecs that store a value x as a number q of 8 bits, where x = q * scale or x = (q - zero) *
scale. Each row has its own `scale` and `zero`, which are float32 numbers.

Owns:  Fp8, Int8, Full8; `quantise` and `dequantise`, which rp8 and topk8 also use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vllm_scope.codecs.base import Codec, RowPart

#: The smallest normal float32. A smaller scale would lose bits, or would be flushed to zero.
_TINY = torch.finfo(torch.float32).tiny
#: The smallest scale of `quantise`, as a fraction of the largest absolute value of a row. float32
#: cannot hold smaller differences of such values. The fraction is a power of two, so that a row of
#: equal numbers is decoded exactly.
_FINEST = 2.0**-23
#: `quantise` multiplies the range of a row by this number. With a division by 255, GPU and CPU
#: could compute different scales (see `_Scaled._encode`).
_STEP = 1 / 255


def _finite_scale(scale: Tensor) -> Tensor:
    """The scale of each row, or NaN if the row has NaN or infinity. If the scale of a row is NaN,
    the whole row is decoded to NaN."""
    return torch.where(scale.isfinite(), scale, torch.nan)


class _Scaled(Codec):
    """A codec that scales each row so that its largest absolute value becomes `limit`."""

    limit: ClassVar[float]
    q_dtype: ClassVar[torch.dtype]

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        q = RowPart("q", self.q_dtype, self.hidden_size)
        return q, RowPart("scale", torch.float32, 1)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        values = rows.float()
        # This is a multiplication by the inverse of `limit`, because a GPU also computes a division
        # by a constant in this way. With a division, the scales of GPU and CPU could differ in the
        # last bit, and ties would then be rounded differently.
        scale = (values.abs().amax(-1, keepdim=True) * (1 / self.limit)).clamp(min=_TINY)
        q = self._rounded(values / scale).clamp(-self.limit, self.limit)
        return {"q": q.to(self.q_dtype), "scale": _finite_scale(scale)}

    def _rounded(self, values: Tensor) -> Tensor:
        return values

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return self._cast(parts["q"].float() * parts["scale"])


class Fp8(_Scaled):
    """Stores values in float8_e4m3fn. A value keeps float8's full relative precision if its
    absolute value is at least 1/28,672 of the row's largest absolute value."""

    limit: ClassVar[float] = torch.finfo(torch.float8_e4m3fn).max
    q_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    codec: Literal["fp8"] = "fp8"


class Int8(_Scaled):
    """Stores values as int8 from -127 to 127. The scale of a row is the scale that vLLM's own int8
    kernels compute."""

    limit: ClassVar[float] = 127
    q_dtype: ClassVar[torch.dtype] = torch.int8

    codec: Literal["int8"] = "int8"

    def _rounded(self, values: Tensor) -> Tensor:
        # An integer cannot be NaN. A row with NaN is decoded to NaN because its scale is NaN.
        return values.round().nan_to_num(0.0)


def quantise(values: Tensor) -> dict[str, Tensor]:
    """Quantise float32 [n, m] to uint8 `q` [n, m], with float32 `scale` and `zero` [n, 1].

    If all numbers of a row are equal, the range of the row is 0. The scale is then a tiny fraction
    of this number. All q are 0, and (q - zero) * scale gives the number again.
    """
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    largest = torch.maximum(low.abs(), high.abs())
    # Multiply before the subtraction, because `high - low` can be too large for float32.
    scale = torch.maximum(high * _STEP - low * _STEP, largest * _FINEST).clamp(min=_TINY)
    zero = -low / scale
    q = (values / scale + zero).round().clamp(0, 255).nan_to_num(0.0)
    return {"q": q.to(torch.uint8), "scale": _finite_scale(scale), "zero": zero.nan_to_num(0.0)}


def dequantise(parts: Mapping[str, Tensor], name: str = "q") -> Tensor:
    """The values from which `quantise` made these parts, with rounding errors, float32 [n, m].
    If a row had NaN or infinity, the whole row is NaN. `name` is the name of the part `q`."""
    return (parts[name].float() - parts["zero"]) * parts["scale"]


def quantised_parts(name: str, size: int) -> tuple[RowPart, ...]:
    """The parts of a row of `size` numbers after `quantise`. `name` is the name of the part `q`."""
    of_row = (RowPart(part, torch.float32, 1) for part in ("scale", "zero"))
    return RowPart(name, torch.uint8, size), *of_row


class Full8(Codec):
    """Stores a value x as a uint8 number q, where x = (q - zero) * scale. Each row has its own
    float32 scale and zero."""

    codec: Literal["full8"] = "full8"

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return quantised_parts("q", self.hidden_size)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return quantise(rows.float())

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return self._cast(dequantise(parts))
