"""Copies arrays with several threads.

Owns:  Copiers, `shares_of` (divides copies among the threads).
Runs:  `run` on the receiver's thread, which also makes a part of the copies.
From:  table (the arrays to copy).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

#: (target, source), two arrays of the same shape and dtype. A copy can be cut along the first axis.
Copy = tuple[np.ndarray, np.ndarray]
#: If all copies together have fewer bytes, the calling thread alone makes the copies.
PARALLEL_BYTES = 4 << 20
MOST_COPIERS = 6


class Copiers:
    """Threads that copy. numpy releases the GIL while it copies.

    Args:
        count: number of threads, including the calling thread. If None, half of the number of
            processors, but at most MOST_COPIERS.
    """

    def __init__(self, count: int | None = None) -> None:
        if count is None:
            count = min(MOST_COPIERS, (os.cpu_count() or 1) // 2)
        self._count = max(1, count)
        self._pool = None
        if self._count > 1:
            self._pool = ThreadPoolExecutor(self._count - 1, "vllm-scope-copy")

    def run(self, copies: Sequence[Copy]) -> None:
        """Make all copies, then return. If a copy raises an error, `run` raises the error after all
        threads have stopped copying."""
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
    """The copies, divided into at most `count` shares of about `total / count` bytes each. `total`
    is the number of bytes of all copies. If a copy is larger than the rest of a share, the copy is
    cut along its first axis."""
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
