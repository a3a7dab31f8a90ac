"""Codecs that keep rows unchanged, or store rows in float16. Most training code accepts float16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vllm_scope.codecs.base import Codec, RowPart

_LIMIT = torch.finfo(torch.float16).max


def halved(rows: Tensor) -> Tensor:
    """Cast rows to float16. Finite values stay finite."""
    # The values are clamped in float32, because bfloat16 cannot hold the number 65504.
    values = rows.float()
    return torch.where(values.isinf(), values, values.clamp(-_LIMIT, _LIMIT)).half()


class NoCodec(Codec):
    """Keeps rows unchanged. Rows are not copied when they are encoded or decoded."""

    lossless: ClassVar[bool] = True

    codec: Literal["none"] = "none"

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return (RowPart("rows", self.torch_dtype, self.hidden_size),)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return {"rows": rows}

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return parts["rows"].to(self.torch_dtype)


class Fp16(NoCodec):
    """Stores rows in float16. Finite values beyond ±65504 become ±65504. Infinity and NaN are
    kept."""

    lossless: ClassVar[bool] = False

    codec: Literal["fp16"] = "fp16"  # type: ignore[assignment]

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return (RowPart("rows", torch.float16, self.hidden_size),)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return {"rows": halved(rows)}
