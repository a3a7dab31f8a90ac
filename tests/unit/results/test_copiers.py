"""Copies of several threads, and of those that fail."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from vllm_scope.results import copiers
from vllm_scope.results.copiers import PARALLEL_BYTES, Copiers

#: So many copies that each thread has a share.
COUNT, EACH = 4, PARALLEL_BYTES


def copies():
    sources = [np.full((EACH >> 10, 1 << 10), i + 1, np.uint8) for i in range(COUNT)]
    return [(np.zeros_like(source), source) for source in sources]


def test_all_threads_together_copy_everything():
    made = copies()
    Copiers(COUNT).run(made)
    assert all((to == source).all() for to, source in made)


@pytest.mark.parametrize("fails", ["its-own-copy", "a-later-submit", "another-thread"])
def test_nothing_is_written_after_run_has_raised(fails, monkeypatch):
    """Whoever called takes the memory back then."""
    caller, begun, gate = threading.get_ident(), threading.Event(), threading.Event()
    copy_all, mine = copiers.copy_all, Copiers(COUNT)
    submit, submitted = mine._pool.submit, []

    def slow(share):
        if threading.get_ident() == caller:
            assert begun.wait(60)
            if fails == "its-own-copy":
                raise MemoryError("no memory")
        else:
            begun.set()
            assert gate.wait(60)
            time.sleep(0.1)  # the caller could return meanwhile
            if fails == "another-thread":
                raise MemoryError("no memory")
        copy_all(share)

    def submitting(call, share):
        if fails == "a-later-submit" and len(submitted) == 2:
            raise MemoryError("no memory")
        submitted.append(submit(call, share))
        return submitted[-1]

    monkeypatch.setattr(copiers, "copy_all", slow)
    monkeypatch.setattr(mine._pool, "submit", submitting)
    opening = threading.Timer(0.3, gate.set)
    opening.start()
    with pytest.raises(MemoryError):
        mine.run(copies())
    assert submitted
    assert all(one.done() for one in submitted)
    opening.join()
