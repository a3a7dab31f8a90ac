"""Half precision: what most training code takes, where the model's dtype is another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vllm_scope.codecs.base import CodecModel, RowPart

_LIMIT = torch.finfo(torch.float16).max


def halved(rows: Tensor) -> Tensor:
    """float16; finite values stay finite."""
    # In float32: 65504 is not a bf16 number.
    values = rows.float()
    return torch.where(values.isinf(), values, values.clamp(-_LIMIT, _LIMIT)).half()


class Fp16(CodecModel):
    """Finite values beyond 65504 become 65504 of their sign; infinity and NaN stay."""

    part_names: ClassVar[tuple[str, ...]] = ("rows",)

    codec: Literal["fp16"] = "fp16"

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return (RowPart("rows", torch.float16, self.hidden_size),)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return {"rows": halved(rows)}

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return parts["rows"].to(self.torch_dtype)
