"""A codec that keeps the k values x with the largest |x| of each row, in one byte each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from vllm_scope.codecs.base import KeepsK, RowPart
from vllm_scope.codecs.scaled import dequantise, quantise, quantised_parts

DEFAULT_K = 64


class TopK8(KeepsK):
    """Stores two things for each row: the int32 indices of the k values x with the largest |x|, and
    these k values, quantised as in `full8`. In the decoded row, all other values are zero.

    Attributes:
        k: the number of values to keep of each row. The default is min(64, hidden_size).
    """

    codec: Literal["topk8"] = "topk8"

    @classmethod
    def usual_k(cls, hidden_size: int) -> int:
        return min(DEFAULT_K, hidden_size)

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return RowPart("indices", torch.int32, self.k), *quantised_parts("values", self.k)

    def _encode(self, rows: Tensor) -> dict[str, Tensor]:
        values = rows.float()
        # topk treats NaN as the largest value, and therefore keeps it. The scale of a row with NaN
        # is then NaN.
        indices = values.abs().topk(self.k, dim=-1).indices
        parts = quantise(values.gather(-1, indices))
        return {"indices": indices.to(torch.int32), "values": parts.pop("q"), **parts}

    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        indices = parts["indices"].long()
        if indices.numel() and bool(((indices < 0) | (indices >= self.hidden_size)).any()):
            raise ValueError(f"indices are outside a row of {self.hidden_size} values")
        kept = dequantise(parts, "values")
        # Rows of zeros. But if the scale of a row is NaN, this product makes the whole row NaN.
        rows = (parts["scale"] * 0.0).expand(num_rows, self.hidden_size).clone()
        return self._cast(rows.scatter_(-1, indices, kept))
