"""The road from workers to the front-end: what heavy tensors travel on.

Owns:  the addresses and the messages.
Runs:  in workers (senders) and front-ends (receiver.py).

Each front-end process binds one receiving socket and tells the workers about it
through vLLM's own control channel; workers connect. So results come straight
from the rank that has them (any stage, any data-parallel replica), and not
through vLLM's message queue, which pickles and caps a message at 4 GiB.

There are two roads for the same messages. A worker whose memory the front-end can
map names rows in its HostRing; the rows are copied once, by the front-end, into the
tensors that the caller gets. From another host, or where the mapping fails, the rows
follow their header over TCP.

Promise: the local socket is a file in a folder that only this user may enter. Nothing
listens on TCP before a worker said that it cannot share memory; then only a worker
that was given the front-end's CURVE keys gets in. Nothing is unpickled: a message is
a small typed header, and sizes are compared before rows are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq

from vllm_scope.errors import CompatError
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.encoding import Encoding
from vllm_scope.sinks import Manifest
from vllm_scope.transport.ring import RingRef
from vllm_scope.worker.plan import Labels

#: The largest frame that is taken off TCP. zmq makes room for a frame when it sees its
#: size, and does so before it knows who sent it.
MOST_FRAME_BYTES = 64 << 20
#: Either end of a connection that says nothing for so long is taken for gone; zmq's own
#: thread says something every HEARTBEAT_MS, however busy Python is.
HEARTBEAT_MS = 2000
SILENCE_MS = 8000


class TcpAddress(msgspec.Struct, frozen=True):
    """Where a front-end listens on TCP, and the keys that let a worker in.

    Attributes:
        endpoint: as zmq writes it, tcp://host:port.
        server_key: the front-end's public key; only its owner can answer.
        client_key, client_secret: the pair by which a worker proves that it was told.
    """

    endpoint: str
    server_key: str
    client_key: str
    client_secret: str

    def __repr__(self) -> str:  # it may be logged
        return f"TcpAddress({self.endpoint})"


class Address(msgspec.Struct, frozen=True):
    """How workers find a front-end.

    Attributes:
        frontend: identity of the front-end; part of every request's handle.
        path: the socket's file; its folder also holds a file named `frontend`,
            by which a worker sees that it is on the same host.
        pid: the front-end's process.
        started: when that process started, in the kernel's clock ticks; a later
            process may get its number.
        tcp: None until some worker needs it.
    """

    frontend: str
    path: str
    pid: int
    started: int
    tcp: TcpAddress | None = None

    @property
    def on_this_host(self) -> bool:
        """Whether the socket's folder is seen here."""
        return (Path(self.path).parent / self.frontend).exists()

    @property
    def alive(self) -> bool:
        """Whether the process runs. Only where `on_this_host`."""
        try:
            return start_of(self.pid) == self.started
        except OSError:  # nothing is known: this process may have no descriptor left
            return True


def start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it does not run.

    Raises:
        OSError: it cannot be told.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # proc(5): the name, in parentheses, may hold anything; the state comes third, the
    # start 22nd.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def check_curve() -> None:
    """Raises CompatError where this zmq cannot encrypt."""
    if not zmq.has("curve"):
        raise CompatError(
            f"libzmq {zmq.zmq_version()} was built without CURVE, so rows cannot travel "
            "over TCP; install pyzmq from its wheel, or run workers and front-end on one host"
        )


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Notice when the other end of a TCP connection is gone."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


# Messages


class SharedHello(msgspec.Struct, array_like=True, tag="shared"):
    """A worker asks the front-end to try its ring. Answered by an Answer.

    Attributes:
        ring: where it is.
        reader: the front-end's counter in it.
    """

    ring: RingRef
    reader: int


class TcpHello(msgspec.Struct, array_like=True, tag="tcp"):
    """First message of a TCP connection. Answered by an Answer.

    Attributes:
        session: random; the same when a worker dials again after a lost connection.
    """

    session: int


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """From the front-end to a worker.

    Attributes:
        read: how many messages of this worker were read, over all connections of the
            session; CLOSED when the front-end goes. On the shared road always 0: the
            ring's counter tells.
        error: why the ring cannot be shared.
    """

    read: int
    error: str | None = None


class RowsHeader(msgspec.Struct, array_like=True, tag="rows"):
    """A batch of rows. Arrays are raw little-endian bytes.

    Attributes:
        ring: what the rows lie in.
        start, stop: which slots of the ring.
        reader: this front-end's counter in the ring; -1 over TCP.
        message: what to set it to when the rows are read.
        boundary: the one tap that the rows are of, or None for whole tokens.
        row_bytes: of one row, by its kind, as in layout.Widths.
        layouts: points and scores of each.
        encoded: of each layout its codecs, as text, with the bytes of a row and the
            points; empty where no layout has any.
    """

    ring: RingRef
    start: int
    stop: int
    reader: int
    message: int
    boundary: int | None
    row_bytes: tuple[int, ...]
    layouts: list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]
    keys: bytes
    positions: bytes
    layout_of: bytes
    encoded: list[list[tuple[str, int, tuple[int, ...]]]] = []

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
            [(layout.points, layout.scores) for layout in labels.layouts],
            labels.keys.tobytes(), labels.positions.tobytes(), labels.layout_of.tobytes(),
            [
                [(encoding.text, encoding.row_bytes, points) for encoding, points in x.encoded]
                for x in labels.layouts
            ] if labels.encodes else [],
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
        if not self.encoded:
            return [Layout(points, scores) for points, scores in self.layouts]
        return [
            Layout(points, scores, tuple((Encoding(text, size), at) for text, size, at in groups))
            for (points, scores), groups in zip(self.layouts, self.encoded, strict=True)
        ]


class FinishHeader(msgspec.Struct, array_like=True, tag="finish"):
    """A stage has sent everything it will send for this request.

    Attributes:
        manifests: what became of it at the other sinks that it named.
    """

    key: int
    stage: int
    error: str | None
    manifests: dict[str, Manifest] = {}


class CountersHeader(msgspec.Struct, array_like=True, tag="counters"):
    """What a worker's sinks have done since its start, for metrics.

    Attributes:
        worker: the identity of its ring.
        sinks: name -> counter -> value, as `sinks.lane.Counters` has them.
    """

    worker: int
    sinks: dict[str, dict[str, float]]


def _always() -> bool:
    return True


class RowsMessage(msgspec.Struct):
    """A received batch. `slots` is valid during the callback.

    Attributes:
        keys, positions: int64 [num_tokens].
        layout_of: int32 [num_tokens], index into `layouts`.
        widths: of rows as they are.
        slots: uint8 [num_slots, SLOT_BYTES].
        valid: asked once the slots are copied: False where others may have written there.
    """

    keys: np.ndarray
    positions: np.ndarray
    layout_of: np.ndarray
    layouts: list[Layout]
    boundary: int | None
    widths: Widths
    slots: torch.Tensor
    valid: Callable[[], bool] = _always


encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode = msgspec.msgpack.Decoder(
    SharedHello | TcpHello | RowsHeader | FinishHeader | CountersHeader
).decode
