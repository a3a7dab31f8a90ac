"""The base class of all codecs: options, contract, and checks of the arguments.

Owns:  Codec, RowPart; KeepsK (the option of codecs that keep k numbers of a row).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator
from torch import Tensor

#: Largest `hidden_size`: no model has wider rows. A file that claims more is refused before
#: anything is allocated.
MAX_HIDDEN_SIZE = 1 << 17


class RowPart(NamedTuple):
    """One part of each encoded row: its name, and `size` numbers of a dtype."""

    name: str
    dtype: torch.dtype
    size: int


class Codec(BaseModel):
    """Makes rows smaller, and decodes them again.

    A codec is immutable and equals every codec with the same options. Threads may share it.

    If a row has NaN or infinity, `none`, `fp16` and `zstd` keep each value. The 8-bit
    codecs have one scale per row, so they return the whole row as NaN.

    Attributes:
        lossless: True if decoded rows equal the encoded ones bit for bit.
        rowwise: True if each part has the rows on its first axis, so that any row can be
            decoded alone.
        codec: the codec's name.
        hidden_size: how many numbers a row has.
        dtype: dtype of the rows, before encoding and after decoding.
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
        """The parts that `encode` makes of each row. Only a rowwise codec has them."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the parts that `encode` makes."""
        return tuple(part.name for part in self.row_parts)

    def prepare(self, device: torch.device) -> None:
        """Make the tensors that `encode` needs on a device. After that, `encode` does not wait for
        the host."""

    def metadata(self) -> dict[str, object]:
        """Name, shape, dtype and options as plain JSON, for `codec_from`."""
        return dict(self._metadata)

    @cached_property
    def _metadata(self) -> dict[str, object]:
        return self.model_dump(mode="json")

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """The rows as parts.

        A rowwise codec makes the parts on the rows' device, and after `prepare` it does not
        synchronise with that device.

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
        """The decoded rows, [num_rows, hidden_size] of the codec's dtype, on the parts' device.

        Raises:
            ValueError: a part is missing, or does not hold `num_rows` rows. Sizes are
                compared before anything is allocated.
        """
        for name in self.part_names:
            if name not in parts:
                raise ValueError(
                    f"part {name!r} is missing; {self.codec} has {', '.join(self.part_names)}"
                )
        # Whole shapes are compared: a part with an axis of size 1 would be broadcast, and would
        # decode to more numbers than it holds.
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
        """float32 values in the rows' dtype. Finite values stay finite, NaN stays NaN."""
        limit = torch.finfo(self.torch_dtype).max
        return values.clamp(-limit, limit).to(self.torch_dtype)


class KeepsK(Codec):
    """A codec that keeps k numbers of each row; without `k` it keeps `usual_k`."""

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
