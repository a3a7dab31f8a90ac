"""Reads arrays from safetensors, npz and GGUF files, and writes GGUF files.

Owns:  the readers of the file formats, the limits of sizes, and the writer of GGUF files.
To:    files.py, probe_files.py, probe_weights.py; files, saes.

Promise: before memory of a claimed size is allocated, the size is compared with `MAX_BYTES` and
with the file's real size. No pickle is read. If one array is wrong, the SpecError names the array.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Container, Mapping
from io import BytesIO
from pathlib import Path
from tokenize import TokenError
from types import ModuleType
from typing import IO, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike

from vllm_scope.errors import SpecError, reason_of, shown
from vllm_scope.request.arrays import of_bfloat16

#: The most bytes of a file. Vectors of 16,384 numbers for three sites of 126 layers take 24 MiB.
MAX_BYTES = 64 << 20
#: The largest number of reads from one GGUF file. Each field takes a few small reads.
MAX_GGUF_READS = 100_000

Arrays = dict[str, np.ndarray]

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises SpecError if the file is larger than `MAX_BYTES`."""
    check_size(path.stat().st_size, str(path))
    return path.read_bytes()


def check_size(num_bytes: int, what: str) -> None:
    if num_bytes > MAX_BYTES:
        raise SpecError(
            f"{what} has {num_bytes:,} bytes; at most {MAX_BYTES:,} are allowed. A steering "
            "module has only a few vectors, so this file may be a model."
        )


def read_safetensors(data: bytes) -> tuple[Arrays, dict[str, str]]:
    """The tensors and the metadata of a safetensors file.

    Returns:
        The arrays by name, and the metadata. An array has the dtype of its tensor, except that a
        bfloat16 tensor becomes a float32 array.

    Raises:
        SpecError: the content is too large or malformed, or a tensor is not float64, float32,
            float16 or bfloat16.
    """
    import safetensors

    check_size(len(data), "the safetensors content")
    try:
        # `deserialize` checks that the header's lengths and shapes fit the data, and that no
        # tensors overlap.
        tensors = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        raise SpecError(f"the content is not safetensors: {error}.") from None
    arrays: Arrays = {}
    for name, tensor in tensors:
        dtype = tensor["dtype"]
        if dtype not in _DTYPES:
            raise SpecError(f"{shown(name)} has dtype {dtype}; only {', '.join(_DTYPES)} are read.")
        flat = np.frombuffer(tensor["data"], _DTYPES[dtype])
        arrays[name] = (of_bfloat16(flat) if dtype == "BF16" else flat).reshape(tensor["shape"])
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return arrays, header.get("__metadata__") or {}


def read_npz(data: bytes) -> Arrays:
    """The arrays of an .npz file, by name, with the dtypes in the file.

    `numpy.load` is not used, because `numpy.load` allocates any size that a header claims.

    Raises:
        SpecError: the content is malformed or too large, or an array is not a vector of floats.
    """
    arrays: Arrays = {}
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            check_size(sum(info.file_size for info in archive.infolist()), "the unpacked .npz")
            check_compression(archive)
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                check_new(name, arrays)
                arrays[name] = _read_npy(archive.read(info), name)
    except SpecError:
        raise
    except Exception as error:  # zipfile raises many types of errors
        raise SpecError(f"the content is not an .npz: {reason_of(error)}.") from None
    return arrays


def check_compression(archive: zipfile.ZipFile) -> None:
    """Raises SpecError if a member of an .npz is neither stored nor deflated. With other kinds of
    compression, zipfile can unpack more bytes than the archive claims for the member."""
    for info in archive.infolist():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise SpecError(
                f"{shown(info.filename)} is compressed with method {info.compress_type} of zip; "
                "save the arrays with numpy.savez or numpy.savez_compressed."
            )


def check_new(name: str, known: Container[str]) -> None:
    """Raises SpecError if an .npz has another array with this name. A zip archive can have several
    members with one name."""
    if name in known:
        raise SpecError(f"the .npz has two arrays with the name {shown(name)}; keep one of them.")


def read_npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of an .npy array. Returns shape, True for Fortran order, and dtype.

    Raises:
        ValueError, SyntaxError, TokenError: the header is malformed.
    """
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its format version is {version}, not (1, 0) or (2, 0)")
    shape, fortran, dtype = (
        npy.read_array_header_1_0(stream)
        if version == (1, 0)
        else npy.read_array_header_2_0(stream)
    )
    return shape, fortran, dtype


class StoredArray(NamedTuple):
    """An array in a plain .npz file.

    Attributes:
        fortran: True for Fortran order.
        start: the offset in the file at which the array's bytes begin.
        num_bytes: the number of bytes that the file has for the array. The shape can claim another
            number.
    """

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype
    start: int
    num_bytes: int

    @property
    def num_items(self) -> int:
        """The number of items that the shape claims."""
        return int(np.prod(self.shape, dtype=object))

    @property
    def is_whole(self) -> bool:
        """True if the file has exactly the bytes that the shape claims."""
        claimed = self.num_items * self.dtype.itemsize
        return min(self.shape, default=0) >= 0 and claimed == self.num_bytes


def stored_array(file: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> StoredArray:
    """Where the array of an archive member lies in the file. The member must be neither compressed
    nor encrypted. `file` is the file that `archive` reads. Raises the errors of
    `read_npy_header`."""
    with archive.open(info) as member:
        header = read_npy_header(member)
        header_bytes = member.tell()
    # In the archive, a member's bytes come after its local header (30 bytes), its name and its
    # extra field.
    file.seek(info.header_offset + 26)
    of_name, of_extra = struct.unpack("<HH", file.read(4))
    start = info.header_offset + 30 + int(of_name) + int(of_extra) + header_bytes
    return StoredArray(*header, start, info.file_size - header_bytes)


def _read_npy(data: bytes, name: str) -> np.ndarray:
    stream = BytesIO(data)
    try:
        shape, _, dtype = read_npy_header(stream)
    except (ValueError, SyntaxError, TokenError) as error:
        # numpy parses a header as a Python literal, and tokenizes the header if this fails.
        # Therefore numpy can raise SyntaxError and TokenError.
        raise SpecError(f"{shown(name)} is not an .npy array: {error}.") from None
    if dtype.kind != "f":
        raise SpecError(f"{shown(name)} has dtype {dtype}; save it as float32.")
    if len(shape) != 1:
        raise SpecError(f"{shown(name)} has shape {list(shape)}; a vector is [hidden_size].")
    body = stream.read()
    if len(body) != shape[0] * dtype.itemsize:
        raise SpecError(f"{shown(name)} claims {shape[0]:,} values, but has {len(body):,} bytes.")
    return np.frombuffer(body, dtype)


def read_gguf(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The tensors and the text fields of a GGUF file.

    Raises:
        SpecError: the file is too large or malformed, or a tensor is quantised or has integers.
        ImportError: the `gguf` library is not installed.
    """
    _gguf(path)
    import gguf

    class BoundedReader(gguf.GGUFReader):
        # The library's reader does not notice the file's end. If a file claims a length of 2**64,
        # the reader loops 2**64 times.
        num_reads = 0

        def _get(
            self, offset: int, dtype: DTypeLike, count: int = 1, **options: object
        ) -> np.ndarray:
            self.num_reads += 1
            if self.num_reads > MAX_GGUF_READS:
                raise ValueError("the file has more fields than a control vector needs")
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("the file is cut short")
            found: np.ndarray = super()._get(offset, dtype, count, **options)
            return found

    check_size(path.stat().st_size, str(path))
    try:
        reader = BoundedReader(path)
        texts = {
            name: found.contents()
            for name, found in reader.fields.items()
            if found.types == [gguf.GGUFValueType.STRING]
        }
    except (ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise SpecError(f"{path} is not a GGUF file that can be read: {error}.") from None
    arrays: Arrays = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind not in _DTYPES:
            raise SpecError(
                f"{shown(tensor.name)} has type {kind}; only {', '.join(_DTYPES)} are read."
            )
        # The array is copied, because the reader's arrays are views of the mapped file.
        array = np.array(tensor.data)
        arrays[tensor.name] = of_bfloat16(array.view("<u2")) if kind == "BF16" else array
    return arrays, texts


def write_gguf(
    path: Path, architecture: str, fields: Mapping[str, str | int], arrays: Arrays
) -> None:
    """Write a GGUF file with float32 arrays and fields.

    Raises:
        ImportError: the `gguf` library is not installed.
    """
    writer = _gguf(path).GGUFWriter(path, architecture)
    for name, value in fields.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    for name, array in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf(path: Path) -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise ImportError(
            f"{path} is a GGUF file, but the library for GGUF files is not installed: "
            "pip install 'vllm-scope[gguf]'."
        ) from None
    library: ModuleType = gguf
    return library
