"""What one token delivers, and where each part of it lies.

Owns:  Layout, and the slot: the unit in which rows are placed.
Runs:  in workers, in EngineCore (what a request needs), in front-ends (what came). numpy,
       no torch.
From:  encoding.   To: program, packer, and whoever takes a batch apart.

Promise: the offsets of a token's parts follow from its layout and the size of a raw row,
so that no batch says them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from vllm_scope.encoding import Encoding
from vllm_scope.sites import boundary_of_point

#: The unit of the arena. Rows and a token's scores start at a multiple of it.
SLOT_BYTES = 16
#: float32 scores in a slot.
SCORES_PER_SLOT = SLOT_BYTES // 4


def slots_of_row(row_bytes: int) -> int:
    return -(-row_bytes // SLOT_BYTES)


@dataclass(frozen=True)
class Layout:
    """What one token delivers: its rows, then its scores, then its encoded rows.

    Taps write rows as they are; what is encoded, is so on its way out of the arena. So a
    token has one layout in the arena, `arena`, and this one behind it.

    Attributes:
        points: where its rows are read, ascending; one row each.
        scores: (boundary, probe number) of its scores, ascending.
        encoded: of each encoding the points of its rows, ascending. A point may be here
            and among `points`.
    """

    points: tuple[int, ...] = ()
    scores: tuple[tuple[int, int], ...] = ()
    encoded: tuple[tuple[Encoding, tuple[int, ...]], ...] = ()

    def slots(self, row_slots: int) -> int:
        """Slots that a token takes.

        Args:
            row_slots: of a row that is not encoded.
        """
        size = self.plain_slots(row_slots)
        for encoding, points in self.encoded:
            size += len(points) * slots_of_row(encoding.row_bytes)
        return size

    def plain_slots(self, row_slots: int) -> int:
        """Slots before the first encoded row."""
        return len(self.points) * row_slots + math.ceil(len(self.scores) / SCORES_PER_SLOT)

    def encoded_at(self, row_slots: int) -> Iterator[tuple[Encoding, tuple[int, ...], int, int]]:
        """Of each encoding: it, its points, the first slot of their rows, slots of a row."""
        first = self.plain_slots(row_slots)
        for encoding, points in self.encoded:
            num_slots = slots_of_row(encoding.row_bytes)
            yield encoding, points, first, num_slots
            first += len(points) * num_slots

    @cached_property
    def arena(self) -> Layout:
        """As taps write it: each point's row once, and the scores."""
        if not self.encoded:
            return self
        points = {*self.points, *(point for _, some in self.encoded for point in some)}
        return Layout(tuple(sorted(points)), self.scores)

    def at(self, boundary: int) -> Layout:
        """The part that is of one tap."""
        return Layout(
            _points_at(self.points, boundary),
            tuple(s for s in self.scores if s[0] == boundary),
            tuple(
                (encoding, here)
                for encoding, points in self.encoded
                if (here := _points_at(points, boundary))
            ),
        )


def _points_at(points: tuple[int, ...], boundary: int) -> tuple[int, ...]:
    return tuple(p for p in points if boundary_of_point(p) == boundary)


def boundaries_of(layout: Layout) -> set[int]:
    """Where a token of this layout delivers something."""
    return {boundary_of_point(p) for p in layout.arena.points} | {b for b, _ in layout.scores}
