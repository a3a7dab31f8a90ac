"""The base class of all codecs, with their methods, their options, and the checks of arguments.

Owns:  Codec, RowPart; KeepsK, the base class of codecs that keep k numbers of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator
from torch import Tensor

#: The largest `hidden_size`. No model has wider rows. A file that claims a larger `hidden_size` is
#: refused before any memory is allocated.
MAX_HIDDEN_SIZE = 1 << 17


class RowPart(NamedTuple):
    """One part of each encoded row, with a name. The part is `size` numbers of a dtype."""

    name: str
    dtype: torch.dtype
    size: int


class Codec(BaseModel):
    """Encodes rows as smaller tensors, and decodes these tensors to rows.

    A codec is immutable, and equals every codec with the same options. Threads can share a codec.

    `none`, `fp16` and `zstd` keep NaN and infinity. If a row has NaN or infinity, an 8-bit codec
    decodes the whole row to NaN, because all numbers of a row share one scale.

    Attributes:
        lossless: True if the decoded rows equal the original rows bit for bit.
        rowwise: True if each row can be decoded without the other rows. In this case, each part has
            one entry per row on its first axis.
        codec: the name by which the codec is chosen.
        hidden_size: the number of elements of a row.
        dtype: the dtype of the rows before they are encoded and after they are decoded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    lossless: ClassVar[bool] = False
    rowwise: ClassVar[bool] = True

    codec: str
    hidden_size: StrictInt = Field(ge=1, le=MAX_HIDDEN_SIZE)
    dtype: Literal["bfloat16", "float16", "float32"]

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    @abstractmethod
    def row_parts(self) -> tuple[RowPart, ...]:
        """The parts that `encode` makes from each row. Only a rowwise codec has `row_parts`."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the parts that `encode` makes."""
        return tuple(part.name for part in self.row_parts)

    def prepare(self, device: torch.device) -> None:
        """Make the tensors that `encode` needs on a device. After this call, `encode` of a rowwise
        codec does not synchronise with this device."""

    def metadata(self) -> dict[str, object]:
        """The codec's name, row size, dtype and options as JSON values. `codec_from` makes an equal
        codec from this metadata."""
        return dict(self._metadata)

    @cached_property
    def _metadata(self) -> dict[str, object]:
        return self.model_dump(mode="json")

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """Encode rows as parts.

        A rowwise codec makes the parts on the rows' device. If `prepare` has been called, the codec
        does not synchronise with this device.

        Args:
            rows: [num_rows, hidden_size] of the codec's dtype.

        Raises:
            ValueError: the rows have another shape or dtype.
        """
        if rows.dim() != 2 or rows.shape[1] != self.hidden_size or rows.dtype != self.torch_dtype:
            raise ValueError(
                f"rows are {list(rows.shape)} {rows.dtype}; this codec takes "
                f"[num_rows, {self.hidden_size}] torch.{self.dtype}"
            )
        return self._encode(rows)

    def decode(self, parts: Mapping[str, Tensor], num_rows: int) -> Tensor:
        """The decoded rows, [num_rows, hidden_size] of the codec's dtype, on the parts' device
        (zstd: on the CPU).

        Raises:
            ValueError: a part is missing, damaged, or of another shape or dtype. Sizes are checked
                before any memory is allocated.
        """
        for name in self.part_names:
            if name not in parts:
                raise ValueError(
                    f"part {name!r} is missing; {self.codec} has {', '.join(self.part_names)}"
                )
        # Whole shapes are compared. Otherwise a part with an axis of size 1 would be broadcast, and
        # would decode to more numbers than the part has.
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
        """Cast float32 values to the rows' dtype. Finite values stay finite. NaN stays NaN."""
        limit = torch.finfo(self.torch_dtype).max
        return values.clamp(-limit, limit).to(self.torch_dtype)


class KeepsK(Codec):
    """A codec that keeps k numbers of each row. The default of `k` is the result of `usual_k`."""

    k: StrictInt = Field(ge=1)

    @classmethod
    @abstractmethod
    def usual_k(cls, hidden_size: int) -> int: ...

    @model_validator(mode="before")
    @classmethod
    def _default_k(cls, body: object) -> object:
        if isinstance(body, dict) and "k" not in body and type(body.get("hidden_size")) is int:
            return {**body, "k": cls.usual_k(body["hidden_size"])}
        return body

    @model_validator(mode="after")
    def _at_most_a_row(self) -> Self:
        if self.k > self.hidden_size:
            raise ValueError(f"k is {self.k}; a row has {self.hidden_size} values")
        return self
