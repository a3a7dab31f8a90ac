"""A sender to a front-end that maps this worker's ring: only headers are sent.

Owns:  SharedSender.
Runs:  on the drain thread. While the worker's main thread waits for room in the ring, also on that
       thread.
"""

from __future__ import annotations

import time
from collections import deque

import zmq

from vllm_scope.errors import CompatError
from vllm_scope.sinks import RowBatch
from vllm_scope.transport.messages import (
    Address,
    CountersHeader,
    DecidedHeader,
    EndsHeader,
    FinishHeader,
    RowsHeader,
    SharedHello,
    decode_answer,
    encode,
)
from vllm_scope.transport.ring import CLOSED, HostRing, Lease
from vllm_scope.transport.senders.base import ANSWER_S, Sender

#: The shortest time between two checks of whether the process of a slow front-end still runs.
LOOK_S = 0.05


class SharedSender(Sender):
    """Sends headers to a front-end that maps this worker's ring.

    Raises:
        CompatError: the front-end cannot map the ring. The error text contains the reason.
        CapacityError: all counters of the ring are in use.
    """

    road = "shared"

    def __init__(self, address: Address, ring: HostRing) -> None:
        if not address.on_this_host:
            raise CompatError("the front-end is on another host than this worker")
        self._address, self._ring = address, ring
        self._num_sent = 0
        self._gone = False
        self._look_at = 0.0
        #: (message number, lease) of each unread message with rows, in order.
        self._unread: deque[tuple[int, Lease]] = deque()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        # The queue is unbounded, because headers are small, and the ring limits the number of rows.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        # A dead front-end must not delay the exit of the worker.
        self._socket.setsockopt(zmq.LINGER, 0)
        self._reader = ring.add_reader()
        try:
            self._socket.connect(f"ipc://{address.path}")
            self._try_ring()
        except CompatError:
            self._socket.close()
            raise

    def _try_ring(self) -> None:
        self._socket.send(encode(SharedHello(self._ring.ref, self._reader)))
        if not self._socket.poll(int(ANSWER_S * 1e3)):
            # The front-end may still use the counter.
            self._ring.free_reader_later(self._reader, self._has_left)
            raise CompatError(f"the front-end did not answer within {ANSWER_S:g} s")
        error = decode_answer(self._socket.recv()).error
        if error is not None:
            self._ring.free_reader(self._reader)
            raise CompatError(f"the front-end cannot map this worker's memory: {error}")

    @property
    def dead(self) -> bool:
        return self._gone or self._has_left()

    def send_rows(self, batch: RowBatch) -> None:
        if self._gone:
            return
        self._num_sent += 1
        span = (batch.lease.start, batch.lease.stop)
        header = RowsHeader.of(
            batch.labels, batch.boundary, batch.widths, self._ring.ref, span,
            self._reader, self._num_sent,
        )  # fmt: skip
        self._send(header)
        batch.lease.retain()
        self._unread.append((self._num_sent, batch.lease))

    def _send(
        self, header: RowsHeader | FinishHeader | EndsHeader | DecidedHeader | CountersHeader
    ) -> None:
        if not self._gone:
            self._socket.send(encode(header))

    def reclaim(self) -> None:
        unread, read = self._unread, self.num_read
        if read == CLOSED or (unread and unread[0][0] > read and self._is_dead_by_now()):
            read, self._gone = CLOSED, True
        self._release(read)

    def _release(self, read: int) -> None:
        """Release the leases of messages up to number `read`. CLOSED releases all leases."""
        while self._unread and self._unread[0][0] <= read:
            self._unread.popleft()[1].release()

    def _has_left(self) -> bool:
        return self.num_read == CLOSED or not self._address.alive

    @property
    def num_read(self) -> int:
        return int(self._ring.counters[self._reader])

    def holds(self, lease: Lease) -> bool:
        return any(mine.overlaps(lease) for _, mine in self._unread)

    def give_up(self) -> None:
        self._ring.revoke(self._reader)
        self._gone = True
        self._release(CLOSED)

    def _is_dead_by_now(self) -> bool:
        """True if the front-end's process has ended. Within LOOK_S of the last check, the result is
        False without a check."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_S
        return not self._address.alive

    def close(self) -> None:
        """Close the socket. For one second, zmq can still deliver waiting messages. If the
        front-end is dead, its counter in the ring becomes free as soon as the front-end cannot
        write to the counter any more."""
        if self.dead:
            self._release(CLOSED)
            self._ring.free_reader_later(self._reader, self._has_left)
        self._socket.close(linger=1000)
