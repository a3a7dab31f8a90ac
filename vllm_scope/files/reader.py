"""Captured rows from files: `vllm_scope.open(path)`.

    capture = vllm_scope.open("captures")
    request = capture["my-name"]
    request["resid_post", 5]                           # Tensor [n, hidden_size]
    for rows in capture.iter_rows("resid_post", 5, batch_size=4096, shuffle=True):
        ...

Owns:  Capture (all requests below a path) and `open`.
To:    captured (one request), iterate (rows for training), export.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from torch import Tensor

from vllm_scope.errors import shown
from vllm_scope.files.captured import CapturedRequest, OpenFiles, Piece
from vllm_scope.files.datafile import read_index
from vllm_scope.files.iterate import iter_rows
from vllm_scope.files.roots import find_folder
from vllm_scope.request.sites import SiteLayer


class Capture:
    """Requests in the order of their files' names, and within a file as they finished.

    A sequence by number; by name or request id with `[...]`, and by tag with `find`.
    """

    def __init__(self, requests: list[CapturedRequest]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[CapturedRequest]:
        return iter(self._requests)

    def __getitem__(self, which: int | str) -> CapturedRequest:
        """By place, or by name or request id.

        Raises:
            IndexError, KeyError: there is none, or several of that name.
        """
        if isinstance(which, int):
            return self._requests[which]
        found = self.find(name=which) or [
            request for request in self if request.manifest.request_id == which
        ]
        if len(found) != 1:
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
        """The requests that are all of what is given."""
        wanted = {"name": name, "tag": tag, "request_id": request_id, "status": status,
                  "owner": owner}  # fmt: skip
        asked = {key: value for key, value in wanted.items() if value is not None}
        return [
            request
            for request in self
            if all(getattr(request.manifest, key) == value for key, value in asked.items())
        ]

    def keys(self) -> list[SiteLayer]:
        """The streams that any of the requests has."""
        return sorted({stream for request in self for stream in request.keys()})

    def iter_rows(
        self,
        site: str,
        layer: int,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
    ) -> Iterator[Tensor]:
        """Every row of a stream once, [batch_size, hidden_size], the last batch smaller.

        In order, a batch is a view of the file where nothing is to decode. Shuffled,
        rows are read in runs that follow each other on disk, and mixed within a pool
        of many runs from everywhere: see vllm_scope.files.iterate.

        Args:
            shuffle: another order for each seed, the same for the same one.

        Raises:
            KeyError: no request has this stream.
            FileError: widths or dtypes differ between files.
        """
        stored = [r.stored((site, layer)) for r in self if (site, layer) in r]
        if not stored:
            raise KeyError(f"({site!r}, {layer}) was not captured; captured are {self.keys()}")
        return iter_rows(stored, batch_size, shuffle, seed)

    def __repr__(self) -> str:
        return f"<Capture of {len(self)} requests>"


def open(path: str | os.PathLike[str]) -> Capture:
    """Find the requests below a folder, a file, or a URL that fsspec knows.

    Reads indexes only; rows are read when they are asked for. Files that were not
    written here are passed over.

    Raises:
        FileError: there is nothing, or a file of ours is damaged.
    """
    folder = find_folder(path)
    files = OpenFiles(folder)
    #: What one request's pieces share -> stage -> the pieces of it, mostly one.
    groups: dict[tuple, dict[int, list[Piece]]] = {}
    for name in folder.names():
        index = read_index(folder, name)
        if index is None:
            continue
        files.dtypes[name] = index.dtypes
        for manifest in index.requests:
            prefix = f"{manifest.number}/" if index.layout == "packed" else ""
            key = (manifest.uid, manifest.child, manifest.num_stages)
            stages = groups.setdefault(key, {})
            stages.setdefault(manifest.stage, []).append(Piece(name, prefix, manifest))
    return Capture(
        [CapturedRequest(files, pieces) for group in groups.values() for pieces in _requests(group)]
    )


def _requests(stages: dict[int, list[Piece]]) -> list[list[Piece]]:
    """The pieces of each request, by stage; a request that was stored twice is two."""
    requests: list[list[Piece]] = []
    for stage in sorted(stages):
        for number, piece in enumerate(stages[stage]):
            if number == len(requests):
                requests.append([])
            requests[number].append(piece)
    return requests
