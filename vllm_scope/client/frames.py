"""Parses binary answers: the JSON and the tensors of each safetensors file.

Owns:  Frame, Frames.
From:  transport (the bytes).   To: calls.

docs/http.md describes the format. Each size in a header is checked before the size is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypedDict

import msgspec
import safetensors

from vllm_scope.errors import ScopeError
from vllm_scope.request.media import ANSWER, prefix_of

#: The largest size of a header that the safetensors library accepts.
MAX_HEADER_BYTES = 100_000_000


class FileTensor(TypedDict):
    """A tensor of a safetensors file, as the safetensors library returns it."""

    dtype: str
    shape: list[int]
    data: bytes


class _Entry(msgspec.Struct):
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct):
    metadata: dict[str, str] | None = msgspec.field(name="__metadata__", default=None)


@dataclass(frozen=True)
class Frame:
    """A safetensors file of a binary answer.

    Attributes:
        answer: the JSON of the answer, or the data of an event; None if the file only keeps the
            connection alive.
        tensors: the tensors by name, except the tensor that contains `answer`.
    """

    answer: bytes | None
    tensors: dict[str, FileTensor]

    @staticmethod
    def parse(file: bytes) -> Frame:
        """A Frame from a file's bytes. Raises ScopeError if the bytes are not safetensors."""
        tensors = tensors_of(file, "binary answer")
        answer = tensors.pop(ANSWER, None)
        return Frame(None if answer is None else bytes(answer["data"]), tensors)

    def of_choice(self, index: int) -> dict[str, FileTensor]:
        """The tensors of a choice, named as in a result's file."""
        start = prefix_of(index)
        return {n.removeprefix(start): t for n, t in self.tensors.items() if n.startswith(start)}


def tensors_of(file: bytes, what: str) -> dict[str, FileTensor]:
    """The tensors of a safetensors file, by name. Raises ScopeError for a file of another
    format."""
    try:
        return dict(safetensors.deserialize(file))
    except safetensors.SafetensorError as error:
        raise ScopeError(f"the server's {what} is not safetensors: {error}.") from None


def metadata_of(file: bytes) -> dict[str, str]:
    """The metadata of a safetensors file that `tensors_of` has accepted."""
    (size,) = struct.unpack_from("<Q", file)
    return msgspec.json.decode(file[8 : 8 + size], type=_Header).metadata or {}


class Frames:
    """Divides a binary stream into its files. The files follow one another without a separator.

    Attributes:
        done: True if the server has sent its last event.
    """

    def __init__(self) -> None:
        self.done = False
        self._rest: list[bytes] = []
        self._num_rest, self._needed = 0, 8

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes of the stream; return the files that are complete now and have an event. The
        event [DONE] is not returned, but sets `done`.

        Raises:
            ScopeError: the bytes are not safetensors files.
        """
        self._rest.append(data)
        self._num_rest += len(data)
        found: list[Frame] = []
        if self._num_rest < self._needed:
            return found
        # The bytes are joined before the loop. If they were joined again for each of many small
        # files, the time would grow with the square of the number of files.
        rest = memoryview(b"".join(self._rest))
        while len(rest) >= self._needed:
            self._needed = _length(rest)
            if len(rest) < self._needed:
                break
            frame = Frame.parse(bytes(rest[: self._needed]))
            if frame.answer == b"[DONE]":
                self.done = True
            elif frame.answer is not None:
                found.append(frame)
            rest, self._needed = rest[self._needed :], 8
        self._rest, self._num_rest = [bytes(rest)], len(rest)
        return found


def _length(data: memoryview) -> int:
    """The length of the file at the beginning of `data`, in bytes. While `data` ends within the
    file's header, the file's length is not known, and the result is the length up to the header's
    end."""
    (size,) = struct.unpack_from("<Q", data)
    if size > MAX_HEADER_BYTES:
        raise ScopeError(f"the server's stream has a header of {size} bytes; it is damaged.")
    if len(data) < 8 + size:
        return 8 + int(size)
    try:
        header = msgspec.json.decode(data[8 : 8 + size], type=dict[str, msgspec.Raw])
        entries = (msgspec.json.decode(v, type=_Entry) for k, v in header.items() if k[:2] != "__")
        end = max((entry.data_offsets[1] for entry in entries), default=0)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ScopeError(f"the server's stream is damaged: {error}.") from None
    return 8 + int(size) + max(0, end)
