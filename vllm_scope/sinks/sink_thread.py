"""Runs one sink instance on a thread, with the overload policy of its queue.

Owns:  SinkThread.
Runs:  `put` and `end` on the drain thread. The sink runs on a separate thread.
From:  router.   To: a Sink, through sink_queue.

Promise: the drain thread waits only if the policy is `block` or `spill`, and never for a stalled
sink. The options queue_mib and held_mib limit the memory. The counts of a request show how many
rows were not delivered. Every request's end is reported one time, also if the sink hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace

from vllm_scope.errors import ConfigError
from vllm_scope.sinks import Block, Ending, Manifest, Report, Sink
from vllm_scope.sinks.counters import Counters
from vllm_scope.sinks.guarded_sink import GuardedSink
from vllm_scope.sinks.options import SinkOptions
from vllm_scope.sinks.quota import REQUEST_BYTES, KeyedBytes, Quota
from vllm_scope.sinks.reports import facts_of, manifest_of
from vllm_scope.sinks.request import Arrival, Delivery, Ended
from vllm_scope.sinks.sink_queue import QueuedEnd, QueuedFlush, QueuedRows, QueueItem, SinkQueue

logger = logging.getLogger("vllm.vllm_scope")

#: Seconds between two checks that test whether the sink has stalled.
WAIT_S = 0.05
#: If a caller waits for published rows and no other request is running, the thread waits for this
#: number of seconds before it flushes. If another request comes in this time, both requests can be
#: published together.
ALONE_S = 0.1

#: A SinkThread calls this function when a request has ended at the sink. Any thread may make this
#: call.
OnEnd = Callable[[Delivery, Manifest], None]
_Streams = dict[str, dict[str, object]]


class SinkThread:
    """Calls a sink with the blocks of requests.

    Args:
        quota: the sink's quota, which all threads of the sink share. If None, a new quota.

    Raises:
        ConfigError: the spill file cannot be made. In this case, the sink is closed first.
    """

    def __init__(
        self, name: str, sink: Sink, options: SinkOptions, on_end: OnEnd,
        quota: Quota | None = None,
    ) -> None:  # fmt: skip
        self.name, self._quota = name, quota or Quota(name, options)
        self.counters = Counters()
        self._options, self._on_end = options, on_end
        self._sink = GuardedSink(name, sink, options.patience_s, self._count_error)
        self.takes = self._sink.takes
        self._held = KeyedBytes(options.share(options.held_mib))
        try:
            self._queue = SinkQueue(name, options, self._sink.log)
        except ConfigError:
            sink.close()
            raise
        self._changed = self._queue.changed
        self._closing = False
        #: The time of the first end of a request since the last flush. None if no request has ended
        #: since the last flush.
        self._dirty_since: float | None = None
        self._num_running = 0
        self._worked_at = 0.0
        #: The Deliveries of ended requests whose rows may still be lost.
        self._unpublished: dict[Delivery, Ending] = {}
        #: The reason why the last lost request was lost. None if no request was lost since the last
        #: call of `flush`.
        self._lost_since_asked: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"vllm-scope-{name}", daemon=True)
        self._thread.start()

    @property
    def stalled(self) -> bool:
        return self._sink.stalled

    def add_request(self) -> None:
        with self._changed:
            self._num_running += 1

    def put(self, delivery: Delivery, arrival: Arrival) -> None:
        """Add rows to the queue. If the queue has no room, follow the policy `on_overload`."""
        rows = QueuedRows(delivery, arrival)
        with self._changed:
            if delivery.error is not None:
                self._drop(rows, delivery.error)
                return
            size = arrival.data.nbytes + (0 if delivery.charged else REQUEST_BYTES)
            if not self._quota.take(delivery.info.owner, size):
                delivery.refused = True
                self._drop(rows, self._quota.reason)
                return
            delivery.charged = True
            started: float | None = None
            while not self._queue.accept(rows):
                if self._options.on_overload == "drop":
                    self._drop(rows, f"the queue of sink {self.name!r} was full")
                    break
                if self.stalled:
                    self._drop(rows, self._sink.stall_reason)
                    break
                if started is None:
                    started = time.monotonic()
                    self.counters.waits += 1
                self._changed.wait(WAIT_S)
            if started is not None:
                self.counters.wait_ms += 1e3 * (time.monotonic() - started)

    def end(self, delivery: Delivery, ended: Ended) -> None:
        """Add a request's end to the queue. Does not wait."""
        with self._changed:
            # While the sink is stalled, a request without rows at the sink must not take memory.
            stalled = self.stalled and not delivery.entered
            unseen = stalled or self._is_refused(delivery)
            if unseen:
                self._num_running -= 1
            else:
                self._queue.append(QueuedEnd(delivery, ended))
        if stalled:
            self.give_up(delivery)
        if unseen:
            ending = delivery.ending(ended)
            if delivery.refused:
                ending = replace(ending, status="partial", reason=self._quota.reason)
            self._tell(delivery, manifest_of(ending, {}, Report()))

    def _is_refused(self, delivery: Delivery) -> bool:
        """True if the request has no rows at the sink and its key has reached the quota. In this
        case, the sink does not get the end of the request, because a sink may make a file when a
        request ends."""
        if delivery.entered or delivery.error is not None:
            return False
        if not (delivery.refused or delivery.charged):
            delivery.refused = not self._quota.take(delivery.info.owner, REQUEST_BYTES)
        return delivery.refused

    def give_up(self, delivery: Delivery) -> None:
        """Count a request as failed because the sink has stalled."""
        delivery.error = delivery.error or self._sink.stall_reason
        self._sink.log.say(self._sink.stall_reason)
        self._count_error()

    def flush(self) -> str | None:
        """Wait until the rows of all ended requests are visible. Returns the reason if the sink is
        stalled, or if a request was lost since the last call; else None."""
        request = QueuedFlush()
        with self._changed:
            self._queue.append(request)
        while not request.done.wait(WAIT_S):
            if self.stalled or not self._thread.is_alive():
                return self._sink.stall_reason
        return request.error

    def stop(self) -> None:
        """Let the thread end after all queued items are delivered. Does not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """Deliver all queued items, then end the thread. If the sink is stalled, do not wait."""
        self.stop()
        while self._thread.is_alive() and not self.stalled:
            self._thread.join(WAIT_S)
        if self._thread.is_alive():
            logger.warning(
                "vllm-scope: %s; the thread of this sink is not stopped.", self._sink.stall_reason
            )

    def snapshot(self) -> Counters:
        with self._changed:
            return replace(
                self.counters, spilled_bytes=self._queue.spilled_bytes,
                queue_bytes=self._queue.num_bytes, held_bytes=self._held.num_bytes,
                spill_bytes=self._queue.disk_bytes,
            )  # fmt: skip

    def _drop(self, rows: QueuedRows, reason: str) -> None:
        rows.delivery.lose(rows.arrival, reason)
        with self._changed:
            self.counters.drops += rows.num_values

    # The thread

    def _run(self) -> None:
        while (item := self._next()) is not None:
            if isinstance(item, QueuedRows):
                self._take(item)
            elif isinstance(item, QueuedEnd):
                self._end(item.delivery, item.ended)
            else:
                error = self._flush_sink()
                item.error, self._lost_since_asked = error or self._lost_since_asked, None
                item.done.set()
            self._worked_at = time.monotonic()
        self._flush_sink()
        self._sink.close()
        self._queue.close()

    def _next(self) -> QueueItem | None:
        """Wait for an item, and return the oldest item of the queue. None if the thread must
        end."""
        while True:
            with self._changed:
                while (wait_s := self._flush_in()) is None or wait_s > 0:
                    if len(self._queue):
                        return self._queue.pop()
                    if self._closing:
                        return None
                    # Python raises OverflowError for a longer wait.
                    most_s = threading.TIMEOUT_MAX
                    self._changed.wait(None if wait_s is None else min(wait_s, most_s))
            self._flush_sink()

    def _flush_in(self) -> float | None:
        """Seconds until the next flush of the sink. None if no flush is needed."""
        if self._dirty_since is None:
            return None
        at = self._dirty_since + self._options.flush_s
        if self._unpublished and not self._num_running and not len(self._queue):
            at = min(at, self._worked_at + ALONE_S)
        return at - time.monotonic()

    def _take(self, rows: QueuedRows) -> None:
        delivery = rows.delivery
        if delivery.error is not None:
            self._drop(rows, delivery.error)
        elif self._sink.live:
            self._write_all(delivery, delivery.live_blocks(rows.arrival))
        elif not self._held.fits(rows.owner, rows.num_bytes):
            whose = "of this key's requests" if rows.owner else "of requests"
            self._drop(rows, f"held_mib of sink {self.name!r} is full {whose} that run")
        else:
            self._held.take(rows.owner, rows.num_bytes)
            delivery.keep(rows.arrival)

    def _write_all(self, delivery: Delivery, blocks: Iterator[Block]) -> _Streams:
        """Write blocks. Returns the shape, dtype and codec of the last block of each stream, by
        stream."""
        streams: _Streams = {}
        try:
            for block in blocks:
                error = self._sink.write(block)
                # During the call, `give_up` may have set the error.
                delivery.error = delivery.error or error
                if delivery.error is not None:
                    break
                self.counters.rows += len(block.positions)
                self.counters.bytes += block.values.nbytes
                streams[block.probe or f"{block.site}.{block.layer}"] = facts_of(block)
        except Exception as error:  # even without free memory, the thread must continue
            delivery.error = delivery.error or self._sink.failure(error, counts=True)
        return streams

    def _end(self, delivery: Delivery, ended: Ended) -> None:
        try:
            self._finish(delivery, ended)
        except Exception as error:  # even without free memory, the caller must get an answer
            reason = self._sink.failure(error, counts=True)
            self._tell(delivery, Manifest("error", reason, 0, 0, 0))
        with self._changed:
            self._num_running -= 1
            self._dirty_since = self._dirty_since or time.monotonic()

    def _finish(self, delivery: Delivery, ended: Ended) -> None:
        streams: _Streams = {}
        if not self._sink.live and delivery.error is None:
            streams = self._write_all(delivery, delivery.whole_blocks(ended))
        self._held.give(delivery.info.owner, delivery.forget())
        ending = delivery.ending(ended)
        report, error = self._sink.finish(ending)
        if error is not None:
            self._lost_since_asked = error
            ending = replace(ending, status="error", reason=ending.reason or error)
        manifest = manifest_of(ending, streams, report)
        if report.published is None or manifest.status == "error":
            self._tell(delivery, manifest)
            return
        self._unpublished[delivery] = ending

        def published(future: Future[None]) -> None:
            failure = None if future.cancelled() else future.exception()
            if future.cancelled() or failure is not None:
                self._lost(delivery, self._sink.failure(failure or CancelledError()))
            elif self._unpublished.pop(delivery, None) is not None:
                self._tell(delivery, manifest)

        report.published.add_done_callback(published)

    def _lost(self, delivery: Delivery, reason: str) -> None:
        """Report that the rows of an ended request will not be published."""
        ending = self._unpublished.pop(delivery, None)
        if ending is not None:
            self._count_error()
            self._lost_since_asked = reason
            ending = replace(ending, status="error", reason=reason)
            self._tell(delivery, manifest_of(ending, {}, Report()))

    def _tell(self, delivery: Delivery, manifest: Manifest) -> None:
        try:
            self._on_end(delivery, manifest)
        except Exception:
            logger.exception("vllm-scope: the end of a request was not reported")

    def _flush_sink(self) -> str | None:
        self._dirty_since = None
        before = list(self._unpublished)
        error = self._sink.flush()
        for delivery in before:
            self._lost(delivery, error or f"sink {self.name!r} was flushed, but published nothing")
        return error

    def _count_error(self) -> None:
        with self._changed:
            self.counters.errors += 1
