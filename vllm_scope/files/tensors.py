"""Writes safetensors files from pieces, and checks the headers of files before reading.

Owns:  `write_tensors`, `head_of`, Header, and the checks of a header.

The safetensors library writes a tensor from one piece of memory. In a shard a tensor has the rows
of many requests. If the rows were joined to one piece, they would be copied one more time.
Therefore this module, not the library, writes the header and the pieces. Tests read the files with
the safetensors library.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

from vllm_scope.batch.by_position import ONE_THREAD
from vllm_scope.errors import FileError, shown
from vllm_scope.files.buffers import bytes_of, cat_rows, copy_rows
from vllm_scope.files.publish import write_bytes

#: Largest number of bytes of a header. A larger header is refused before it is read. The
#: safetensors format allows 100 MB.
MAX_HEADER_BYTES = 64 << 20
#: A file of several requests is full if its header has about this number of bytes. The last request
#: of the file can make the header larger.
MOST_HEADER_BYTES = MAX_HEADER_BYTES // 2
#: Largest number of bytes of a tensor's entry in a header, without the name of the stream. These
#: bytes are the end of the tensor's name, the dtype, two lengths and two offsets.
_ENTRY_BYTES = 120
#: Readers refuse a file that has a tensor with more dimensions than this number. Tensors of
#: captured rows have one or two dimensions.
MAX_DIMS = 8
#: Largest number of elements of a tensor. torch has the same limit.
_MAX_NUMBERS = (1 << 63) - 1
#: Pieces with fewer bytes are joined, because a system call for each piece costs more than a copy.
_SMALL_BYTES = 1 << 16
#: Number of bytes that the writer copies at a time if there are gaps between the rows of a piece.
#: For example, there are gaps if one block of memory has the rows of several layers. With this
#: size, the copied rows are still in the cache of a core when they are written to the file.
_COPIED_BYTES = 1 << 19

CODE_OF = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
}
DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write a whole safetensors file.

    Args:
        file: an unbuffered, empty file.
        tensors: for each name, a tensor as a list of one or more pieces. A tensor consists of its
            pieces, joined along the first axis. Therefore the pieces have the same dtype, and the
            same lengths of all other axes.
        metadata: the header's metadata.
    """
    # Write tensors with wide dtypes first. Each tensor is then aligned when the file is mapped.
    names = sorted(tensors, key=lambda name: (-tensors[name][0].dtype.itemsize, name))
    shapes = []
    for name in names:
        pieces = tensors[name]
        size = sum(piece.nbytes for piece in pieces)
        shape = [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]]
        shapes.append((name, CODE_OF[pieces[0].dtype], shape, size))
    write_bytes(file, head_of(shapes, metadata))
    for name in names:
        for piece in joined(tensors[name]):
            for some in _in_turn(piece):
                write_bytes(file, bytes_of(some).data)


def _in_turn(piece: Tensor) -> Iterator[Tensor]:
    """Yield the piece. If there are gaps between its rows, yield copies of some rows at a time
    instead.

    Each copy overwrites the memory of the previous copy.
    """
    if piece.is_contiguous() or piece.dim() != 2 or piece.stride(1) != 1:
        yield piece
        return
    at_once = max(_COPIED_BYTES // max(piece[0].nbytes, 1), 1)
    memory = torch.empty(min(at_once, len(piece)), piece.shape[1], dtype=piece.dtype)
    for some in piece.split(at_once):
        copied = memory[: len(some)]
        copy_rows(copied, some)
        yield copied


def head_of(
    tensors: Iterable[tuple[str, str, list[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes of a file before the first tensor: the length of the header, then the header.

    Args:
        tensors: (name, code of the dtype, shape, number of bytes) of each tensor, in file order.

    Raises:
        FileError: the header would be larger than MAX_HEADER_BYTES.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, code, shape, size in tensors:
        header[name] = HeaderTensor(code, shape, (at, at + size))
        at += size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FileError(
            f"the header would take {len(text)} bytes, of at most {MAX_HEADER_BYTES}; put "
            "fewer requests into a file."
        )
    return struct.pack("<Q", len(text)) + text


def entry_bytes(stream: str) -> int:
    """The largest number of bytes that the entry of a tensor of this stream takes in a header. The
    stream's name is encoded first, because some characters take 6 bytes in JSON."""
    return len(msgspec.json.encode(stream)) + _ENTRY_BYTES


def joined(pieces: Sequence[Tensor]) -> list[Tensor]:
    """The pieces in their order. Small pieces that follow each other are joined."""
    found: list[Tensor] = []
    small: list[Tensor] = []
    num_numbers = 0
    for piece in pieces:
        count = piece.numel() if piece.nbytes < _SMALL_BYTES else ONE_THREAD
        if small and num_numbers + count >= ONE_THREAD:
            found.append(cat_rows(small))
            small, num_numbers = [], 0
        if count < ONE_THREAD:
            small.append(piece)
            num_numbers += count
        else:
            found.append(piece)
    return [*found, cat_rows(small)] if small else found


class HeaderTensor(msgspec.Struct, frozen=True):
    """A tensor in a header. Offsets count from the header's end."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct, frozen=True):
    """A checked header. Every tensor lies within the file, and has the size that its shape needs.

    Attributes:
        num_bytes: number of bytes before the first tensor, that is, the bytes of the header and 8
            bytes for the length of the header.
    """

    metadata: dict[str, str]
    tensors: dict[str, HeaderTensor]
    num_bytes: int


def read_header(file: BinaryIO, size: int, where: str, mark: str | None = None) -> Header:
    """Read and check a safetensors header.

    Args:
        file: the file, at its first byte.
        size: the file's size in bytes.
        where: the file's name, for error texts.
        mark: a name that is in the metadata, or among the tensors, of each file that this package
            writes. If a file lacks this name, its tensors are not checked, and the result has no
            tensors. If None, the tensors of all files are checked.

    Raises:
        FileError: the file is not a safetensors file, or its header has wrong sizes.
    """
    first = file.read(8)
    if len(first) < 8:
        raise FileError(f"{where} has {size} bytes; it is not a safetensors file.")
    (length,) = struct.unpack("<Q", first)
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise FileError(
            f"{where} says that its header has {length} bytes; the file has {size}, and a header "
            f"has at most {MAX_HEADER_BYTES}. The file is damaged, or not a safetensors file."
        )
    try:
        body = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(body.pop("__metadata__", b"{}"), type=dict[str, str])
        if mark is not None and mark not in metadata and mark not in body:
            return Header(metadata, {}, 8 + length)
        tensors = {
            name: msgspec.json.decode(tensor, type=HeaderTensor) for name, tensor in body.items()
        }
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{where}: its header cannot be read: {error}") from None
    for name, tensor in tensors.items():
        _check(name, tensor, size - 8 - length, where)
    return Header(metadata, tensors, 8 + length)


def _check(name: str, tensor: HeaderTensor, data_bytes: int, where: str) -> None:
    dtype = DTYPE_OF.get(tensor.dtype)
    if dtype is None:
        raise FileError(
            f"{where}: {shown(name)} is of dtype {shown(tensor.dtype)}, which is not supported"
        )
    (start, stop), shape = tensor.data_offsets, tensor.shape
    if len(shape) > MAX_DIMS:
        raise FileError(
            f"{where}: {shown(name)} has {len(shape)} dimensions; a tensor can have at most "
            f"{MAX_DIMS}"
        )
    if min(shape, default=0) < 0 or not 0 <= start <= stop <= data_bytes:
        raise FileError(f"{where}: {shown(name)} does not lie within the file")
    # To compute strides, torch multiplies the lengths of the axes, also if the tensor is empty.
    # Therefore `numbers` is limited too, and counts an axis of length 0 as length 1.
    numbers = math.prod(max(length, 1) for length in shape)
    num_bytes = 0 if 0 in shape else numbers * dtype.itemsize
    if num_bytes != stop - start or numbers > _MAX_NUMBERS:
        raise FileError(
            f"{where}: {shown(name)} has {stop - start} bytes; its shape {shown(shape)} "
            "needs another number of bytes"
        )
