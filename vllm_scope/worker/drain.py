"""Arena -> host rows -> sink, off the path of the forward.

Owns:  the side stream and the drain thread.
Runs:  `submit` and `finish_request` on the worker's thread, after the forward was
       enqueued; everything else on the drain thread.
From:  arena, plan.Labels.   To: host_ring (copies), a BatchSink (sinks.router).

Promise: rows reach the sink in the order of their steps, and a request's `finish`
after all of its rows. Where the sink is slow, the worker waits; nothing is lost.

Steps are handed on a few at a time: the thread looks again only after `LINGER_S`, or
soon after a request has ended, whose caller waits for what is here. Python's lock is
shared with the thread that launches the model; waking up for each step of 1 ms cost
that thread a third of its speed (measured, H200, 0.5B shape). Where no caller looks
before the end, little that waits may wait longer: a message of one step costs the
front-end 0.6 ms, of 16 steps 0.7 to 0.9 (measured, 16 requests, two busy cores).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from vllm_scope.program.layout import SLOT_BYTES, Widths
from vllm_scope.request.encoding import Encoding
from vllm_scope.sinks import BatchSink, RowBatch
from vllm_scope.transport.ring import HostRing, JoinedLease, Lease
from vllm_scope.worker.arena import Arena, HostFence, Region, StreamFence
from vllm_scope.worker.packer import Packer
from vllm_scope.worker.plan import Labels

logger = logging.getLogger(__name__)

#: How long rows may wait for those of the next step, where somebody looks at them as they come.
LINGER_S = 0.004
#: How long while nobody follows a request that runs, and no more than this waits.
LINGER_UNSEEN_S, MOST_UNSEEN_BYTES = 0.08, 8 << 20
#: How long the last rows of a request may wait.
LINGER_AT_END_S = 0.002
#: The thread rests so many times as long as it worked, from LINGER_AT_END_S up to this: who
#: waits for room in a ring waits for the thread.
REST, MOST_REST_S = 4, 0.04
#: Rows of steps are joined up to this many bytes.
MOST_BYTES = 64 << 20


class _Rows(msgspec.Struct, frozen=True, eq=False):
    """Rows on their way.

    Attributes:
        region: of the arena; None where the taps wrote the ring itself.
        copied: on a GPU, passed once the rows are in the ring.
        positions: [num_rows] int64, the true positions of the batch's rows, where
            the host's were a guess.
    """

    labels: Labels
    boundary: int | None
    region: Region | None
    lease: Lease
    copied: torch.cuda.Event | None
    positions: Tensor | None


@dataclass(frozen=True)
class _Finish:
    key: int
    error: str | None


class Drain:
    """Copies regions of the arena to the host ring and hands them to a sink, in order.

    Verbs: `add_request`, `submit` (a written region), `finish_request`, `close`.
    """

    def __init__(self, arena: Arena, ring: HostRing, sink: BatchSink, widths: Widths) -> None:
        self._widths = widths
        self._arena, self._ring, self._sink = arena, ring, sink
        # Bounded by the ring: each step in it holds a span.
        self._items: deque[_Rows | _Finish] = deque()
        self._sleeping = False
        self._closing = False
        self._wake = threading.Event()
        #: Since the thread last looked: a request has ended; it should look soon.
        self._ended, self._soon = threading.Event(), threading.Event()
        #: Running requests whose callers look at rows as they come.
        self._followed: set[int] = set()
        #: Slots, of the arena or the ring, that may wait while nobody does, and those that have
        #: come since the last look. Nobody waits for room in a ring that is mostly free.
        most = min(MOST_UNSEEN_BYTES // SLOT_BYTES, arena.num_slots // 4, len(ring.slots) // 4)
        self._most_unseen, self._num_unseen = most, 0
        self._cuda = arena.slots.is_cuda
        self._packer = Packer(arena.slots.dtype, arena.slots.device, widths)
        #: Passed by; to make one takes longer than to record it.
        self._events: list[torch.cuda.Event] = []
        if self._cuda:
            self._stream = torch.cuda.Stream(arena.slots.device)
            #: The taps' stream, as it was when somebody asked last.
            self._main = torch.cuda.current_stream(arena.slots.device)
        self._thread = threading.Thread(target=self._run, name="vllm-scope-drain", daemon=True)
        self._thread.start()

    def add_request(self, key: int, encodings: Sequence[Encoding]) -> None:
        """Make ready for a request whose rows are encoded.

        Raises:
            CapacityError: it needs more than there is room for.
        """
        if self._cuda:
            with torch.cuda.stream(self._stream):  # where it is used, and given back
                self._packer.hold(key, encodings)
        else:
            self._packer.hold(key, encodings)

    def follow(self, key: int) -> None:
        """Until this request ends, rows are handed on as they come."""
        self._followed.add(key)
        self._soon.set()

    def submit(
        self,
        region: Region,
        labels: Labels,
        boundary: int | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Send a region on its way. Its taps are enqueued on the current stream.

        Args:
            region: what was written.
            labels: whose rows they are.
            boundary: the one tap that the region holds, or None for whole programs.
            positions: [num_rows] int64 on the device: true positions by batch row,
                or None where the labels' positions are true.
        """
        num_slots = region.num_slots
        if labels.encodes:
            num_slots = self._packer.num_slots(labels, boundary)
        lease = self._ring.acquire(num_slots)
        copied = None
        if self._cuda:
            copied, positions = self._copy(region, labels, boundary, lease, positions)
            if copied is None:
                lease.release()
                return
        elif positions is not None:
            positions = positions.clone()
        self._put(_Rows(labels, boundary, region, lease, copied, positions))

    def submit_written(self, lease: Lease, labels: Labels, positions: Tensor | None) -> None:
        """Send on its way what taps on a GPU write straight into the ring.

        One event instead of a copy on another stream: for a small step the host's
        part of that copy takes longer than the copy itself.
        """
        if positions is not None:
            positions = self._to_host(positions)
        written = self._events.pop() if self._events else torch.cuda.Event(blocking=True)
        written.record(self._stream_of_taps())
        self._put(_Rows(labels, None, None, lease, written, positions))

    def _stream_of_taps(self) -> torch.cuda.Stream:
        """The current stream. To ask torch for it takes longer than to record an event on it
        (4.5 us and 1.8, H200), so that it is asked again only where it is another."""
        if self._main.cuda_stream != torch._C._cuda_getCurrentRawStream(self._main.device_index):
            self._main = torch.cuda.current_stream(self._main.device)
        return self._main

    def finish_request(self, key: int, error: str | None = None) -> None:
        self._packer.release(key)
        self._followed.discard(key)
        self._put(_Finish(key, error))
        for news in (self._ended, self._soon):
            if not news.is_set():  # many end in one step, and to ask takes less
                news.set()

    def _put(self, item: _Rows | _Finish) -> None:
        self._items.append(item)
        if isinstance(item, _Rows):
            held = 0 if item.region is None else item.region.num_slots
            self._num_unseen += max(held, item.lease.stop - item.lease.start)
            if self._num_unseen > self._most_unseen:
                self._soon.set()
        if self._sleeping:
            self._wake.set()

    def close(self) -> None:
        """Deliver what waits, then stop."""
        if self._thread.is_alive():
            self._closing = True
            self._wake.set()
            self._ended.set()
            self._soon.set()
            self._thread.join(timeout=30)
        self._sink.close()
        if not self._thread.is_alive():  # else it still reads there
            self._ring.close()

    def _copy(
        self,
        region: Region,
        labels: Labels,
        boundary: int | None,
        lease: Lease,
        positions: Tensor | None,
    ) -> tuple[torch.cuda.Event | None, Tensor | None]:
        """The event behind the copy; None where these rows are lost."""
        if positions is not None:
            positions = self._to_host(positions)
        written = torch.cuda.Event()
        written.record(self._stream_of_taps())
        # Blocking: the drain thread sleeps in `synchronize` instead of spinning.
        copied, whole = torch.cuda.Event(blocking=True), True
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(written)
            try:
                self._fill(region, labels, boundary, lease)
            except Exception:
                # To encode takes memory, and others' kernels. In the middle of the engine's
                # step, which goes on: as in `_guard`, requests report these rows as dropped.
                logger.exception("vllm-scope: rows could not be encoded")
                self._stream.synchronize()  # nothing writes to the lease any more
                whole = False
            copied.record()
            assert isinstance(region.fence, StreamFence)
            region.fence.event.record()
        return copied if whole else None, positions

    def _fill(self, region: Region, labels: Labels, boundary: int | None, lease: Lease) -> None:
        if labels.encodes:
            self._packer.pack(self._arena.view(region), labels, boundary, lease.slots)
        else:
            lease.slots.copy_(self._arena.view(region).view(torch.uint8), non_blocking=True)

    @staticmethod
    def _to_host(positions: Tensor) -> Tensor:
        # On the main stream: the next step overwrites vLLM's buffer there.
        pinned = torch.empty(positions.shape, dtype=positions.dtype, pin_memory=True)
        return pinned.copy_(positions, non_blocking=True)

    def _run(self) -> None:
        while True:
            if self._items:
                started = time.thread_time()
                self._ended.clear()
                self._soon.clear()
                self._num_unseen = 0
                self._deliver([self._items.popleft() for _ in range(len(self._items))])
                if not self._closing:
                    worked = time.thread_time() - started
                    self._rest(min(max(LINGER_AT_END_S, REST * worked), MOST_REST_S))
                continue
            if self._closing:
                return
            self._sleeping = True
            if not self._items and not self._closing:
                self._wake.wait()
            self._wake.clear()
            self._sleeping = False

    def _rest(self, least: float) -> None:
        """Let items gather, `least` seconds or more."""
        time.sleep(least)
        if least < LINGER_S and self._ended.wait(LINGER_S - least):
            return
        if not self._followed:
            self._soon.wait(max(0.0, LINGER_UNSEEN_S - max(least, LINGER_S)))

    def _deliver(self, items: list[_Rows | _Finish]) -> None:
        steps: list[_Rows] = []
        for item in items:
            if steps and not (isinstance(item, _Rows) and _may_join(steps, item)):
                self._guard(lambda: self._write(steps))  # noqa: B023
                steps = []
            if isinstance(item, _Finish):
                self._guard(lambda: self._sink.finish(item.key, item.error))  # noqa: B023
            else:
                steps.append(item)
        if steps:
            self._guard(lambda: self._write(steps))

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # These rows are lost; their requests report them as dropped. The
            # engine and later steps go on.
            logger.exception("vllm-scope: rows could not be delivered")

    def _write(self, steps: list[_Rows]) -> None:
        try:
            for step in steps:
                if step.copied is None:
                    self._copy_on_host(step)
            # Copies are on one stream, taps that write the ring themselves on another; on
            # each the earlier ones are done too.
            for written in (True, False):
                events = [s.copied for s in steps if (s.region is None) is written and s.copied]
                if events:
                    events[-1].synchronize()
            labels = [_true_labels(step) for step in steps]
            if len(steps) == 1:
                self._sink.write(
                    RowBatch(labels[0], steps[0].lease, self._widths, steps[0].boundary)
                )
                return
            joined = Labels(
                np.concatenate([x.keys for x in labels]),
                np.concatenate([x.positions for x in labels]),
                np.concatenate([x.layout_of for x in labels]),
                labels[0].layouts,
                np.concatenate([x.rows for x in labels]),
            )
            lease = JoinedLease([step.lease for step in steps], self._ring)
            self._sink.write(RowBatch(joined, lease, self._widths))
        finally:
            for step in steps:
                step.lease.release()
                if step.region is None and step.copied is not None:
                    self._events.append(step.copied)

    def _copy_on_host(self, step: _Rows) -> None:
        assert step.region is not None
        assert isinstance(step.region.fence, HostFence)
        try:
            self._fill(step.region, step.labels, step.boundary, step.lease)
        finally:
            step.region.fence.set()


def _may_join(steps: list[_Rows], item: _Rows) -> bool:
    """Whole programs, the same ones, next to each other in the ring, not too large."""
    first, last = steps[0], steps[-1]
    size = (item.lease.stop - first.lease.start) * SLOT_BYTES
    return (
        item.boundary is None
        and last.boundary is None
        and item.lease.start == last.lease.stop
        and item.labels.layouts == last.labels.layouts
        and size <= MOST_BYTES
    )


def _true_labels(step: _Rows) -> Labels:
    if step.positions is None:
        return step.labels
    true = step.positions.numpy().astype(np.int64)
    return replace(step.labels, positions=true[step.labels.rows])
