"""The garbage collector beside a computation of many requests.

Owns:  `frozen_heap`, `seldom`.
Runs:  in the front-end process, on the caller's thread; `seldom` also in EngineCore.
To:    engine.offline, frontend.sweep_runs, core.variants.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Python 3.11 has 700, 10 and 10. A cell of a sweep has some hundred objects in EngineCore until it
#: ends. About as many objects as all running cells have may come before a collection, so most are
#: freed before one looks at them.
_THRESHOLDS = (200_000, 20, 50)


class _Seldom:
    """Makes collections rarer from the first `begin` to the last `end`. Thresholds that somebody
    else sets in between stay."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = 0
        self._before = self._set = gc.get_threshold()

    def begin(self) -> None:
        with self._lock:
            if not self._num:
                self._before = gc.get_threshold()
                if self._before[0]:  # 0 if somebody has switched collections off
                    gc.set_threshold(*map(max, self._before, _THRESHOLDS))
                self._set = gc.get_threshold()
            self._num += 1

    def end(self) -> None:
        with self._lock:
            self._num -= 1
            if not self._num and gc.get_threshold() == self._set:
                gc.set_threshold(*self._before)


#: Of this process.
seldom = _Seldom()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collections inside, and make these rarer.

    A collection would look at all of them again and again, because each request makes hundreds of
    new ones: a tenth of this process's time, if EngineCore is in another process. Old garbage is
    freed after the computation: to collect it now would keep the engine waiting for 0.3 s.
    """
    # Frozen already: by the caller, or by vLLM, whose EngineCore is in this process.
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.collect(1)
        gc.freeze()
    seldom.begin()
    try:
        yield
    finally:
        seldom.end()
        if freezes:
            gc.unfreeze()
