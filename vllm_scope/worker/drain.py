"""Moves rows from the arena through the host ring to the sink, outside the model's forward.

Owns:  Drain, which has the drain thread and the items that wait for this thread.
Runs:  `submit` and `finish_request` on the worker's thread. The worker calls `submit` after it has
       enqueued the taps that write the rows. The drain thread delivers the rows.
From:  arena, step_plan (labels).   To: filler (copies rows into transport.ring), deliverer, pace.

Promise: the sink gets rows in the order of their steps. The sink's `finish` for a request is called
after the sink has all rows of the request. If the sink is slow, the worker waits, and the drain
drops no rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from msgspec.structs import replace
from torch import Tensor

from vllm_scope.batch.labels import Labels
from vllm_scope.core.score_index import ScoreKey
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.request.heads import Bank, Encoding
from vllm_scope.request.nets import Net
from vllm_scope.request.resolved import ResolvedMoments
from vllm_scope.sinks import BatchSink
from vllm_scope.transport.ring import HostRing, Lease
from vllm_scope.worker.arena import Arena, Region
from vllm_scope.worker.deliverer import Deliverer
from vllm_scope.worker.drain_items import (
    Collect,
    Finish,
    Forget,
    Item,
    Keep,
    Rows,
    Stored,
    true_labels,
)
from vllm_scope.worker.filler import Filler
from vllm_scope.worker.held_saes import NONE, PairMakers
from vllm_scope.worker.pace import Pace
from vllm_scope.worker.score_store import Filled, ScoreStore
from vllm_scope.worker.side_stream import to_host
from vllm_scope.worker.summing import Summing
from vllm_scope.worker.watch import Watch

logger = logging.getLogger("vllm.vllm_scope")

T = TypeVar("T")

#: If the waiting rows have more bytes than this number, the drain thread ends a long rest
#: (pace.LINGER_UNSEEN_S).
MOST_UNSEEN_BYTES = 8 << 20
#: The longest time, in seconds, that `of_sums`, `settle` and `_wait_for_sums` wait for the drain
#: thread.
ANSWER_S = 300.0


class Drain:
    """Copies regions of the arena to the host ring, and gives the rows to a sink, in order.

    Args:
        watch: If the watch has requests, the drain gives the rows of each step to the watch.
        store: The store collects scores from the rows of each step, on the drain thread.
        saes, moments_bytes, joins, drafts: The same as for Filler.

    Attributes:
        defers: True on a GPU. If `defers` is True and the watch has no requests, `submit_stored`
            does not wake the drain thread. `nudge` then wakes the thread later.
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
        drafts: bool = False,
    ) -> None:
        self._widths, self._watch, self._store = widths, watch, store
        self._ring, self._sink = ring, sink
        self.filler = Filler(
            arena, ring, widths, self._end_scores, saes, moments_bytes, joins, drafts
        )
        self._summing, self._stream = self.filler.summing, self.filler.stream
        self._deliverer = Deliverer(self.filler, ring, sink, widths, store)
        self._pace = Pace()
        # The size of the ring limits the length of this queue: each step with rows for the sink has
        # a lease on slots of the ring.
        self._items: deque[Item] = deque()
        self._closing = False
        #: `_num_unseen`: how many slots were submitted since the drain thread last processed items.
        #: If there are more than `_most_unseen`, the thread ends a long rest. `_most_unseen` is at
        #: most a quarter of the slots of the arena and of the ring, so that both have room for the
        #: next steps.
        most = min(MOST_UNSEEN_BYTES // SLOT_BYTES, arena.num_slots // 4, len(ring.slots) // 4)
        self._most_unseen, self._num_unseen = most, 0
        self.defers = self._stream.is_cuda
        #: True if stored scores were submitted since the last `nudge`.
        self._unseen_scores = False
        #: True if the drain thread may still have to fill the leases of earlier steps. Always False
        #: on a GPU.
        self._unfilled = False
        self._thread = threading.Thread(target=self._run, name="vllm-scope-drain", daemon=True)
        self._thread.start()

    # Requests

    def add_request(
        self, key: int, encodings: Sequence[Encoding], banks: Mapping[Bank, Sequence[Net]]
    ) -> None:
        """Prepare the projections of a request's codecs and the weights of its probes.

        Raises:
            CapacityError: there is no room for the projections or for the weights.
        """
        self.filler.packer.hold(key, encodings, banks)

    def warm(self, call: Callable[[], None]) -> None:
        """On a GPU, call a function on the drain's stream, before the first step. Later work on
        this stream then reuses the memory that the function allocates and frees. On a CPU, do
        nothing."""
        if self._stream.is_cuda:
            self._stream.warm(call)

    def follow(self, key: int) -> None:
        """Until this request ends, deliver rows soon after they are computed. A request is followed
        if its caller reads rows while the request runs, or if a sink other than `memory` gets its
        rows."""
        self._pace.follow(key)

    def finish_request(self, key: int, error: str | None = None) -> None:
        self._pace.unfollow(key)
        if key in self._summing:
            self._in_order(partial(self._summing.finish_request, key))
        self._put(Finish(key, error))
        self._pace.ended()

    # Sums

    def add_moments(self, key: int, num_prompt: int, asked: Sequence[ResolvedMoments]) -> None:
        """Add a request's rows to sums from now on."""
        self._summing.add_request(key, num_prompt, asked)

    def accept(self, num_tokens: Mapping[int, int]) -> None:
        """Record how many tokens of each request with Moments are accepted.

        Args:
            num_tokens: Maps the key of a request to the number of its accepted tokens (prompt and
                generated). EngineCore counts these tokens when it schedules the next step, or when
                the request ends.
        """
        self._in_order(partial(self._accept, num_tokens))

    def _accept(self, num_tokens: Mapping[int, int]) -> None:
        for key, count in num_tokens.items():
            self._summing.accept(key, count)

    def _in_order(self, call: Callable[[], None]) -> None:
        """Call a function after all submitted rows were given to the sums. On a GPU, `submit` has
        already given the rows to the sums, so the function is called now."""
        if self._stream.is_cuda:
            call()
        else:
            self.later(call)

    def of_sums(self, call: Callable[[Summing], T]) -> T:
        """Call a function with the sums, after all submitted rows were given to the sums. Returns
        the function's result. On a CPU, raises TimeoutError if the drain thread has not called the
        function after ANSWER_S seconds."""
        if self._stream.is_cuda:
            with self._stream.entered():
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

    # Rows

    def submit(
        self,
        region: Region,
        labels: Labels,
        boundary: int | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Deliver the rows of a region. The taps that write the region are already enqueued on the
        current stream.

        Args:
            boundary: The boundary of the tap, if the region has the rows of only one tap. None if
                the region has the rows of all taps.
            positions: int64 [num_rows] on the device, the actual position of each batch row. None
                if the positions in `labels` are correct.
        """
        lease = self._ring.acquire(self.filler.num_slots(region, labels, boundary))
        copied = tapped = None
        if self._stream.is_cuda:
            # A step is not deferred if a watch waits for the step, or if the region has the rows of
            # only one tap.
            whole = boundary is None and not self._watch
            if whole and self.filler.may_put_off(region, labels):
                positions = None if positions is None else to_host(positions)
                tapped = self.filler.put_off(region, self.hurry)
            else:
                copied, positions = self.filler.copy(region, labels, boundary, lease, positions)
                if copied is None:
                    lease.release()
                    return
        elif positions is not None:
            positions = positions.clone()
        self._put(Rows(labels, boundary, region, lease, copied, positions, tapped))

    def submit_written(self, lease: Lease, labels: Labels, positions: Tensor | None) -> None:
        """Deliver rows that taps on a GPU write directly into the ring.

        Such rows need no copy on the side stream, only one event. For a small step this saves time,
        because the host needs longer to enqueue a copy than the device needs to run it.
        """
        if positions is not None:
            positions = to_host(positions)
        self._put(Rows(labels, None, None, lease, self._stream.after_taps(), positions))

    # The store of scores

    def submit_stored(self, labels: Labels, write: Callable[[Lease], bool]) -> None:
        """Deliver the scores that the store kept for cached tokens.

        On a CPU, or if the watch has requests, this method wakes the drain thread. Otherwise
        `nudge` wakes the drain thread later. If the drain thread worked now, it would delay the
        worker's thread, which launches the model next.

        Args:
            labels: The labels of the tokens. All tokens have one layout.
            write: The function that writes the scores to a lease. The drain thread calls this
                function (see Stored).
        """
        num_slots = len(labels.keys) * labels.layouts[0].slots(self._widths)
        item = Stored(labels, self._ring.acquire(num_slots), write)
        if self._watch:
            item.written = threading.Event()
            self._watch.add(item.labels_if_whole, item.written.wait, item.lease, None)
            self._put(item)
            self.hurry()  # the watch waits for these scores
            return
        self._items.append(item)
        self._unseen_scores = True
        self._num_unseen += num_slots
        if not self.defers:
            self._pace.soon()
            self._pace.wake()

    def nudge(self) -> None:
        """Let the drain thread deliver stored scores. If the drain thread sleeps, the thread wakes
        up at once. If the drain thread is in a long rest, the rest ends in two cases only: many
        slots wait, or a running request is followed (`follow`). Call this method after the launch
        of the step that follows `submit_stored`. The drain thread then works while the device
        computes this step."""
        if not self._unseen_scores:
            return
        self._unseen_scores = False
        if self._pace.is_followed or self._num_unseen > self._most_unseen:
            self._pace.soon()
        self._pace.wake()

    def collect(self, key: int, layout: Layout, block_size: int) -> None:
        """From now on, let the store collect a request's scores from submitted rows. `layout` is
        the layout of all tokens of the request."""
        self._items.append(Collect(key, layout, block_size))

    def keep(self, filled: Sequence[Filled]) -> None:
        """Let the store keep the scores of these KV blocks. All rows of these blocks must already
        be submitted."""
        self._put(Keep(filled))

    def forget(self, keys: Sequence[ScoreKey]) -> None:
        """Let the store forget the scores of these KV blocks."""
        self._put(Forget(keys))

    def _end_scores(self, keys: Collection[int]) -> None:
        """Let the store stop collecting the scores of these requests."""
        if self._store is None:
            return
        for key in keys:
            if threading.current_thread() is self._thread:
                self._store.end(key)
            else:
                self.later(partial(self._store.end, key))

    # The thread

    def later(self, call: Callable[[], None]) -> None:
        """Call a function on the drain thread, after all submitted rows were processed."""
        self._put(call)

    def begin_launch(self) -> None:
        """Call this method before the launch of the model. On a GPU, the drain thread then starts
        no work until `end_launch` is called. There are two exceptions: another thread calls
        `hurry`, or the drain thread has waited pace.MOST_LAUNCH_S seconds for the end."""
        if self._stream.is_cuda:
            self._pace.begin_launch()

    def end_launch(self) -> None:
        self._pace.end_launch()

    def hurry(self) -> None:
        """Let the drain thread process its items now, without rest. Call this method if another
        thread waits for the drain thread, or if no request with taps is running."""
        self._pace.hurry()

    def settle(self) -> None:
        """Wait until heads were applied to all submitted rows. Wait at most ANSWER_S seconds for
        the drain thread. The caller can then change weights that heads read on the device, such as
        the model's unembedding."""
        if not self._thread.is_alive():
            return
        done = threading.Event()
        self.later(done.set)
        self.hurry()
        if not done.wait(ANSWER_S):
            logger.error(
                "vllm-scope: the drain thread is late; a lens may use the new weights for old rows"
            )
        if self._stream.is_cuda:
            self._stream.synchronize()  # waits for the work that the thread has enqueued

    def _put(self, item: Item) -> None:
        if isinstance(item, Rows):
            if self._watch:
                if self._unfilled:
                    self._wait_for_sums()
                shown = self._show(item, self._watch)
                if shown is None:
                    item.lease.release()
                    return
                item = shown
            else:
                self._unfilled = not self._stream.is_cuda
        self._items.append(item)
        if isinstance(item, Rows):
            # Count the region only if it waits for the drain thread. On a GPU, the region of a step
            # that is not deferred does not wait, because its copy is already enqueued. The region
            # of a deferred step (`tapped` is not None) is counted by `filler.much_waits`.
            region = None if item.tapped else item.waits
            held = 0 if region is None else region.num_slots
            self._num_unseen += max(held, item.lease.stop - item.lease.start)
            if self._num_unseen > self._most_unseen or self.filler.much_waits:
                self._pace.soon()
        self._pace.wake()

    def _show(self, step: Rows, watch: Watch) -> Rows | None:
        """Give a step to the watch. On a CPU, this method copies the rows to the ring now. The
        drain thread could copy the rows too late for the watch. Returns the step that the drain
        thread will process, or None if the step's rows are lost."""
        if step.copied is None:
            if not self.filler.fill_waiting([step]):
                return None
            step = replace(step, region=None)
        wait = (lambda: None) if step.copied is None else step.copied.synchronize
        watch.add(partial(true_labels, step), wait, step.lease, step.boundary)
        return replace(step, watched=True)

    def _wait_for_sums(self) -> None:
        """If requests have Moments, wait until the drain thread has filled the leases of earlier
        steps. Without this wait, this step's rows would be added to sums before the rows of earlier
        steps."""
        if self._summing:
            filled = threading.Event()
            self.later(filled.set)
            self.hurry()
            filled.wait(ANSWER_S)
        self._unfilled = False

    def close(self) -> None:
        """Deliver all waiting rows, then stop the drain thread. Wait at most 30 seconds."""
        if self._thread.is_alive():
            self._closing = True
            self.hurry()
            self._thread.join(timeout=30)
        self._sink.close()
        if not self._thread.is_alive():  # a running drain thread can still read the ring
            self._ring.close()

    def _run(self) -> None:
        while True:
            if self._items:
                self._pace.await_launch()
                started = time.thread_time()
                self._pace.look()
                self._num_unseen = 0
                self._deliverer.deliver([self._items.popleft() for _ in range(len(self._items))])
                if not self._closing:
                    self._pace.rest(time.thread_time() - started)
                continue
            if self._closing:
                return
            self._pace.sleep(lambda: not self._items and not self._closing)
