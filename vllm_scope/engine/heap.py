"""Makes Python's garbage collections rarer while many requests are computed.

Owns:  `frozen_heap`, `seldom`.
Runs:  in the front-end process, on the caller's thread; `seldom` also in EngineCore.
To:    engine.offline, frontend.sweep_runs, core.variants.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: The defaults of Python 3.11 are 700, 10 and 10. A cell of a sweep has some hundred objects in
#: EngineCore until it ends. The first threshold is about the number of objects of all running
#: cells, so most objects are freed before a collection looks at them.
_THRESHOLDS = (200_000, 20, 50)


class _Seldom:
    """Makes collections rarer from the first `begin` to the last `end`. Thresholds that
    other code sets in between stay."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = 0
        self._before = self._set = gc.get_threshold()

    def begin(self) -> None:
        with self._lock:
            if not self._num:
                self._before = gc.get_threshold()
                if self._before[0]:  # 0 if other code has switched collections off
                    gc.set_threshold(*map(max, self._before, _THRESHOLDS))
                self._set = gc.get_threshold()
            self._num += 1

    def end(self) -> None:
        with self._lock:
            self._num -= 1
            if not self._num and gc.get_threshold() == self._set:
                gc.set_threshold(*self._before)


#: The one instance of this process.
seldom = _Seldom()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Inside, make garbage collections rarer, and exclude the objects that exist at the start.

    Each request makes hundreds of objects, which starts collections again and again. If each
    collection looked at the old objects too, this would take a tenth of this process's time (with
    EngineCore in another process). Old garbage is freed only after the end: to collect it at the
    start would make the engine wait for 0.3 s.
    """
    # The heap may be frozen already: by the caller, or by vLLM if EngineCore is in this process.
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
