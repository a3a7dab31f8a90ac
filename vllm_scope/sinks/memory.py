"""Rows back to the caller: to the front-end that made the request.

Owns:  which request belongs to which front-end, and which spans of the ring they
       have not read yet, as seen by one worker.
Runs:  registration on the worker's thread, `write` and `finish` on the drain thread;
       `reclaim` on either.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

import numpy as np

from vllm_scope.errors import CapacityError
from vllm_scope.host_ring import MAX_READERS, HostRing, Lease
from vllm_scope.road import Address, Sender
from vllm_scope.sinks import RowBatch

logger = logging.getLogger(__name__)


class MemorySink:
    """Routes labelled batches to front-ends by the request's key."""

    def __init__(self, stage: int, ring: HostRing, row_bytes: int) -> None:
        self._stage = stage
        self._row_bytes = row_bytes
        self._ring = ring
        ring.reclaim = self.reclaim
        self._lock = threading.Lock()
        self._addresses: dict[str, Address] = {}
        self._senders: dict[str, Sender] = {}
        self._frontend_of: dict[int, str] = {}
        #: Per front-end, in message order: (message number, the lease it reads).
        self._unread: dict[str, deque[tuple[int, Lease]]] = {}

    def connect(self, address: Address) -> None:
        """Learn of a front-end. Idempotent.

        Raises:
            CompatError: it is on another host.
            CapacityError: too many front-ends.
        """
        address.check_local()
        with self._lock:
            if address.frontend not in self._addresses and len(self._addresses) >= MAX_READERS:
                raise CapacityError(f"{MAX_READERS} front-ends are connected; at most as many")
            self._addresses[address.frontend] = address

    def add_request(self, key: int, frontend: str) -> None:
        """Raises CapacityError for a front-end that never connected."""
        with self._lock:
            if frontend not in self._addresses:
                raise CapacityError(f"front-end {frontend} is not connected to this worker")
            self._frontend_of[key] = frontend

    def write(self, batch: RowBatch) -> None:
        self.reclaim()
        with self._lock:
            of = self._frontend_of
            # Keys are unique over all front-ends; each ignores the others'.
            frontends = {of[k] for k in np.unique(batch.labels.keys).tolist() if k in of}
        for frontend in frontends:
            lease = batch.lease
            number = self._sender(frontend).send_rows(
                batch.labels, self._row_bytes, self._ring.ref,
                lease.start, lease.stop, batch.boundary,
            )  # fmt: skip
            # The caller holds the lease until `write` returns.
            lease.retain()
            with self._lock:
                self._unread.setdefault(frontend, deque()).append((number, lease))

    def finish(self, key: int, error: str | None) -> None:
        with self._lock:
            frontend = self._frontend_of.pop(key, None)
        if frontend is not None:
            self._sender(frontend).send_finish(key, self._stage, error)

    def reclaim(self) -> None:
        """Release what front-ends have read, and what a dead one never will."""
        with self._lock:
            for frontend, unread in self._unread.items():
                sender = self._senders[frontend]
                read = int(self._ring.counters[sender.reader])
                if unread and unread[0][0] > read and not self._addresses[frontend].alive:
                    read = sender.num_sent
                while unread and unread[0][0] <= read:
                    unread.popleft()[1].release()

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()

    def _sender(self, frontend: str) -> Sender:
        # Sockets belong to the drain thread, so they are opened here.
        if frontend not in self._senders:
            sender = Sender(self._addresses[frontend], reader=len(self._senders))
            with self._lock:
                self._senders[frontend] = sender
        return self._senders[frontend]
