"""What all codecs share: their options, and the checks of what they are given.

Owns:  CodecModel; the scale of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, StrictInt
from torch import Tensor

#: No model is wider; a file that says so is refused before anything is allocated.
MAX_HIDDEN_SIZE = 1 << 17

#: The smallest normal float32: scales below it would lose bits, or be flushed to zero.
TINY = torch.finfo(torch.float32).tiny


class RowPart(NamedTuple):
    """What a part holds of each row: `size` numbers of a dtype."""

    name: str
    dtype: torch.dtype
    size: int


class CodecModel(BaseModel):
    """A codec is its options; frozen, compared and hashed by them.

    Attributes:
        hidden_size: length of a row.
        dtype: of the rows that go in and come back.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    lossless: ClassVar[bool] = False
    rowwise: ClassVar[bool] = True
    #: The parts that `encode` makes.
    part_names: ClassVar[tuple[str, ...]]

    codec: str
    hidden_size: StrictInt = Field(ge=1, le=MAX_HIDDEN_SIZE)
    dtype: Literal["bfloat16", "float16", "float32"]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """What `encode` makes of each row."""
        raise NotImplementedError(f"rows of {self.codec} cannot be told apart")

    def prepare(self, device: torch.device) -> None:
        """Make what `encode` needs on a device, so that it waits for nothing later."""

    def metadata(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        if rows.dim() != 2 or rows.shape[1] != self.hidden_size or rows.dtype != self.torch_dtype:
            raise ValueError(
                f"rows are {list(rows.shape)} {rows.dtype}; this codec takes "
                f"[num_rows, {self.hidden_size}] torch.{self.dtype}"
            )
        return self._encode(rows)

    def decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        for name in self.part_names:
            if name not in parts:
                raise ValueError(
                    f"part {name!r} is missing; {self.codec} has {', '.join(self.part_names)}"
                )
        # Whole shapes: parts that broadcast would be far more numbers than they hold.
        for part in self.row_parts if self.rowwise else ():
            found = parts[part.name]
            if (tuple(found.shape), found.dtype) != ((num_rows, part.size), part.dtype):
                raise ValueError(
                    f"part {part.name!r} is {list(found.shape)} {found.dtype}; "
                    f"[{num_rows}, {part.size}] {part.dtype} is expected"
                )
        rows = self._decode(parts, num_rows)
        if tuple(rows.shape) != (num_rows, self.hidden_size):
            raise ValueError(
                f"the parts hold {list(rows.shape)}; [{num_rows}, {self.hidden_size}] is expected"
            )
        return rows

    @abstractmethod
    def _encode(self, rows: Tensor) -> dict[str, Tensor]: ...

    @abstractmethod
    def _decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor: ...

    def _cast(self, values: Tensor) -> Tensor:
        """float32 values in the rows' dtype; finite ones stay finite, NaN stays NaN."""
        limit = torch.finfo(self.torch_dtype).max
        return values.clamp(-limit, limit).to(self.torch_dtype)


def finite_scale(scale: Tensor) -> Tensor:
    """A row's scale, NaN where the row held NaN or infinity: such a row decodes to NaN."""
    return torch.where(scale.isfinite(), scale, torch.nan)
