"""Packs the parts of an encoded row into one row of bytes, which is handled like any other row.

Owns:  Packing (the byte range of each part); EncodedRows (packed rows, with the codec that decodes
       them).
Runs:  in any process.
From:  request.heads. To: worker.packer, which encodes; sinks and results, which decode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vllm_scope.codecs import Codec, codec_from, make_codec
from vllm_scope.errors import ConfigError, SpecError
from vllm_scope.program.layout import SLOT_BYTES, slots_of_row
from vllm_scope.request.heads import CodecChoice, Encoding


class Packing:
    """The byte range of each part in an encoded row.

    Parts with larger numbers (in bytes) come first, so that the offset of each part is a multiple
    of the size of its numbers.

    Attributes:
        codec: a rowwise codec.
        num_bytes: the number of bytes of an encoded row, without the padding of the last slot.
        num_slots: the number of slots of an encoded row.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._places: dict[str, tuple[int, int, torch.dtype]] = {}
        at = 0
        for part in sorted(codec.row_parts, key=lambda part: -part.dtype.itemsize):
            stop = at + part.size * part.dtype.itemsize
            self._places[part.name] = (at, stop, part.dtype)
            at = stop
        self.num_bytes = at
        self.num_slots = slots_of_row(at)

    def pack(self, rows: Tensor) -> Tensor:
        """Encode rows [num_rows, hidden_size] to uint8 [num_rows, num_slots * SLOT_BYTES], on the
        rows' device.

        Does not synchronise with the device. The padding bytes in the last slot of a row are zero.
        """
        parts = self.codec.encode(rows)
        pieces = [parts[name].view(torch.uint8) for name in self._places]
        filling = self.num_slots * SLOT_BYTES - self.num_bytes
        if filling:
            pieces.append(pieces[0].new_zeros((len(rows), filling)))
        return torch.cat(pieces, dim=1)

    def parts(self, data: Tensor) -> dict[str, Tensor]:
        """The codec's parts, as views of `data`, uint8 [num_rows, num_slots * SLOT_BYTES]."""
        return {
            name: data[:, self._places[name][0] : self._places[name][1]].view(self._places[name][2])
            for name in self.codec.part_names
        }


def encoding_of(choice: CodecChoice, hidden_size: int, dtype: str, where: str) -> Encoding:
    """Make the Encoding for a caller's codec choice and the rows of one engine.

    Raises:
        SpecError: an option is unknown, or its value is not allowed for rows of this size.
    """
    try:
        codec = make_codec(choice.name, hidden_size, getattr(torch, dtype), **dict(choice.options))
    except ConfigError as error:
        raise SpecError(f"{where}: {error}") from None
    metadata = codec.metadata()
    return Encoding(json.dumps(metadata, sort_keys=True), Packing(codec).num_bytes)


@lru_cache(maxsize=256)
def packing_of(encoding: Encoding) -> Packing:
    """Make the Packing of an Encoding. Raises ConfigError if the codec or an option is wrong."""
    return Packing(codec_from(encoding.metadata))


@dataclass(frozen=True)
class EncodedRows:
    """Encoded rows. `decode` decodes them.

    Attributes:
        codec: the codec that encoded the rows.
        data: the encoded rows, uint8 [num_rows, num_slots * SLOT_BYTES], on the CPU.
    """

    codec: Codec
    data: Tensor

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, some: slice | Tensor) -> EncodedRows:
        return EncodedRows(self.codec, self.data[some])

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the decoded rows."""
        return len(self.data), self.codec.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the decoded rows."""
        return self.codec.torch_dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of the encoded rows."""
        return self.data.nbytes

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """The parts by name, as `Codec.encode` returned them, with the rows on the first axis."""
        return Packing(self.codec).parts(self.data)

    def decode(self) -> Tensor:
        """The decoded rows, [num_rows, hidden_size], in the model's dtype."""
        return self.codec.decode(self.parts, len(self))

    def kept(self) -> EncodedRows:
        """A copy that shares no memory with this object."""
        return EncodedRows(self.codec, self.data.contiguous().clone())


def decoded(rows: Tensor | EncodedRows) -> Tensor:
    return rows.decode() if isinstance(rows, EncodedRows) else rows
