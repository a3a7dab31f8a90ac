"""Values of one request by column, in the order of their arrival.

Owns:  Table, FrozenTable (a table's contents in one snapshot), ArrivedParts (all tables' parts).
Runs:  in the front-end. The receiver's thread makes room for values. This thread and the copiers
       write the values. Any thread may read the values.
From:  buffer.   To: copiers (the copies to make), result.

Promise: no thread changes a value that a snapshot has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from vllm_scope.batch.by_position import Part
from vllm_scope.results.allocator import PLAIN, CachingAllocator
from vllm_scope.results.copiers import Copy
from vllm_scope.results.snapshot import What

#: `write` itself copies values of at most this number of bytes, because threads would need longer
#: for small copies.
SMALL_BYTES = 4096


class TableKey(NamedTuple):
    """The key of a table of one request.

    Attributes:
        what: the kind of the table's values.
        columns: all points of the layout (Layout) with values of this kind. Each point is a column.
        also: as in Layout: pairs (point, column) for further points whose values the column has.
    """

    what: What
    columns: tuple[int, ...]
    also: tuple[tuple[int, int], ...] = ()

    def names(self, wanted: Set[int]) -> dict[int, tuple[int, ...]]:
        """For each column, the wanted points whose values the column has. Columns without wanted
        points are left out."""
        called = {column: [column] for column in self.columns}
        for name, column in self.also:
            if column in called:
                called[column].append(name)
        found = {column: tuple(n for n in names if n in wanted) for column, names in called.items()}
        return {column: names for column, names in found.items() if names}


class Table:
    """The values of some columns of one request, in order of arrival.

    A column is named by a point. Values are only appended, therefore snapshots can share the
    table's memory.

    Args:
        names: the points of each column, in the form that TableKey.names returns.
        allocator: makes the memory for the values.

    Attributes:
        columns: the point that names each column.
    """

    def __init__(
        self,
        names: Mapping[int, tuple[int, ...]],
        value_bytes: int,
        dtype: torch.dtype,
        allocator: CachingAllocator = PLAIN,
    ) -> None:
        self.columns, self._names = tuple(names), tuple(names.values())
        self._dtype, self._allocator = dtype, allocator
        # The dtype is uint8, because numpy has no bf16.
        self._values = np.empty((0, len(names), value_bytes), np.uint8)
        #: The labels, int64 [2, num_sets, room]: positions, and arrival numbers (Pending.add). All
        #: columns share one set of labels until `write_one` adds values to a single column.
        self._labels = np.empty((2, 1, 0), np.int64)
        #: The number of values in each column, or one number if all columns have the same labels.
        #: `_counts` counts only committed values, which snapshots see. `_placed` also counts added
        #: values that are not committed.
        self._counts, self._placed = [0], [0]
        #: The first `_num_alike` values have the same labels in all columns. None if the columns
        #: can no longer share labels.
        self._num_alike: int | None = 0
        #: The added values that are not copied yet: (index into `_values`, the values).
        self._coming: list[tuple[slice | tuple[slice, int], np.ndarray]] = []

    def write(self, labels: np.ndarray, values: np.ndarray, room: int) -> None:
        """Add tokens with a value in every column. `copies` then returns the copies that the caller
        must make.

        Args:
            labels: int64 [2, num_tokens], positions and arrivals.
            values: uint8 [num_tokens, num_columns, bytes].
            room: number of tokens to make room for, if the table must grow.
        """
        first = self._placed[0]
        if len(self._placed) > 1 and self._placed.count(first) != len(self._placed):
            # A column missed a message, therefore the columns have different lengths.
            for at, column in enumerate(self.columns):
                self.write_one(column, labels, values[:, at], room)
            return
        last = first + len(values)
        self._make_room(last, room)
        if values.nbytes <= SMALL_BYTES:
            self._values[first:last] = values
        else:
            self._coming.append((slice(first, last), values))
        self._labels[:, :, first:last] = labels[:, None]
        self._placed = [last] * len(self._placed)

    def write_one(self, column: int, labels: np.ndarray, values: np.ndarray, room: int) -> None:
        """Add tokens with a value in one column. values: uint8 [num_tokens, bytes]."""
        if len(self._counts) < len(self.columns):
            # Set the counts after the labels, because a snapshot on another thread needs a label
            # for each counted value.
            if self._labels.shape[1] == 1:
                self._labels = self._labels.repeat(len(self.columns), axis=1)
            if self._num_alike is not None:
                self._num_alike = self._counts[0]
            self._counts = self._counts * len(self.columns)
            self._placed = self._placed * len(self.columns)
        at = self.columns.index(column)
        first = self._placed[at]
        last = first + len(values)
        self._make_room(last, room)
        self._coming.append(((slice(first, last), at), values))
        self._labels[:, at, first:last] = labels
        self._placed = [*self._placed[:at], last, *self._placed[at + 1 :]]

    def copies(self) -> list[Copy]:
        """The copies that the caller must make before `commit`. `write` itself has already copied
        small values."""
        return [(self._values[where], values) for where, values in self._coming]

    def commit(self) -> None:
        """Let snapshots see the values that were added and copied."""
        self._coming.clear()
        self._counts = self._placed
        if len(self._counts) > 1 and self._num_alike is not None:
            self._rejoin(self._num_alike)

    def _rejoin(self, num_alike: int) -> None:
        """Let columns share labels again, if all columns have equally many values and the same
        labels. This is so when a message for each tap of a step has arrived."""
        count = self._counts[0]
        if self._counts.count(count) < len(self._counts):
            return
        new = self._labels[:, :, num_alike:count]
        if (new == new[:, :1]).all():
            self._counts = self._placed = [count]
        else:
            self._num_alike = None

    def revert(self) -> None:
        """Forget the values that were added and not committed."""
        self._coming.clear()
        self._placed = self._counts

    def _make_room(self, last: int, room: int) -> None:
        if last <= len(self._values):
            return
        size, used = max(last, room, 2 * len(self._values)), max(self._placed)
        labels = np.empty((*self._labels.shape[:2], size), np.int64)
        labels[:, :, :used] = self._labels[:, :, :used]
        values = self._allocator.empty(size, *self._values.shape[1:])
        values[:used] = self._values[:used]
        self._values, self._labels = values, labels

    def freeze(self) -> FrozenTable:
        """The contents of the table now."""
        # Read the counts before the arrays, because another thread may replace the arrays.
        counts = tuple(self._counts)
        return FrozenTable(self._names, counts, self._labels, self._values, self._dtype)


@dataclass(eq=False)  # not frozen, because a frozen object takes twice the time to make
class FrozenTable:
    """The contents of a table at one time. The contents never change.

    Attributes:
        names: for each column, the points whose values the column has.
        counts: number of values of each column, or one number if all columns have the same labels.
    """

    names: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    labels: np.ndarray
    values: np.ndarray
    dtype: torch.dtype

    def together(self) -> tuple[Part, np.ndarray] | None:
        """Returns all columns as one Part of uint8 rows, and the same bytes as an array [n,
        num_columns, bytes]. None if the table is empty, or if the columns do not share their
        labels."""
        if not self.values.size or len(self.counts) != 1:
            return None
        values = self.values[: self.counts[0]]
        return Part(*self._shared, torch.from_numpy(values)), values

    @cached_property
    def _shared(self) -> tuple[np.ndarray, np.ndarray]:
        """The positions and arrivals of all columns. This property may be used only if the columns
        share their labels. Each access returns the same objects."""
        positions, arrivals = self.labels[:, 0, : self.counts[0]]
        return positions, arrivals

    def parts(self) -> dict[int, Part]:
        """Views of the values of each point, by point."""
        if not self.values.size:
            return {}
        labels, counts = self.labels, self.counts
        values = torch.from_numpy(self.values).view(self.dtype)
        if len(counts) == 1:
            # All columns share these arrays, because ScopeResult counts columns with identical
            # arrays together.
            positions, arrivals = self._shared
            return {
                name: Part(positions, arrivals, rows)
                for names, rows in zip(self.names, values[: counts[0]].unbind(1), strict=True)
                for name in names
            }
        return {
            name: Part(labels[0, at, :count], labels[1, at, :count], values[:count, at])
            for at, (names, count) in enumerate(zip(self.names, counts, strict=True))
            for name in names
        }


class ArrivedParts(Mapping[What, Mapping[int, list[Part]]]):
    """The parts of a result. Parts are made at first use, because the snapshots of a streaming
    request are seldom read."""

    def __init__(self, tables: Mapping[TableKey, Table]) -> None:
        self._tables = [(key.what, table.freeze()) for key, table in list(tables.items())]
        self._made: dict[What, dict[int, list[Part]]] = {}

    def __getitem__(self, what: What) -> Mapping[int, list[Part]]:
        found = self._made.get(what)
        if found is None:
            found = {}
            for kind, table in self._tables:
                if kind == what:
                    for column, part in table.parts().items():
                        found.setdefault(column, []).append(part)
            self._made[what] = found
        return found

    def only_table(self, what: What) -> FrozenTable | None:
        """The table of a kind of values. None if there is no table, or several tables, with values
        of this kind."""
        found = [table for kind, table in self._tables if kind == what]
        return found[0] if len(found) == 1 else None

    def only(self, kinds: Set[What]) -> ArrivedParts:
        """Only the parts whose values are of these kinds. The new object keeps no reference to the
        memory of other kinds."""
        found = ArrivedParts({})
        found._tables = [(what, table) for what, table in self._tables if what in kinds]
        return found

    def __iter__(self) -> Iterator[What]:
        return iter(dict.fromkeys(what for what, _ in self._tables))

    def __len__(self) -> int:
        return len(dict.fromkeys(what for what, _ in self._tables))
