"""The messages between a feeder and a trainer, beside the rows.

Owns:  the messages, Channel.
Runs:  on both sides.

The trainer sends no message. It only closes its end, or is gone.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from typing import Any

import msgspec

from vllm_scope.feeds.memory import Field
from vllm_scope.harvests.contexts import Long

#: The largest number of bytes of a message. A message is one packet, far below the kernel's limit
#: for a packet.
_MOST_BYTES = 1 << 17


class Settings(msgspec.Struct, frozen=True):
    """How a feed works: the arguments of `vllm_scope.stream`."""

    batch_size: int
    num_slots: int
    seed: int
    column: str | None
    split: str
    config: str | None
    long: Long
    context: int | None


class Order(msgspec.Struct, frozen=True):
    """What a feed reads. The engine's process gets the order on its standard input.

    Attributes:
        dataset: a path or a name, or a list of texts, token ids or rows.
        scope: the reads as a spec, in JSON.
        engine: arguments of LLM.
    """

    dataset: str | list[Any]
    scope: str
    model: str
    engine: dict[str, Any]
    settings: Settings


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The memory has its size, and rows will follow."""

    fields: tuple[Field, ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """All rows are written."""

    num_rows: int
    num_skipped: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """No more rows will come.

    Attributes:
        kind: the name of the error's class in errors.py.
        sentence: the error's text.
    """

    kind: str
    sentence: str


Message = Begun | Ended | Failed
_decoder = msgspec.json.Decoder(Message)


class Channel:
    """One end of a pair of sockets.

    Args:
        parent: the id of the process at the other end, if this process is its child; else None.
            The id is needed because other children of the parent may hold the other end open when
            the parent is gone.
    """

    def __init__(self, end: socket.socket, parent: int | None = None) -> None:
        self._end, self._parent = end, parent

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, message: Message) -> None:
        """Send a message. Raises EOFError if the other end is closed."""
        try:
            self._end.send(msgspec.json.encode(message))
        except OSError as error:
            raise EOFError(str(error)) from None

    def receive(self, wait_s: float) -> Message | None:
        """The next message; None if there is none within `wait_s`.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            ready, _, _ = select.select([self._end], [], [], wait_s)
            body = self._end.recv(_MOST_BYTES) if ready else None
        except (OSError, ValueError) as error:  # this end was closed meanwhile
            raise EOFError(str(error)) from None
        if body == b"" or (self._parent is not None and os.getppid() != self._parent):
            raise EOFError("the other end is closed")
        return None if body is None else _decoder.decode(body)

    def wait_for_end(self) -> None:
        """Return once the other end is closed, or the process `parent` is gone.

        `parent` must not be None.
        """
        assert self._parent is not None
        ends = select.poll()
        ends.register(self._end, 0)  # `poll` reports a hang-up in any case
        with suppress(ProcessLookupError):
            ends.register(os.pidfd_open(self._parent), select.POLLIN)
            if os.getppid() == self._parent:  # else it has ended, and its id may be reused
                ends.poll()

    def close(self) -> None:
        """Close both directions, even if another process holds this end."""
        with suppress(OSError):  # the other end was closed before
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
