"""Copies of arrays, by several threads.

Owns:  Copiers, and `shares_of` (how copies are shared out).
Runs:  `run` on the receiver's thread, which takes a share itself.
From:  table (what is copied).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

#: To and from: arrays of the same shape and dtype, the first axis of which may be cut.
Copy = tuple[np.ndarray, np.ndarray]
#: From so many bytes on several threads copy.
PARALLEL_BYTES = 4 << 20
MOST_COPIERS = 6


class Copiers:
    """Threads that copy. numpy releases the GIL while it does.

    Args:
        count: of the threads, with the caller's; None for half of the processors.
    """

    def __init__(self, count: int | None = None) -> None:
        if count is None:
            count = min(MOST_COPIERS, (os.cpu_count() or 1) // 2)
        self._count = max(1, count)
        self._pool = None
        if self._count > 1:
            self._pool = ThreadPoolExecutor(self._count - 1, "vllm-scope-copy")

    def run(self, copies: Sequence[Copy]) -> None:
        """Return when everything is copied. If a copy raises, no thread copies any more, either."""
        total = sum(to.nbytes for to, _ in copies)
        if self._pool is None or total < PARALLEL_BYTES:
            copy_all(copies)
            return
        own, *others = shares_of(copies, self._count, total)
        running: list[Future[None]] = []
        try:
            running += (self._pool.submit(copy_all, share) for share in others)
            copy_all(own)
        finally:
            wait(running)
        for one in running:
            one.result()


def copy_all(copies: Sequence[Copy]) -> None:
    for to, source in copies:
        to[...] = source


def shares_of(copies: Sequence[Copy], count: int, total: int) -> list[list[Copy]]:
    """The copies in `count` shares of about `total / count` bytes each. A copy that is larger than
    what is left of a share is cut along its first axis."""
    most = -(-total // count)
    shares: list[list[Copy]] = [[]]
    left = most
    for to, source in copies:
        while len(to):
            if left <= 0 and len(shares) < count:
                shares.append([])
                left = most
            each = to.nbytes // len(to)
            here = len(to) if len(shares) == count else min(len(to), -(-left // max(1, each)))
            shares[-1].append((to[:here], source[:here]))
            left -= here * each
            to, source = to[here:], source[here:]
    return shares
