"""The k largest values of each row, in bytes; the others are zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, StrictInt, model_validator
from torch import Tensor

from vllm_scope.codecs.base import CodecModel, RowPart
from vllm_scope.codecs.full8 import dequantise, quantise, quantised_parts

DEFAULT_K = 64


class TopK8(CodecModel):
    """int32 indices of the largest |x|, and their values as `full8` quantises them.

    Attributes:
        k: values kept per row; 64, or hidden_size where that is less.
    """

    part_names: ClassVar[tuple[str, ...]] = ("indices", "values", "scale", "zero")

    codec: Literal["topk8"] = "topk8"
    k: StrictInt = Field(ge=1)

    @model_validator(mode="before")
    @classmethod
    def _default_k(cls, body: Any) -> Any:
        if isinstance(body, dict) and "k" not in body and type(body.get("hidden_size")) is int:
            return {**body, "k": min(DEFAULT_K, body["hidden_size"])}
        return body

    @model_validator(mode="after")
    def _sane_k(self) -> TopK8:
        if self.k > self.hidden_size:
            raise ValueError(f"k is {self.k}; a row has {self.hidden_size} values")
        return self

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return RowPart("indices", torch.int32, self.k), *quantised_parts("values", self.k)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        values = rows.float()
        # NaN counts as the largest, so a row with one is marked by its scale.
        indices = values.abs().topk(self.k, dim=-1).indices
        parts = quantise(values.gather(-1, indices))
        return {
            "indices": indices.to(torch.int32),
            "values": parts["q"],
            "scale": parts["scale"],
            "zero": parts["zero"],
        }

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        indices = parts["indices"].long()
        if indices.numel() and bool(((indices < 0) | (indices >= self.hidden_size)).any()):
            raise ValueError(f"indices leave a row of {self.hidden_size} values")
        kept = dequantise(parts["values"], parts["scale"], parts["zero"])
        # Zeros, but NaN throughout a row whose scale is NaN.
        rows = (parts["scale"] * 0.0).expand(num_rows, self.hidden_size).clone()
        return self._cast(rows.scatter_(-1, indices, kept))
