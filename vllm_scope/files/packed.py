"""Writes several requests into one safetensors file, with separate tensors for each request.

    0/resid_post.5, 0/resid_post.5.positions, 0/token_ids, 1/resid_post.5, ...

This layout is for many small requests whose tensors are read one by one. A file is full when it has
`packed_requests` requests, when its size reaches `file_mib`, or when its header is half as large as
a header can be.
"""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from contextlib import suppress

import msgspec
from torch import Tensor

from vllm_scope.errors import FileError
from vllm_scope.files.index import Index, IndexedRequest
from vllm_scope.files.options import FileOptions
from vllm_scope.files.per_request import publish_tensors, tensors_of
from vllm_scope.files.publish import Publisher
from vllm_scope.files.stored import FileLayout, FinishedRequest, Stored, settling
from vllm_scope.files.tensors import MOST_HEADER_BYTES, entry_bytes


class PackedLayout(FileLayout):
    def __init__(self, options: FileOptions, publisher: Publisher) -> None:
        super().__init__(options, publisher)
        self._identity = secrets.token_hex(8)
        self._num_files = 0
        self._begin()

    def _begin(self) -> None:
        self._published: Future[None] = Future()
        self._stem = f"packed-{self._identity}-{self._num_files:06d}"
        self._tensors: dict[str, list[Tensor]] = {}
        self._manifests: list[IndexedRequest] = []
        self._nbytes = self._header_bytes = 0

    def add(self, request: FinishedRequest) -> Stored:
        number = len(self._manifests)
        manifest = request.manifest(f"{self._stem}.safetensors", number=number)
        tensors = tensors_of(request, f"{number}/")
        self._tensors |= tensors
        # The header also has the index, as a JSON string.
        text = msgspec.json.encode(manifest).decode()
        self._header_bytes += sum(map(entry_bytes, tensors)) + len(msgspec.json.encode(text))
        self._manifests.append(manifest)
        self._nbytes += request.nbytes
        stored = Stored(manifest, self._published)
        if (
            self._nbytes >= self._options.file_bytes
            or self._header_bytes >= MOST_HEADER_BYTES
            or len(self._manifests) >= self._options.packed_requests
        ):
            # Suppress the error here, because `Stored.published` of each request has the error.
            with suppress(FileError):
                self.flush()
        return stored

    def flush(self) -> None:
        if not self._manifests:
            return
        stem, tensors, index = self._stem, self._tensors, Index("packed", self._manifests)
        published = self._published
        self._num_files += 1
        self._begin()
        with settling(published):
            publish_tensors(self._publisher, stem, tensors, index)
