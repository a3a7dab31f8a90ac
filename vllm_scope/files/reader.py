"""Reads captured rows from files: `vllm_scope.open(path)`.

    capture = vllm_scope.open("captures")
    request = capture["my-name"]
    request["resid_post", 5]                           # Tensor [n, hidden_size]
    for rows in capture.iter_rows("resid_post", 5, batch_size=4096, shuffle=True):
        ...

Owns:  Capture (all requests below a path), `open`.
To:    captured (one request), iterate (rows for training), export.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from itertools import zip_longest
from typing import SupportsIndex

from torch import Tensor

from vllm_scope.errors import shown
from vllm_scope.files.captured import CapturedRequest, Piece
from vllm_scope.files.datafile import read_index
from vllm_scope.files.iterate import iter_rows
from vllm_scope.files.roots import find_folder
from vllm_scope.files.streams import OpenFiles
from vllm_scope.request.sites import SiteLayer


class Capture:
    """Captured requests, in the order of file names. The requests of one file are in the order in
    which they ended.

    The key in `capture[key]` is an index, a name or a request id. `find` can also search for tags,
    statuses and owners.
    """

    def __init__(self, requests: list[CapturedRequest]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[CapturedRequest]:
        return iter(self._requests)

    def __getitem__(self, which: SupportsIndex | str) -> CapturedRequest:
        """The request with this index, name or request id.

        Raises:
            IndexError, KeyError: no request matches, or several requests match.
        """
        if isinstance(which, SupportsIndex):  # an int, also of numpy or torch
            index = operator.index(which)
            if not -len(self) <= index < len(self):
                raise IndexError(f"there is no request {index}; the capture has {len(self)}")
            return self._requests[index]
        found = self.find(name=which) or [
            request for request in self if request.manifest.request_id == which
        ]
        if not found:
            raise KeyError(
                f"no request is called {shown(which)}; the capture has {len(self)} requests; "
                "iterate over the capture to see them"
            )
        if len(found) > 1:
            raise KeyError(
                f"{len(found)} requests are called {shown(which)}; find(name=..., tag=...) "
                "returns all of them"
            )
        return found[0]

    def find(
        self,
        *,
        name: str | None = None,
        tag: str | None = None,
        request_id: str | None = None,
        status: str | None = None,
        owner: str | None = None,
    ) -> list[CapturedRequest]:
        """The requests that match every given value."""
        wanted = name, tag, request_id, status, owner
        of = operator.attrgetter("name", "tag", "request_id", "status", "owner")
        return [
            request
            for request in self
            if all(w in (None, own) for w, own in zip(wanted, of(request.manifest), strict=True))
        ]

    def keys(self) -> list[SiteLayer]:
        """All streams that at least one request has."""
        return sorted({stream for request in self for stream in request.keys()})

    def iter_rows(
        self,
        site: str,
        layer: int,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        part: tuple[int, int] = (0, 1),
        skip: int = 0,
    ) -> Iterator[Tensor]:
        """Yield each row of a stream one time, in batches [batch_size, hidden_size]. The last batch
        may be smaller.

        If `shuffle` is False and the stream has no codec, a batch may be a view of the file.
        If `shuffle` is True, this method reads runs of neighbouring rows, and mixes the rows of
        many runs. See vllm_scope.files.iterate.

        Args:
            shuffle: if True, yield rows in a random order. The same seed gives the same order.
            part: (index, number of parts), if several processes read the rows. Each row is in one
                part.
            skip: number of batches to leave out at the beginning.

        Raises:
            KeyError: no request has this stream.
            FileError: the rows of two requests have different widths or dtypes, or a file is
                damaged.
            ValueError: `batch_size` is below 1, `skip` is negative, or the index of `part` is not
                from 0 to the number of parts minus 1.
        """
        stored = [r.stored((site, layer)) for r in self if (site, layer) in r]
        if not stored:
            raise KeyError(f"({site!r}, {layer}) was not captured; captured are {self.keys()}")
        return iter_rows(stored, batch_size, shuffle, seed, part, skip)

    def __repr__(self) -> str:
        return f"<Capture of {len(self)} requests>"


def open(path: str | os.PathLike[str]) -> Capture:
    """The requests below a folder, in a file, or below a URL that fsspec supports.

    Reads only indexes. Rows are read when the caller accesses the rows. Files of other programs are
    skipped.

    Raises:
        FileError: the path does not exist, or a file of captured rows is damaged.
        ConfigError: fsspec is missing or cannot open the URL.
    """
    folder = find_folder(path)
    files = OpenFiles(folder)
    #: The pieces of each request, by (uid, child, num_stages) of the request and by pipeline stage.
    #: A stage usually has one piece.
    groups: dict[tuple[str, int, int], dict[int, list[Piece]]] = {}
    for name in folder.names():
        index = read_index(folder, name)
        if index is None:
            continue
        files.indexes[name] = index
        for manifest in index.requests:
            prefix = f"{manifest.number}/" if index.layout == "packed" else ""
            key = (manifest.uid, manifest.child, manifest.num_stages)
            stages = groups.setdefault(key, {})
            stages.setdefault(manifest.stage, []).append(Piece(name, prefix, manifest))
    return Capture(
        [CapturedRequest(files, pieces) for group in groups.values() for pieces in _requests(group)]
    )


def _requests(stages: dict[int, list[Piece]]) -> list[list[Piece]]:
    """The pieces of each request, in the order of the pipeline stages. If a request was stored
    twice, the result has two requests."""
    of_requests = zip_longest(*(stages[stage] for stage in sorted(stages)))
    return [[piece for piece in pieces if piece is not None] for pieces in of_requests]
