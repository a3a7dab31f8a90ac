"""Which rows each batch has, and in which slot each row lies: a function of counts and a seed.

Owns:  Mix.
Runs:  in the feeder and in the trainer. Both compute the same plan, so no slot numbers are sent.

Batch k is drawn at random from the first `num_mixed + k * batch_size` rows, without the rows of
earlier batches. These `num_mixed` rows take half of the slots. The other half is for the rows that
follow, so that neither side has to wait for the other at each batch.

Promise: the batches depend on the order of the rows, `num_slots`, `batch_size` and `seed`, but not
on the speed of either side.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Mix:
    """The plan of one feed, advanced batch by batch.

    Args:
        num_slots: at least twice `batch_size`.

    Attributes:
        num_drawn: number of batches drawn so far.
        num_mixed: number of rows from which a batch is drawn.
    """

    def __init__(self, num_slots: int, batch_size: int, seed: int) -> None:
        self.num_mixed, self.num_drawn = num_slots // 2, 0
        self._size = batch_size
        self._random = np.random.default_rng(seed)
        #: Index n % `num_slots` holds the slot of row n: the n-th slot to become free.
        self._slots = np.arange(num_slots)
        #: Slots of the rows from which a batch is drawn. The last batch took the slots at `_holes`.
        self._pool = self._slots[: self.num_mixed].copy()
        self._holes = np.empty(0, np.int64)

    @property
    def num_needed(self) -> int:
        """Number of rows that must be written before the next batch is drawn."""
        return self.num_mixed + self.num_drawn * self._size

    @property
    def num_writable(self) -> int:
        """Number of rows that may be written so far; the next row must wait for a free slot."""
        return len(self._slots) + self.num_drawn * self._size

    def slots(self, start: int, stop: int) -> Ints:
        """The slots of rows start to stop - 1, which must be among the last `num_slots` writable
        rows."""
        found: Ints = self._slots[np.arange(start, stop) % len(self._slots)]
        return found

    def draw(self) -> Ints:
        """The slots of the next batch, [batch_size]. They are free once the batch is copied."""
        first = self.num_needed - len(self._holes)
        self._pool[self._holes] = self.slots(first, self.num_needed)
        self._holes = self._random.choice(self.num_mixed, self._size, replace=False)
        drawn: Ints = self._pool[self._holes]
        freed = self.num_drawn * self._size + np.arange(self._size)
        self._slots[freed % len(self._slots)] = drawn
        self.num_drawn += 1
        return drawn

    def rest(self, num_rows: int) -> Iterator[Ints]:
        """Yield the slots of the remaining batches, once all rows are written. The last batch may
        be smaller.

        Args:
            num_rows: number of rows of the whole feed.
        """
        while num_rows >= self.num_needed:
            yield self.draw()
        first = self.num_needed - len(self._holes)
        kept = np.delete(self._pool, self._holes)[:num_rows]
        last = np.concatenate([kept, self.slots(first, num_rows)])
        self._random.shuffle(last)
        for start in range(0, len(last), self._size):
            yield last[start : start + self._size]
