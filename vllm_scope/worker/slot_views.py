"""Views of rows in slots of the arena or of a batch.

Owns:  Grid (for rows at regular distances), `gathered` (for rows at any slots), WORDS.
Runs:  on the threads of packer and summing.

All rows are moved as int64 words. A slot has WORDS words, and a row starts at a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from vllm_scope.batch.by_position import Ints
from vllm_scope.program.layout import SLOT_BYTES

#: How many int64 words a slot has.
WORDS = SLOT_BYTES // 8


class Grid(NamedTuple):
    """The first slots of rows. The slots are at regular distances along three axes: parts, tokens
    and points. If all tokens have one layout, their rows usually form a grid.

    Attributes:
        first: the grid's first slot.
        shape: the number of entries along each axis.
        steps: along each axis, the number of slots from one entry to the next entry.
    """

    first: int
    shape: tuple[int, int, int]
    steps: tuple[int, int, int]

    @staticmethod
    def of(first: int, num_tokens: int, step: int, places: Ints) -> Grid | None:
        """The grid of the rows of tokens that all have the same layout. None if `places` are
        descending or not at regular distances, because torch cannot make a view of such rows.

        Args:
            first: The first token's first slot.
            step: The number of slots of a token.
            places: [num_parts, num_points], first slots, relative to the token's first slot.
        """
        steps = []
        for axis in (0, 1):
            found = np.diff(places, axis=axis)
            if found.size and (found != found[0, 0]).any():
                return None
            steps.append(int(found[0, 0]) if found.size else 0)
        if min(steps) < 0:
            return None
        shape = len(places), num_tokens, places.shape[1]
        return Grid(first + int(places[0, 0]), shape, (steps[0], step, steps[1]))

    @staticmethod
    def of_tokens(firsts: Ints) -> Grid | None:
        """The grid of one row per token. None if the slots are descending or not at regular
        distances.

        Args:
            firsts: [n], n > 0, the rows' first slots.
        """
        return Grid.of(0, 1, 0, firsts[None])

    def view(self, words: Tensor, num_slots: int) -> Tensor:
        """A view of the rows, [parts, tokens, points, words of a row]. Each row has `num_slots`
        slots.

        Args:
            words: int64 [slots, WORDS], contiguous.
        """
        steps = (*(step * WORDS for step in self.steps), 1)
        at = words.storage_offset() + self.first * WORDS
        return words.as_strided((*self.shape, num_slots * WORDS), steps, at)

    def rows(self, words: Tensor, num_slots: int) -> Tensor:
        """The rows, int64 [n, words of a row], in the order of `view`: a view, or a copy."""
        return self.view(words, num_slots).flatten(0, 2)


def gathered(words: Tensor, firsts: Tensor, num_slots: int) -> Tensor:
    """A copy of rows, int64 [n, words of a row]. Each row has `num_slots` slots.

    Args:
        words: int64 [slots, WORDS], contiguous.
        firsts: int64 [n], on the device of `words`.
    """
    # Row i of this view starts at slot i. The rows overlap.
    places = (len(words) - num_slots + 1, num_slots * WORDS)
    return words.as_strided(places, (WORDS, 1)).index_select(0, firsts)
