"""One safetensors file per request.

    resid_post.5              [n, hidden_size]   or resid_post.5.q, ... of a codec
    resid_post.5.positions    int64 [n]
    token_ids                 int32 [num_tokens]

The index is in the file's metadata under `vllm_scope`, and beside it as `.json`, which
is for people: readers take the file's own.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from vllm_scope.files.manifest import Index
from vllm_scope.files.names import place
from vllm_scope.files.options import FileOptions
from vllm_scope.files.publish import Publisher, write_bytes
from vllm_scope.files.stored import FinishedRequest, Stored, published
from vllm_scope.files.tensors import write_tensors

#: Where a safetensors file's metadata has the index.
KEY = "vllm_scope"


def part_key(stream: str, part: str) -> str:
    """A part's tensor name; rows that need no decoding have the stream's own."""
    return stream if part == "rows" else f"{stream}.{part}"


def tensors_of(request: FinishedRequest, prefix: str = "") -> dict[str, list[Tensor]]:
    """Tensor name -> its pieces."""
    found = {f"{prefix}token_ids": [request.token_ids]}
    for name, stream in request.streams.items():
        found[f"{prefix}{name}.positions"] = [stream.positions]
        for part, pieces in stream.parts.items():
            found[prefix + part_key(name, part)] = pieces
    return found


def publish_indexed(
    publisher: Publisher, stem: str, tensors: dict[str, list[Tensor]], index: Index
) -> None:
    """The file, which has the index too, then the index beside it."""
    body = index.encode()
    metadata = {KEY: body.decode()}
    publisher.publish({
        f"{stem}.safetensors": partial(write_tensors, tensors=tensors, metadata=metadata),
        f"{stem}.json": partial(write_bytes, body=body),
    })  # fmt: skip


class PerRequestLayout:
    def __init__(self, options: FileOptions, publisher: Publisher) -> None:
        self._publisher = publisher

    def add(self, request: FinishedRequest) -> Stored:
        stem = place(request.record)
        folder, _, name = stem.rpartition("/")
        manifest = request.manifest(f"{name}.safetensors")
        index = Index("per_request", [manifest])
        publish_indexed(self._publisher, stem, tensors_of(request), index)
        return Stored(manifest, published(), folder)

    def flush(self) -> None: ...

    def close(self) -> None: ...
