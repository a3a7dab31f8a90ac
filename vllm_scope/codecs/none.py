"""Rows as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor

from vllm_scope.codecs.base import CodecModel, RowPart


class NoCodec(CodecModel):
    """No copy is made in either direction."""

    lossless: ClassVar[bool] = True
    part_names: ClassVar[tuple[str, ...]] = ("rows",)

    codec: Literal["none"] = "none"

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return (RowPart("rows", self.torch_dtype, self.hidden_size),)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        return {"rows": rows}

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        return parts["rows"].to(self.torch_dtype)
