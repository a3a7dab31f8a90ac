"""All requests of this process whose rows arrive, and the receiver that brings them.

Owns:  Inbox, and `inbox`, which returns the only Inbox of this process.
Runs:  in the front-end. Messages are handled on the receiver's thread; `open` and `forget` are
       called on any thread.
From:  transport.receiver (RowsMessage, FinishHeader).   To: buffer.

Promise: rows of a request whose Pending was collected are ignored, and cost nothing.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm_scope.batch.by_request import by_key, by_layout
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.results.allocator import PLAIN, CachingAllocator, reuse_bytes
from vllm_scope.results.budget import Budget, Share, asking
from vllm_scope.results.buffer import LATE, Pending, Piece, pieces_of
from vllm_scope.results.copiers import Copiers
from vllm_scope.sinks.metrics import forget_worker
from vllm_scope.transport.messages import (
    Address,
    CountersHeader,
    DecidedHeader,
    FinishHeader,
    RowsMessage,
)
from vllm_scope.transport.receiver import Receiver

logger = logging.getLogger("vllm.vllm_scope")


class _Tap(NamedTuple):
    """Fields of the last message, as in RowsMessage, if the message was of one tap."""

    boundary: int
    keys: np.ndarray
    positions: np.ndarray


class Inbox:
    """All pending requests of this process, and the receiver that fills them.

    Args:
        num_copiers: number of threads that copy large messages; as `count` of Copiers.
        allocator: makes the memory for rows.

    Attributes:
        allocator: as given.
        budget: None offline, where there is no limit.
        on_counters: called with the totals of a worker's sinks.
        generation: changes if a worker may have dropped this process; engines then connect again.
    """

    def __init__(self, num_copiers: int | None = None, allocator: CachingAllocator = PLAIN) -> None:
        # Weak: when vLLM drops a request (aborted, client gone), its rows go too.
        self._pending: weakref.WeakValueDictionary[int, Pending] = weakref.WeakValueDictionary()
        #: Requests whose askers are not the operator (Asker.operator): they see less of manifests.
        self._outsiders: weakref.WeakSet[Pending] = weakref.WeakSet()
        # Unique over all front-ends of an engine, because their keys meet in the engine's workers.
        self._keys = itertools.count(secrets.randbits(30) << 32)
        #: Number of tokens that arrived so far, in all messages. Arrival numbers come from it: they
        #: decide which row of a position is the last.
        self._num_arrived = 0
        self._last_tap: _Tap | None = None
        self._copiers, self.allocator = Copiers(num_copiers), allocator
        self.budget: Budget | None = None
        self.on_counters: Callable[[CountersHeader], None] = lambda _: None
        self.generation = 0
        self._receiver = Receiver(
            self._on_rows, self._on_finish, lambda header: self.on_counters(header), self._on_lost,
            forget_worker, self._on_decided,
        )  # fmt: skip

    @property
    def address(self) -> Address:
        return self._receiver.address

    def __len__(self) -> int:
        return len(self._pending)

    def open(
        self,
        asked: Resolved,
        sites: Sites,
        prompt_ids: list[int],
        max_tokens: int,
        num_stages: int,
        promised: int = 0,
        copies: int = 1,
    ) -> Pending:
        """Make the buffer of a request that enters.

        Args:
            asked: the reads and probes that go to memory.
            promised: bytes that the prompt delivers to this process (budget.bytes_of_prompt).
            copies: number of such requests that enter together (`n`).

        Raises:
            SpecError: the prompts alone deliver more than one key may hold.
            CapacityError: the prompt delivers more than the key may hold now, here or in files.
        """
        share, asker = None, asking.get()
        if self.budget is not None:
            share = Share(self.budget, promised, copies, asker.owner)
            asker.expect(promised)  # if it raises, the share gives back what it took
        pending = Pending(
            next(self._keys), asked, sites, prompt_ids, max_tokens, num_stages, share,
            self.allocator,
        )  # fmt: skip
        self._pending[pending.key] = pending
        if not asker.operator:
            self._outsiders.add(pending)
        return pending

    def hold(self, num_bytes: int) -> Share | None:
        """Count rows that are kept after their request has ended, as bytes of the running code's
        asker. The rows count until the returned Share is collected. Returns None offline. Raises
        SpecError and CapacityError as `open` does."""
        return None if self.budget is None else Share(self.budget, num_bytes, 1, asking.get().owner)

    def forget(self, pending: Pending) -> None:
        """Drop a request's rows now; rows that still arrive for it are ignored."""
        self._pending.pop(pending.key, None)
        pending.clear()

    def renew(self) -> None:
        """Have engines connect again. Called if due rows do not arrive: a worker may then have
        dropped this process."""
        self.generation += 1

    def listen(self, host: str) -> None:
        """Let workers reach this process over TCP too; see Receiver.listen."""
        self._receiver.listen(host)

    def close(self) -> None:
        self._receiver.close()

    def _on_rows(self, message: RowsMessage) -> None:
        arrived: dict[int, Pending] = {}
        first = self._first_number(message)
        for layout, tokens, data in by_layout(
            message.layouts, message.layout_of, message.boundary, message.widths, message.slots
        ):
            local = layout if message.boundary is None else layout.at(message.boundary)
            pieces = pieces_of(layout, local, data, message.widths)
            labels = np.stack([message.positions[tokens], first + tokens])
            for key, some in by_key(message.keys[tokens]):
                pending = self._pending.get(key)
                if pending is not None and _added(pending, pieces, labels, some):
                    arrived[key] = pending
        whole = False
        try:
            # The worker may reuse the memory once `_on_rows` has returned.
            self._copiers.run([copy for one in arrived.values() for copy in one.copies()])
            whole = message.valid()
        finally:
            for pending in arrived.values():
                pending.commit() if whole else pending.revert()

    def _first_number(self, message: RowsMessage) -> int:
        """The arrival number of a message's first token.

        The taps of a step that is drained tap by tap come in ascending order. Their messages have
        the same numbers, so that a request's columns may share labels. If the tap of a message does
        not come after the tap of the message before, the message begins the next step and has
        larger numbers.
        """
        last = self._last_tap
        if (
            last is not None
            and message.boundary is not None
            and message.boundary > last.boundary
            and np.array_equal(message.keys, last.keys)
            and np.array_equal(message.positions, last.positions)
        ):
            first = self._num_arrived - len(message.keys)
        else:
            first = self._num_arrived
            self._num_arrived += len(message.keys)
        self._last_tap = None
        if message.boundary is not None:
            self._last_tap = _Tap(message.boundary, message.keys, message.positions)
        return first

    def _on_lost(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            pending = self._pending.get(key)
            if pending is not None:
                pending.lose(LATE, over=True)
        self.renew()

    def _on_finish(self, header: FinishHeader) -> None:
        pending = self._pending.get(header.key)
        if pending is not None:
            manifests = header.manifests
            if pending in self._outsiders:
                manifests = {sink: found.public(sink) for sink, found in manifests.items()}
            pending.finish(header.stage, header.error, manifests)

    def _on_decided(self, header: DecidedHeader) -> None:
        pending = self._pending.get(header.key)
        if pending is not None:
            pending.decide(header.decided)


def _added(
    pending: Pending, pieces: list[Piece], labels: np.ndarray, some: slice | np.ndarray
) -> bool:
    try:
        pending.add(pieces, labels, some)
    except Exception:
        # This request reports the rows as dropped; the other requests go on.
        logger.exception("vllm-scope: rows of a request could not be kept")
        pending.revert()
        return False
    return True


_inbox: Inbox | None = None
_budget: Budget | None = None
_inbox_lock = threading.Lock()


def num_pending() -> int:
    """The number of requests whose rows this process holds or waits for."""
    return 0 if _inbox is None else len(_inbox)


def num_bytes_held() -> int:
    """Bytes of rows and scores of this process's running requests; 0 offline, where they are not
    counted."""
    return 0 if _budget is None else _budget.num_bytes


def inbox() -> Inbox:
    """This process's inbox, opened at its first use."""
    global _inbox
    with _inbox_lock:
        if _inbox is None:
            _inbox = Inbox(allocator=CachingAllocator(reuse_bytes()))
            _inbox.budget = _budget
        return _inbox


def share_memory(num_processes: int) -> None:
    """Bound the memory that this process keeps for reuse, as one of `num_processes` processes."""
    inbox().allocator.bound(reuse_bytes(num_processes=num_processes))


def limit(most_bytes: int) -> None:
    """Bound the bytes that this process's inbox holds, in a server."""
    global _budget
    with _inbox_lock:
        if _budget is None:
            _budget = Budget(most_bytes)
        _budget.most_bytes = most_bytes
        if _inbox is not None:
            _inbox.budget = _budget
