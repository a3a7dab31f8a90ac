"""Writes the rows of many requests into a few large files. This layout is for training.

    resid_post.5             [tokens, hidden_size]   with a codec, its parts: resid_post.5.q, ...
    resid_post.5.request     int32 [tokens]          number of the request in the index
    resid_post.5.positions   int64 [tokens]
    resid_post.5.token_ids   int32 [tokens]          the token of each row
    token_ids                int32 [all tokens]      prompt and output of all requests
    vllm_scope               uint8 [bytes]           the index, as JSON
    resid_post.5.<name>      tensors that a `Summary` makes of the rows, if the writer has one

A `.json` file in the same folder has the same index, for people. In the shard, the index is a
tensor. The index is not in the header of the file, because a safetensors header has a size limit.
The index of many small requests can exceed this limit.

Owns:  ShardedLayout, and the shards that it fills.
Runs:  `add` runs on the caller's thread, and keeps the pieces of a request without a copy. Two or
       more other threads write shards. While one thread waits for the disk, another thread can fill
       the page cache.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.by_position import Ints
from vllm_scope.codecs import Codec
from vllm_scope.files.buffers import cat_rows
from vllm_scope.files.index import MAX_INDEX_BYTES, Index, IndexedRequest
from vllm_scope.files.options import FileOptions
from vllm_scope.files.per_request import KEY, part_key, publish_indexed
from vllm_scope.files.publish import Publisher
from vllm_scope.files.stored import FileLayout, FinishedRequest, Stored, settling
from vllm_scope.files.tensors import MOST_HEADER_BYTES, entry_bytes, joined, write_tensors

#: Default number of shards that are written at the same time. If another shard is full, `add`
#: waits.
NUM_WRITERS = 2
#: Largest number of shards that are filled at the same time. Rows of one stream with different
#: codecs need different shards. If one more shard is needed, the oldest shard is written first.
MOST_OPEN = 4
#: A shard is also full if its index has this number of bytes. The last request of the shard can
#: make the index larger. Readers accept an index of twice this size.
MOST_INDEX_BYTES = MAX_INDEX_BYTES // 2
#: If rows are decoded for a Summary, each block has at least this number of rows. Only the last
#: block can be smaller.
BLOCK_ROWS = 4096
#: A function that gets the decoded rows of one stream of a shard, in blocks [some, hidden_size],
#: and returns tensors by name. The threads that write shards call this function.
Summary = Callable[[Iterator[Tensor]], dict[str, Tensor]]


@dataclass
class _Rows:
    """The rows of one stream in a shard.

    Attributes:
        parts: maps the names of the codec's parts to the parts of the rows of all requests. A part
            is one tensor, given as a list of pieces along the first axis.
        requests: for each request that has rows in this stream, the request's number in the index.
        firsts: for each request in `requests`, the index of its first token in the shard's token
            ids.
        positions: for each request in `requests`, the positions of its rows.
    """

    codec: Codec
    num_rows: int = 0
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    requests: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    positions: list[Ints] = field(default_factory=list)

    def tensors(self, name: str, token_ids: Tensor) -> dict[str, list[Tensor]]:
        """The tensors of the stream `name`. Maps the name of each tensor to its pieces. `token_ids`
        are the token ids of the whole shard, int32."""
        counts = [len(positions) for positions in self.positions]
        positions = np.concatenate(self.positions)
        tokens = positions + np.repeat(self.firsts, counts)
        requests = np.repeat(np.asarray(self.requests, np.int32), counts)
        return {
            **{part_key(name, part): pieces for part, pieces in self.parts.items()},
            f"{name}.request": [torch.from_numpy(requests)],
            f"{name}.positions": [torch.from_numpy(positions)],
            f"{name}.token_ids": [torch.from_numpy(token_ids.numpy()[tokens])],
        }


class _Shard:
    """Requests whose rows go into one file.

    Attributes:
        nbytes: number of bytes of the shard's tensors so far, without the index.
        index_bytes: number of bytes of the manifests in the index so far.
        header_bytes: an upper bound of the header's number of bytes so far. The tensors of a
            Summary are not counted.
        published: a future that is done when the file is visible. If the file was not written, the
            future has the exception.
    """

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.nbytes = self.index_bytes = self.header_bytes = 0
        self.manifests: list[IndexedRequest] = []
        self.published: Future[None] = Future()
        self._token_ids: list[Tensor] = []
        self._num_tokens = 0
        self._streams: dict[str, _Rows] = {}

    def fits(self, request: FinishedRequest) -> bool:
        """True if the rows of the request can join the rows of the shard. For each stream that
        request and shard share, the width, the dtype and the codec must be the same."""
        known = self._streams
        return all(
            name not in known or known[name].codec == stream.codec
            for name, stream in request.streams.items()
        )

    def add(self, request: FinishedRequest) -> Stored:
        number = len(self.manifests)
        firsts = {name: rows.num_rows for name, rows in self._streams.items()}
        # This step comes first, because only this step can fail, and a shard must not contain only
        # a part of a request.
        manifest = request.manifest(f"{self.stem}.safetensors", firsts, number, self._num_tokens)
        for name, stream in request.streams.items():
            if (rows := self._streams.get(name)) is None:
                rows = self._streams[name] = _Rows(stream.codec)
                # 3 more tensors: the rows' requests, positions and token ids.
                self.header_bytes += (len(stream.parts) + 3) * entry_bytes(name)
            for part, pieces in stream.parts.items():
                rows.parts.setdefault(part, []).extend(pieces)
            rows.num_rows += stream.num_rows
            rows.requests.append(number)
            rows.firsts.append(self._num_tokens)
            rows.positions.append(stream.positions)
            # 8 bytes for each row: the request's number and the token id.
            self.nbytes += stream.nbytes + 8 * stream.num_rows
        self.nbytes += request.token_ids.nbytes
        self._token_ids.append(request.token_ids)
        self._num_tokens += len(request.token_ids)
        self.manifests.append(manifest)
        self.index_bytes += len(msgspec.json.encode(manifest)) + 1
        return Stored(manifest, self.published)

    def publish(self, publisher: Publisher, summary: Summary | None) -> None:
        with settling(self.published):
            body = Index("sharded", self.manifests).encode()
            index = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            token_ids = cat_rows(self._token_ids)
            tensors: dict[str, list[Tensor]] = {"token_ids": [token_ids], KEY: [index]}
            for name, rows in self._streams.items():
                tensors |= rows.tensors(name, token_ids)
            if summary is not None:
                for stream in self._streams:
                    made = summary(self._blocks(stream))
                    tensors |= {f"{stream}.{name}": [tensor] for name, tensor in made.items()}
            write = partial(write_tensors, tensors=tensors, metadata={"layout": "sharded"})
            publish_indexed(publisher, f"{self.stem}.safetensors", write, body)

    def _blocks(self, stream: str) -> Iterator[Tensor]:
        """The decoded rows of a stream. The rows of short requests are joined to one block, because
        a Summary is faster with one large block than with many small blocks."""
        codec, pieces = self._streams[stream].codec, self._streams[stream].parts
        names = list(codec.part_names)
        if codec.codec == "none":  # `joined` joins the rows of short requests
            yield from joined(pieces[names[0]])
            return
        waiting: list[tuple[Tensor, ...]] = []
        num_rows = 0
        for parts in zip(*(pieces[name] for name in names), strict=True):
            waiting.append(parts)
            num_rows += len(parts[0])
            if num_rows >= BLOCK_ROWS:
                yield _decoded(codec, names, waiting)
                waiting, num_rows = [], 0
        if waiting:
            yield _decoded(codec, names, waiting)


def _decoded(codec: Codec, names: list[str], pieces: list[tuple[Tensor, ...]]) -> Tensor:
    parts = {
        name: cat_rows(some) for name, some in zip(names, zip(*pieces, strict=True), strict=True)
    }
    return codec.decode(parts, sum(len(first) for first, *_ in pieces))


class ShardedLayout(FileLayout):
    def __init__(
        self,
        options: FileOptions,
        publisher: Publisher,
        summary: Summary | None = None,
        num_writers: int = NUM_WRITERS,
    ) -> None:
        super().__init__(options, publisher)
        self._summary, self._num_writers = summary, num_writers
        self._identity = secrets.token_hex(8)
        self._num_shards = 0
        self._threads = ThreadPoolExecutor(num_writers, thread_name_prefix="vllm-scope-shard")
        self._writing: list[Future[None]] = []
        #: The shards that `add` fills, the oldest shard first.
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
        if (
            shard.nbytes >= self._options.file_bytes
            or shard.index_bytes >= MOST_INDEX_BYTES
            or shard.header_bytes >= MOST_HEADER_BYTES
        ):
            self._rotate(shard)
        return stored

    def _rotate(self, shard: _Shard) -> list[Future[None]]:
        """Give a shard to a thread, which writes the shard. Returns a list with the future of the
        write, or an empty list if the shard is empty."""
        self._open.remove(shard)
        if not shard.manifests:  # `add` failed for the first request of the shard
            return []
        written = self._threads.submit(shard.publish, self._publisher, self._summary)
        self._writing.append(written)
        if len(self._writing) > self._num_writers:
            wait(self._writing, return_when=FIRST_COMPLETED)
        # If a write has failed, `Stored.published` of the shard's requests has the error.
        self._writing = [one for one in self._writing if not one.done()]
        return [written]

    def flush(self) -> None:
        written = [one for one in self._writing if not one.done()]
        for shard in list(self._open):
            written += self._rotate(shard)  # the write may have failed already
        self._writing = []
        failures = [error for future in written if (error := future.exception()) is not None]
        if failures:
            raise failures[0]

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._threads.shutdown()
