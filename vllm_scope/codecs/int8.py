"""Signed bytes around zero: as vLLM's own int8 kernels scale a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vllm_scope.codecs.base import TINY, CodecModel, RowPart, finite_scale

_LIMIT = 127
#: As in fp8: multiplied with, for the same scale on a GPU as on a CPU.
_STEP = 1 / _LIMIT


class Int8(CodecModel):
    """int8 values from -127 to 127, and a float32 scale per row."""

    part_names: ClassVar[tuple[str, ...]] = ("q", "scale")

    codec: Literal["int8"] = "int8"

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return RowPart("q", torch.int8, self.hidden_size), RowPart("scale", torch.float32, 1)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        values = rows.float()
        scale = (values.abs().amax(-1, keepdim=True) * _STEP).clamp(min=TINY)
        # NaN has no integer; such a row is marked by its scale.
        scaled = (values / scale).round().clamp(-_LIMIT, _LIMIT).nan_to_num(0.0)
        return {"q": scaled.to(torch.int8), "scale": finite_scale(scale)}

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return self._cast(parts["q"].float() * parts["scale"])
