"""Computes, from counts and a seed, the rows of each batch and the slot of each row.

Owns:  Mix.
Runs:  in the feeder and in the trainer. The feeder and the trainer compute the same plan. Therefore
       they do not send slot numbers to each other.

Batch k is drawn at random from the first `num_mixed + k * batch_size` rows, without the rows of
earlier batches. When a batch is drawn, the `num_mixed` rows that wait fill half of the slots. The
feeder writes later rows into the other half. Therefore feeder and trainer seldom wait for each
other.

Promise: the batches depend only on the order of the rows, `num_slots`, `batch_size` and `seed`. The
speed of the feeder and of the trainer does not change the batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Mix:
    """The plan of one feed. The plan says which rows each batch has, and in which slots these rows
    are. Each call of `draw` advances the plan by one batch.

    Args:
        num_slots: number of slots of the shared memory, at least twice `batch_size`.

    Attributes:
        num_drawn: number of batches drawn so far.
        num_mixed: number of rows from which a batch is drawn.
    """

    def __init__(self, num_slots: int, batch_size: int, seed: int) -> None:
        self.num_mixed, self.num_drawn = num_slots // 2, 0
        self._size = batch_size
        self._random = np.random.default_rng(seed)
        #: The slot of row n is at index n % `num_slots`. The first `num_slots` rows get the slots
        #: in ascending order. Each row that is drawn frees its slot. Later rows get the freed slots
        #: in the order in which `draw` freed them.
        self._slots = np.arange(num_slots)
        #: Slots of the rows from which a batch is drawn. The last batch took the slots at the
        #: indices `_holes` of `_pool`.
        self._pool = self._slots[: self.num_mixed].copy()
        self._holes = np.empty(0, np.int64)

    @property
    def num_needed(self) -> int:
        """Total number of rows that must be written before the next batch is drawn."""
        return self.num_mixed + self.num_drawn * self._size

    @property
    def num_writable(self) -> int:
        """Total number of rows that the feeder may write before the next batch is drawn. Further
        rows must wait for a free slot."""
        return len(self._slots) + self.num_drawn * self._size

    def slots(self, start: int, stop: int) -> Ints:
        """The slots of the rows `start` to `stop` - 1. `start` must be at least `num_writable`
        minus the number of slots, because later rows use the slots of earlier rows again."""
        found: Ints = self._slots[np.arange(start, stop) % len(self._slots)]
        return found

    def draw(self) -> Ints:
        """The slots of the rows of the next batch, [batch_size]. The slots are free after the
        trainer has copied the batch."""
        first = self.num_needed - len(self._holes)
        self._pool[self._holes] = self.slots(first, self.num_needed)
        self._holes = self._random.choice(self.num_mixed, self._size, replace=False)
        drawn: Ints = self._pool[self._holes]
        freed = self.num_drawn * self._size + np.arange(self._size)
        self._slots[freed % len(self._slots)] = drawn
        self.num_drawn += 1
        return drawn

    def rest(self, num_rows: int) -> Iterator[Ints]:
        """After all rows are written, yield the slots of each remaining batch. The last batch may
        be smaller.

        Args:
            num_rows: total number of rows of the feed.
        """
        while num_rows >= self.num_needed:
            yield self.draw()
        first = self.num_needed - len(self._holes)
        kept = np.delete(self._pool, self._holes)[:num_rows]
        last = np.concatenate([kept, self.slots(first, num_rows)])
        self._random.shuffle(last)
        for start in range(0, len(last), self._size):
            yield last[start : start + self._size]
