"""8-bit floats: small values keep their relative precision beside large ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vllm_scope.codecs.base import TINY, CodecModel, RowPart, finite_scale

_LIMIT = torch.finfo(torch.float8_e4m3fn).max
#: Of the largest value, a scale. Multiplied with: a GPU divides by a number by multiplying with
#: its inverse, and where a scale differs in its last bit, ties round to other sides than on a CPU.
_STEP = 1 / _LIMIT


class Fp8(CodecModel):
    """float8_e4m3fn values whose largest is 448, and a float32 scale per row."""

    part_names: ClassVar[tuple[str, ...]] = ("q", "scale")

    codec: Literal["fp8"] = "fp8"

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        q = RowPart("q", torch.float8_e4m3fn, self.hidden_size)
        return q, RowPart("scale", torch.float32, 1)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        values = rows.float()
        scale = (values.abs().amax(-1, keepdim=True) * _STEP).clamp(min=TINY)
        scaled = (values / scale).clamp(-_LIMIT, _LIMIT)
        return {"q": scaled.to(torch.float8_e4m3fn), "scale": finite_scale(scale)}

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return self._cast(parts["q"].float() * parts["scale"])
