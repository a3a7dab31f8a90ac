"""Makes Python's garbage collections rarer while requests are computed.

Owns:  `frozen_heap`, `seldom`.
Runs:  in the front-end process: during sweeps and harvests, and while an LLMEngine holds the state
       of a request with a spec. In EngineCore, on the scheduler's thread: while a request has taps.
       If such a state or a scheduler is freed, `seldom.end` runs on the thread that frees it.
To:    engine.offline, frontend.sweep_runs, frontend.requests, core.scheduler.

During a collection, no thread of the process runs Python code. Therefore a collection in EngineCore
delays the launch of the model. In the front-end, a full collection takes 0.3 to 0.6 s. If requests
read many rows, the ring is full after this time, and the launch of the model waits too.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: The number of new objects after which Python begins a collection of the youngest objects. The
#: default of Python is 700. A running cell of a sweep has several hundred objects in EngineCore,
#: and all running cells together have about _FIRST objects. Therefore most objects are freed before
#: a collection visits them. A batch of 256 requests with 64 probes took 4.2 s on an H100. With the
#: default, collections in EngineCore took 63 ms of this time, and 32 ms if the requests had no
#: taps. If a server always has requests with taps, garbage in cycles stays in memory until there
#: are _FIRST new objects. These objects take less than 100 MB.
_FIRST = 200_000


#: After the last `end`, Python allocates _MORE more objects before the next collection. Without
#: these objects, the next collection would come at once, and would delay the last outputs of a
#: batch. (It took 3.5 ms in EngineCore after 64 requests with probes, on an H200's host.)
_MORE = 10_000


class _Seldom:
    """Makes garbage collections rarer from the first `begin` to the last `end`. The first
    collection after the last `end` sets the earlier thresholds again. If other code sets the
    collector's thresholds in between, these thresholds stay as they are. A `with` block calls
    `begin` and `end`."""

    def __init__(self) -> None:
        # While a thread holds the lock, a collection on this thread can free an object that calls
        # `end`. Therefore the lock is an RLock.
        self._lock = threading.RLock()
        self._num = 0
        #: `_before`: the thresholds before the first `begin`. `_set`: the thresholds that this
        #: object has set; None if it has set none.
        self._before = gc.get_threshold()
        self._set: tuple[int, int, int] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def begin(self) -> None:
        with self._lock:
            self._num += 1
            if self._num > 1:
                return
            if gc.get_threshold() != self._set:
                self._before = gc.get_threshold()
            if self._collected not in gc.callbacks:
                gc.callbacks.append(self._collected)
            self._change(_FIRST)

    def begin_for(self, owner: object) -> None:
        """Call `begin` now. When Python frees the owner, call `end`."""
        self.begin()
        weakref.finalize(owner, self.end).atexit = False

    def end(self) -> None:
        with self._lock:
            self._num = max(0, self._num - 1)
            if not self._num and gc.get_threshold() == self._set:
                self._change(gc.get_count()[0] + _MORE)

    def _change(self, first: int) -> None:
        """Let the next collection begin after `first` new objects, or later if the thresholds
        before `begin` were higher."""
        if self._before[0]:  # 0 if other code has disabled garbage collections
            gc.set_threshold(max(self._before[0], first), *self._before[1:])
        self._set = gc.get_threshold()

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        """Python calls this method before and after each collection. After the last `end`, the
        method sets the earlier thresholds again."""
        if phase == "stop" and self._set is not None:
            with self._lock:
                if not self._num:
                    self._restore()

    def _restore(self) -> None:
        if gc.get_threshold() == self._set:
            gc.set_threshold(*self._before)
        self._set = None

    def _forget(self) -> None:
        """In a fork of this process, forget what began before the fork."""
        self._lock, self._num = threading.RLock(), 0
        self._restore()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


#: The only _Seldom object in this process.
seldom = _Seldom()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """In the `with` block, garbage collections are rarer, and ignore all older objects.

    Each request makes hundreds of objects, which cause garbage collections. If these collections
    also visited the old objects, the collections would take a tenth of this process's time. (This
    was measured with EngineCore in another process.) Old garbage is freed only after the `with`
    block. There is no full collection at the start, because it would stop the engine for 0.3 s.
    """
    # The heap can already be frozen, by the caller or by an EngineCore in this process.
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.collect(1)
        gc.freeze()
    try:
        with seldom:
            yield
    finally:
        if freezes:
            gc.unfreeze()
