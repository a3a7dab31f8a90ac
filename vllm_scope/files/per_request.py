"""One safetensors file per request.

    resid_post.5              [n, hidden_size]   with a codec, its parts: resid_post.5.q, ...
    resid_post.5.positions    int64 [n]
    token_ids                 int32 [num_tokens]

Readers use the index in the file's metadata, under `vllm_scope`. A `.json` file in the same folder
has the same index, for people.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from vllm_scope.files.index import Index, IndexedRequest
from vllm_scope.files.names import place
from vllm_scope.files.publish import Publisher, Write, write_bytes
from vllm_scope.files.stored import FileLayout, FinishedRequest, Stored, published
from vllm_scope.files.tensors import write_tensors

#: The name of the index in the metadata of a safetensors file. In a shard or a numpy archive, the
#: name of the tensor or array that has the index.
KEY = "vllm_scope"


def part_key(stream: str, part: str) -> str:
    """The name of the tensor that has one part of a stream, such as `resid_post.5.q`. The codecs
    `none` and `fp16` make only the part `rows`, whose tensor has the name of the stream."""
    return stream if part == "rows" else f"{stream}.{part}"


def tensors_of(request: FinishedRequest, prefix: str = "") -> dict[str, list[Tensor]]:
    """The tensors of the request, by name. A tensor is a list of pieces, to be joined along the
    first axis."""
    found = {f"{prefix}token_ids": [request.token_ids]}
    for name, stream in request.streams.items():
        found[f"{prefix}{name}.positions"] = [torch.from_numpy(stream.positions)]
        for part, pieces in stream.parts.items():
            found[prefix + part_key(name, part)] = pieces
    return found


def publish_indexed(publisher: Publisher, name: str, write: Write, body: bytes) -> None:
    """Publish a data file, then a `.json` file with the index in the same folder."""
    stem = name.rpartition(".")[0]
    publisher.publish({name: write, f"{stem}.json": partial(write_bytes, body=body)})


def publish_tensors(
    publisher: Publisher, stem: str, tensors: dict[str, list[Tensor]], index: Index
) -> None:
    """Publish a safetensors file that has the index in its metadata, then a `.json` file with the
    same index."""
    body = index.encode()
    write = partial(write_tensors, tensors=tensors, metadata={KEY: body.decode()})
    publish_indexed(publisher, f"{stem}.safetensors", write, body)


class PerRequestLayout(FileLayout):
    suffix = "safetensors"

    def add(self, request: FinishedRequest) -> Stored:
        stem = place(request.record)
        folder, _, name = stem.rpartition("/")
        manifest = request.manifest(f"{name}.{self.suffix}")
        self._publish(stem, tensors_of(request), manifest)
        return Stored(manifest, published(), folder)

    def _publish(
        self, stem: str, tensors: dict[str, list[Tensor]], manifest: IndexedRequest
    ) -> None:
        publish_tensors(self._publisher, stem, tensors, Index("per_request", [manifest]))
