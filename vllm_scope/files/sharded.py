"""Rows of many requests in a few large files: the layout for training.

    resid_post.5             [tokens, hidden_size]   or resid_post.5.q, ... of a codec
    resid_post.5.request     int32 [tokens]          number of the request in the index
    resid_post.5.positions   int64 [tokens]
    resid_post.5.token_ids   int32 [tokens]          the token that the row is of
    token_ids                int32 [all tokens]      prompt and output of all requests
    vllm_scope               uint8 [bytes]           the index, as JSON
    resid_post.5.<name>      what a `Summary` makes of the stream's rows, if the writer has one

The index is also beside the shard as `.json`, for people. In the file it is a tensor, because
the index of many small requests is larger than a safetensors header may be.

Owns:  ShardedLayout and its shards.
Runs:  `add` on the caller's thread keeps the pieces without a copy. Shards are written on
       two threads: one fills the page cache while the other waits for the disk.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from vllm_scope.codecs import Codec
from vllm_scope.files.index import Index, IndexedRequest
from vllm_scope.files.options import FileOptions
from vllm_scope.files.per_request import KEY, part_key, publish_indexed
from vllm_scope.files.publish import Publisher
from vllm_scope.files.stored import FileLayout, FinishedRequest, Stored, settling
from vllm_scope.files.tensors import write_tensors

#: Shards that are written at once. If one more is full, the caller waits.
NUM_WRITERS = 2
#: Shards that are filled at once: rows of one stream under different codecs need different
#: shards. If one more is needed, the oldest is written.
MOST_OPEN = 4
#: Rows that a Summary is given at once.
BLOCK_ROWS = 4096
#: Makes tensors, by name, of the decoded rows of one stream of a shard, [some, hidden_size] each.
#: Called on the threads that write shards.
Summary = Callable[[Iterator[Tensor]], dict[str, Tensor]]


class _Shard:
    """Requests whose rows go into one file.

    Attributes:
        nbytes: of the tensors so far.
    """

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.nbytes = 0
        self.manifests: list[IndexedRequest] = []
        self.waiting: list[Future[None]] = []
        self._pieces: dict[str, list[Tensor]] = {"token_ids": []}
        self._codecs: dict[str, Codec] = {}
        self._num_rows: dict[str, int] = {}
        self._num_tokens = 0

    def fits(self, request: FinishedRequest) -> bool:
        """True if each of its streams has the shard's width, dtype and codec."""
        return all(
            self._codecs.get(name, stream.codec) == stream.codec
            for name, stream in request.streams.items()
        )

    def add(self, request: FinishedRequest) -> Stored:
        number = len(self.manifests)
        manifest = request.manifest(
            f"{self.stem}.safetensors", self._num_rows, number, self._num_tokens
        )
        pieces = {"token_ids": [request.token_ids]}
        for name, stream in request.streams.items():
            pieces |= {part_key(name, part): found for part, found in stream.parts.items()}
            pieces[f"{name}.request"] = [
                torch.full_like(stream.positions, number, dtype=torch.int32)
            ]
            pieces[f"{name}.positions"] = [stream.positions]
            pieces[f"{name}.token_ids"] = [request.token_ids[stream.positions]]
        # Nothing below can fail, so that a request is in the shard whole or not at all.
        for key, found in pieces.items():
            self._pieces.setdefault(key, []).extend(found)
            self.nbytes += sum(piece.nbytes for piece in found)
        for name, stream in request.streams.items():
            self._codecs[name] = stream.codec
            self._num_rows[name] = self._num_rows.get(name, 0) + stream.shape[0]
        self._num_tokens += len(request.token_ids)
        self.manifests.append(manifest)
        stored = Stored(manifest, Future())
        self.waiting.append(stored.published)
        return stored

    def publish(self, publisher: Publisher, summary: Summary | None) -> None:
        with settling(self.waiting):
            body = Index("sharded", self.manifests).encode()
            index = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            tensors = {**self._pieces, KEY: [index]}
            if summary is not None:
                for stream in self._codecs:
                    made = summary(self._blocks(stream))
                    tensors |= {f"{stream}.{name}": [tensor] for name, tensor in made.items()}
            write = partial(write_tensors, tensors=tensors, metadata={"layout": "sharded"})
            publish_indexed(publisher, f"{self.stem}.safetensors", write, body)

    def _blocks(self, stream: str) -> Iterator[Tensor]:
        """The rows of a stream, decoded, in blocks of about BLOCK_ROWS."""
        codec = self._codecs[stream]
        names = list(codec.part_names)
        waiting: list[tuple[Tensor, ...]] = []
        num_rows = 0
        for parts in zip(*(self._pieces[part_key(stream, name)] for name in names), strict=True):
            waiting.append(parts)
            num_rows += len(parts[0])
            if num_rows >= BLOCK_ROWS:
                yield _decoded(codec, names, waiting)
                waiting, num_rows = [], 0
        if waiting:
            yield _decoded(codec, names, waiting)


def _decoded(codec: Codec, names: list[str], pieces: list[tuple[Tensor, ...]]) -> Tensor:
    parts = {
        name: torch.cat(some) for name, some in zip(names, zip(*pieces, strict=True), strict=True)
    }
    return codec.decode(parts, sum(len(first) for first, *_ in pieces))


class ShardedLayout(FileLayout):
    def __init__(
        self, options: FileOptions, publisher: Publisher, summary: Summary | None = None
    ) -> None:
        super().__init__(options, publisher)
        self._summary = summary
        self._identity = secrets.token_hex(8)
        self._num_shards = 0
        self._threads = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="vllm-scope-shard")
        self._writing: deque[Future[None]] = deque()
        #: The oldest first.
        self._open: list[_Shard] = []

    def _shard_for(self, request: FinishedRequest) -> _Shard:
        for shard in self._open:
            if shard.fits(request):
                return shard
        if len(self._open) == MOST_OPEN:
            self._rotate(self._open[0])
        self._open.append(_Shard(f"shard-{self._identity}-{self._num_shards:06d}"))
        self._num_shards += 1
        return self._open[-1]

    def add(self, request: FinishedRequest) -> Stored:
        shard = self._shard_for(request)
        stored = shard.add(request)
        if shard.nbytes >= self._options.file_bytes:
            self._rotate(shard)
        return stored

    def _rotate(self, shard: _Shard) -> None:
        self._open.remove(shard)
        if not shard.manifests:  # adding its first request failed
            return
        # A failure is set on the requests' futures.
        while self._writing and self._writing[0].done():
            self._writing.popleft()
        self._writing.append(self._threads.submit(shard.publish, self._publisher, self._summary))
        if len(self._writing) > NUM_WRITERS:
            self._writing.popleft().exception()

    def flush(self) -> None:
        for shard in list(self._open):
            self._rotate(shard)
        written, self._writing = self._writing, deque()
        failures = [error for future in written if (error := future.exception()) is not None]
        if failures:
            raise failures[0]

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._threads.shutdown()
