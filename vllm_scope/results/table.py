"""Values of one request by column, in the order of their arrival.

Owns:  Table, and ArrivedParts (what a snapshot sees of the tables).
Runs:  in the front-end; the receiver's thread and the copiers write, any thread reads.
From:  buffer.   To: result.

Promise: memory that a snapshot shares is never written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_scope.batch.by_position import Part
from vllm_scope.results.result import What


class TableKey(NamedTuple):
    """Identifies a table of one request.

    Attributes:
        what: what the table holds.
        columns: all points of the layout with such rows.
        also: as in Layout.
    """

    what: What
    columns: tuple[int, ...]
    also: tuple[tuple[int, int], ...] = ()

    def names(self, wanted: Set[int]) -> dict[int, tuple[int, ...]]:
        """Column -> the wanted points whose values it has. Columns with none are left out."""
        called = {column: [column] for column in self.columns}
        for name, column in self.also:
            if column in called:
                called[column].append(name)
        found = {column: tuple(n for n in names if n in wanted) for column, names in called.items()}
        return {column: names for column, names in found.items() if names}


class Table:
    """Values of some columns of one request, in the order of their arrival.

    A column is a point. Append-only, so snapshots share its memory.

    Args:
        names: as TableKey.names returns them.

    Attributes:
        columns: the points.
    """

    def __init__(
        self, names: Mapping[int, tuple[int, ...]], value_bytes: int, dtype: torch.dtype
    ) -> None:
        self.columns, self._names = tuple(names), tuple(names.values())
        self._dtype = dtype
        # numpy releases the GIL while it copies. The values are bytes, because it has no bf16.
        self._values = np.empty((0, len(names), value_bytes), np.uint8)
        #: int64 [2, num_sets, room]: positions, and arrival numbers among all of the request's
        #: values. Columns share one set until one of them gets values alone.
        self._labels = np.empty((2, 1, 0), np.int64)
        #: [num_sets], the number of values in each column.
        self._counts = [0]

    def write(self, labels: np.ndarray, values: np.ndarray, room: int) -> list[int]:
        """Add tokens with a value of every column; snapshots do not see them before `commit`.

        Args:
            labels: int64 [2, num_tokens], positions and arrivals.
            values: uint8 [num_tokens, num_columns, bytes].
            room: tokens to make room for, if the table must grow.

        Returns:
            The argument of `commit`.
        """
        first = self._counts[0]
        if len(self._counts) > 1 and self._counts.count(first) != len(self._counts):
            # A column lost a message, so the columns end at different places.
            counts = self._counts
            for at, column in enumerate(self.columns):
                counts = self.write_one(column, labels, values[:, at], room, counts)
            return counts
        last = first + len(values)
        if last > len(self._values):
            self._make_room(last, room, first)
        self._values[first:last] = values
        self._labels[:, :, first:last] = labels[:, None]
        return [last] * len(self._counts)

    def write_one(
        self,
        column: int,
        labels: np.ndarray,
        values: np.ndarray,
        room: int,
        counts: list[int] | None = None,
    ) -> list[int]:
        """Add tokens with a value of one column, uint8 [num_tokens, bytes].

        Args:
            counts: what the last call returned, if its values are not committed yet.
        """
        if len(self._counts) < len(self.columns):
            # Set the counts last: a snapshot on another thread then finds a set for each count.
            self._labels = self._labels.repeat(len(self.columns), axis=1)
            self._counts = self._counts * len(self.columns)
        at = self.columns.index(column)
        counts = list(self._counts if counts is None else counts)
        first = counts[at]
        last = first + len(values)
        if last > len(self._values):
            self._make_room(last, room, max(counts))
        self._values[first:last, at] = values
        self._labels[:, at, first:last] = labels
        counts[at] = last
        return counts

    def commit(self, counts: list[int]) -> None:
        """Let snapshots see what was written."""
        self._counts = counts

    def _make_room(self, last: int, room: int, used: int) -> None:
        size = max(last, room, 2 * len(self._values))
        values = np.empty((size, *self._values.shape[1:]), np.uint8)
        labels = np.empty((*self._labels.shape[:2], size), np.int64)
        labels[:, :, :used] = self._labels[:, :, :used]
        values[:used] = self._values[:used]
        self._values, self._labels = values, labels

    def freeze(self) -> _Frozen:
        """The values so far."""
        # Read the counts first: another thread may replace the arrays by larger ones meanwhile.
        counts = tuple(self._counts)
        return _Frozen(self._names, counts, self._labels, self._values, self._dtype)


@dataclass(frozen=True)
class _Frozen:
    """The contents of a table at one time."""

    names: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    labels: np.ndarray
    values: np.ndarray
    dtype: torch.dtype

    def parts(self) -> dict[int, Part]:
        """Name of a column -> its values, as views."""
        if not self.values.size:
            return {}
        labels, counts = self.labels, self.counts
        values = torch.from_numpy(self.values).view(self.dtype)
        if len(counts) == 1:
            # A shared view, so that ScopeResult counts each table once.
            positions, arrivals = labels[:, 0, : counts[0]]
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
    """A result's parts, made at first use: most snapshots of a streaming request are hardly
    read."""

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

    def __iter__(self) -> Iterator[What]:
        return iter(dict.fromkeys(what for what, _ in self._tables))

    def __len__(self) -> int:
        return len(dict.fromkeys(what for what, _ in self._tables))
