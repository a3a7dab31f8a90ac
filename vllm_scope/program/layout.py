"""The values that one token delivers, and the offset of each part.

Owns:  Layout, and the slot, which is the unit of memory for rows.
Runs:  in workers, in EngineCore (to count slots), in front-ends (to read batches). numpy, no torch.
From:  request.heads.   To: operations, worker.packer, and every file that reads a batch.

A head is a computation on a row, such as a codec or a bank of probes. A raw row is a row to which
no head was applied. A point is a place in the model at which rows are read (request.sites).

Promise: the layout of a token and the widths of raw rows determine the offsets of all parts.
Therefore a batch of rows contains no offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from vllm_scope.request.heads import Head, Summed, Told
from vllm_scope.request.sites import STREAM, boundary_of_point, kind_of_point

#: The number of bytes of a slot. The arena is divided into slots. Rows and scores begin at a slot.
SLOT_BYTES = 16
#: A numpy dtype of the size of one slot. With this dtype, the gathering of slots takes a tenth of
#: the time that it takes with single bytes.
SLOT = np.dtype(np.complex128)


def slots_of_row(row_bytes: int) -> int:
    return -(-row_bytes // SLOT_BYTES)


@dataclass(frozen=True)
class Widths:
    """The sizes of raw rows (rows that no codec has encoded).

    Attributes:
        row_bytes: the bytes of one row, without padding, for each kind of site (sites.KINDS). The
            tuple ends at the last kind that has taps.
    """

    row_bytes: tuple[int, ...]

    @staticmethod
    def of(row_sizes: Iterable[int], itemsize: int) -> Widths:
        """The Widths of rows with `row_sizes` numbers (by kind) of `itemsize` bytes each."""
        return Widths(tuple(size * itemsize for size in row_sizes))

    @cached_property
    def row_slots(self) -> tuple[int, ...]:
        """The number of slots of one row, by kind."""
        return tuple(map(slots_of_row, self.row_bytes))


@dataclass(frozen=True)
class Layout:
    """The values that one token delivers: its raw rows, and then the results of heads.

    Taps write raw rows to the arena, in the layout `arena`. Heads are applied to the rows when
    the rows leave the arena.

    Attributes:
        points: the points of the token's raw rows, ascending, one row for each point. If the
            request named several points that have the same row, only the first of them is in
            `points`.
        encoded: each head, and the points to whose rows it is applied, ascending. A point can also
            be in `points`. A head of the class Told needs no rows, because taps write its numbers
            directly.
        also: pairs of points (a, b), ascending. The request named both points, which have the same
            row, because no edit is between them. The row is delivered once, at point b.
    """

    points: tuple[int, ...] = ()
    encoded: tuple[tuple[Head, tuple[int, ...]], ...] = ()
    also: tuple[tuple[int, int], ...] = ()

    def slots(self, widths: Widths) -> int:
        """The number of slots of one token."""
        encoded = (len(some) * slots_of_row(head.row_bytes) for head, some in self.encoded)
        return self.plain_slots(widths) + sum(encoded)

    @cached_property
    def _kinds(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Each kind of site, with its points. Points of one kind are adjacent in `points`:
        ascending points are also in the order of their kinds."""
        if self.points and kind_of_point(self.points[-1]) == STREAM:  # the usual case is fast
            return ((STREAM, self.points),)
        return tuple((kind, tuple(some)) for kind, some in groupby(self.points, kind_of_point))

    def row_of(self, point: int) -> int:
        """The point under which the row of `point` is delivered: `point` itself, or a point with
        the same row."""
        return dict(self.also).get(point, point)

    def names_of(self, row: int) -> tuple[int, ...]:
        """All points that the request named for one row. `row` is the point under which the row is
        delivered."""
        return (row, *(point for point, first in self.also if first == row))

    def points_of(self, kind: int) -> tuple[int, ...]:
        """The points whose rows are of this kind."""
        return next((points for one, points in self._kinds if one == kind), ())

    def rows_at(self, widths: Widths) -> Iterator[tuple[int, tuple[int, ...], int, int]]:
        """For each kind, yield four values: the kind, its points, the first slot of their rows, and
        the number of slots of one row."""
        first = 0
        for kind, points in self._kinds:
            num_slots = widths.row_slots[kind]
            yield kind, points, first, num_slots
            first += len(points) * num_slots

    def row_slots(self, widths: Widths) -> dict[int, int]:
        """The first slot of each point's row, by the point."""
        return {
            point: first + i * num_slots
            for _, points, first, num_slots in self.rows_at(widths)
            for i, point in enumerate(points)
        }

    def slot_of(self, point: int, widths: Widths) -> int:
        """The first slot of a point's row. Raises ValueError if there is no such row."""
        kind = kind_of_point(point)
        for one, points, first, num_slots in self.rows_at(widths):
            if one == kind:
                return first + points.index(point) * num_slots
        raise ValueError(f"point {point} is not of this layout")

    def plain_slots(self, widths: Widths) -> int:
        """The number of slots of the raw rows. In memory, the raw rows are before all results of
        heads."""
        return sum(len(points) * widths.row_slots[kind] for kind, points in self._kinds)

    def encoded_at(self, widths: Widths) -> Iterator[tuple[Head, tuple[int, ...], int, int]]:
        """For each head, yield the head, its points, the first slot of its results, and the number
        of slots of one result."""
        first = self.plain_slots(widths)
        for head, points in self.encoded:
            num_slots = slots_of_row(head.row_bytes)
            yield head, points, first, num_slots
            first += len(points) * num_slots

    def made_at(self, head: Head, point: int, widths: Widths) -> int | None:
        """The first slot of a head's result for the row of a point. None if there is no result."""
        row = self.row_of(point)
        for one, points, first, num_slots in self.encoded_at(widths):
            if one == head and row in points:
                return first + points.index(row) * num_slots
        return None

    @property
    def arena(self) -> Layout:
        """The layout of the data that taps write to the arena, the device memory for results. It
        has the rows of `points`, the rows that heads need, and the numbers of heads of the class
        `Told`."""
        return self._arena or self

    @cached_property
    def _arena(self) -> Layout | None:
        """The layout for `arena`. None means that `arena` is this object itself. The object is not
        stored here, because an object that refers to itself stays in memory until Python collects
        cycles."""
        told = tuple(pair for pair in self.encoded if isinstance(pair[0], Told))
        if len(told) == len(self.encoded):
            return None
        points = set(self.points)
        points.update(p for pair in self.encoded if pair not in told for p in pair[1])
        return Layout(tuple(sorted(points)), told)

    @property
    def sent(self) -> Layout:
        """The layout of the data that leaves the device. Rows that are only added to sums are left
        out."""
        return self._sent or self

    @cached_property
    def _sent(self) -> Layout | None:
        """The layout for `sent`. None means that `sent` is this object itself, as for `_arena`."""
        kept = tuple(pair for pair in self.encoded if not isinstance(pair[0], Summed))
        return None if len(kept) == len(self.encoded) else Layout(self.points, kept, self.also)

    def at(self, boundary: int | None) -> Layout:
        """The part of this layout that one tap delivers. The whole layout if `boundary` is None."""
        if boundary is None:
            return self
        return Layout(
            _points_at(self.points, boundary),
            tuple(
                (head, here)
                for head, points in self.encoded
                if (here := _points_at(points, boundary))
            ),
            tuple(pair for pair in self.also if boundary_of_point(pair[0]) == boundary),
        )


def _points_at(points: tuple[int, ...], boundary: int) -> tuple[int, ...]:
    return tuple(p for p in points if boundary_of_point(p) == boundary)


def boundaries_of(layout: Layout) -> set[int]:
    """The boundaries at which a token with this layout delivers rows or numbers."""
    arena = layout.arena
    some = (arena.points, *(points for _, points in arena.encoded))
    return {boundary_of_point(p) for points in some for p in points}
