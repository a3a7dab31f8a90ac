"""Rows of many requests in a few large files: the layout for training.

    resid_post.5             [tokens, hidden_size]   or resid_post.5.q, ... of a codec
    resid_post.5.request     int32 [tokens]          number of the request in the index
    resid_post.5.positions   int64 [tokens]
    resid_post.5.token_ids   int32 [tokens]          the token that the row is of
    token_ids                int32 [all tokens]      prompt and output of all requests
    vllm_scope               uint8 [bytes]           the index, as JSON

The index is beside the shard too, as `.json`, for people. In the file it is a tensor: of
small requests it takes more than a safetensors header may have.

Owns:  ShardedLayout and its shards.
Runs:  `add` on the caller's thread puts pieces aside, no copy; shards are written on
       two threads, so that one fills the page cache while the other waits for the disk.
"""

from __future__ import annotations

import secrets
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from vllm_scope.codecs import Codec
from vllm_scope.files.manifest import Index, Manifest
from vllm_scope.files.options import FileOptions
from vllm_scope.files.per_request import KEY, part_key
from vllm_scope.files.publish import Publisher, write_bytes
from vllm_scope.files.stored import FinishedRequest, Stored, telling
from vllm_scope.files.tensors import write_tensors

#: Shards that are being written; a third waits, and the caller with it.
NUM_WRITERS = 2
#: Shards that are being filled: rows of a stream that come under unlike codecs go into as
#: many, and the oldest is written when there would be one more.
MOST_OPEN = 4


class _Shard:
    """Requests whose rows go into one file.

    Attributes:
        nbytes: of the tensors so far.
    """

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.nbytes = 0
        self.manifests: list[Manifest] = []
        self.waiting: list[Future[None]] = []
        self._pieces: dict[str, list[Tensor]] = {"token_ids": []}
        self._codecs: dict[str, Codec] = {}
        self._num_rows: dict[str, int] = {}
        self._num_tokens = 0

    def fits(self, request: FinishedRequest) -> bool:
        """Whether its streams are of the same width, dtype and codec as the shard's."""
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
        # From here on nothing can fail: a request is in the shard whole, or not at all.
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

    def publish(self, publisher: Publisher) -> None:
        with telling(self.waiting):
            body = Index("sharded", self.manifests).encode()
            index = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            tensors = {**self._pieces, KEY: [index]}
            metadata = {"layout": "sharded"}
            publisher.publish({
                f"{self.stem}.safetensors": partial(
                    write_tensors, tensors=tensors, metadata=metadata
                ),
                f"{self.stem}.json": partial(write_bytes, body=body),
            })  # fmt: skip


class ShardedLayout:
    def __init__(self, options: FileOptions, publisher: Publisher) -> None:
        self._options = options
        self._publisher = publisher
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
        if not shard.manifests:  # what was to be its first request could not be taken
            return
        # Requests hear of a failure by their own futures.
        while self._writing and self._writing[0].done():
            self._writing.popleft()
        self._writing.append(self._threads.submit(shard.publish, self._publisher))
        if len(self._writing) > NUM_WRITERS:
            self._writing.popleft().exception()

    def flush(self) -> None:
        for shard in list(self._open):
            self._rotate(shard)
        done, self._writing = list(self._writing), deque()
        failures = [future.exception() for future in done]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._threads.shutdown()
