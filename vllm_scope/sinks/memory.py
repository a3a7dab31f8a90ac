"""The sink `memory`, which sends rows to the front-end that made the request.

Owns:  MemorySink, which knows the front-end of each request and has a sender to each front-end.
Runs:  `connect` and `add_request` run on the worker's thread. `write` runs on the drain thread.
       `finish` runs on the drain thread, or on any thread on which a sink ends a request.
       `reclaim` runs on the worker's thread and on the drain thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np

from vllm_scope.control.policy import Decided
from vllm_scope.errors import CapacityError, CompatError
from vllm_scope.sinks import Manifest, RowBatch
from vllm_scope.sinks.reports import plain
from vllm_scope.transport.messages import Address, CountersHeader
from vllm_scope.transport.ring import HostRing, Lease
from vllm_scope.transport.senders import Road, Sender, SharedSender, TcpSender

logger = logging.getLogger("vllm.vllm_scope")

UNSENT = (
    "a worker could not send some rows of the request to this process; the worker's log contains "
    "the reason. Send the request again, or read fewer layers or tokens."
)


class MemorySink:
    """Sends each labelled batch to the front-ends of the requests in the batch.

    Args:
        stage: the pipeline stage of this worker.
        ring: the host ring that has the batches.
        road: the allowed transports, as a value of the engine's option `road`.
    """

    def __init__(
        self, stage: int, ring: HostRing, road: Literal["auto", "shared", "tcp"] = "auto"
    ) -> None:
        self._stage = stage
        self._ring = ring
        self._road = road
        ring.reclaim, ring.give_up = self.reclaim, self._give_up
        self._lock = threading.Lock()
        self._senders: dict[str, Sender] = {}
        self._frontend_of: dict[int, str] = {}
        #: Like `_frontend_of`, but only for requests whose rows are sent to the front-end.
        self._reads: dict[int, str] = {}
        #: The keys of running requests that lost rows because a message could not be sent. These
        #: requests fail. Without the failure, a caller could get an earlier row of the same
        #: position, such as the row of a rejected draft, in place of the lost row.
        self._unsent: set[int] = set()
        self._num_bytes = 0
        #: The lease of the last call of `_give_up`, and for each front-end the number of messages
        #: that the front-end had read at this call.
        self._waits_for: Lease | None = None
        self._read_before: dict[str, int] = {}

    @property
    def roads(self) -> list[Road]:
        return [sender.road for sender in self._senders.values()]

    @property
    def num_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self._frontend_of)

    def connect(self, address: Address) -> Road | None:
        """Connect to a front-end with the first transport that works. Idempotent.

        Returns:
            The transport. None if only TCP can work and the front-end does not accept TCP.

        Raises:
            CompatError: no allowed transport works.
            CapacityError: too many front-ends are connected.
        """
        with self._lock:
            self._forget_dead()
            known = self._senders.get(address.frontend)
        if known is not None:
            return known.road
        sender = self._open(address)
        if sender is None:
            return None
        with self._lock:
            self._senders[address.frontend] = sender
        return sender.road

    def _open(self, address: Address) -> Sender | None:
        if self._road != "tcp":
            try:
                return SharedSender(address, self._ring)
            except CompatError as error:
                if self._road == "shared":
                    raise CompatError(
                        f"{error}, and additional_config['scope'].road is 'shared'; run both "
                        "processes on one host, or set road to 'auto'"
                    ) from None
                if address.tcp is None:
                    logger.info("vllm-scope: rows cannot be shared (%s); they need TCP.", error)
        return None if address.tcp is None else TcpSender(address.tcp, self._ring)

    def add_request(self, key: int, frontend: str) -> None:
        """Raises CapacityError if the front-end is not connected."""
        with self._lock:
            if frontend not in self._senders:
                raise CapacityError(f"front-end {frontend} is not connected to this worker")
            self._frontend_of[key] = self._reads[key] = frontend

    def leave_out_rows(self, key: int) -> None:
        """Send only the end of this request to its front-end, because its rows go to other
        sinks."""
        with self._lock:
            self._reads.pop(key, None)

    def write(self, batch: RowBatch) -> None:
        """Send rows to the front-ends of their requests. If sending to one front-end fails, the
        other front-ends still get their rows."""
        self.reclaim()
        with self._lock:
            of = self._reads
            # If there is only one front-end, send the batch without looking up the keys. A
            # front-end ignores keys of other front-ends.
            one = set(self._senders) if len(self._senders) == 1 and of else None
            frontends = one or {of[k] for k in np.unique(batch.labels.keys).tolist() if k in of}
            for frontend in frontends:
                sent = False
                with self._guarded("rows of a step", frontend):
                    self._senders[frontend].send_rows(batch)
                    self._num_bytes += batch.nbytes
                    sent = True
                if not sent:
                    keys = np.unique(batch.labels.keys).tolist()
                    self._unsent.update(key for key in keys if of.get(key) == frontend)

    def finish(
        self, key: int, error: str | None, manifests: dict[str, Manifest] | None = None
    ) -> None:
        """Send the end of a request to its front-end."""
        with self._lock:
            frontend, told = self._end(key, error)
            if frontend is not None:
                self._senders[frontend].send_finish(key, self._stage, told, manifests or {})

    def finish_all(self, ends: Sequence[tuple[int, str | None]]) -> None:
        """Send the ends of several requests, with one message to each front-end. `ends` has (key,
        error) of each request. If one message fails, the other messages are still sent."""
        found: dict[str, list[tuple[int, str | None]]] = {}
        with self._lock:
            for key, error in ends:
                frontend, told = self._end(key, error)
                if frontend is not None:
                    found.setdefault(frontend, []).append((key, told))
            for frontend, some in found.items():
                with self._guarded(f"the ends of {len(some)} requests", frontend):
                    self._senders[frontend].send_ends(some, self._stage)

    def _end(self, key: int, error: str | None) -> tuple[str | None, str | None]:
        """Forget a request. Returns the front-end that must get the end of the request, if any, and
        the text of the error. Characters that cannot be encoded are replaced in this text.
        Otherwise the message could not be sent, and the sender of the request would wait forever.
        """
        self._reads.pop(key, None)
        if key in self._unsent:
            self._unsent.remove(key)
            error = error or UNSENT
        return self._frontend_of.pop(key, None), None if error is None else plain(error)

    @staticmethod
    @contextmanager
    def _guarded(what: str, frontend: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            logger.exception("vllm-scope: %s could not be sent to front-end %s", what, frontend)

    def tell(self, key: int, decided: Decided) -> None:
        """Send a policy's decision to the front-end of the request. The thread that makes the
        output of a step calls this function."""
        with self._lock:
            frontend = self._frontend_of.get(key)
            if frontend is not None:
                self._senders[frontend].send_decided(key, decided)

    def counters(self) -> dict[str, float]:
        """Some fields of `counters.Counters`. The ring serves as the queue of this sink."""
        return {"bytes": self._num_bytes, "wait_ms": self._ring.wait_ms}

    def send_counters(self, sinks: dict[str, dict[str, float]]) -> bool:
        """Send the counters of all sinks to only one front-end. If two front-ends got the counters,
        everything would be counted twice. Returns False if no front-end is alive."""
        with self._lock:
            alive = next((s for s in self._senders.values() if not s.dead), None)
            if alive is not None:
                alive.send_counters(CountersHeader(self._ring.ref.identity, sinks))
            return alive is not None

    def reclaim(self) -> None:
        """Release the leases of rows that front-ends have read or can no longer read."""
        with self._lock:
            for sender in self._senders.values():
                sender.reclaim()

    def _give_up(self, lease: Lease) -> None:
        """Drop each front-end that blocks the worker. The worker waits for `lease`. A front-end
        blocks the worker if it holds `lease`, and has read no message since the previous call. If
        the previous call had another lease, no front-end is dropped."""
        with self._lock:
            before = self._read_before if self._waits_for is lease else {}
            self._waits_for = lease
            self._read_before = {f: sender.num_read for f, sender in self._senders.items()}
            for frontend, sender in self._senders.items():
                stands_still = self._read_before[frontend] == before.get(frontend)
                if stands_still and sender.holds(lease):
                    logger.warning(
                        "vllm-scope: front-end %s has not read its rows for %.0f s "
                        "(deliver_timeout_s); its requests' rows are dropped.",
                        frontend, self._ring.patience_s,
                    )  # fmt: skip
                    sender.give_up()

    def close(self) -> None:
        with self._lock:
            for sender in self._senders.values():
                sender.close()
            self._senders.clear()
            self._frontend_of.clear()
            self._reads.clear()
            self._unsent.clear()

    def _forget_dead(self) -> None:
        dead = {frontend for frontend, sender in self._senders.items() if sender.dead}
        for frontend in dead:
            self._senders.pop(frontend).close()
        self._frontend_of = {k: f for k, f in self._frontend_of.items() if f not in dead}
        self._reads = {k: f for k, f in self._reads.items() if f not in dead}
        self._unsent &= self._reads.keys()
