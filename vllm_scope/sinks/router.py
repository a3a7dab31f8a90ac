"""Gives the drain's rows to sinks, and reports when a request has ended.

Owns:  Router, which makes and owns the sink threads of one worker.
Runs:  `add_request` and `expect_end` on the worker's thread. `write` and `finish` on the drain
       thread. `flush` and `counters` on any thread. A separate thread looks for stalled sinks.
From:  worker.deliverer.   To: sinks.memory, sinks.sink_thread.

Promise: the router sends a request's end to the caller when every sink that the request named has
finished the request or has stalled. The caller does not wait for the sinks in `global_sinks`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np

from vllm_scope.batch.by_position import Ints
from vllm_scope.batch.by_request import by_key, by_layout
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.sinks import Manifest, Report, RequestInfo, RowBatch
from vllm_scope.sinks.counters import Counters
from vllm_scope.sinks.memory import MemorySink
from vllm_scope.sinks.options import SinkConfig
from vllm_scope.sinks.quota import Quota
from vllm_scope.sinks.reports import manifest_of
from vllm_scope.sinks.request import Delivery, Ended
from vllm_scope.sinks.sink_thread import SinkThread

logger = logging.getLogger("vllm.vllm_scope")

#: The destination of a sink in `global_sinks` is this prefix and the sink's name. Requests cannot
#: name a destination with this prefix.
GLOBAL = "global:"
#: Seconds between two searches for stalled sinks, and number of searches between two reports of the
#: counters.
LOOK_S = 0.1
LOOKS_PER_REPORT = 10
_UNKNOWN_END = Ended((), "error")


@dataclass
class _Routed:
    """A request with at least one sink other than memory.

    Attributes:
        deliveries: by destination, the sink thread and the request's Delivery.
        waiting: after the request has ended, the destinations whose manifest has not arrived yet.
        ended: None until the request has ended.
    """

    deliveries: dict[str, tuple[SinkThread, Delivery]]
    waiting: set[str] = field(default_factory=set)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    error: str | None = None
    ended: Ended | None = None


class Router:
    """All sinks of a worker, as one BatchSink.

    Args:
        memory: the sink that sends rows back to callers.
        sinks, global_sinks: the configuration of each sink, by name, from the engine's options.
        here: the boundaries of this worker's pipeline stage.

    Raises:
        ScopeError: a sink cannot be made. A plugin can also raise other errors.
    """

    def __init__(
        self,
        memory: MemorySink,
        sinks: Mapping[str, SinkConfig],
        global_sinks: Mapping[str, SinkConfig],
        sites: Sites,
        here: Sequence[int],
    ) -> None:
        self._memory, self._sites, self._here = memory, sites, here
        self._lock = threading.Lock()
        self._routed: dict[int, _Routed] = {}
        self._expected: dict[int, Ended] = {}
        self._keys: Ints = np.zeros(0, np.int64)
        self._stop = threading.Event()
        self._reported: dict[str, dict[str, float]] = {}
        self._threads: dict[str, list[SinkThread]] = {}
        self._quotas: dict[str, Quota] = {}
        named = {GLOBAL + name: config for name, config in global_sinks.items()}
        try:
            for name, config in {**sinks, **named}.items():
                self._open(name, config)
        except BaseException:
            self._close_threads()
            raise
        self._watcher: threading.Thread | None = None
        if self._threads:
            self._watcher = threading.Thread(
                target=self._watch, name="vllm-scope-sinks", daemon=True
            )
            self._watcher.start()

    def _open(self, name: str, config: SinkConfig) -> None:
        make = config.factory()
        threads = self._threads[name] = []
        quota = self._quotas[name] = Quota(name, config.options)
        for _ in range(config.options.threads):
            threads.append(SinkThread(name, make(), config.options, self._on_end, quota))

    def add_request(self, info: RequestInfo, asked: Resolved) -> None:
        """Register a request. The worker calls this before rows of the request arrive.

        Args:
            info: the data about the request, without tag and name. The reads that go to a
                destination have the tag and the name for this destination.
            asked: all actions of the request, including the reads that `global_sinks` add.
        """
        deliveries = {}
        for to in asked.destinations:
            if to not in self._threads:
                continue  # the sink `memory` has no sink thread
            called = next((read.called for read in asked.reads if read.to == to), (None, None))
            # Rows that go to a sink in `global_sinks` belong to the operator.
            owner = "" if to.startswith(GLOBAL) else info.owner
            own = replace(info, tag=called[0], name=called[1], owner=owner)
            delivery = Delivery(own, asked, to, self._sites, self._here)
            if not delivery.empty:
                threads = self._threads[to]
                deliveries[to] = (threads[info.key % len(threads)], delivery)
        for thread, _ in deliveries.values():
            thread.add_request()
        if deliveries:
            with self._lock:
                self._routed[info.key] = _Routed(deliveries)
                self._keys = np.array(sorted(self._routed), np.int64)

    def expect_end(self, key: int, ended: Ended) -> None:
        """Store the scheduler's data about the end of a request. The worker calls this method
        before `finish`."""
        with self._lock:
            if key in self._routed:
                self._expected[key] = ended

    # Drain thread

    def write(self, batch: RowBatch) -> None:
        try:
            self._memory.write(batch)
        finally:
            self._write(batch)

    def _write(self, batch: RowBatch) -> None:
        keys, labels = self._keys, batch.labels
        if not len(keys) or not np.isin(labels.keys, keys).any():
            return
        for layout, tokens, data in by_layout(
            labels.layouts, labels.layout_of, batch.boundary, batch.widths, batch.slots
        ):
            local = layout.at(batch.boundary)
            positions = labels.positions[tokens]
            for key, some in by_key(labels.keys[tokens]):
                self._route(key, local, positions[some], data[some], batch.widths)

    def _route(
        self, key: int, layout: Layout, positions: Ints, data: np.ndarray, widths: Widths
    ) -> None:
        routed = self._routed.get(key)
        if routed is None:
            return
        for thread, delivery in routed.deliveries.values():
            try:
                arrival = delivery.arrival(layout, positions, data, widths)
                if arrival is not None:
                    thread.put(delivery, arrival)
            except Exception as error:
                # For example, there is no memory to copy the rows. The other requests continue.
                logger.exception("vllm-scope: rows could not be given to the sink %r", thread.name)
                delivery.error = delivery.error or (
                    f"the sink {thread.name!r} did not get some rows ({type(error).__name__}); the "
                    "worker's log contains the reason. Send the request again when other requests "
                    "have finished."
                )

    def finish(self, key: int, error: str | None) -> None:
        with self._lock:
            ended = self._expected.pop(key, _UNKNOWN_END)
            routed = self._routed.get(key)
            if routed is not None:
                routed.ended, routed.error = ended, error
                routed.waiting = {to for to in routed.deliveries if not to.startswith(GLOBAL)}
                if not routed.waiting:
                    self._forget(key)
        try:
            if routed is None or not routed.waiting:
                self._memory.finish(key, error)
        finally:
            for thread, delivery in () if routed is None else routed.deliveries.values():
                delivery.error = delivery.error or error
                thread.end(delivery, ended)

    def finish_all(self, ends: Sequence[tuple[int, str | None]]) -> None:
        with self._lock:
            told = [(key, error) for key, error in ends if key not in self._routed]
            others = [(key, error) for key, error in ends if key in self._routed]
            for key, _ in told:
                self._expected.pop(key, None)
        for call in (
            partial(self._memory.finish_all, told), *(partial(self.finish, *end) for end in others)
        ):  # fmt: skip
            try:
                call()
            except Exception:  # continue with the ends of the other requests
                logger.exception("vllm-scope: the end of a request could not be sent")

    def close(self) -> None:
        """Deliver all queued items, then close all sinks."""
        self._stop.set()
        self._close_threads()
        if self._watcher is not None:
            self._watcher.join(5)
        self._memory.close()

    def _close_threads(self) -> None:
        threads = [thread for some in self._threads.values() for thread in some]
        for thread in threads:  # stop all threads first, so that waits for hanging sinks overlap
            thread.stop()
        for thread in threads:
            thread.close()

    # Any thread

    def flush(self) -> dict[str, str | None]:
        """For each sink, None if the rows of all ended requests are visible. Otherwise the reason
        why rows are not visible."""
        return {
            name: next((e for e in [thread.flush() for thread in threads] if e is not None), None)
            for name, threads in self._threads.items()
        }

    @property
    def takes(self) -> dict[str, list[str]]:
        """By sink, the kinds of actions that may name the sink. The sinks in `global_sinks` are
        left out."""
        return {
            name: threads[0].takes
            for name, threads in self._threads.items()
            if not name.startswith(GLOBAL)
        }

    def counters(self) -> dict[str, dict[str, float]]:
        """The value of each counter, by sink and counter."""
        found = {"memory": self._memory.counters()}
        for name, threads in self._threads.items():
            total = Counters()
            for thread in threads:
                total += thread.snapshot()
            found[name] = asdict(total)
        return found

    def _forget(self, key: int) -> None:
        self._routed.pop(key, None)
        self._keys = np.array(sorted(self._routed), np.int64)

    # Sink threads

    def _on_end(self, delivery: Delivery, manifest: Manifest) -> None:
        key, to = delivery.info.key, delivery.to
        with self._lock:
            routed = self._routed.get(key)
            if routed is None or to not in routed.waiting:
                return
            routed.waiting.discard(to)
            routed.manifests[to] = manifest
            done = not routed.waiting
            if done:
                self._forget(key)
        if done:
            self._memory.finish(key, routed.error, routed.manifests)

    def _watch(self) -> None:
        looks = 0
        while not self._stop.wait(LOOK_S):
            looks += 1
            try:
                self._answer_for_stalled()
                if looks % LOOKS_PER_REPORT == 0:
                    self._report()
            except Exception:
                # This thread must continue, because it ends the requests of hanging sinks.
                logger.exception("vllm-scope: a check of the sinks failed")
        self._report()

    def _answer_for_stalled(self) -> None:
        stalled = {
            thread for threads in self._threads.values() for thread in threads if thread.stalled
        }
        if not stalled:
            return
        with self._lock:
            late = [
                (routed.deliveries[to], routed.ended)
                for routed in self._routed.values()
                for to in routed.waiting
                if routed.deliveries[to][0] in stalled
            ]
        for (thread, delivery), ended in late:
            thread.give_up(delivery)
            ending = replace(delivery.ending(ended or _UNKNOWN_END), status="error")
            self._on_end(delivery, manifest_of(ending, {}, Report()))

    def _report(self) -> None:
        counters = self.counters()
        if counters != self._reported and self._memory.send_counters(counters):
            self._reported = counters
