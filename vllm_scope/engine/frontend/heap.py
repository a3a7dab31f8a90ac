"""The garbage collector beside a computation of many requests.

Owns:  `frozen_heap`.
Runs:  in the front-end process, on the caller's thread.
To:    engine.offline, sweeping.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collections inside.

    A collection would look at all of them again and again, because each request makes hundreds of
    new ones: a tenth of this process's time, if EngineCore is in another process. Old garbage is
    freed after the computation: to collect it now would keep the engine waiting for 0.3 s.
    """
    if gc.get_freeze_count():  # the caller did so, or vLLM, whose EngineCore is in this process
        yield
        return
    gc.collect(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
