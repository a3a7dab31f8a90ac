"""The messages from a feeder to its trainer.

Owns:  Settings, the messages, Channel.
Runs:  in the feeder and in the trainer.

Only the feeder sends messages. The trainer closes its end of the channel when the trainer needs no
more rows.
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

#: Largest number of bytes of a message. A message is one packet, and the kernel allows larger
#: packets.
_MOST_BYTES = 1 << 17


class Settings(msgspec.Struct, frozen=True):
    """The settings of a feed, from the arguments of `vllm_scope.stream`."""

    batch_size: int
    num_slots: int
    seed: int
    column: str | None
    split: str
    config: str | None
    long: Long
    context: int | None


class Order(msgspec.Struct, frozen=True):
    """The input of a feed. The engine's process gets the order on its standard input.

    Attributes:
        dataset: the path or the name of a data set, or a list. The items of a list are texts, lists
            of token ids, or rows (dicts).
        scope: the reads as a spec, in JSON.
        engine: the arguments of LLM.
    """

    dataset: str | list[Any]
    scope: str
    model: str
    engine: dict[str, Any]
    settings: Settings


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The feeder has set the size of the shared memory, and will now write rows."""

    fields: tuple[Field, ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The feeder has written all rows."""

    num_rows: int
    num_skipped: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The feed has failed. The feeder will write no more rows.

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
        parent: the process id of this process's parent, if the parent has the other end. Else None.
            With this id, the channel notices that the parent has ended. Without the id, the channel
            would not notice the parent's end while another child process of the parent keeps the
            other end of the channel open.
    """

    def __init__(self, end: socket.socket, parent: int | None = None) -> None:
        self._end, self._parent = end, parent

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, message: Message) -> None:
        """Send a message. Raises EOFError if one end is closed."""
        try:
            self._end.send(msgspec.json.encode(message))
        except OSError as error:
            raise EOFError(str(error)) from None

    def receive(self, wait_s: float) -> Message | None:
        """The next message. None if no message arrives within `wait_s`.

        Raises:
            EOFError: one end is closed, or the process `parent` has ended.
        """
        try:
            ends = select.poll()  # `select.select` refuses a descriptor of 1024 or more
            ends.register(self._end, select.POLLIN)
            body = self._end.recv(_MOST_BYTES) if ends.poll(wait_s * 1000) else None
        except (OSError, ValueError) as error:  # another thread closed this end
            raise EOFError(str(error)) from None
        if body == b"" or (self._parent is not None and os.getppid() != self._parent):
            raise EOFError("the other end is closed")
        return None if body is None else _decoder.decode(body)

    def wait_for_end(self) -> None:
        """Return when the other end is closed or the process `parent` has ended.

        `parent` must not be None.
        """
        assert self._parent is not None
        ends = select.poll()
        ends.register(self._end, 0)  # `poll` always reports a hang-up, also if the event mask is 0
        with suppress(ProcessLookupError):
            ends.register(os.pidfd_open(self._parent), select.POLLIN)
            if os.getppid() == self._parent:  # if the ids differ, the parent has ended
                ends.poll()

    def close(self) -> None:
        """Close both directions of the channel, even if another process has a copy of this end."""
        with suppress(OSError):  # the other end is already closed
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
