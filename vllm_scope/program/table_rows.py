"""Computes all programs of a request together, as rows of the op table.

Owns:  OpList (an ordered list of every operation that a token of a spec can get), and TableRows.
Runs:  in workers, when a request whose programs have vectors arrives; in EngineCore and in the
       front-end, to compute the request's Cost. numpy, no torch.
From:  compiled.   To: graph.tap.program_tables, core.admission.

The docstring of compiled.py explains the words pick, column and point.

Promise: the programs are equal to the programs that `Compiled.program` builds one by one. But the
computation of all programs together is faster. A request can have hundreds of programs and
thousands of operations, and the thread that launches the model waits for the result.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_scope.program.layout import SLOT_BYTES, Widths, slots_of_row
from vllm_scope.program.operations import OP_READ, Op, row_key
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Head, Told
from vllm_scope.request.sites import LEVELS, boundary_of_point, kind_of_point

Ints = NDArray[np.int64]


class Listed(NamedTuple):
    """An operation, and the picks that give it to a token. The token gets the operation if at least
    one of these picks has a value other than 0 for the token.

    Attributes:
        boundary, level, rank: the three numbers by which operations are sorted.
        op: the operation. For a replacement, the operation with the first of the new rows.
        picks: the indices of picks. Empty if every token gets the operation.
        row: for OP_READ, the point at which the row is read. Otherwise -1.
        values: the rows of a replacement. The value of the pick is the number of the row, counted
            from 1.
    """

    boundary: int
    level: int
    rank: int
    op: Op
    picks: Sequence[int]
    row: int = -1
    values: Array | None = None


@dataclass(frozen=True, eq=False)
class TableRows:
    """The distinct programs of some columns.

    Attributes:
        index: int64 [num_columns], the program of each column.
        exists: bool [num_programs]; False for the program that does nothing.
        fixed: int32 [num_ops, 8]: code, register, source, and the numbers a to e as float32 bits.
        words: int32 [num_ops, 2], where the operation writes its result, as two offsets in words of
            4 bytes. The first offset counts from the token's first slot. The second offset counts
            from the token's first slot of the same tap. Both are -1 if there is no result.
        vector: int64 [num_ops], the index of the vector in `keys` and `vectors`, or -1 for none.
        following: int64 [num_ops], the index of the next operation at the same tap, or -1 for none.
        heads: int64 [num_heads], for each program and each of its taps, the index of the first
            operation. (This is the head of a list of operations, and not a Head.)
        head_program, head_boundary: int64 [num_heads], the program and the boundary of each entry
            of `heads`.
        keys: the distinct keys of the operations' vectors. Vectors with equal keys are equal.
        vectors: the vector of each key, float32 [width of a row].
        num_slots: int64 [num_programs], the number of slots of a token in the arena.
        num_delivered: int64 [num_programs], the number of slots of a token in the ring, after heads
            are applied.
    """

    index: Ints
    exists: NDArray[np.bool_]
    fixed: NDArray[np.int32]
    words: NDArray[np.int32]
    vector: Ints
    following: Ints
    heads: Ints
    head_program: Ints
    head_boundary: Ints
    keys: list[bytes]
    vectors: list[NDArray[np.float32]]
    num_slots: Ints
    num_delivered: Ints

    @property
    def num_ops(self) -> int:
        return len(self.fixed)


@dataclass(frozen=True, eq=False)
class _Selected:
    """The operations and the cells of the distinct programs of some columns. A cell is a value that
    a token can deliver: a head, and the point of the row to which the head is applied.

    Attributes:
        index: int64 [num_columns], the program of each column.
        exists: bool [num_programs]; False for the program that does nothing.
        here: bool [number of operations, num_programs], True if the program has the operation.
        cells: bool [number of cells and of points, num_programs]. True if the program has the
            cell. After the cells, there is one entry for each requested point that shares its row
            with another requested point; True if the program reads this point.
        program, op, vector: int64 [num_ops]. For each operation: the index of its program, its
            index in the OpList, and the index of its vector (-1 for none).
    """

    index: Ints
    exists: NDArray[np.bool_]
    here: NDArray[np.bool_]
    cells: NDArray[np.bool_]
    program: Ints
    op: Ints
    vector: Ints


class OpList:
    """Every operation that a token of a spec can get, and every row that a token can deliver."""

    def __init__(
        self,
        listed: Iterable[Listed],
        reads: Iterable[tuple[int, tuple[int, ...], Head | None]],
        rows: Mapping[int, int],
        num_picks: int,
    ) -> None:
        """
        Args:
            reads, rows: the attributes of Compiled with these names.
        """
        #: The picks that need each cell (head, point of the row).
        cells: dict[tuple[Head | None, int], list[int]] = {}
        #: The picks that need a point, for each point that shares its row with another point. If
        #: two tokens deliver the same row under different points, the tokens have different
        #: programs.
        names: dict[int, list[int]] = {}
        shared = {row for point, row in rows.items() if point != row}
        for pick, points, head in reads:
            for point in points:
                cells.setdefault((head, rows[point]), []).append(pick)
                if rows[point] in shared:
                    names.setdefault(point, []).append(pick)
        read: dict[int, list[int]] = {}
        for (head, row), picks in cells.items():
            if not isinstance(head, Told):
                read.setdefault(row, []).extend(picks)
        reading = (
            Listed(boundary_of_point(row), row % LEVELS, 1, Op(OP_READ), picks, row)
            for row, picks in read.items()
        )
        ops = sorted((*listed, *reading), key=lambda one: one[:3])
        self._num_ops = len(ops)
        self._rows = [one.row for one in ops if one.row >= 0]
        self._told = sorted(
            (cell for cell in cells if isinstance(cell[0], Told)),
            key=lambda cell: (cell[0].text, cell[1]),  # type: ignore[union-attr]
        )
        plain = [cell for cell in cells if not isinstance(cell[0], Told)]
        self._cells = [*self._told, *plain]
        of_cells = [*(cells[cell] for cell in self._cells), *names.values()]
        self._set_presence(ops, of_cells, num_picks)
        self._marks = _marks(len(self._starts))
        self._set_ops(ops)
        if self._cells:
            self._set_stores(ops, rows)

    def _set_presence(
        self, ops: Sequence[Listed], of_cells: Sequence[Sequence[int]], num_picks: int
    ) -> None:
        # An operation that every token gets has no pick in `ops`. Here, such an operation gets a
        # pick with the index `num_picks`, which selects every token.
        picks = [one.picks or (num_picks,) for one in ops] + list(of_cells)
        self._picks = np.array([pick for some in picks for pick in some], np.int64)
        self._starts = np.cumsum([0, *map(len, picks)])[:-1]

    def _set_ops(self, ops: Sequence[Listed]) -> None:
        self._boundary = np.array([one.boundary for one in ops], np.int64)
        given = [(op.a, op.b, op.c, op.d, op.e) for op in (one.op for one in ops)]
        numbers = np.array(given, np.float64)
        try:
            with np.errstate(over="raise"):
                bits = numbers.astype(np.float32).view(np.int32).reshape(-1, 5)
        except FloatingPointError:
            raise OverflowError("float32 cannot hold a number of an operation") from None
        codes = [(one.op.code, one.op.register, one.op.source) for one in ops]
        self._fixed = np.empty((len(ops), 8), np.int32)
        self._fixed[:, :3] = codes or np.zeros((0, 3))
        self._fixed[:, 3:] = bits
        #: The key of each vector, and the vector as (array, index of a row). With the index -1, the
        #: vector is the whole array.
        self._keys: list[bytes] = []
        self._arrays: list[tuple[Array, int]] = []
        self._vector = np.full(len(ops), -1, np.int64)
        self._replaces = np.full(len(ops), -1, np.int64)
        #: For each vector, the index of the first vector with the same content.
        same: list[int] = []
        known: dict[bytes, int] = {}
        for i, one in enumerate(ops):
            array = one.op.vector if one.values is None else one.values
            if array is None:
                continue
            if one.values is not None:
                self._replaces[i] = one.picks[0]
            at = known.setdefault(array.digest, len(self._keys))
            self._vector[i] = at
            if at < len(self._keys):
                continue
            if one.values is None:
                self._keys.append(array.digest)
                self._arrays.append((array, -1))
                same.append(at)
            else:
                rows = range(array.shape[0])
                self._keys += [row_key(array, row) for row in rows]
                self._arrays += [(array, row) for row in rows]
                same += (at + _firsts(array.numpy)).tolist()
        self._same = np.array([*same, -1], np.int64)

    def _set_stores(self, ops: Sequence[Listed], rows: Mapping[int, int]) -> None:
        """Set the places where operations store their results.

        For an operation that reads, `_store` is the index of the row. Some operations compute a
        number of a bank. For such an operation, `_store` is the number of rows plus the index of
        the bank, and `_index` is the index of the number in the bank. For any other operation,
        `_store` is -1."""
        told = {cell: len(self._rows) + i for i, cell in enumerate(self._told)}
        index, next_row = [], 0
        for one in ops:
            at = one.op.told
            if one.row >= 0:
                index.append((next_row, 0))
                next_row += 1
            elif at is None:
                index.append((-1, 0))
            else:
                cell = at[1], rows.get(at[0].point(), -1)
                index.append((told.get(cell, -1), at[2]))
        found = np.array(index, np.int64).reshape(-1, 2)
        self._store, self._index = found[:, 0], found[:, 1]
        #: The indices of the operations that read, in the order of `_rows`.
        self._read_ops = np.flatnonzero([one.row >= 0 for one in ops])

    def _present(self, columns: NDArray[np.int32]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """What tokens with these columns get. The first array has the operations of each token,
        bool [number of operations, num_columns]. The second array has the values that each token
        delivers, in the form of `_Selected.cells`."""
        picked = np.ones((len(columns) + 1, columns.shape[1]), bool)
        np.greater(columns, 0, out=picked[:-1])
        has = picked[self._picks]
        if len(self._picks) > len(self._starts):
            has = np.bitwise_or.reduceat(has.view(np.uint8), self._starts, axis=0).view(bool)
        return has[: self._num_ops], has[self._num_ops :]

    def _select(self, columns: NDArray[np.int32]) -> _Selected:
        here, cells = self._present(columns)
        program, op = np.divmod(np.flatnonzero(here.T), max(self._num_ops, 1))
        vector, pick = self._vector[op], self._replaces[op]
        if (pick >= 0).any():
            vector = np.where(pick >= 0, vector + columns[pick, program] - 1, vector)
            vector = self._same[vector]
        # Each operation of a program adds a random number to the program's sum. Programs with equal
        # sums count as equal. Different programs have equal sums only with negligible probability.
        sums = np.zeros(len(op) + 1, np.int64)
        np.cumsum(self._marks[op] * (2 * vector + 3), out=sums[1:])
        sums = sums[np.cumsum(here.sum(axis=0))]
        sums[1:] -= sums[:-1].copy()
        if self._cells:
            sums += self._marks[self._num_ops :] @ cells
        first: dict[int, int] = {}
        index = [first.setdefault(one, i) for i, one in enumerate(sums.tolist())]
        if len(first) < len(index):
            kept = np.array(list(first.values()))
            number = np.full(len(index), -1, np.int64)
            number[kept] = range(len(kept))
            own = number[program] >= 0
            program, op, vector = number[program[own]], op[own], vector[own]
            here, cells, index = here[:, kept], cells[:, kept], number[index].tolist()
        exists = np.logical_or(here.any(axis=0), cells.any(axis=0))
        return _Selected(np.array(index, np.int64), exists, here, cells, program, op, vector)

    def count(self, columns: NDArray[np.int32]) -> tuple[int, int, list[bytes], set[Head]]:
        """Count the programs of tokens with these columns, [num_picks, num_columns]. Returns the
        number of distinct programs, the number of operations in all programs, the keys of all
        vectors, and the heads that at least one program needs."""
        found = self._select(columns)
        keys = [self._keys[i] for i in np.unique(found.vector) if i >= 0]
        some = np.flatnonzero(found.cells[: len(self._cells)].any(axis=1))
        heads = {head for head, _ in (self._cells[i] for i in some) if head is not None}
        return int(found.exists.sum()), len(found.op), keys, heads

    def at(self, columns: NDArray[np.int32], widths: Widths) -> TableRows:
        """The TableRows of the programs of `columns`, [num_picks, num_columns]."""
        found = self._select(columns)
        program, op = found.program, found.op
        boundary = self._boundary[op]
        new = np.ones(len(op), bool)
        new[1:] = (program[1:] != program[:-1]) | (boundary[1:] != boundary[:-1])
        heads = np.flatnonzero(new)
        following = np.arange(1, len(op) + 1)
        following[heads[1:] - 1] = -1
        following[-1:] = -1
        used = np.zeros(len(self._keys) + 1, bool)  # the last entry stands for no vector
        used[found.vector] = True
        given = np.flatnonzero(used[:-1]).tolist()
        vector = np.full(len(used), -1, np.int64)
        vector[given] = range(len(given))
        vector = vector[found.vector]
        words, num_slots, num_delivered = self._stored(found, widths)
        return TableRows(
            found.index, found.exists, self._fixed[op], words, vector, following, heads,
            program[heads], boundary[heads], [self._keys[i] for i in given],
            [array.numpy if row < 0 else array.numpy[row] for array, row in map(
                self._arrays.__getitem__, given)],
            num_slots, num_delivered,
        )  # fmt: skip

    def _stored(self, found: _Selected, widths: Widths) -> tuple[NDArray[np.int32], Ints, Ints]:
        """The values (words, num_slots, num_delivered) of TableRows for these programs."""
        here, cells, op, program = found.here, found.cells, found.op, found.program
        num_programs = here.shape[1]
        if not self._cells:
            none = np.zeros(num_programs, np.int64)
            return np.full((len(op), 2), -1, np.int32), none, none
        num_told = len(self._told)
        sizes = [widths.row_slots[kind_of_point(row)] for row in self._rows]
        sizes += [slots_of_row(head.row_bytes) for head, _ in self._told if head is not None]
        places = [*self._rows, *(row for _, row in self._told)]
        stored = np.vstack((here[self._read_ops], cells[:num_told]))
        slots = stored * np.array(sizes, np.int64)[:, None]
        ends = np.cumsum(slots, axis=0)
        # Within the slots of one tap, rows come before the numbers of banks, as in the whole
        # layout.
        tap = np.array([boundary_of_point(point) for point in places])
        by_tap = np.argsort(tap, kind="stable")
        within = np.empty_like(slots)
        within[by_tap] = np.cumsum(slots[by_tap], axis=0) - slots[by_tap]
        first = by_tap[np.searchsorted(tap[by_tap], tap)]
        within -= within[first]
        store = self._store[op]
        firsts = np.stack(((ends - slots)[store, program], within[store, program]), axis=1)
        words = SLOT_BYTES // 4 * firsts + self._index[op][:, None]
        nothing = (store < 0) | ~stored[store, program]
        words[nothing] = -1
        made = [
            widths.row_slots[kind_of_point(row)] if head is None else slots_of_row(head.row_bytes)
            for head, row in self._cells
        ]
        delivered = np.array(made, np.int64) @ cells[: len(made)]
        return words.astype(np.int32), ends[-1], delivered


def _firsts(rows: NDArray[np.float32]) -> Ints:
    """The index of the first row with the same bits, for each row: [num_rows]."""
    sums = rows.view(np.int32) @ _marks(rows.shape[1])
    _, firsts, index = np.unique(sums, return_index=True, return_inverse=True)
    found: Ints = firsts[index]
    return found


def _marks(count: int) -> Ints:
    """Random numbers, [count]. Because they are random, no client can make different programs or
    rows whose sums are equal."""
    found = _random[-1]
    while len(found) < count:  # another thread can append at the same time
        found = np.frombuffer(secrets.token_bytes(16 * len(found)), np.int64)
        _random.append(found)
    return found[:count]


_random = [np.frombuffer(secrets.token_bytes(8 * 4096), np.int64)]
