"""A request that ended, on its way into a file; and what became of it.

Owns:  EncodedStream, FinishedRequest (what a layout is given), Stored (what it says).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from vllm_scope.codecs import Codec
from vllm_scope.files.manifest import Manifest, RequestRecord, StreamEntry


@dataclass(frozen=True)
class Stored:
    """What became of a request.

    Attributes:
        manifest: holds once `published` is done, and not before: until then the rows
            are in this process's memory.
        published: done when the file is visible; it fails with what kept it from that.
        folder: of the file, below the root.
    """

    manifest: Manifest
    published: Future[None]
    folder: str = ""

    def path(self, file: str) -> str:
        """Below the root, of a file that the manifest names."""
        return f"{self.folder}/{file}" if self.folder else file


def published() -> Future[None]:
    """Of a file that is visible already."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


@contextmanager
def telling(waiting: Sequence[Future[None]]) -> Iterator[None]:
    """What happens in here is what becomes of these."""
    try:
        yield
    except BaseException as error:
        for future in waiting:
            future.set_exception(error)
        raise
    for future in waiting:
        future.set_result(None)


@dataclass(frozen=True)
class EncodedStream:
    """One stream of a request, ready for a file.

    Attributes:
        positions: int64 [num_rows].
        parts: of the codec, each as its pieces, at least one.
    """

    positions: Tensor
    parts: dict[str, list[Tensor]]
    codec: Codec
    shape: tuple[int, int]
    dtype: str

    @property
    def nbytes(self) -> int:
        pieces = (piece for part in self.parts.values() for piece in part)
        return self.positions.nbytes + sum(piece.nbytes for piece in pieces)

    def entry(self, file: str, first: int = 0) -> StreamEntry:
        return StreamEntry(self.shape, self.dtype, self.codec.metadata(), file, first)


@dataclass(frozen=True)
class FinishedRequest:
    """A request with all of its rows, encoded.

    Attributes:
        record: as given, its status corrected where rows are missing.
        streams: by `site.layer`.
        token_ids: int32 [num_tokens], prompt and output.
    """

    record: RequestRecord
    streams: dict[str, EncodedStream]
    token_ids: Tensor

    @property
    def nbytes(self) -> int:
        return self.token_ids.nbytes + sum(stream.nbytes for stream in self.streams.values())

    def manifest(
        self,
        file: str,
        firsts: dict[str, int] | None = None,
        number: int = 0,
        first_token: int = 0,
    ) -> Manifest:
        """Its manifest as the request `number` of `file`."""
        record = self.record
        status, reason = _status(record, sum(s.shape[0] for s in self.streams.values()))
        return Manifest(
            request_id=_utf8(record.request_id),
            owner=record.owner,
            uid=_utf8(record.uid),
            model=_utf8(record.model),
            status=status,
            reason=None if reason is None else _utf8(reason),
            expected=record.expected,
            delivered=record.delivered,
            dropped=record.dropped,
            num_prompt_tokens=len(record.prompt_ids),
            num_output_tokens=len(record.output_ids),
            files=[file],
            streams={
                name: stream.entry(file, (firsts or {}).get(name, 0))
                for name, stream in self.streams.items()
            },
            tag=None if record.tag is None else _utf8(record.tag),
            name=None if record.name is None else _utf8(record.name),
            child=record.child,
            stage=record.stage,
            num_stages=record.num_stages,
            number=number,
            first_token=first_token,
        )


def _utf8(text: str) -> str:
    """The text, half a surrogate pair as `?`: JSON can bring one in, but not take it out."""
    return text.encode("utf-8", "replace").decode()


def _status(record: RequestRecord, num_rows: int) -> tuple:
    """The record's status, or `partial` where its own counts contradict it."""
    if record.status != "ok":
        return record.status, record.reason
    if num_rows != record.delivered:
        return "partial", f"{record.delivered} rows were delivered, {num_rows} reached the file"
    if record.delivered != record.expected:
        missing = record.expected - record.delivered
        return "partial", f"{missing} of {record.expected} rows are missing"
    return "ok", record.reason
