"""Opens a data file, maps the file into memory, and returns its tensors by name.

Owns:  MappedFile, NpzFile, and the checks that are made before memory is allocated.
"""

from __future__ import annotations

import mmap
import zipfile
from typing import BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_scope.errors import FileError, shown
from vllm_scope.files.folder import Folder
from vllm_scope.files.index import MAX_INDEX_BYTES, Index
from vllm_scope.files.npz import BITS
from vllm_scope.files.per_request import KEY
from vllm_scope.files.tensors import read_header
from vllm_scope.vectors.containers import StoredArray, stored_array


def read_index(folder: Folder, name: str) -> Index | None:
    """The index of a data file. None if another program wrote the file.

    Raises:
        FileError: the file is damaged or cannot be read.
    """
    file, size = folder.open(name)
    with file:
        if name.endswith(".npz"):
            return _npz_index(file, size, name)
        header = read_header(file, size, name, KEY)
        if KEY in header.metadata:
            return Index.decode(header.metadata[KEY], name)
        tensor = header.tensors.get(KEY)
        if tensor is None or header.metadata.get("layout") != "sharded":
            return None
        start, stop = tensor.data_offsets
        return _read_index(file, header.num_bytes + start, stop - start, name)


def _read_index(file: BinaryIO, start: int, num_bytes: int, name: str) -> Index:
    """The index in `num_bytes` bytes of a file, from byte `start` on. Raises FileError."""
    if num_bytes > MAX_INDEX_BYTES:
        raise FileError(
            f"{name} has an index of {num_bytes} bytes; an index has at most {MAX_INDEX_BYTES}."
        )
    file.seek(start)
    return Index.decode(file.read(num_bytes), name)


def open_data(folder: Folder, name: str, dtypes: dict[str, str]) -> MappedFile | NpzFile:
    """Open a data file for reading. Raises FileError."""
    return NpzFile(folder, name, dtypes) if name.endswith(".npz") else MappedFile(folder, name)


class MappedFile:
    """A safetensors file. Tensors are views of the page cache. Only pages that are used are read
    from disk."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._name = name
        # Check the header again, because the file may have been replaced after its index was read.
        file, size = folder.open(name)
        with file:
            read_header(file, size, name, KEY)
        try:
            self._file = safe_open(folder.local(name), framework="pt")
        except (SafetensorError, OSError) as error:
            raise FileError(f"{name} cannot be read: {error}") from None
        self._names = set(self._file.keys())

    def tensor(self, name: str) -> Tensor:
        if name not in self._names:
            raise FileError(f"{self._name} has no tensor {shown(name)}, which its index names.")
        try:
            found: Tensor = self._file.get_tensor(name)
        except (SafetensorError, ValueError, TypeError, RuntimeError, OSError) as error:
            raise FileError(f"{self._name}: {shown(name)} cannot be read: {error}") from None
        return found


class NpzFile:
    """A numpy archive. The archive is not compressed, therefore each array can be mapped."""

    def __init__(self, folder: Folder, name: str, dtypes: dict[str, str]) -> None:
        self._name = name
        self._dtypes = dtypes
        folder.open(name)[0].close()  # raises FileError if the file was replaced
        with open(folder.local(name), "rb") as file:
            size = file.seek(0, 2)
            self._members = _members(file, size, name)
            # Pages are copied on write. If a caller writes to a tensor, the file does not change.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str) -> Tensor:
        if name not in self._members:
            raise FileError(f"{self._name} has no array {shown(name)}, which its index names.")
        one = self._members[name]
        try:
            array = np.frombuffer(self._map, one.dtype, one.num_items, one.start)
            tensor = torch.from_numpy(array.reshape(one.shape))
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise FileError(f"{self._name}: {shown(name)} cannot be read: {error}") from None
        if name not in self._dtypes:
            return tensor
        wanted = {str(real).removeprefix("torch."): real for real in BITS}
        real = wanted.get(self._dtypes[name])
        if real is None or BITS[real] != tensor.dtype:
            raise FileError(
                f"{self._name}: array {shown(name)} cannot have the dtype "
                f"{shown(self._dtypes[name])}, which its index names."
            )
        return tensor.view(real)


def _npz_index(file: BinaryIO, size: int, name: str) -> Index | None:
    members = _members(file, size, name)
    if KEY not in members:
        return None
    index = members[KEY]
    if index.dtype != np.uint8:
        raise FileError(f"{name}: its index is of dtype {index.dtype}, not bytes.")
    return _read_index(file, index.start, index.num_bytes, name)


def _members(file: BinaryIO, size: int, name: str) -> dict[str, StoredArray]:
    """The arrays of an archive, by name. Each size is checked against the file's size.

    If another program wrote the archive, the result is empty and no array is checked.
    """
    found: dict[str, StoredArray] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            if f"{KEY}.npy" not in archive.namelist():
                return found
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    raise FileError(
                        f"{name}: {shown(info.filename)} is compressed or encrypted; this "
                        "package reads only plain archives."
                    )
                one = stored_array(file, archive, info)
                if (
                    one.fortran
                    or one.dtype.hasobject
                    or not one.is_whole
                    or one.start + one.num_bytes > size
                ):
                    raise FileError(f"{name}: array {shown(info.filename)} is damaged.")
                found[info.filename.removesuffix(".npy")] = one
    except FileError:
        raise
    except Exception as error:  # zipfile and numpy's parser raise many types of exceptions
        raise FileError(f"{name} cannot be read: {error}") from None
    return found
