"""A sender to a front-end that cannot map the ring: rows follow their header over TCP.

Owns:  TcpSender, which has a thread for its socket.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zmq
from msgspec.structs import replace

from vllm_scope.batch.labels import Labels
from vllm_scope.errors import CompatError
from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.sinks import RowBatch
from vllm_scope.transport.messages import (
    MOST_FRAME_BYTES,
    CountersHeader,
    DecidedHeader,
    EndsHeader,
    FinishHeader,
    RowsHeader,
    TcpAddress,
    TcpHello,
    check_curve,
    decode_answer,
    encode,
    keep_alive,
)
from vllm_scope.transport.ring import CLOSED, HostRing, Lease
from vllm_scope.transport.senders.base import ANSWER_S, Sender

logger = logging.getLogger("vllm.vllm_scope")

#: After a lost connection, the thread makes up to MOST_DIALS new connections. It makes the first
#: connection at once, and each later connection after a pause of DIAL_S seconds. For each
#: connection, the thread waits DIAL_S seconds for an answer. If no connection gets an answer, the
#: front-end counts as dead.
MOST_DIALS = 3
DIAL_S = 2.0
#: A closing worker waits at most this many seconds until a front-end has read all messages.
CLOSE_S = 5.0
#: A batch is sent in pieces of about this size. The front-end copies one piece while the network
#: carries the next piece. Therefore both ends of the connection need little extra memory for a
#: large batch.
PIECE_BYTES = 8 << 20
PIECE_TOKENS = 1 << 16


@dataclass
class _Sent:
    """A message that the front-end has not read.

    Attributes:
        frames: the header, and a view of the rows in the ring if the message has rows.
        lease: the lease of the rows; None if the message has no rows.
        tracker: zmq sets the tracker's `done` to True when zmq has stopped reading `frames`.
    """

    number: int
    frames: list[bytes | memoryview]
    lease: Lease | None = None
    tracker: zmq.MessageTracker | None = None

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


class TcpSender(Sender):
    """Sends headers and rows. The sender's thread releases leases when answers arrive.

    zmq sends the rows directly from the ring. After a lost connection, the thread connects again,
    and sends the unread messages again, in order.

    Raises:
        CompatError: the front-end does not answer at the address, or zmq cannot encrypt.
    """

    road = "tcp"

    def __init__(self, address: TcpAddress, ring: HostRing) -> None:
        check_curve()
        self._address, self._ring = address, ring
        self._session = secrets.randbits(62)
        self._num_sent = self._num_confirmed = 0
        #: Messages to send. The caller appends messages, and the thread removes them.
        self._outgoing: deque[_Sent] = deque()
        #: Messages that were sent, but that the front-end has not read yet. Only the thread changes
        #: this queue.
        self._unread: deque[_Sent] = deque()
        #: The number of connections since the front-end last read a message.
        self._num_dials = 0
        #: The number of connections in total.
        self._num_hellos = 0
        self._given_up = False
        self._dead = False
        self._lock = threading.Lock()
        self._close_at = float("inf")
        self._answered = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="vllm-scope-tcp", daemon=True)
        self._thread.start()
        if not self._answered.wait(ANSWER_S):
            self.close(patience_s=0)
            raise CompatError(
                f"this worker cannot reach the front-end at {address.endpoint}. Open the port "
                "between the hosts, or set additional_config['scope'].road_host to an address "
                "of the front-end's host that workers can reach"
            )

    @property
    def dead(self) -> bool:
        return self._dead

    def send_rows(self, batch: RowBatch) -> None:
        start = batch.lease.start
        for labels, first, last in _pieces(batch):
            data = batch.slots[first:last].numpy().reshape(-1).data
            if data.nbytes > MOST_FRAME_BYTES:
                raise ValueError(f"a token has {data.nbytes >> 20} MiB of rows; read fewer rows")
            span = (start + first, start + last)
            header = RowsHeader.of(labels, batch.boundary, batch.widths, self._ring.ref, span)
            self._put([encode(header), data], batch.lease)

    def _send(self, header: FinishHeader | EndsHeader | DecidedHeader | CountersHeader) -> None:
        self._put([encode(header)], None)

    def _put(self, frames: list[bytes | memoryview], lease: Lease | None) -> None:
        self._num_sent += 1
        with self._lock:
            if self._dead:
                return
            if lease is not None:
                lease.retain()
            self._outgoing.append(_Sent(self._num_sent, frames, lease))
            os.eventfd_write(self._wake, 1)

    @property
    def num_read(self) -> int:
        return self._num_confirmed

    def holds(self, lease: Lease) -> bool:
        with self._lock:
            waiting = [*list(self._unread), *self._outgoing]
        return any(sent.lease is not None and sent.lease.overlaps(lease) for sent in waiting)

    def give_up(self) -> None:
        self._given_up = True
        self._wake_thread()

    def close(self, patience_s: float = CLOSE_S) -> None:
        """Wait at most `patience_s` until the front-end has read all messages, then stop."""
        self._close_at = time.monotonic() + patience_s
        self._wake_thread()
        self._thread.join()

    def _wake_thread(self) -> None:
        with self._lock:
            if not self._dead:
                os.eventfd_write(self._wake, 1)

    # The thread

    def _run(self) -> None:
        try:
            while not self._over() and self._num_dials < MOST_DIALS:
                self._serve_connection()
        except Exception:
            logger.exception("vllm-scope: the connection to a front-end failed")
        finally:
            self._give_up()

    def _over(self) -> bool:
        if self._given_up:
            return True
        idle = not self._outgoing and not self._unread
        closing = self._close_at < float("inf")
        return closing and (idle or time.monotonic() > self._close_at)

    def _serve_connection(self) -> None:
        """Connect, then send and receive until the connection is lost."""
        if self._num_dials:
            time.sleep(DIAL_S)
        self._num_dials += 1
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.curve_serverkey = self._address.server_key.encode()
        socket.curve_publickey = self._address.client_key.encode()
        socket.curve_secretkey = self._address.client_secret.encode()
        # The queue is unbounded, because the ring limits the number of rows that wait.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, 1 << 16)
        keep_alive(socket)
        socket.ipv6 = "[" in self._address.endpoint
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        for end in (socket, monitor, self._wake):
            poller.register(end, zmq.POLLIN)
        try:
            socket.connect(self._address.endpoint)
            self._num_hellos += 1
            socket.send(encode(TcpHello(self._session, self._num_hellos)))
            self._serve(socket, monitor, poller)
        finally:
            socket.disable_monitor()
            socket.close(linger=0)

    def _serve(
        self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], poller: zmq.Poller
    ) -> None:
        answered = False
        redial_at = time.monotonic() + DIAL_S
        while not self._over():
            ready = dict(poller.poll(200))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if socket in ready:
                self._confirm(decode_answer(socket.recv()).read)
                if not answered:
                    answered = True
                    self._answered.set()
                    for sent in self._unread:
                        self._write(socket, sent)
            while answered and self._outgoing:
                self._unread.append(self._outgoing.popleft())
                self._write(socket, self._unread[-1])
            if monitor in ready or (not answered and time.monotonic() > redial_at):
                return

    def _write(self, socket: zmq.Socket[bytes], sent: _Sent) -> None:
        sent.tracker = socket.send_multipart(sent.frames, copy=False, track=True)

    def _confirm(self, num_read: int) -> None:
        if num_read == CLOSED:
            self._given_up = True  # the thread ends
            return
        self._num_confirmed = num_read
        progress = not self._unread
        while self._unread and self._unread[0].number <= num_read:
            self._unread.popleft().release()
            progress = True
        if progress:
            self._num_dials = 0

    def _give_up(self) -> None:
        with self._lock:
            self._dead = True
            os.close(self._wake)
            dropped = [*self._unread, *self._outgoing]
            self._unread.clear()
            self._outgoing.clear()
        if dropped:
            logger.warning(
                "vllm-scope: the front-end at %s is gone; %d messages to it are dropped",
                self._address.endpoint, len(dropped),
            )  # fmt: skip
        for sent in dropped:
            # The socket is closed, but zmq's thread may still send the rows. The lease must last
            # until zmq is done, because a front-end that still runs must not get overwritten rows.
            if sent.tracker is not None:
                sent.tracker.wait()
            sent.release()


def _pieces(batch: RowBatch) -> Iterator[tuple[Labels, int, int]]:
    """Yield (labels, first slot, last slot + 1) for each piece of a batch. Each piece has at most
    PIECE_TOKENS tokens and PIECE_BYTES bytes, but at least one token."""
    labels, num_tokens = batch.labels, len(batch.labels.keys)
    if batch.boundary is not None:
        ends = np.arange(1, num_tokens + 1) * (len(batch.slots) // num_tokens)
    else:
        slots = np.array([layout.slots(batch.widths) for layout in labels.layouts], np.int64)
        ends = np.cumsum(slots[labels.layout_of])
    first, first_slot = 0, 0
    while first < num_tokens:
        fit = int(np.searchsorted(ends, first_slot + PIECE_BYTES // SLOT_BYTES, "right"))
        last = min(max(fit, first + 1), first + PIECE_TOKENS, num_tokens)
        last_slot = int(ends[last - 1])
        some = slice(first, last)
        part = replace(
            labels, keys=labels.keys[some], positions=labels.positions[some],
            layout_of=labels.layout_of[some], rows=labels.rows[some],
        )  # fmt: skip
        yield part, first_slot, last_slot
        first, first_slot = last, last_slot
