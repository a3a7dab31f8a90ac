"""Python's garbage collector, held still while something is timed.

A pass over this process's many objects would count as time of the code under test. vLLM freezes the
objects of its processes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """No collection inside. Afterwards the collector is as it was, also after an error."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Collections inside pass over the objects that are there now. Afterwards none is frozen, also
    after an error."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
