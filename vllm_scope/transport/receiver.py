"""The front-end's end of all connections: receives the messages of all workers.

Owns:  the sockets that workers connect to, and the session of each worker on TCP.
Runs:  on a thread of the front-end.
From:  senders.   To: results.inbox.

Promise: the callbacks get the messages of a worker in the order of sending, each message one time.
Two kinds of messages do not reach their callback: a message that cannot be read, and rows of a
worker that has revoked this front-end. With shared memory, the receiver acknowledges only messages
with rows, after the callback has returned or failed. Over TCP, the receiver acknowledges every
message: after the callback has returned or failed, or if the message cannot be read.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq

from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.transport.folders import RUN, hold, prefix, release, remove_abandoned, short
from vllm_scope.transport.listener import TcpListener
from vllm_scope.transport.mapped import MappedRings
from vllm_scope.transport.messages import (
    Ack,
    Address,
    CountersHeader,
    DecidedHeader,
    EndsHeader,
    FinishHeader,
    RowsHeader,
    RowsMessage,
    SharedHello,
    TcpHello,
    decode,
    encode,
    start_of,
)
from vllm_scope.transport.ring import CLOSED

logger = logging.getLogger("vllm.vllm_scope")

#: The receiver reads at most this many messages from one socket before it reads the other socket.
MOST_IN_TURN = 16
#: The receiver forgets a worker FORGET_S seconds after its connection was lost. By this time, the
#: worker has stopped trying to connect again (senders.tcp).
FORGET_S = 60.0
#: The `kind` argument in folders.py for the folder of a front-end's socket.
KIND = "rows"


@dataclass
class _Session:
    """A worker on TCP: the worker's connection, and how many of the worker's messages were read.

    A worker that connects again repeats the messages that were not read. Therefore the receiver
    ignores messages that arrive later over the old connection, and no message is read twice. zmq
    can deliver the hello of an old connection after the hello of a newer connection. The receiver
    ignores such a late hello too.

    Attributes:
        dial: the `dial` in the TcpHello of this connection.
        worker: the identity of the worker's ring; None until the worker has sent its counters.
        lost_at: the time, in monotonic seconds, at which the front-end noticed that the connection
            was lost; None before this time.
    """

    peer: bytes
    dial: int = 0
    num_read: int = 0
    worker: int | None = None
    lost_at: float | None = None


class Receiver:
    """Binds the sockets, and calls the callbacks with the messages on a thread of its own.

    Args:
        on_lost: If a worker has revoked this front-end, the receiver calls this function with the
            keys of the requests whose rows were read too late. If a worker revokes the front-end
            while `on_rows` copies rows, the message's `valid` returns False.
        on_unread: If the header of a message can be read, but its rows cannot, the receiver calls
            this function with the keys of the requests of these rows.
        on_gone: When a new worker connects, the receiver calls this function with the identity of
            each ring whose worker has ended, or has had no TCP connection for FORGET_S seconds.
    """

    def __init__(
        self,
        on_rows: Callable[[RowsMessage], None],
        on_finish: Callable[[FinishHeader], None],
        on_counters: Callable[[CountersHeader], None] = lambda _: None,
        on_lost: Callable[[np.ndarray], None] = lambda _: None,
        on_gone: Callable[[int], None] = lambda _: None,
        on_decided: Callable[[DecidedHeader], None] = lambda _: None,
        on_unread: Callable[[np.ndarray], None] = lambda _: None,
    ) -> None:
        folder, holder = _make_folder()
        pid = os.getpid()
        started = start_of(pid)
        assert started is not None
        self.address = Address(uuid.uuid4().hex, str(folder / "rows"), pid, started)
        (folder / self.address.frontend).touch()
        self._on_rows, self._on_finish = on_rows, on_finish
        self._on_counters, self._on_lost = on_counters, on_lost
        self._on_gone, self._on_decided = on_gone, on_decided
        self._on_unread = on_unread
        self._rings = MappedRings(lambda identity: self._on_gone(identity))
        self._sessions: dict[int, _Session] = {}
        #: Maps a connection to its session. `_say_goodbye` sends CLOSED over each connection.
        self._peers: dict[bytes, _Session] = {}
        self._context = zmq.Context()
        self._local = self._context.socket(zmq.ROUTER)
        self._local.setsockopt(zmq.RCVHWM, 0)
        self._local.bind(f"ipc://{self.address.path}")
        self._tcp: zmq.Socket[bytes] | None = None
        self._listener = TcpListener(self._context)
        self._lock = threading.Lock()
        self._closing = False
        #: A descriptor that wakes the thread. At its end, the thread closes this descriptor under
        #: `_lock`, and sets `_wake` to -1.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="vllm-scope-inbox", daemon=True)
        self._thread.start()
        # API servers are processes of multiprocessing, and such processes run no atexit functions.
        self._cleanup = Finalize(self, release, (folder, holder), exitpriority=0)

    def listen(self, host: str) -> None:
        """Also bind the TCP socket, and put its address into `address`. If the receiver already
        listens on TCP, or is closed, do nothing.

        Args:
            host: an address, or a network interface, of this host that workers can reach. For
                safety, the socket is bound to this address only.

        Raises:
            CompatError: the installed zmq cannot encrypt.
            ConfigError: `host` is not an address or interface of this host.
        """
        with self._lock:
            if self.address.tcp is not None or self._wake < 0:
                return
            self._tcp, tcp = self._listener.open(host)  # from now on, only the thread uses `_tcp`
            os.eventfd_write(self._wake, 1)
            self.address = msgspec.structs.replace(self.address, tcp=tcp)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=5)
        self._cleanup()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._local, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._closing:
            if self._tcp is not None and self._tcp not in poller:
                poller.register(self._tcp, zmq.POLLIN)
            for socket, _ in poller.poll():
                if socket is self._local:
                    self._take_turn(self._receive_local)
                elif socket is self._tcp:
                    self._take_turn(self._receive_tcp)
                else:
                    os.eventfd_read(self._wake)
        self._say_goodbye()

    def _take_turn(self, receive: Callable[[], None]) -> None:
        """Read up to MOST_IN_TURN waiting messages. A poll before each message would double the
        time."""
        for _ in range(MOST_IN_TURN):
            try:
                receive()
            except zmq.Again:
                return
            except Exception:
                # The rows of this message are lost. The requests report these rows as dropped, or
                # fail.
                logger.exception("vllm-scope: a message could not be read")

    def _say_goodbye(self) -> None:
        self._rings.close()
        self._local.close(linger=0)
        with self._lock:
            if self._tcp is not None:
                for peer in self._peers:
                    self._tcp.send_multipart([peer, encode(Ack(CLOSED))])
                self._tcp.close(linger=500)
            self._listener.close()
            os.close(self._wake)
            self._wake = -1
        self._context.term()

    def _take_news(self, header: object) -> None:
        if isinstance(header, FinishHeader):
            self._on_finish(header)
        elif isinstance(header, EndsHeader):
            for end in header.ends:
                self._on_finish(end)
        elif isinstance(header, DecidedHeader):
            self._on_decided(header)
        elif isinstance(header, CountersHeader):
            self._on_counters(header)

    # Shared memory

    def _receive_local(self) -> None:
        peer, frame = self._local.recv_multipart(zmq.NOBLOCK)
        header = decode(frame)
        if isinstance(header, RowsHeader):
            ring, reader = self._rings.get(header.ring), header.reader
            try:
                if not ring.revoked(reader):
                    slots = partial(ring.slots, header.start, header.stop)
                    self._read_rows(header, slots, lambda: not ring.revoked(reader))
            finally:
                ring.acknowledge(reader, header.message)
                if ring.revoked(reader):
                    self._on_lost(_keys_of(header))
        elif isinstance(header, SharedHello):
            self._local.send_multipart([peer, encode(self._rings.answer(header))])
        else:
            self._take_news(header)

    def _read_rows(
        self,
        header: RowsHeader,
        slots: Callable[[], torch.Tensor],
        valid: Callable[[], bool] = lambda: True,
    ) -> None:
        """Give the rows of a message to `on_rows`.

        Args:
            slots: returns the message's slots.
            valid: the attribute of RowsMessage.
        """
        try:
            message = header.received(slots())
        except Exception:
            self._on_unread(_keys_of(header))
            raise
        message.valid = valid
        self._on_rows(message)

    # TCP

    def _receive_tcp(self) -> None:
        assert self._tcp is not None
        sender, *frames = self._tcp.recv_multipart(zmq.NOBLOCK, copy=False)
        peer = sender.bytes
        session = self._peers.get(peer)
        if session is None:
            header = decode(frames[0].buffer)
            if not isinstance(header, TcpHello):
                return  # the message came over the session's old connection
            self._forget_sessions(header.session)
            session = self._sessions.setdefault(header.session, _Session(peer))
            if header.dial < session.dial:
                return  # the worker has already replaced this connection
            self._peers.pop(session.peer, None)
            self._peers[peer] = session
            session.peer, session.dial, session.lost_at = peer, header.dial, None
        else:
            session.num_read += 1
            self._read_tcp(session, frames)
        self._tcp.send_multipart([peer, encode(Ack(session.num_read))])

    def _forget_sessions(self, coming: int) -> None:
        """Forget workers whose connection was lost at least FORGET_S seconds ago.

        Args:
            coming: the session of the worker that connects now, which is never forgotten.
        """
        assert self._tcp is not None
        self._tcp.router_mandatory = True  # a send over a lost connection then fails
        try:
            for number, session in list(self._sessions.items()):
                try:
                    self._tcp.send_multipart([session.peer, encode(Ack(session.num_read))])
                except zmq.ZMQError:
                    session.lost_at = session.lost_at or time.monotonic()
                    late = time.monotonic() - session.lost_at >= FORGET_S
                    if late and number != coming:
                        del self._sessions[number]
                        self._peers.pop(session.peer, None)
                        if session.worker is not None:
                            self._on_gone(session.worker)
        finally:
            self._tcp.router_mandatory = False

    def _read_tcp(self, session: _Session, frames: list[zmq.Frame]) -> None:
        try:
            header = decode(frames[0].buffer)
            if isinstance(header, RowsHeader):
                self._read_rows(header, lambda: _slots_of(header, frames[1]))
            else:
                if isinstance(header, CountersHeader):
                    session.worker = header.worker
                self._take_news(header)
        except Exception:
            logger.exception("vllm-scope: a message could not be read")


def _keys_of(header: RowsHeader) -> np.ndarray:
    """The distinct keys of the requests whose rows a message has."""
    return np.unique(np.frombuffer(header.keys, np.int64))


def _slots_of(header: RowsHeader, frame: zmq.Frame) -> torch.Tensor:
    """The slots of a frame: uint8 [stop - start, SLOT_BYTES], a view of the frame's memory.

    Raises:
        ValueError: the frame does not have as many slots as `header` says.
    """
    num_slots = header.stop - header.start
    if len(frame) != num_slots * SLOT_BYTES:
        raise ValueError(f"{len(frame)} bytes are not {num_slots} slots of {SLOT_BYTES} bytes")
    if not num_slots:
        return torch.empty((0, SLOT_BYTES), dtype=torch.uint8)
    return torch.frombuffer(frame.buffer, dtype=torch.uint8).view(num_slots, SLOT_BYTES)


def _make_folder() -> tuple[Path, int]:
    """Make a folder with the mode 0700. Return the folder, and the descriptor of its lock."""
    parent = Path(tempfile.gettempdir())
    remove_abandoned(parent, KIND)
    run = short(os.environ.get(RUN, "alone"))
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix(KIND)}{run}-", dir=parent))
    return folder, hold(folder)
