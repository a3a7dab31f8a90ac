"""One sink instance: its thread, its bounded queue, its policy.

Owns:  Lane, Counters.
Runs:  `put` on the drain thread, `end` on the drain thread, the sink on the lane's own.
From:  router.   To: a Sink.

Promise: the drain thread waits here only as the policy says, and never for a sink
whose call has hung for `patience_s`. Memory is bounded by queue_mib and held_mib. What
is not delivered is counted on its request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from vllm_scope.sinks import Block, Ending, Manifest, Report, Sink
from vllm_scope.sinks.options import SinkOptions
from vllm_scope.sinks.request import Arrival, Delivery, Ended
from vllm_scope.sinks.spill import SpillFile

logger = logging.getLogger("vllm.vllm_scope")

#: How long a wait lasts before it is looked whether the sink has stalled.
WAIT_S = 0.05

#: Told when a request is done with this sink.
OnEnd = Callable[[Delivery, Manifest], None]


@dataclass
class Counters:
    """Of one sink, since the start; the last three are of now.

    Attributes:
        rows: rows and scores that the sink was given.
        bytes: of these.
        waits, wait_ms: how often and how long the drain thread waited for room.
        drops: rows that were dropped.
        spilled_bytes: that went to disk in between.
        errors: calls that raised, and stalls.
        queue_bytes, held_bytes, spill_bytes: that wait.
    """

    rows: int = 0
    bytes: int = 0
    waits: int = 0
    wait_ms: float = 0.0
    drops: int = 0
    spilled_bytes: int = 0
    errors: int = 0
    queue_bytes: int = 0
    held_bytes: int = 0
    spill_bytes: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


@dataclass
class _Rows:
    """Rows in the queue; their bytes are in memory, or next in the spill file."""

    delivery: Delivery
    arrival: Arrival
    spilled: bool = False

    @property
    def num_values(self) -> int:
        layout = self.arrival.layout
        return len(self.arrival.positions) * (len(layout.points) + len(layout.scores))


@dataclass(frozen=True)
class _End:
    delivery: Delivery
    ended: Ended


class _Flush:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: str | None = None


class Lane:
    """Hands blocks to a sink.

    Verbs: `put`, `end`, `flush`, `close`.
    """

    def __init__(self, name: str, sink: Sink, options: SinkOptions, on_end: OnEnd) -> None:
        self.name = name
        self.counters = Counters()
        self._sink, self._options, self._on_end = sink, options, on_end
        self._live = bool(getattr(sink, "live", False))
        self.takes_scores = bool(getattr(sink, "takes_scores", True))
        self._most_queued = options.share(options.queue_mib)
        self._most_held = options.share(options.held_mib)
        self._spill: SpillFile | None = None
        if options.on_overload == "spill":
            self._spill = SpillFile(options.spill_folder, options.share(options.spill_mib))
        self._items: deque[_Rows | _End | _Flush] = deque()
        self._changed = threading.Condition()
        self._closing = False
        #: When the call that runs now began.
        self._called_at: float | None = None
        self._dirty = False
        self._thread = threading.Thread(target=self._run, name=f"vllm-scope-{name}", daemon=True)
        self._thread.start()

    @property
    def stalled(self) -> bool:
        """A call has not returned for longer than anyone waits."""
        called_at = self._called_at
        return called_at is not None and time.monotonic() - called_at > self._options.patience_s

    @property
    def stall_reason(self) -> str:
        return (
            f"sink {self.name!r} did not return from a call within {self._options.patience_s:g} s"
        )

    def put(self, delivery: Delivery, arrival: Arrival) -> None:
        """Take rows, or drop and count them, as the policy says."""
        rows = _Rows(delivery, arrival)
        with self._changed:
            if delivery.error is not None:
                self._drop(rows, delivery.error)
                return
            started: float | None = None
            while not self._accept(rows):
                if self._options.on_overload == "drop":
                    self._drop(rows, f"the queue of sink {self.name!r} was full")
                    break
                if self.stalled:
                    self._drop(rows, self.stall_reason)
                    break
                if started is None:
                    started = time.monotonic()
                    self.counters.waits += 1
                self._changed.wait(WAIT_S)
            if started is not None:
                self.counters.wait_ms += 1e3 * (time.monotonic() - started)

    def end(self, delivery: Delivery, ended: Ended) -> None:
        """The last of a request. Never waits."""
        with self._changed:
            self._append(_End(delivery, ended))

    def give_up(self, delivery: Delivery) -> None:
        """A stalled sink: its request is answered without it."""
        with self._changed:
            delivery.error = delivery.error or self.stall_reason
            self.counters.errors += 1

    def flush(self) -> str | None:
        """Wait until all that ended so far is visible; the reason where it is not."""
        request = _Flush()
        with self._changed:
            self._append(request)
        while not request.done.wait(WAIT_S):
            if self.stalled or not self._thread.is_alive():
                return self.stall_reason
        return request.error

    def close(self) -> None:
        """Deliver what waits; a sink that hangs is left behind."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        while self._thread.is_alive() and not self.stalled:
            self._thread.join(WAIT_S)
        if self._thread.is_alive():
            logger.warning("vllm-scope: %s; it is left behind.", self.stall_reason)

    def snapshot(self) -> Counters:
        with self._changed:
            spilled = self._spill.num_bytes if self._spill is not None else 0
            return replace(self.counters, spill_bytes=spilled)

    # The queue; `_changed` is held

    def _accept(self, rows: _Rows) -> bool:
        """Append where there is room, in memory or on disk."""
        size, queued = rows.arrival.data.nbytes, self.counters.queue_bytes
        # What was spilled is older: nothing may overtake it. And rows that are larger
        # than the whole queue go alone.
        first = self._spill is None or not len(self._spill)
        if first and (queued == 0 or queued + size <= self._most_queued):
            self.counters.queue_bytes += size
            self._append(rows)
            return True
        if self._spill is not None and self._spill.put(rows.arrival.data):
            rows.spilled = True
            rows.arrival = replace(rows.arrival, data=np.empty((0, 0), np.uint8))
            self.counters.spilled_bytes += size
            self._append(rows)
            return True
        return False

    def _append(self, item: _Rows | _End | _Flush) -> None:
        self._items.append(item)
        self._changed.notify_all()

    def _drop(self, rows: _Rows, reason: str) -> None:
        rows.delivery.lose(reason)
        self.counters.drops += rows.num_values

    # The thread

    def _run(self) -> None:
        while True:
            item = self._next()
            if item is None:
                break
            if isinstance(item, _Rows):
                self._take(item)
            elif isinstance(item, _End):
                self._finish(item.delivery, item.ended)
            else:
                item.error = self._flush_sink()
                item.done.set()
        self._flush_sink()
        self._call(self._sink.close)
        if self._spill is not None:
            self._spill.close()

    def _next(self) -> _Rows | _End | _Flush | None:
        """The oldest item; None once there is nothing left to do at all."""
        flush_at = time.monotonic() + self._options.flush_s
        while True:
            with self._changed:
                if not self._items and not self._closing:
                    self._changed.wait(self._options.flush_s)
                if self._items:
                    item = self._items.popleft()
                    if isinstance(item, _Rows):
                        self._fetch(item)
                        self._changed.notify_all()
                    return item
                if self._closing:
                    return None
            if self._dirty and time.monotonic() >= flush_at:
                self._flush_sink()

    def _fetch(self, rows: _Rows) -> None:
        """Its bytes, out of the queue or off the disk."""
        if not rows.spilled:
            self.counters.queue_bytes -= rows.arrival.data.nbytes
            return
        assert self._spill is not None
        try:
            data = self._spill.take()
        except OSError as error:
            rows.delivery.error = f"spilled rows of sink {self.name!r} were lost: {error}"
            return
        rows.arrival = replace(rows.arrival, data=data.reshape(len(rows.arrival.positions), -1))

    def _take(self, rows: _Rows) -> None:
        delivery = rows.delivery
        if delivery.error is not None:
            self._drop(rows, delivery.error)
        elif self._live:
            for block in delivery.live_blocks(rows.arrival):
                self._write(delivery, block)
        elif self.counters.held_bytes + rows.arrival.data.nbytes > self._most_held:
            self._drop(rows, f"held_mib of sink {self.name!r} is full of requests that run")
        else:
            self.counters.held_bytes += rows.arrival.data.nbytes
            delivery.keep(rows.arrival)

    def _write(self, delivery: Delivery, block: Block) -> None:
        if delivery.error is not None:
            return
        error = self._call(self._sink.write, block)
        # It may have been given up meanwhile.
        delivery.error = delivery.error or error
        if delivery.error is None:
            self.counters.rows += len(block.positions)
            self.counters.bytes += block.rows.nbytes

    def _finish(self, delivery: Delivery, ended: Ended) -> None:
        streams: dict[str, dict[str, Any]] = {}
        if not self._live and delivery.error is None:
            for block in delivery.whole_blocks(ended):
                name = block.probe or f"{block.site}.{block.layer}"
                dtype = str(block.rows.dtype).removeprefix("torch.")
                streams[name] = {"shape": list(block.rows.shape), "dtype": dtype}
                self._write(delivery, block)
        self.counters.held_bytes -= delivery.forget()
        ending = delivery.ending(ended)
        reports: list[Report | None] = []
        error = self._call(lambda: reports.append(self._sink.finish(ending)))
        if error is not None:
            ending = replace(ending, status="error", reason=ending.reason or error)
        self._dirty = True
        self._on_end(delivery, _manifest(ending, streams, reports[0] if reports else None))

    def _flush_sink(self) -> str | None:
        self._dirty = False
        return self._call(self._sink.flush)

    def _call(self, call: Callable[..., Any], *args: Any) -> str | None:
        """Why it failed, or None."""
        self._called_at = time.monotonic()
        try:
            call(*args)
        except Exception as error:
            self.counters.errors += 1
            if self.counters.errors == 1:
                logger.exception("vllm-scope: sink %r failed", self.name)
            return f"sink {self.name!r} failed: {type(error).__name__}: {error}"
        finally:
            self._called_at = None
        return None


def _manifest(ending: Ending, streams: dict[str, Any], report: Report | None) -> Manifest:
    report = report or Report()
    if ending.status == "ok" and report.status is not None:
        ending = replace(ending, status=report.status, reason=report.reason)
    delivered = 0 if ending.status == "error" else ending.delivered
    return Manifest(
        ending.status, ending.reason, ending.expected, delivered, ending.expected - delivered,
        report.files, {**streams, **report.streams} if ending.status != "error" else {},
        [dict(report.details)] if report.details else [],
    )  # fmt: skip
