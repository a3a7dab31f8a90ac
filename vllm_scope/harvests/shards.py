"""Reads the contexts, hashes and figures of a harvest's shards, and makes shards visible.

Owns:  Shard, Shards, HashingPublisher, `move_shards`, `take_left`.
Runs:  in the harvesting process. HashingPublisher runs in the process that has the engine, on the
       threads that write shards.
From:  files (writes shards, and reads their indexes).   To: job, manifest.

Promise: a context is finished if a visible shard has the context. No other file decides whether a
context is finished. Therefore no finished context is lost if the process is killed before it writes
the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from functools import partial
from typing import BinaryIO, cast

import msgspec
import numpy as np

from vllm_scope.errors import FileError
from vllm_scope.files.datafile import read_index
from vllm_scope.files.folder import Folder
from vllm_scope.files.options import FileOptions
from vllm_scope.files.per_request import KEY as INDEX
from vllm_scope.files.publish import Publisher, Write
from vllm_scope.files.roots import find_folder
from vllm_scope.files.staged import Staged, make_staged
from vllm_scope.files.tensors import read_header
from vllm_scope.harvests.contexts import key_of
from vllm_scope.harvests.statistics import KEY, Statistics

_CHUNK = 1 << 20


class Shard(msgspec.Struct, frozen=True):
    """The entry of one shard's file in the manifest.

    Attributes:
        sha256: the file's hash, in hexadecimal digits.
        num_bytes: the file's size.
        contexts: number of contexts in the file.
        documents: number of documents whose first token is in the file.
        tokens: number of tokens in the file's contexts.
        truncated: number of documents whose later tokens were left out.
    """

    sha256: str
    num_bytes: int
    contexts: int
    documents: int
    tokens: int
    truncated: int = 0


class HashingPublisher:
    """A publisher that stores the hash and the size of each file that it makes visible."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.found: dict[str, tuple[str, int]] = {}

    def publish(self, files: Mapping[str, Write]) -> None:
        made: dict[str, _Hashing] = {}

        def write(name: str, to_file: Write, file: BinaryIO) -> None:
            made[name] = _Hashing(file)
            to_file(cast(BinaryIO, made[name]))

        self._publisher.publish({n: partial(write, n, each) for n, each in files.items()})
        self.found |= {n: (one.sha256.hexdigest(), one.num_bytes) for n, one in made.items()}

    def close(self) -> None:
        self._publisher.close()


class _Hashing:
    """An unbuffered file. Each write also updates the file's hash."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256, self.num_bytes = hashlib.sha256(), 0

    def write(self, body: memoryview) -> int:
        taken = self._file.write(body)
        self.sha256.update(body[:taken])
        self.num_bytes += taken
        return taken


class Shards:
    """The visible shards of one folder.

    Args:
        truncates: True if the job leaves out all tokens after a document's first context.

    Attributes:
        done: the keys of the shards' contexts. A key takes about 100 bytes of memory.
        found: maps the name of the file of each visible shard to the shard's entry.
        statistics: maps the name of a stream, such as `resid_post.5`, to the figures of the
            stream's rows in all shards.
    """

    def __init__(self, folder: Folder, truncates: bool) -> None:
        self._folder, self._truncates = folder, truncates
        self.done: set[bytes] = set()
        self.found: dict[str, Shard] = {}
        self.statistics: dict[str, Statistics] = {}

    def take(self, hashes: Mapping[str, tuple[str, int]]) -> None:
        """Add all shards that have become visible since the last call.

        Args:
            hashes: the SHA-256 and the size of files with a known hash, by the name of the file. If
                a file is not in `hashes`, or has another size, this method computes its hash.

        Raises:
            FileError: a file is damaged or has rows that no harvest wrote, or a context is in two
                shards or twice in one shard.
        """
        for name in self._folder.names():
            if name not in self.found:
                self._take(name, hashes.get(name))

    def _take(self, name: str, known: tuple[str, int] | None) -> None:
        index = read_index(self._folder, name)
        if index is None:  # not a shard, but the file with the means or another program's file
            return
        if any(not request.documents for request in index.requests):
            raise FileError(f"{name} has rows that no harvest wrote; harvest into another folder.")
        keys = {key_of(request.documents) for request in index.requests}
        if len(keys) < len(index.requests) or keys & self.done:
            raise FileError(
                f"{name} has a context that is also in another shard; remove the file, and run "
                "the command again."
            )
        spans = [span for request in index.requests for span in request.documents]
        digest, size = self._hashed(name, known)
        self._add_statistics(name, size)
        self.done |= keys
        self.found[name] = Shard(
            digest, size,
            contexts=len(keys),
            documents=sum(span.first == 0 for span in spans),
            tokens=sum(span.num_tokens for span in spans),
            truncated=sum(span.num_tokens < span.total for span in spans) * self._truncates,
        )  # fmt: skip

    def _hashed(self, name: str, known: tuple[str, int] | None) -> tuple[str, int]:
        file, size = self._folder.open(name)
        found = hashlib.sha256()
        with file:
            if known is not None and known[1] == size:
                return known
            while chunk := file.read(_CHUNK):
                found.update(chunk)
        return found.hexdigest(), size

    def _add_statistics(self, name: str, size: int) -> None:
        file, _ = self._folder.open(name)
        with file:
            header = read_header(file, size, name, INDEX)
            for key, tensor in header.tensors.items():
                stream, _, last = key.rpartition(".")
                if last == KEY and tensor.dtype == "F64":
                    start, stop = tensor.data_offsets
                    file.seek(header.num_bytes + start)
                    one = Statistics.parse(np.frombuffer(file.read(stop - start), np.float64), name)
                    known = self.statistics.get(stream)
                    self.statistics[stream] = one if known is None else known + one


def take_left(files: FileOptions) -> None:
    """Make visible all shards that the engines of a killed harvest had finished in hidden folders.
    Then remove the hidden folders.

    The caller holds the folder's lock.

    Raises:
        FileError: a shard is damaged or cannot be moved, or a hidden folder cannot be read.
    """
    staged = make_staged(files.root, files.fsync, files.file_mode)
    if not (places := staged.places()):
        return
    folder = find_folder(files.root)
    done = {key for name in folder.names() for key in _keys(folder, name)}
    for place in places:
        done |= move_shards(staged, place, done.isdisjoint)
        staged.remove(place)


def move_shards(
    staged: Staged,
    place: str,
    wanted: Callable[[Set[bytes]], bool],
    names: Iterable[str] | None = None,
) -> Set[bytes]:
    """Move shards from a hidden folder, where another process wrote them, to the root.

    Args:
        place: the path or URL of the hidden folder.
        wanted: a function of the keys of a shard's contexts. A shard for which this function
            returns False stays in `place`.
        names: the names of the shards, or None for all shards in `place`.

    Returns:
        The keys of the contexts in the shards that have become visible.

    Raises:
        FileError: a shard is damaged, or cannot be moved.
    """
    moved: set[bytes] = set()
    try:
        folder = find_folder(place)
    except FileError:  # `place` was removed, or is a URL below which no process wrote a file
        return moved
    for name in folder.names() if names is None else names:
        keys = _keys(folder, name)
        if keys and wanted(keys):
            staged.move(place, [name])
            with suppress(FileError):  # the process can be killed before it writes the JSON file
                staged.move(place, [f"{name.removesuffix('.safetensors')}.json"])
            moved |= keys
    return moved


def _keys(folder: Folder, name: str) -> set[bytes]:
    """The keys of the contexts in a shard. The set is empty if the file is not a shard of a
    harvest."""
    index = read_index(folder, name)
    requests = [] if index is None else index.requests
    return {key_of(one.documents) for one in requests if one.documents}
