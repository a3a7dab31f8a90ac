"""The messages between workers and a front-end, and the front-end's address.

Owns:  the addresses and the messages.
Runs:  in workers (senders) and front-ends (receiver.py).

Each front-end process binds one receiving socket and sends its address to the workers through
vLLM's own control channel; the workers connect. Rows come straight from the rank that has
them (any stage, any data-parallel replica). vLLM's message queue is not used: it pickles each
message, and a message has at most 4 GiB.

The same messages travel in two ways. If the front-end can map the worker's memory, a message
names rows in the HostRing, and the front-end copies them once, into the tensors that the
caller gets. From another host, or if the mapping fails, the rows follow their header over TCP.

Promise: the local socket is a file in a folder that only this user may enter. The front-end
listens on TCP only after a worker has said that it cannot share memory, and only workers with
the CURVE keys of the front-end's address can connect. Nothing is unpickled: a message is a small
typed header, and its sizes are checked before its rows are read.
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

#: The largest frame that is accepted over TCP. zmq allocates a frame as soon as it has read the
#: frame's size, before it knows the sender.
MOST_FRAME_BYTES = 64 << 20
#: If one end of a connection is silent for SILENCE_MS, the other end counts it as gone. zmq's own
#: thread sends a heartbeat every HEARTBEAT_MS, even while Python is busy.
HEARTBEAT_MS = 2000
SILENCE_MS = 8000


class TcpAddress(msgspec.Struct, frozen=True):
    """Where a front-end listens on TCP, and the keys with which a worker can connect.

    Attributes:
        endpoint: tcp://host:port, in zmq's notation.
        server_key: the front-end's public key. A worker accepts answers only from the owner of the
            secret key.
        client_key, client_secret: the pair by which a worker proves that it has this address.
    """

    endpoint: str
    server_key: str
    client_key: str
    client_secret: str

    def __repr__(self) -> str:  # without keys: an address may be logged
        return f"TcpAddress({self.endpoint})"


class Address(msgspec.Struct, frozen=True):
    """How workers find a front-end.

    Attributes:
        frontend: identity of the front-end; part of every request's Recipient.
        path: the socket's file. In the same folder is a file whose name is the value of
            `frontend`. A worker that sees this second file is on the same host.
        pid: the front-end's process.
        started: when that process started, in the kernel's clock ticks; a later process may
            get the same pid.
        tcp: the TCP address; None until a worker needs it.
    """

    frontend: str
    path: str
    pid: int
    started: int
    tcp: TcpAddress | None = None

    @property
    def on_this_host(self) -> bool:
        """True if this process sees the socket's folder."""
        return (Path(self.path).parent / self.frontend).exists()

    @property
    def alive(self) -> bool:
        """True if the front-end's process runs. Ask only if `on_this_host`."""
        try:
            return start_of(self.pid) == self.started
        except OSError:  # unknown: this process may have no descriptor left for /proc
            return True


def start_of(pid: int) -> int | None:
    """The start time of a process, in clock ticks since boot; None if it does not run.

    Raises:
        OSError: /proc cannot be read.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # proc(5): field 2, in parentheses, may have any text; field 3 is the state, 22 the start.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def check_curve() -> None:
    """Raise CompatError if this zmq cannot encrypt."""
    if not zmq.has("curve"):
        raise CompatError(
            f"libzmq {zmq.zmq_version()} was built without CURVE, so rows cannot travel "
            "over TCP; install pyzmq from its wheel, or run workers and front-end on one host"
        )


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Make zmq notice when the other end of a TCP connection is gone."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


# Messages


class SharedHello(msgspec.Struct, array_like=True, tag="shared"):
    """A worker asks the front-end to try its ring. Answered by an Ack.

    Attributes:
        ring: the worker's ring.
        reader: the front-end's counter in the ring.
    """

    ring: RingRef
    reader: int


class TcpHello(msgspec.Struct, array_like=True, tag="tcp"):
    """First message of a TCP connection. Answered by an Ack.

    Attributes:
        session: a random number. A worker that dials again after a lost connection sends it again.
    """

    session: int


class Ack(msgspec.Struct, array_like=True, tag="answer"):
    """The front-end's answer to a worker.

    Attributes:
        read: over TCP, the number of this worker's messages that were read, over all connections
            of the session; CLOSED if the front-end closes. With shared memory always 0, because
            the ring has a counter.
        error: the reason why the ring cannot be shared; None if it can.
    """

    read: int
    error: str | None = None


class RowsHeader(msgspec.Struct, array_like=True, tag="rows"):
    """A batch of rows. Arrays are raw little-endian bytes.

    Attributes:
        start, stop: the rows are in slots `start` to `stop - 1` of the ring.
        reader: this front-end's counter in the ring; -1 over TCP.
        message: the value to which the front-end sets its counter when it has read the rows.
        boundary: the tap whose rows these are, or None for whole tokens.
        row_bytes: bytes of one row, by its kind, as in layout.Widths.
        layouts: `points` of each Layout.
        also: `also` of each Layout; empty if `also` is empty in all Layouts.
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
    """The end of a request: this pipeline stage sends nothing more for it.

    Attributes:
        manifests: sink -> the request's manifest at this sink, for sinks other than memory.
    """

    key: int
    stage: int
    error: str | None
    manifests: dict[str, Manifest] = {}


class EndsHeader(msgspec.Struct, array_like=True, tag="ends"):
    """Several FinishHeaders in one message: requests of a batch often end in the same step."""

    ends: list[FinishHeader]


class DecidedHeader(msgspec.Struct, array_like=True, tag="decided"):
    """A decision of a request's policy. Sent before the request's FinishHeader."""

    key: int
    decided: Decided


class CountersHeader(msgspec.Struct, array_like=True, tag="counters"):
    """The counters of a worker's sinks since the worker's start, for metrics.

    Attributes:
        worker: the identity of the worker's ring.
        sinks: name -> counter -> value, as in `sinks.counters.Counters`.
    """

    worker: int
    sinks: dict[str, dict[str, float]]


class RowsMessage(msgspec.Struct):
    """A received batch, the argument of `Receiver`'s `on_rows`.

    `slots` is valid only until `on_rows` returns.

    Attributes:
        keys, positions: int64 [num_tokens].
        layout_of: int32 [num_tokens], index into `layouts`.
        widths: bytes of a raw row, by its kind.
        slots: uint8 [num_slots, SLOT_BYTES].
        valid: call it after the slots are copied. It returns False if the slots may have been
            overwritten; the copy must then be discarded.
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
