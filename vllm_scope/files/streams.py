"""Reads rows of one stream from one file, and keeps the files of a folder open.

Owns:  StoredStream, OpenFiles.
From:  captured (which stream to read).   To: captured, iterate.

Promise: each size in an index is checked against the file before the size is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from vllm_scope.codecs import Codec
from vllm_scope.errors import FileError
from vllm_scope.files.datafile import MappedFile, NpzFile, open_data, read_index
from vllm_scope.files.folder import Folder, LocalFolder
from vllm_scope.files.index import Index
from vllm_scope.files.per_request import part_key

#: Largest number of open files. After a file is closed, tensors of the file stay valid.
MAX_OPEN = 64


class OpenFiles:
    """The open data files of a folder. A file is opened when it is used for the first time.

    Attributes:
        indexes: the index of each data file, by the name of the file.
    """

    def __init__(self, folder: Folder) -> None:
        self.get = lru_cache(maxsize=MAX_OPEN)(self._open)
        self.indexes: dict[str, Index] = {}
        self._folder = folder

    def _open(self, name: str) -> MappedFile | NpzFile:
        """Raises FileError if the file is damaged, or was replaced after its index was read."""
        index = self.indexes[name]
        found = open_data(self._folder, name, index.dtypes)
        # A LocalFolder itself notices that a file was replaced. The names of `packed` and `sharded`
        # files are never used again, so no other file can replace such a file.
        if not isinstance(self._folder, LocalFolder) and index.layout in ("per_request", "npz"):
            path = self._folder.local(name)
            if read_index(LocalFolder(path.parent, path.name), path.name) != index:
                raise FileError(f"{name} was replaced after it was listed; open the folder again.")
        return found


@dataclass(frozen=True)
class StoredStream:
    """Rows of one stream in one file. The rows belong to one request or to consecutive requests.

    Attributes:
        name: the name of the file.
        key: the stream's name in the file.
        first: index of the first row in the file's stream.
        codec: the codec of the rows.
    """

    files: OpenFiles
    name: str
    key: str
    first: int
    num_rows: int
    codec: Codec

    @property
    def encoded(self) -> bool:
        """True if `rows` decodes rows. False if `rows` returns views of the file."""
        return self.codec.codec != "none"

    @property
    def positions(self) -> Tensor:
        """int64 [num_rows]: the absolute positions of the rows."""
        found = self._slice(f"{self.key}.positions", torch.int64)
        if found.dim() != 1:
            raise FileError(f"{self.name}: positions of {self.key} are {list(found.shape)}")
        return found

    def check(self) -> None:
        """Raise FileError if the file has fewer positions than the stream has rows."""
        self._slice(f"{self.key}.positions", torch.int64)

    def rows(self, start: int, stop: int) -> Tensor:
        """The decoded rows `start` to `stop` - 1, [stop - start, hidden_size]. If the stream has no
        codec, the result is a view of the file."""
        if not self.codec.rowwise:
            return self._decode(self._parts(), self.num_rows)[start:stop]
        parts = {name: part[start:stop] for name, part in self._parts().items()}
        return self._decode(parts, stop - start)

    def take(self, index: Tensor) -> Tensor:
        """The decoded rows with these indices, [len(index), hidden_size]."""
        if not self.codec.rowwise:
            return self._decode(self._parts(), self.num_rows)[index]
        parts = {name: _select(part, index) for name, part in self._parts().items()}
        return self._decode(parts, len(index))

    def joined(self, other: StoredStream) -> StoredStream | None:
        """This stream and `other` as one stream. None if the rows of `other` do not follow the rows
        of this stream in the file, or if the codec cannot decode single rows."""
        if (
            self.codec.rowwise
            and (self.name, self.key, self.codec) == (other.name, other.key, other.codec)
            and self.first + self.num_rows == other.first
        ):
            return replace(self, num_rows=self.num_rows + other.num_rows)
        return None

    def _parts(self) -> dict[str, Tensor]:
        keys = {part: part_key(self.key, part) for part in self.codec.part_names}
        if self.codec.rowwise:
            return {part: self._slice(key, None) for part, key in keys.items()}
        file = self.files.get(self.name)
        return {part: file.tensor(key) for part, key in keys.items()}

    def _slice(self, key: str, dtype: torch.dtype | None) -> Tensor:
        tensor = self.files.get(self.name).tensor(key)
        last = self.first + self.num_rows
        if tensor.dim() < 1 or tensor.shape[0] < last or dtype not in (None, tensor.dtype):
            raise FileError(
                f"{self.name}: {key} is {list(tensor.shape)} {tensor.dtype}; its index says "
                f"that it has rows up to {last}"
            )
        return tensor[self.first : last]

    def _decode(self, parts: dict[str, Tensor], num_rows: int) -> Tensor:
        try:
            return self.codec.decode(parts, num_rows)
        except (ValueError, RuntimeError) as error:
            raise FileError(f"{self.name}: {self.key} cannot be decoded: {error}") from None


def _select(part: Tensor, index: Tensor) -> Tensor:
    # torch has no index_select for fp8 on CPUs.
    if part.dtype == torch.float8_e4m3fn:
        return part.view(torch.uint8).index_select(0, index).view(part.dtype)
    return part.index_select(0, index)
