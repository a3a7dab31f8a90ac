"""The messages between workers and a front-end, and the front-end's address.

Owns:  the addresses and the messages.
Runs:  in workers (senders) and front-ends (receiver.py).

Each front-end process binds one receiving socket, and sends its address to the workers through
vLLM's own control channel. The workers connect to this socket. Each rank that has rows sends the
rows directly to the front-end. The ranks do not use vLLM's message queue, which pickles each
message and limits a message to 4 GiB.

The same messages travel in two ways. If the front-end can map the worker's memory, a message names
slots of the HostRing. The front-end copies the rows from these slots into the caller's tensors. If
the worker is on another host, or if the mapping fails, the worker sends the rows over TCP, after
the header of their message.

Promise: the local socket is a file in a folder that only this user can enter. The front-end listens
on TCP only after a worker has reported that shared memory is not possible. Only workers with the
CURVE keys of the front-end's address can connect over TCP. No data is unpickled. A message begins
with a small typed header, and the front-end checks the sizes of the rows before it reads the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq

from vllm_scope.batch.labels import Labels
from vllm_scope.control.policy import Decided
from vllm_scope.errors import CompatError
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.heads import known_head
from vllm_scope.sinks import Manifest
from vllm_scope.transport.ring import RingRef

#: The largest frame that is accepted over TCP. This limit is needed because zmq allocates as many
#: bytes for a frame as the peer states, even before zmq has authenticated the peer.
MOST_FRAME_BYTES = 64 << 20
#: If an end of a connection gets no data for SILENCE_MS, the connection counts as lost. zmq's own
#: thread sends a heartbeat every HEARTBEAT_MS, even while Python is busy.
HEARTBEAT_MS = 2000
SILENCE_MS = 8000


class TcpAddress(msgspec.Struct, frozen=True):
    """The address at which a front-end listens on TCP, and the keys with which a worker can
    connect.

    Attributes:
        endpoint: tcp://host:port, in zmq's notation.
        server_key: the front-end's public key. A worker accepts answers only from the owner of the
            matching secret key.
        client_key, client_secret: the key pair of every worker that connects to this front-end.
    """

    endpoint: str
    server_key: str
    client_key: str
    client_secret: str

    def __repr__(self) -> str:  # without keys, because an address can be in the log
        return f"TcpAddress({self.endpoint})"


class Address(msgspec.Struct, frozen=True):
    """The data with which a worker finds a front-end.

    Attributes:
        frontend: the identity of the front-end. A request's Recipient contains the identity of its
            front-end.
        path: the path of the local socket. The folder of this socket also has a file whose name is
            the value of `frontend`. A worker that sees this file is on the same host.
        pid: the pid of the front-end's process.
        started: the start time of this process, in the kernel's clock ticks. A later process with
            the same pid has another start time.
        tcp: the TCP address; None until a worker needs this address.
    """

    frontend: str
    path: str
    pid: int
    started: int
    tcp: TcpAddress | None = None

    @property
    def on_this_host(self) -> bool:
        """True if this process can see the front-end's file in the folder of the socket."""
        return (Path(self.path).parent / self.frontend).exists()

    @property
    def alive(self) -> bool:
        """True if the front-end's process runs, or if /proc cannot be read. Only valid if
        `on_this_host` is True."""
        try:
            return start_of(self.pid) == self.started
        except OSError:  # this process may have no free descriptor to read /proc
            return True


def start_of(pid: int) -> int | None:
    """The start time of a process, in clock ticks since boot; None if the process does not run.

    Raises:
        OSError: /proc cannot be read.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # See proc(5). Field 2 is in parentheses, and can be any text. Field 3 is the state of the
    # process, and field 22 is the start time.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def check_curve() -> None:
    """Raise CompatError if the installed zmq cannot encrypt."""
    if not zmq.has("curve"):
        raise CompatError(
            f"rows cannot travel over TCP, because libzmq {zmq.zmq_version()} was built without "
            "CURVE; install pyzmq from its wheel, or run workers and front-end on one host"
        )


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Make zmq close a TCP connection whose other end does not answer."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


# Messages


class SharedHello(msgspec.Struct, array_like=True, tag="shared"):
    """A worker asks the front-end to map the worker's ring. The front-end answers with an Ack.

    Attributes:
        reader: the index of the counter in the ring with which this front-end acknowledges
            messages.
    """

    ring: RingRef
    reader: int


class TcpHello(msgspec.Struct, array_like=True, tag="tcp"):
    """The first message of a TCP connection. The front-end answers with an Ack.

    Attributes:
        session: a random number. A worker uses the same number if it connects again.
        dial: the number of connections that the worker has made in this session, including this
            connection.
    """

    session: int
    dial: int


class Ack(msgspec.Struct, array_like=True, tag="answer"):
    """The front-end's answer to a worker.

    Attributes:
        read: over TCP, the number of messages of the session that the front-end has read on all
            connections; CLOSED if the front-end closes. With shared memory, `read` is 0, because
            the ring has a counter.
        error: why the front-end cannot map the ring. None if it has mapped the ring; always None
            over TCP.
    """

    read: int
    error: str | None = None


class RowsHeader(msgspec.Struct, array_like=True, tag="rows"):
    """A batch of rows. Arrays are raw little-endian bytes.

    Attributes:
        start, stop: the rows are in slots `start` to `stop - 1` of the ring.
        reader: the index of this front-end's counter in the ring; -1 over TCP.
        message: the front-end sets its counter to this number after it has read the rows; 0 over
            TCP.
        boundary: the boundary of the only tap with rows in the batch; None if the batch has the
            rows of all taps.
        row_bytes: the number of bytes of one row, for each kind, as in layout.Widths.
        layouts: the attribute `points` of each Layout.
        also: the attribute `also` of each Layout; empty if `also` is empty in all Layouts.
        encoded: for each Layout, (text, bytes of a row, points) of each head; empty if no Layout
            has heads.
    """

    ring: RingRef
    start: int
    stop: int
    reader: int
    message: int
    boundary: int | None
    row_bytes: tuple[int, ...]
    layouts: list[tuple[int, ...]]
    keys: bytes
    positions: bytes
    layout_of: bytes
    encoded: list[list[tuple[str, int, tuple[int, ...]]]] = []
    also: list[tuple[tuple[int, int], ...]] = []

    @staticmethod
    def of(
        labels: Labels,
        boundary: int | None,
        widths: Widths,
        ring: RingRef,
        span: tuple[int, int],
        reader: int = -1,
        message: int = 0,
    ) -> RowsHeader:
        return RowsHeader(
            ring, *span, reader, message, boundary, widths.row_bytes,
            [layout.points for layout in labels.layouts],
            labels.keys.tobytes(), labels.positions.tobytes(), labels.layout_of.tobytes(),
            [
                [(head.text, head.row_bytes, points) for head, points in x.encoded]
                for x in labels.layouts
            ] if any(x.encoded for x in labels.layouts) else [],
            [x.also for x in labels.layouts] if any(x.also for x in labels.layouts) else [],
        )  # fmt: skip

    def received(self, slots: torch.Tensor) -> RowsMessage:
        return RowsMessage(
            np.frombuffer(self.keys, np.int64),
            np.frombuffer(self.positions, np.int64),
            np.frombuffer(self.layout_of, np.int32),
            self._layouts(),
            self.boundary,
            Widths(self.row_bytes),
            slots,
        )

    def _layouts(self) -> list[Layout]:
        none: list[tuple[()]] = [()] * len(self.layouts)
        return [
            Layout(points, tuple((known_head(text, size), at) for text, size, at in some), also)
            for points, some, also in zip(
                self.layouts, self.encoded or none, self.also or none, strict=True
            )
        ]


class FinishHeader(msgspec.Struct, array_like=True, tag="finish"):
    """The end of a request at one pipeline stage. After this header, the stage sends no more
    messages for the request.

    Attributes:
        manifests: maps the name of each sink, except the memory sink, to the request's manifest at
            this sink.
    """

    key: int
    stage: int
    error: str | None
    manifests: dict[str, Manifest] = {}


class EndsHeader(msgspec.Struct, array_like=True, tag="ends"):
    """Several FinishHeaders in one message, because many requests can end in the same step."""

    ends: list[FinishHeader]


class DecidedHeader(msgspec.Struct, array_like=True, tag="decided"):
    """A decision of a request's policy. The header is sent before the request's FinishHeader."""

    key: int
    decided: Decided


class CountersHeader(msgspec.Struct, array_like=True, tag="counters"):
    """The counters of a worker's sinks since the worker's start, for metrics.

    Attributes:
        worker: the identity of the worker's ring.
        sinks: maps the name of each sink to the values of its counters, by name, as in
            `sinks.counters.Counters`.
    """

    worker: int
    sinks: dict[str, dict[str, float]]


class RowsMessage(msgspec.Struct):
    """A received batch, the argument of `Receiver`'s `on_rows`.

    Attributes:
        keys, positions: int64 [num_tokens].
        layout_of: int32 [num_tokens], the index of each token's layout in `layouts`.
        widths: the number of bytes of a raw row, for each kind.
        slots: uint8 [num_slots, SLOT_BYTES], valid only until `on_rows` returns.
        valid: Call this function after you copied the slots. If the result is False, the worker may
            have overwritten the slots, and you must discard the copy.
    """

    keys: np.ndarray
    positions: np.ndarray
    layout_of: np.ndarray
    layouts: list[Layout]
    boundary: int | None
    widths: Widths
    slots: torch.Tensor
    valid: Callable[[], bool] = lambda: True


encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Ack).decode
decode = msgspec.msgpack.Decoder(
    SharedHello | TcpHello | RowsHeader | FinishHeader | EndsHeader | DecidedHeader | CountersHeader
).decode
