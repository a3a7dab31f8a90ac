"""Arena -> host ring -> sink, off the path of the forward.

Owns:  the side stream and the drain thread.
Runs:  `submit` and `finish_request` on the worker's thread, after the forward was
       enqueued; `_copy` there too; everything else on the drain thread.
From:  arena, plan.Labels.   To: transport.ring (copies), a BatchSink (sinks.router).

Promise: rows reach the sink in the order of their steps, and a request's `finish`
after all of its rows. If the sink is slow, the worker waits; nothing is lost.

On a GPU, steps are copied on the worker's thread. Small ones with probes on rows, features or a
lens are copied on the drain thread, several at once: that takes fewer launches, and large weights
are read once for all of them.

The thread delivers several steps at a time. It looks again after LINGER_S, or sooner if a
request has ended, whose caller waits. The thread shares the GIL with the thread that launches
the model: waking up for each step of 1 ms cost that thread a third of its speed (measured, H200,
0.5B shape). If no caller looks before the end, rows may wait longer: a message of one step costs
the front-end 0.6 ms, one of 16 steps 0.7 to 0.9 ms (measured, 16 requests, two busy cores).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from vllm_scope.batch.labels import Labels
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.request.heads import Bank, Encoding, Told
from vllm_scope.request.nets import Net
from vllm_scope.request.resolved import ResolvedMoments
from vllm_scope.sinks import BatchSink, RowBatch
from vllm_scope.transport.ring import HostRing, JoinedLease, Lease
from vllm_scope.worker.arena import Arena, Region, StreamFence
from vllm_scope.worker.held_saes import NONE, PairMakers
from vllm_scope.worker.packer import Packer, first_slots
from vllm_scope.worker.score_store import MOST_STEPS_KEPT, Filled, ScoreStore
from vllm_scope.worker.summing import Summing
from vllm_scope.worker.watch import Watch

logger = logging.getLogger("vllm.vllm_scope")

T = TypeVar("T")

#: How long rows may wait for those of the next step, if some caller follows its request.
LINGER_S = 0.004
#: The same if no caller does, and at most so many bytes wait.
LINGER_UNSEEN_S, MOST_UNSEEN_BYTES = 0.08, 8 << 20
#: How long the last rows of a request may wait.
LINGER_AT_END_S = 0.002
#: For the time that it works the thread owes REST times as much rest. If it owes more than
#: MOST_OWED_S, it rests after each look, for LINGER_AT_END_S to MOST_REST_S: a worker that needs
#: room in a ring waits for the thread. If it owes less, callers whose requests have ended do not
#: wait for its rest, as when a few short requests come at once.
REST, MOST_REST_S, MOST_OWED_S = 4, 0.04, 0.2
#: Steps are joined into one batch up to this many bytes.
MOST_BYTES = 64 << 20
HEAD_FAILED = (
    "scores, features, tokens of a lens or encoded rows of some tokens could not be computed on "
    "the device; the worker's log says why. Send the request again when others have finished, or "
    "start with a smaller gpu_memory_utilization."
)
#: How long a question about sums, or a change of the weights, waits for the rows before it.
ANSWER_S = 300.0


class _Rows(msgspec.Struct, frozen=True, eq=False):
    """Rows of one step, or of one tap of it, on their way.

    Attributes:
        boundary: as in RowBatch.
        region: of the arena; None if the rows are in the ring already, or are written there.
        copied: on a GPU, the event after which the rows are in the ring; None if the drain thread
            copies them.
        tapped: on a GPU, for rows that the drain thread copies: the event after which they are in
            the region.
        watched: the watch waits for `copied`, so no later step may use that event.
        positions: int64 [num_rows], the true positions of the batch's rows; None if the
            labels' positions are true.
    """

    labels: Labels
    boundary: int | None
    region: Region | None
    lease: Lease
    copied: torch.cuda.Event | None
    positions: Tensor | None
    tapped: torch.cuda.Event | None = None
    watched: bool = False

    @property
    def waits(self) -> Region | None:
        """The region, if the drain thread copies it."""
        return self.region if self.copied is None else None


@dataclass(frozen=True)
class _Finish:
    key: int
    error: str | None


@dataclass(eq=False)
class _Stored:
    """Scores of cached tokens.

    Attributes:
        write: writes them to the lease; False if they are not there.
        written: set after that.
        whole: True if they are in the lease.
    """

    labels: Labels
    lease: Lease
    write: Callable[[Lease], bool]
    written: threading.Event
    whole: bool = False


@dataclass(frozen=True)
class _Keep:
    """Scores that the store keeps, of steps before this."""

    filled: Sequence[Filled]


#: What the thread does, in order. A call has no rows.
_Item = _Rows | _Finish | _Stored | _Keep | Callable[[], None]


class Drain:
    """Copies regions of the arena to the host ring and hands them to a sink, in order.

    Args:
        watch: sees the rows of each step too, while it has requests.
        store: sees them on the drain thread.
        saes: that the worker holds, by name.
        moments_bytes: of the device, for the sums of Moments.
        joins: True if heads work on the rows of several steps at once. None means on a GPU alone:
            there it takes fewer launches, and a held SAE's weights are read once for all of them.

    Verbs: `add_request`, `submit` (a written region), `finish_request`, `close`.
    """

    def __init__(
        self,
        arena: Arena,
        ring: HostRing,
        sink: BatchSink,
        widths: Widths,
        watch: Watch | None = None,
        store: ScoreStore | None = None,
        saes: PairMakers = NONE,
        moments_bytes: int = 0,
        joins: bool | None = None,
    ) -> None:
        self._widths, self._watch, self._store = widths, watch, store
        self._arena, self._ring, self._sink = arena, ring, sink
        # Bounded by the ring: each step in it holds a lease.
        self._items: deque[_Item] = deque()
        self._sleeping = False
        #: Seconds of rest that the thread owes, and when it was counted.
        self._owed, self._rested = 0.0, time.monotonic()
        self._closing = False
        self._wake = threading.Event()
        #: Since the thread last looked: a request has ended; the thread should look soon, or now.
        self._ended, self._soon, self._now = (threading.Event() for _ in range(3))
        #: Running requests for which something could not be computed -> what to tell them.
        self._failed: dict[int, str] = {}
        #: Running requests whose callers look at rows as they arrive.
        self._followed: set[int] = set()
        #: Slots, of the arena or the ring, that may wait if no request is followed, and those
        #: submitted since the last look. A quarter of a ring leaves room for the next steps.
        most = min(MOST_UNSEEN_BYTES // SLOT_BYTES, arena.num_slots // 4, len(ring.slots) // 4)
        self._most_unseen, self._num_unseen = most, 0
        #: Slots of the arena that were left to the drain thread on a GPU, that it has copied, and
        #: that may wait for it.
        self._num_put_off, self._num_caught_up, self._most_put_off = 0, 0, arena.num_slots // 4
        self._cuda = arena.slots.is_cuda
        self._joins = self._cuda if joins is None else joins
        #: Stored scores wait for `nudge`.
        self._defers = self._cuda
        #: Stored scores were submitted since the last `nudge`.
        self._unseen_scores = False
        #: On a CPU: steps may wait that the drain thread fills.
        self._unfilled = False
        self._packer = Packer(arena.slots.dtype, arena.slots.device, widths, saes)
        #: Used events, for reuse: making one takes longer than recording it.
        self._events: list[torch.cuda.Event] = []
        if self._cuda:
            self._stream = torch.cuda.Stream(arena.slots.device)
            #: The taps' stream, when last asked.
            self._main = torch.cuda.current_stream(arena.slots.device)
            self._tapped = torch.cuda.Event()
        with self._side():
            self._summing = Summing(arena.slots.dtype, arena.slots.device, widths, moments_bytes)
        self._thread = threading.Thread(target=self._run, name="vllm-scope-drain", daemon=True)
        self._thread.start()

    def add_request(
        self, key: int, encodings: Sequence[Encoding], banks: Mapping[Bank, Sequence[Net]]
    ) -> None:
        """Make what a request's codecs and probes need.

        Raises:
            CapacityError: there is no room for it.
        """
        with self._side():
            self._packer.hold(key, encodings, banks)

    def warm(self, call: Callable[[], None]) -> None:
        """Call something before the first step, where rows are worked on: on a GPU on the drain's
        stream, so that the memory that it takes and frees stays there."""
        if not self._cuda:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._arena.slots.device))
        with self._side():
            call()
        self._stream.synchronize()

    def _side(self) -> AbstractContextManager[object]:
        """The stream that works on rows: memory is taken on the stream that uses and frees it."""
        return _entered(self._stream) if self._cuda else nullcontext()

    def add_moments(self, key: int, num_prompt: int, asked: Sequence[ResolvedMoments]) -> None:
        """Add a request's rows to sums from now on."""
        self._summing.add_request(key, num_prompt, asked)

    def accept(self, num_tokens: Mapping[int, int]) -> None:
        """Key of a request with Moments -> how many of its tokens are accepted, as was known when
        the coming step was scheduled."""
        self._in_order(partial(self._accept, num_tokens))

    def _accept(self, num_tokens: Mapping[int, int]) -> None:
        for key, count in num_tokens.items():
            self._summing.accept(key, count)

    def _in_order(self, call: Callable[[], None]) -> None:
        """Call something after the rows that were submitted so far have been added to sums."""
        if self._cuda:
            call()
        else:
            self.later(call)

    def of_sums(self, call: Callable[[Summing], T]) -> T:
        """The result of a call, with the sums of the rows that were submitted so far."""
        if self._cuda:
            with self._side():
                return call(self._summing)
        done: Future[T] = Future()

        def answer() -> None:
            try:
                done.set_result(call(self._summing))
            except BaseException as error:
                done.set_exception(error)

        self.later(answer)
        self.hurry()
        return done.result(timeout=ANSWER_S)

    def follow(self, key: int) -> None:
        """Deliver rows after LINGER_S until this request ends: its caller looks at them."""
        self._followed.add(key)
        self._soon.set()

    def submit(
        self,
        region: Region,
        labels: Labels,
        boundary: int | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Deliver a region whose taps are enqueued on the current stream.

        Args:
            boundary: the one tap that the region holds, or None for whole programs.
            positions: int64 [num_rows] on the device: true positions by batch row,
                or None if the labels' positions are true.
        """
        num_slots = region.num_slots
        if labels.encodes:
            num_slots = self._packer.num_slots(labels, boundary)
        lease = self._ring.acquire(num_slots)
        copied = tapped = None
        if self._cuda and boundary is None and self._may_put_off(region, labels):
            positions = None if positions is None else self._to_host(positions)
            tapped = self._put_off(region)
        elif self._cuda:
            copied, positions = self._copy(region, labels, boundary, lease, positions)
            if copied is None:
                lease.release()
                self._lost(labels)
                return
        elif positions is not None:
            positions = positions.clone()
        self._put(_Rows(labels, boundary, region, lease, copied, positions, tapped))

    def _may_put_off(self, region: Region, labels: Labels) -> bool:
        """True if the drain thread shall copy a step on a GPU, together with others. The step is
        small, its rows are multiplied, nobody waits for them in this step, and no sums are made."""
        return (
            self._joins
            and not self._watch
            and region.num_slots <= self._most_put_off // 8
            and self._num_waiting + region.num_slots <= self._most_put_off
            and any(map(_multiplies, labels.layouts))
            and not labels.sums
        )

    @property
    def _num_waiting(self) -> int:
        return self._num_put_off - self._num_caught_up

    def _put_off(self, region: Region) -> torch.cuda.Event:
        assert isinstance(region.fence, StreamFence)
        region.fence.put_off(self.hurry)
        self._num_put_off += region.num_slots
        tapped = self._event()
        tapped.record(self._stream_of_taps())
        return tapped

    def _event(self) -> torch.cuda.Event:
        """A used one, if there is one. On the worker's thread or on the drain thread."""
        try:
            return self._events.pop()
        except IndexError:
            return torch.cuda.Event(blocking=True)

    def hurry(self) -> None:
        """Let the thread look now, without rest: something waits for it, or no request runs that
        its work would delay."""
        for news in (self._now, self._ended, self._soon, self._wake):
            news.set()

    def submit_written(self, lease: Lease, labels: Labels, positions: Tensor | None) -> None:
        """Deliver what taps on a GPU write straight into the ring.

        It takes one event instead of a copy on another stream: for a small step the
        host's part of that copy takes longer than the copy itself.
        """
        if positions is not None:
            positions = self._to_host(positions)
        written = self._event()
        written.record(self._stream_of_taps())
        self._put(_Rows(labels, None, None, lease, written, positions))

    def _stream_of_taps(self) -> torch.cuda.Stream:
        """The current stream. Asking torch for it takes longer than recording an event (4.5 us
        and 1.8 us, H200), so this asks again only if the raw stream has changed."""
        if self._main.cuda_stream != torch._C._cuda_getCurrentRawStream(self._main.device_index):
            self._main = torch.cuda.current_stream(self._main.device)
        return self._main

    def submit_stored(self, labels: Labels, write: Callable[[Lease], bool]) -> None:
        """Deliver scores that were kept.

        On a GPU, without a watch, the drain thread does not wake up for them before `nudge`. It
        would delay the worker's thread, which is about to launch the model. On a CPU it wakes up at
        once.

        Args:
            labels: of one layout.
            write: called on the drain thread, see _Stored.
        """
        num_slots = len(labels.keys) * labels.layouts[0].slots(self._widths)
        item = _Stored(labels, self._ring.acquire(num_slots), write, threading.Event())
        if self._watch:
            found = partial(_labels_of, item)
            self._watch.add(found, partial(_wait_for, item.written), item.lease, None)
            self._put(item)
            self.hurry()  # the watch waits for them
            return
        self._items.append(item)
        self._unseen_scores = True
        if not self._defers:
            self.nudge()

    def nudge(self) -> None:
        """Let the drain thread deliver stored scores soon. Call it once the step of their requests
        is launched: the thread then works while the device computes the prompts' other tokens."""
        if not self._unseen_scores:
            return
        self._unseen_scores = False
        self._soon.set()
        if self._sleeping:
            self._wake.set()

    def keep(self, filled: Sequence[Filled]) -> None:
        """Keep scores of the rows that were submitted so far."""
        self._put(_Keep(filled))

    def later(self, call: Callable[[], None], wake: bool = True) -> None:
        """Call something on the drain thread, after the rows that were submitted so far.

        Args:
            wake: False if it may wait for the next rows.
        """
        if wake:
            self._put(call)
        else:
            self._items.append(call)

    def settle(self) -> None:
        """Wait until heads have worked on all rows that were submitted so far: what they read on
        the device, such as the model's unembedding, may then change."""
        if not self._thread.is_alive():
            return
        done = threading.Event()
        self.later(done.set)
        self.hurry()
        if not done.wait(ANSWER_S):
            logger.error("vllm-scope: rows wait for a sink; a lens may read later weights for them")
        if self._cuda:
            self._stream.synchronize()  # its work is enqueued when the thread has done its part

    def finish_request(self, key: int, error: str | None = None) -> None:
        self._followed.discard(key)
        if key in self._summing:
            self._in_order(partial(self._summing.finish_request, key))
        self._put(_Finish(key, error))
        for news in (self._ended, self._soon):
            if not news.is_set():  # many end in one step, and asking takes less time
                news.set()

    def _show(self, step: _Rows) -> _Rows | None:
        """Let the watch see a step. It may wait for the rows, so on a CPU they are copied now.
        Returns None if they are lost."""
        assert self._watch is not None
        if step.copied is None:
            if not self._fill_waiting([step]):
                return None
            step = replace(step, region=None)
        wait = step.copied.synchronize if step.copied is not None else _nothing_to_wait_for
        self._watch.add(partial(_true_labels, step), wait, step.lease, step.boundary)
        return replace(step, watched=True)

    def _wait_for_sums(self) -> None:
        """Wait until the drain thread has filled all steps before this one: a request's rows are
        added in the order of their positions."""
        if self._summing:
            filled = threading.Event()
            self.later(filled.set)
            self.hurry()
            filled.wait(ANSWER_S)
        self._unfilled = False

    def _lost(self, labels: Labels) -> None:
        """Stop keeping scores for requests that lost rows: a rejected draft's scores could stand in
        the place of those that were lost."""
        self._keep_no_more(set(labels.keys.tolist()))

    def _keep_no_more(self, keys: Collection[int]) -> None:
        if self._store is None:
            return
        for key in keys:
            if threading.current_thread() is self._thread:
                self._store.end(key)
            else:
                self.later(partial(self._store.end, key))

    def _put(self, item: _Item) -> None:
        if isinstance(item, _Rows):
            if self._watch:
                if self._unfilled:
                    self._wait_for_sums()
                shown = self._show(item)
                if shown is None:
                    item.lease.release()
                    return
                item = shown
            else:
                self._unfilled = not self._cuda
        self._items.append(item)
        if isinstance(item, _Rows):
            # On a GPU the region is free once its copy, which is enqueued, is done.
            region = None if item.tapped else item.waits
            held = 0 if region is None else region.num_slots
            self._num_unseen += max(held, item.lease.stop - item.lease.start)
            if self._num_unseen > self._most_unseen or 2 * self._num_waiting > self._most_put_off:
                self._soon.set()
        if self._sleeping:
            self._wake.set()

    def close(self) -> None:
        """Deliver what waits, then stop."""
        if self._thread.is_alive():
            self._closing = True
            self.hurry()
            self._thread.join(timeout=30)
        self._sink.close()
        if not self._thread.is_alive():  # a thread that hangs still reads there
            self._ring.close()

    def _copy(
        self,
        region: Region,
        labels: Labels,
        boundary: int | None,
        lease: Lease,
        positions: Tensor | None,
    ) -> tuple[torch.cuda.Event | None, Tensor | None]:
        """The event after the copy, None if these rows are lost; and the positions' copy."""
        if positions is not None:
            positions = self._to_host(positions)
        # One event does for all steps, as a stream waits for what was recorded when it was told
        # to wait. Sums look at theirs later.
        written = torch.cuda.Event() if labels.sums else self._tapped
        written.record(self._stream_of_taps())
        # Blocking: the drain thread sleeps in `synchronize` instead of spinning.
        copied, whole = self._event(), True
        with self._side():
            self._stream.wait_event(written)
            try:
                self._fill(region, labels, boundary, lease, positions, written.query)
            except Exception:
                # Encoding may run out of memory. The engine's step goes on; as in `_guard`,
                # requests report these rows as dropped.
                logger.exception("vllm-scope: rows could not be encoded")
                self._stream.synchronize()  # nothing writes to the lease any more
                whole = False
            copied.record()
            region.fence.set()
        return copied if whole else None, positions

    def _fill(
        self, region: Region, labels: Labels, boundary: int | None, lease: Lease,
        positions: Tensor | None, ready: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        if labels.encodes:
            rows = self._arena.view(region)
            if labels.sums:
                firsts = first_slots(labels, boundary, self._widths)
                words = rows.view(torch.int64)
                self._summing.add(words, labels, boundary, firsts, positions, ready)
            self._fail(self._packer.pack(rows, labels, boundary, lease.slots))
        else:
            lease.slots.copy_(self._arena.view(region).view(torch.uint8), non_blocking=True)

    def _fail(self, keys: Collection[int]) -> None:
        """End these requests with an error, and keep no scores of theirs."""
        self._failed.update(dict.fromkeys(keys, HEAD_FAILED))
        self._keep_no_more(keys)

    @staticmethod
    def _to_host(positions: Tensor) -> Tensor:
        # On the main stream, before the next step overwrites vLLM's buffer.
        pinned = torch.empty(positions.shape, dtype=positions.dtype, pin_memory=True)
        return pinned.copy_(positions, non_blocking=True)

    def _run(self) -> None:
        while True:
            if self._items:
                started = time.thread_time()
                for news in (self._ended, self._soon, self._now):
                    news.clear()
                self._num_unseen = 0
                self._deliver([self._items.popleft() for _ in range(len(self._items))])
                if not self._closing:
                    self._rest(REST * (time.thread_time() - started))
                continue
            if self._closing:
                return
            self._sleeping = True
            if not self._items and not self._closing:
                self._wake.wait()
            self._wake.clear()
            self._sleeping = False

    def _rest(self, earned: float) -> None:
        """Let items gather for a while.

        Args:
            earned: the rest, in seconds, for the last look.
        """
        now = time.monotonic()
        self._owed, self._rested = max(0.0, self._owed - now + self._rested) + earned, now
        least, usual = LINGER_AT_END_S, max(LINGER_S, min(earned, MOST_REST_S))
        if self._owed > MOST_OWED_S:
            least = min(max(least, earned), MOST_REST_S)
        if self._now.wait(least):
            return
        if least < usual and self._ended.wait(usual - least):
            return
        if not self._followed:
            self._soon.wait(max(0.0, LINGER_UNSEEN_S - max(least, usual)))

    def _deliver(self, items: list[_Item]) -> None:
        steps: list[_Rows] = []
        stored: list[_Stored] = []
        kept: list[Filled] = []
        for kind, same in groupby(items, type):
            some = list(same)
            if kind is _Keep:  # later, so that more steps may be joined with those before it
                kept += [one for item in some if isinstance(item, _Keep) for one in item.filled]
                continue
            # The steps so far are sent before anything else is done, and their scores are kept.
            if kind is not _Rows:
                self._write_and_keep(steps, kept)
                steps, kept = [], []
            # Calls that come between stored scores do not concern those that are in the ring.
            if stored and kind in (_Rows, _Finish):
                self._write_all_stored(stored)
                stored = []
            if kind is _Finish:
                self._end([item for item in some if isinstance(item, _Finish)])
                continue
            for item in some:
                if isinstance(item, _Stored):
                    # Now: a later call may forget what it takes.
                    self._guard(partial(self._fill_stored, item))
                    stored.append(item)
                elif isinstance(item, _Rows):
                    late = bool(kept) and len(steps) >= MOST_STEPS_KEPT
                    if steps and (late or not _may_join(steps, item)):
                        self._write_and_keep(steps, kept)
                        steps, kept = [], []
                    steps.append(item)
                elif not isinstance(item, _Finish | _Keep):  # as the kind says
                    self._guard(item)
        self._write_and_keep(steps, kept)
        if stored:
            self._write_all_stored(stored)

    def _write_and_keep(self, steps: list[_Rows], kept: Sequence[Filled]) -> None:
        if steps:
            self._guard(partial(self._write, steps))
        if kept and self._store is not None:
            self._guard(partial(self._store.keep, kept))

    def _end(self, items: Sequence[_Finish]) -> None:
        """End requests whose rows were written."""
        ends = [(item.key, self._failed.pop(item.key, None) or item.error) for item in items]
        self._packer.release_all([key for key, _ in ends])
        if self._store is not None:
            for key, _ in ends:
                self._guard(partial(self._store.end, key))
        if len(ends) == 1:
            self._guard(partial(self._sink.finish, *ends[0]))
        else:
            self._guard(partial(self._sink.finish_all, ends))

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # These rows are lost; their requests report them as dropped. The
            # engine and later steps go on.
            logger.exception("vllm-scope: rows could not be delivered")

    def _write(self, steps: list[_Rows]) -> None:
        try:
            waiting = [step for step in steps if step.waits]
            lost = {id(step) for step in waiting} - set(map(id, self._fill_waiting(waiting)))
            # Copies are on one stream, taps that write into the ring on another. On each, the
            # last event follows all earlier ones.
            for written in (True, False):
                events = [s.copied for s in steps if (s.region is None) is written and s.copied]
                if events:
                    events[-1].synchronize()
            run: list[_Rows] = []
            for step in steps:
                if id(step) in lost or (run and not _may_join(run, step)):
                    self._write_joined(run)
                    run = []
                if id(step) not in lost:
                    run.append(step)
            self._write_joined(run)
        finally:
            for step in steps:
                step.lease.release()
                for used in (step.tapped, None if step.watched else step.copied):
                    if used is not None:
                        self._events.append(used)

    def _write_joined(self, steps: list[_Rows]) -> None:
        """Give steps that may be joined to the sink. Their rows are there."""
        if not steps:
            return
        labels = [_true_labels(step) for step in steps]
        if self._store:
            for one, step in zip(labels, steps, strict=True):
                self._store.collect(one, step.lease, step.boundary)
        first = steps[0]
        lease = first.lease
        if len(steps) > 1:
            lease = JoinedLease([step.lease for step in steps], self._ring)
        if lease.start < lease.stop:  # else all went into sums
            whole = labels[0] if len(steps) == 1 else _joined(labels)
            self._sink.write(RowBatch(whole, lease, self._widths, first.boundary))

    def _write_all_stored(self, items: Sequence[_Stored]) -> None:
        """Give scores that were kept to the sink: those that lie side by side in the ring as one
        batch, as when several requests come at once."""
        run: list[_Stored] = []
        try:
            for item in items:
                if not item.whole:
                    continue
                if run and not _stored_may_join(run, item):
                    self._guard(partial(self._write_stored, run))
                    run = []
                run.append(item)
            if run:
                self._guard(partial(self._write_stored, run))
        finally:
            for item in items:
                item.written.set()
                item.lease.release()

    @staticmethod
    def _fill_stored(item: _Stored) -> None:
        item.whole = item.write(item.lease)

    def _write_stored(self, run: Sequence[_Stored]) -> None:
        labels, lease = run[0].labels, run[0].lease
        if len(run) > 1:
            labels = _joined([item.labels for item in run])
            lease = JoinedLease([item.lease for item in run], self._ring)
        self._sink.write(RowBatch(labels, lease, self._widths))

    def _fill_waiting(self, steps: Sequence[_Rows]) -> list[_Rows]:
        """Copy the regions of steps to their leases, and wait until they are there. Returns the
        steps of which they are; the rows of the others are lost."""
        filled: list[_Rows] = []
        for some in _adjacent(steps, self._joins):
            regions = [step.region for step in some if step.region is not None]
            try:
                filled += self._filled(some)
            finally:
                with self._side():
                    for region in regions:
                        region.fence.set()
                self._num_caught_up += sum(r.num_slots for r in regions if some[0].tapped)
        if self._cuda and steps:
            # Not `synchronize` of the stream, which spins.
            copied = self._event()
            copied.record(self._stream)
            copied.synchronize()
            self._events.append(copied)
        return filled

    def _filled(self, steps: Sequence[_Rows]) -> Sequence[_Rows]:
        """Those that could be filled: together, or else each by itself."""
        try:
            # On a GPU vLLM's thread, which works on other rows, is in this mode too.
            with self._side(), torch.inference_mode(self._cuda):
                self._fill_together(steps)
            return steps
        except Exception:
            if len(steps) == 1:
                # As in `_guard`.
                logger.exception("vllm-scope: rows could not be delivered")
                self._lost(steps[0].labels)
                return ()
        return [one for step in steps for one in self._filled([step])]

    def _fill_together(self, steps: Sequence[_Rows]) -> None:
        first, regions = steps[0], [step.region for step in steps if step.region is not None]
        for step in steps:
            if step.tapped is not None:
                self._stream.wait_event(step.tapped)
        if len(steps) == 1:
            self._fill(regions[0], first.labels, first.boundary, first.lease, first.positions)
            return
        start, stop = regions[0].start, regions[-1].stop
        whole = Region(start, stop - start, regions[-1].fence)
        lease = JoinedLease([step.lease for step in steps], self._ring)
        self._fill(whole, _joined([step.labels for step in steps]), None, lease, None)


@contextmanager
def _entered(stream: torch.cuda.Stream) -> Iterator[None]:
    """Inside, work goes to this stream. `torch.cuda.stream` does the same, and takes the host ten
    times as long: 50 us of a step beside an H100."""
    before = torch.cuda.current_stream(stream.device)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


def _multiplies(layout: Layout) -> bool:
    """True if products of rows are made when they leave the arena."""
    return any(isinstance(head, Bank) and not isinstance(head, Told) for head, _ in layout.encoded)


def _labels_of(item: _Stored) -> Labels | None:
    return item.labels if item.whole else None


def _wait_for(event: threading.Event) -> None:
    event.wait()


def _nothing_to_wait_for() -> None:
    pass


def _may_join(steps: list[_Rows], item: _Rows) -> bool:
    """True for whole programs of the same layouts, adjacent in the ring, below MOST_BYTES."""
    first, last = steps[0], steps[-1]
    size = (item.lease.stop - first.lease.start) * SLOT_BYTES
    return (
        item.boundary is None
        and last.boundary is None
        and item.lease.start == last.lease.stop
        and item.labels.layouts == last.labels.layouts
        and size <= MOST_BYTES
    )


def _stored_may_join(run: Sequence[_Stored], item: _Stored) -> bool:
    first, last = run[0], run[-1]
    return (
        item.lease.start == last.lease.stop
        and item.labels.layouts == first.labels.layouts
        and (item.lease.stop - first.lease.start) * SLOT_BYTES <= MOST_BYTES
    )


def _adjacent(steps: Sequence[_Rows], joins: bool) -> Iterator[list[_Rows]]:
    """Runs of steps whose rows heads can work on at once: side by side in the arena and in the
    ring, and none of whose rows are summed. `steps`: such as `_may_join` allows."""
    run: list[_Rows] = []
    for step in steps:
        if run and not (joins and _follows(run[-1], step)):
            yield run
            run = []
        run.append(step)
    if run:
        yield run


def _follows(last: _Rows, step: _Rows) -> bool:
    assert last.region is not None
    assert step.region is not None
    return (
        step.labels.encodes
        and not step.labels.sums
        and step.region.start == last.region.stop
        and step.lease.start == last.lease.stop
    )


def _joined(labels: Sequence[Labels]) -> Labels:
    """Of steps with the same layouts."""
    return Labels(
        np.concatenate([one.keys for one in labels]),
        np.concatenate([one.positions for one in labels]),
        np.concatenate([one.layout_of for one in labels]),
        labels[0].layouts,
        np.concatenate([one.rows for one in labels]),
    )


def _true_labels(step: _Rows) -> Labels:
    """The labels of what leaves the device, with true positions."""
    labels = step.labels
    layouts = tuple(layout.sent for layout in labels.layouts) if labels.encodes else labels.layouts
    if layouts != labels.layouts:
        labels = replace(labels, layouts=layouts)
    if step.positions is None:
        return labels
    true = step.positions.numpy().astype(np.int64)
    return replace(labels, positions=true[labels.rows])
