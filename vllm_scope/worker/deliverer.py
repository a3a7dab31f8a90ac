"""Does the drain thread's work, and gives the rows of adjacent steps to a sink as one batch.

Owns:  Deliverer, and Waiting (the steps whose rows are written together).
Runs:  on the drain thread.
From:  drain (the items), filler.   To: a BatchSink (sinks.router), the score store.

Promise: the sink gets rows in the order of their steps. The sink's `finish` for a request is called
after the sink has all rows of the request. If rows cannot be delivered, the deliverer logs the
error. The requests of these rows then report the rows as dropped, or fail. The engine and all later
steps continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_scope.core.score_index import ScoreKey
from vllm_scope.program.layout import Widths
from vllm_scope.sinks import BatchSink, RowBatch
from vllm_scope.transport.ring import HostRing, JoinedLease
from vllm_scope.worker.drain_items import (
    Collect,
    Finish,
    Forget,
    Item,
    Keep,
    Rows,
    Stored,
    joined,
    lie_together,
    may_join,
    true_labels,
)
from vllm_scope.worker.filler import Filler
from vllm_scope.worker.score_store import MOST_STEPS_KEPT, Filled, ScoreStore

logger = logging.getLogger("vllm.vllm_scope")


@dataclass
class Waiting:
    """Steps whose rows will be written together, and the work that follows these steps. After the
    rows are written, the store keeps scores, then the store forgets scores, and then requests
    end."""

    steps: list[Rows] = field(default_factory=list)
    kept: list[Filled] = field(default_factory=list)
    forgotten: set[ScoreKey] = field(default_factory=set)
    ended: list[Finish] = field(default_factory=list)

    def may_take(self, step: Rows) -> bool:
        """True if the step can be written together with the waiting steps. The end of a request
        must not wait for a later unfinished step, because the request's caller waits for the end.
        """
        if self.ended and not (self.steps and step.is_done):
            return False
        # A Keep item concerns scores in a ring of the store. While the item waits, at most
        # MOST_STEPS_KEPT more steps may add scores to this ring. More steps could overwrite the
        # item's scores.
        late = bool(self.kept) and len(self.steps) >= MOST_STEPS_KEPT
        return not self.steps or (not late and may_join(self.steps, step))

    def add(self, item: Keep | Forget | Finish) -> None:
        if isinstance(item, Finish):
            self.ended.append(item)
        elif isinstance(item, Forget):
            self.forgotten.update(item.keys)
        else:
            self.kept += item.filled
            if self.forgotten:  # a block that is kept again must not be forgotten
                for one in item.filled:
                    self.forgotten.difference_update((each, one.probes) for each in one.hashes)


class Deliverer:
    """Gives rows, scores and ends of requests to a sink, and scores of KV blocks to the store."""

    def __init__(
        self, filler: Filler, ring: HostRing, sink: BatchSink, widths: Widths,
        store: ScoreStore | None,
    ) -> None:  # fmt: skip
        self._filler, self._ring, self._sink = filler, ring, sink
        self._widths, self._store = widths, store

    def deliver(self, items: Sequence[Item]) -> None:
        """Process the items: write rows and scores, keep and forget scores, end requests, call
        functions.

        `Waiting.may_take` decides which steps are written together. Therefore a Keep, Forget or
        Finish item can be processed after steps that follow the item, but never before steps that
        precede the item. A function or a Stored item is processed after all earlier Rows, Keep,
        Forget and Finish items. A Collect item is processed at once.
        """
        waiting = Waiting()
        stored: list[Stored] = []
        for item in items:
            # If a function is between two Stored items, their scores can still be one batch,
            # because the function changes no scores in the ring.
            if stored and isinstance(item, Rows | Finish):
                self._write_all_stored(stored)
                stored = []
            if isinstance(item, Rows):
                if not waiting.may_take(item):
                    self._do(waiting)
                    waiting = Waiting()
                waiting.steps.append(item)
            elif isinstance(item, Collect):
                if self._store is not None:
                    begin = partial(self._store.begin, item.key, item.layout, item.block_size)
                    self._guard(begin)
            elif isinstance(item, Keep | Forget | Finish):
                waiting.add(item)
            else:
                self._do(waiting)
                waiting = Waiting()
                if isinstance(item, Stored):
                    # Fill the lease now, because a later Forget item can remove these scores.
                    self._guard(partial(self._fill_stored, item))
                    stored.append(item)
                else:  # the item is a function
                    self._guard(item)
        self._do(waiting)
        if stored:
            self._write_all_stored(stored)

    def _do(self, waiting: Waiting) -> None:
        if waiting.steps:
            self._guard(partial(self.write, waiting.steps))
        if self._store is not None:
            if waiting.kept:
                self._guard(partial(self._store.keep, waiting.kept))
            if waiting.forgotten:
                self._guard(partial(self._store.forget, waiting.forgotten))
        if waiting.ended:
            self._end(waiting.ended)

    def _end(self, items: Sequence[Finish]) -> None:
        """End requests whose rows were written."""
        failed = self._filler.failed
        ends = [(item.key, failed.pop(item.key, None) or item.error) for item in items]
        self._filler.packer.release_all([key for key, _ in ends])
        if self._store is not None:
            for key, _ in ends:
                self._guard(partial(self._store.end, key))
        if len(ends) == 1:
            self._guard(partial(self._sink.finish, *ends[0]))
        else:
            self._guard(partial(self._sink.finish_all, ends))

    @staticmethod
    def _guard(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception("vllm-scope: rows could not be delivered")

    def write(self, steps: Sequence[Rows]) -> None:
        """Wait until the rows of some steps are in the ring. Then give the rows to the sink, and
        release the leases of these steps. The sink does not get the rows of a step whose copy
        failed. Before the call, `may_join` must have accepted each step after the first."""
        try:
            waiting = [step for step in steps if step.waits]
            lost = {id(step) for step in waiting} - set(map(id, self._filler.fill_waiting(waiting)))
            # The side stream copies rows to the ring. Taps that write into the ring run on the
            # model's stream. On each of these two streams, the last event follows all earlier
            # events. Therefore this thread waits for one event of each stream.
            for written in (True, False):
                events = [s.copied for s in steps if (s.region is None) is written and s.copied]
                if events:
                    events[-1].synchronize()
            run: list[Rows] = []
            for step in steps:
                if id(step) in lost or (run and not may_join(run, step)):
                    self._write_joined(run)
                    run = []
                if id(step) not in lost:
                    run.append(step)
            self._write_joined(run)
        except Exception:
            for step in steps:
                self._filler.lose(step.labels)
            raise
        finally:
            for step in steps:
                step.lease.release()
                for used in (step.tapped, None if step.watched else step.copied):
                    if used is not None:
                        self._filler.stream.give_back(used)

    def _write_joined(self, steps: Sequence[Rows]) -> None:
        """Give the rows of some steps to the sink as one batch. All rows must be in the ring."""
        if not steps:
            return
        labels = [true_labels(step) for step in steps]
        whole, first = labels[0], steps[0]
        lease = first.lease
        if len(steps) > 1:
            whole = joined(labels)
            lease = JoinedLease([step.lease for step in steps], self._ring)
        if self._store:
            sizes = [len(one.keys) for one in labels]
            self._store.collect(whole, lease, first.boundary, sizes)
        if lease.start < lease.stop:  # the lease is empty if all rows were added to sums
            self._sink.write(RowBatch(whole, lease, self._widths, first.boundary))

    def _write_all_stored(self, items: Sequence[Stored]) -> None:
        """Give stored scores to the sink. If `lie_together` is True for some items, the sink gets
        their scores as one batch. Usually, such items belong to requests that arrived together."""
        run: list[Stored] = []
        try:
            for item in items:
                if not item.whole:
                    continue
                if run and not lie_together(run, item):
                    self._guard(partial(self._write_stored, run))
                    run = []
                run.append(item)
            if run:
                self._guard(partial(self._write_stored, run))
        finally:
            for item in items:
                if item.written is not None:
                    item.written.set()
                item.lease.release()

    @staticmethod
    def _fill_stored(item: Stored) -> None:
        item.whole = item.write(item.lease)

    def _write_stored(self, run: Sequence[Stored]) -> None:
        labels, lease = run[0].labels, run[0].lease
        if len(run) > 1:
            labels = joined([item.labels for item in run])
            lease = JoinedLease([item.lease for item in run], self._ring)
        self._sink.write(RowBatch(labels, lease, self._widths))
