"""8 bits a value and one float32 scale per row: x = q * scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vllm_scope.codecs.base import Codec, RowPart

#: The smallest normal float32: scales below it would lose bits, or be flushed to zero.
TINY = torch.finfo(torch.float32).tiny


def finite_scale(scale: Tensor) -> Tensor:
    """A row's scale; NaN if the row held NaN or infinity, so that it decodes to NaN."""
    return torch.where(scale.isfinite(), scale, torch.nan)


class _Scaled(Codec):
    """The row's largest value becomes `limit`."""

    limit: ClassVar[float]
    q_dtype: ClassVar[torch.dtype]

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        q = RowPart("q", self.q_dtype, self.hidden_size)
        return q, RowPart("scale", torch.float32, 1)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        values = rows.float()
        # Multiplied with the inverse of `limit`: a GPU divides by a constant in this way. If a
        # scale differs in its last bit, ties round to other sides than on a CPU.
        scale = (values.abs().amax(-1, keepdim=True) * (1 / self.limit)).clamp(min=TINY)
        q = self._rounded(values / scale).clamp(-self.limit, self.limit)
        return {"q": q.to(self.q_dtype), "scale": finite_scale(scale)}

    def _rounded(self, values: Tensor) -> Tensor:
        return values

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return self._cast(parts["q"].float() * parts["scale"])


class Fp8(_Scaled):
    """float8_e4m3fn: small values keep their relative precision beside large ones."""

    limit: ClassVar[float] = torch.finfo(torch.float8_e4m3fn).max
    q_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    codec: Literal["fp8"] = "fp8"


class Int8(_Scaled):
    """int8 from -127 to 127, scaled as vLLM's own int8 kernels scale a row."""

    limit: ClassVar[float] = 127
    q_dtype: ClassVar[torch.dtype] = torch.int8

    codec: Literal["int8"] = "int8"

    def _rounded(self, values: Tensor) -> Tensor:
        # NaN has no integer. The row's scale says that it had one.
        return values.round().nan_to_num(0.0)
