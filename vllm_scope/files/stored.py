"""The data of an ended request for a file layout, and the result of storing the request.

Owns:  EncodedStream, FinishedRequest (a layout's input), Stored (a layout's output), FileLayout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from msgspec import UNSET
from torch import Tensor

from vllm_scope.batch.by_position import Ints
from vllm_scope.codecs import Codec
from vllm_scope.files.index import IndexedRequest, IndexedStream, RequestRecord, Status
from vllm_scope.files.options import FileOptions
from vllm_scope.files.publish import Publisher
from vllm_scope.request.read_features import NOT_KNOWN, ReadFeatures

Text = TypeVar("Text", str, str | None)


@dataclass(frozen=True)
class Stored:
    """The result of storing a request.

    Attributes:
        manifest: the request's manifest. When `published` is done without an exception, the file
            that the manifest names has the rows. Until then, the rows are only in the memory of
            this process.
        published: a future that is done when the file is visible. If the file was not written, the
            future has the exception.
        folder: the file's folder, relative to the root.
    """

    manifest: IndexedRequest
    published: Future[None]
    folder: str = ""

    def path(self, file: str) -> str:
        """The path of a file in the manifest, relative to the root."""
        return f"{self.folder}/{file}" if self.folder else file


def published() -> Future[None]:
    """A future that is done, for a file that is already visible."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


@contextmanager
def settling(published: Future[None]) -> Iterator[None]:
    """When the `with` block ends, set the result of the future to None. If the block raises an
    exception, give this exception to the future, and raise it again."""
    try:
        yield
    except BaseException as error:
        published.set_exception(error)
        raise
    published.set_result(None)


@dataclass(frozen=True)
class EncodedStream:
    """One stream of a request, ready for a file.

    Attributes:
        positions: the rows' positions, [num_rows].
        parts: maps the names of the codec's parts to the parts of these rows. A part is one tensor,
            given as a list of one or more pieces along the first axis.
        read: if the rows are features, which features of the SAE were read.
    """

    positions: Ints
    parts: dict[str, list[Tensor]]
    codec: Codec
    read: ReadFeatures = NOT_KNOWN

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        pieces = [piece.nbytes for part in self.parts.values() for piece in part]
        return self.positions.nbytes + sum(pieces)


@dataclass(frozen=True)
class FinishedRequest:
    """A request with all of its encoded rows.

    Attributes:
        streams: the request's streams, by `site.layer`.
        token_ids: int32 [num_tokens], the tokens of prompt and output.
    """

    record: RequestRecord
    streams: dict[str, EncodedStream]
    token_ids: Tensor

    @property
    def nbytes(self) -> int:
        return self.token_ids.nbytes + sum(stream.nbytes for stream in self.streams.values())

    def manifest(
        self, file: str, firsts: dict[str, int] | None = None, number: int = 0, first_token: int = 0
    ) -> IndexedRequest:
        """The manifest of this request in `file`. `number` is the request's index among the
        requests of this file.

        Args:
            firsts: for each stream, the index of the request's first row in the file's stream.
                Default: 0.
            first_token: index of the request's first token in the file's token ids.
        """
        record, first_of = self.record, firsts or {}
        status, reason = _status(record, sum(s.num_rows for s in self.streams.values()))
        streams = {
            name: IndexedStream(
                (stream.num_rows, stream.codec.hidden_size),
                stream.codec.dtype,
                stream.codec.metadata(),
                file,
                first_of.get(name, 0),
                UNSET if stream.read == NOT_KNOWN else stream.read,
            )
            for name, stream in self.streams.items()
        }
        return IndexedRequest(
            _utf8(record.request_id), _utf8(record.uid), _utf8(record.model), status,
            _utf8(reason), record.expected, record.delivered, record.dropped,
            len(record.prompt_ids), len(record.output_ids), [file], streams, _utf8(record.tag),
            _utf8(record.name), record.child, record.stage, record.num_stages, number,
            first_token, _utf8(record.owner), record.documents, record.num_layers,
        )  # fmt: skip


def _utf8(text: Text) -> Text:
    """The text, in which `?` replaces each lone surrogate. JSON text can contain lone surrogates,
    but UTF-8 cannot."""
    if text is None or text.isascii():
        return text
    return text.encode("utf-8", "replace").decode()


def _status(record: RequestRecord, num_rows: int) -> tuple[Status, str | None]:
    """Returns the status and the reason of the record. If the record has the status `ok`, but rows
    are missing, the status is `partial`."""
    if record.status != "ok":
        return record.status, record.reason
    if num_rows != record.delivered:
        return "partial", f"{record.delivered} rows were delivered, {num_rows} reached the file"
    if record.delivered != record.expected:
        missing = record.expected - record.delivered
        return "partial", f"{missing} of {record.expected} rows are missing"
    return "ok", record.reason


class FileLayout(ABC):
    """Writes requests into files. Only one thread at a time may call the methods."""

    def __init__(self, options: FileOptions, publisher: Publisher) -> None:
        self._options = options
        self._publisher = publisher

    @abstractmethod
    def add(self, request: FinishedRequest) -> Stored:
        """Add a request to a file. A layout with one file per request raises FileError if it cannot
        write the file. With other layouts, `Stored.published` has the error."""

    def flush(self) -> None:  # noqa: B027
        """Wait until every request is published or has failed. Raises FileError if a file cannot be
        written during this call. If an earlier file could not be written, the error may be only in
        `Stored.published`."""

    def close(self) -> None:
        """Call `flush`, then end the threads of the layout."""
        self.flush()
