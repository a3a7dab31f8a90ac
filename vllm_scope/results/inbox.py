"""All requests of this process whose rows arrive, and the receiver of the rows.

Owns:  Inbox, `inbox` (returns the only Inbox of this process).
Runs:  in the front-end. The receiver's thread handles messages. Any thread may call `open` and
       `forget`.
From:  transport.receiver (RowsMessage, FinishHeader).   To: buffer.

Promise: the inbox ignores rows of a request whose Pending was garbage-collected.
"""

from __future__ import annotations

import itertools
import logging
import os
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

UNKEPT = (
    "this process could not keep some rows of the request, and dropped all its rows; the log of "
    "this process contains the reason. Send the request again when other requests have finished, "
    "or read fewer layers or tokens."
)


class _Tap(NamedTuple):
    """Fields of the last RowsMessage, if the message had the rows of one tap."""

    boundary: int
    keys: np.ndarray
    positions: np.ndarray


class Inbox:
    """All pending requests of this process, and the receiver of their rows.

    Args:
        num_copiers: number of threads that copy large messages. See `count` in Copiers.
        allocator: makes the memory for rows.

    Attributes:
        allocator: the argument.
        budget: the limits of the rows' bytes. None offline, where there is no limit.
        on_counters: a function that the receiver calls with the totals of a worker's sinks.
        generation: a number that grows when a worker may no longer send rows to this process.
            Engines connect again when the number has grown.
    """

    def __init__(self, num_copiers: int | None = None, allocator: CachingAllocator = PLAIN) -> None:
        # The references are weak. When vLLM drops a request, Python frees the request's rows too.
        self._pending: weakref.WeakValueDictionary[int, Pending] = weakref.WeakValueDictionary()
        #: Requests whose senders are not the operator (Asker.operator). These senders get shorter
        #: manifests.
        self._outsiders: weakref.WeakSet[Pending] = weakref.WeakSet()
        # Keys must be unique over all front-ends, because all front-ends share the workers.
        self._keys = itertools.count(secrets.randbits(30) << 32)
        #: Number of tokens that have arrived so far. The arrival numbers of the next step's tokens
        #: begin here. If the worker sends one message for each tap of a step, the step's tokens
        #: count one time. If a position has several rows, the row with the largest arrival number
        #: was computed last.
        self._num_arrived = 0
        self._last_tap: _Tap | None = None
        self._copiers, self.allocator = Copiers(num_copiers), allocator
        self.budget: Budget | None = None
        self.on_counters: Callable[[CountersHeader], None] = lambda _: None
        self.generation = 0
        self._receiver = Receiver(
            self._on_rows, self._on_finish, lambda header: self.on_counters(header), self._on_lost,
            forget_worker, self._on_decided, self._on_unread,
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
        """Make the Pending of a new request.

        Args:
            asked: the reads and probes whose values go to the sink `memory`.
            promised: number of bytes that the prompt delivers to this process
                (budget.bytes_of_prompt).
            copies: number of completions of the request (`n`), which enter together.

        Raises:
            SpecError: the prompt delivers more bytes, for all completions together, than one API
                key may ever hold.
            CapacityError: the sender's API key has no room now, in memory or in files.
        """
        share, asker = None, asking.get()
        if self.budget is not None:
            share = Share(self.budget, promised, copies, asker.owner)
            try:
                asker.expect(promised)
            except BaseException:
                # The error's traceback can keep the share alive.
                share.give_back()
                raise
        pending = Pending(
            next(self._keys), asked, sites, prompt_ids, max_tokens, num_stages, share,
            self.allocator,
        )  # fmt: skip
        self._pending[pending.key] = pending
        if not asker.operator:
            self._outsiders.add(pending)
        return pending

    def hold(self, num_bytes: int) -> Share | None:
        """Count `num_bytes` bytes in the budget, for rows that the current sender keeps after their
        request has ended. The bytes count until the returned Share is garbage-collected. Returns
        None offline. Raises SpecError and CapacityError as `open` does."""
        return None if self.budget is None else Share(self.budget, num_bytes, 1, asking.get().owner)

    def forget(self, pending: Pending) -> None:
        """Drop a request's rows now, and ignore rows of this request that arrive later."""
        self._pending.pop(pending.key, None)
        pending.clear()

    def renew(self) -> None:
        """Make engines connect again. Callers use this method if rows that are due do not arrive.
        A possible reason is that a worker no longer sends rows to this process."""
        self.generation += 1

    def listen(self, host: str) -> None:
        """Allow workers to connect to this process over TCP too. See Receiver.listen."""
        self._receiver.listen(host)

    def close(self) -> None:
        self._receiver.close()

    def _on_rows(self, message: RowsMessage) -> None:
        arrived: dict[int, Pending] = {}
        first = self._first_number(message)
        whole = False
        try:
            for layout, tokens, data in by_layout(
                message.layouts, message.layout_of, message.boundary, message.widths, message.slots
            ):
                local = layout.at(message.boundary)
                pieces = pieces_of(layout, local, data, message.widths)
                labels = np.stack([message.positions[tokens], first + tokens])
                for key, some in by_key(message.keys[tokens]):
                    pending = self._pending.get(key)
                    if pending is not None and _added(pending, pieces, labels, some):
                        arrived[key] = pending
            # Copy now, because the worker may reuse the memory after `_on_rows` has returned.
            self._copiers.run([copy for one in arrived.values() for copy in one.copies()])
            whole = message.valid()
        except Exception:
            self._on_unread(message.keys)
            raise
        finally:
            for pending in arrived.values():
                pending.commit() if whole else pending.revert()

    def _first_number(self, message: RowsMessage) -> int:
        """The arrival number of a message's first token.

        If a step is too large for the arena, the worker sends one message for each tap, in
        ascending order of taps. All messages of the step have the same arrival numbers, so that the
        columns of a request can share their labels. A message begins a new step, with larger
        numbers, if it has other tokens than the previous message, or if its tap is not later.
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

    def _on_unread(self, keys: np.ndarray) -> None:
        """Drop all rows of requests that lost some rows. An earlier row of the same position may
        belong to a rejected draft, and would otherwise be returned in place of the lost row."""
        for key in keys.tolist():
            pending = self._pending.get(key)
            if pending is not None:
                pending.lose(UNKEPT)

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
        # The other requests continue. This request also loses its earlier rows, because one of them
        # may belong to a rejected draft, and would otherwise be returned in place of a lost row.
        logger.exception("vllm-scope: rows of a request could not be kept")
        pending.revert()
        pending.lose(UNKEPT)
        return False
    return True


_inbox: Inbox | None = None
_budget: Budget | None = None
_inbox_lock = threading.Lock()
#: In a forked process, the copy of the parent's inbox. Without this reference, Python would free
#: the copy and close zmq's objects, which belong to the parent.
_of_parent: Inbox | None = None


def _leave_parents() -> None:
    """Let a forked process make its own inbox. The fork copies the parent's inbox, but not the
    thread that receives rows. With the copied inbox, workers would send the rows of this process to
    its parent, whose requests have the same keys."""
    global _inbox, _inbox_lock, _of_parent
    _inbox, _inbox_lock, _of_parent = None, threading.Lock(), _inbox


os.register_at_fork(after_in_child=_leave_parents)


def num_pending() -> int:
    """The number of requests that have a Pending in this process."""
    return 0 if _inbox is None else len(_inbox)


def num_bytes_held() -> int:
    """Number of bytes in this process's budget that are taken, for running requests and by
    `Inbox.hold`. Returns 0 offline."""
    return 0 if _budget is None else _budget.num_bytes


def inbox() -> Inbox:
    """This process's inbox. The first call of this function makes the inbox."""
    global _inbox
    with _inbox_lock:
        if _inbox is None:
            _inbox = Inbox(allocator=CachingAllocator(reuse_bytes()))
            _inbox.budget = _budget
        return _inbox


def share_memory(num_processes: int) -> None:
    """Limit the memory that this process keeps for reuse. Each of the `num_processes` processes has
    the same limit."""
    inbox().allocator.bound(reuse_bytes(num_processes=num_processes))


def limit(most_bytes: int) -> None:
    """Set the largest number of bytes of rows in this process's inbox. Only a server calls this
    function."""
    global _budget
    with _inbox_lock:
        if _budget is None:
            _budget = Budget(most_bytes)
        _budget.most_bytes = most_bytes
        if _inbox is not None:
            _inbox.budget = _budget
