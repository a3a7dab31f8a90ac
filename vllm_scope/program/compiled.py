"""The programs of a spec. The values of the spec's picks for a token determine the token's program.

Owns:  Compiled, the limits of one request, and the cache of built programs.
Runs:  in workers, in EngineCore and in the front-end. numpy, no torch.
From:  compiler (makes a Compiled from actions), picks.   To: operations (builds the programs).

A program is the list of operations that taps run on one token's row. A pick is a selector and its
use, which is to edit or to deliver (program.picks). For each token, a pick has a value, which is 0
if the pick does not select the token. A column is the values of all picks for one token.

Places in the model are numbers (request.sites). A boundary is a place that can have a tap. The
edits of up to two sites apply at one boundary, as group 0 and then group 1. A row can be read
before, between and after these groups: each of these is a point.

Promise: a request that exceeds the limits is refused before any of its programs is built.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError
from vllm_scope.program.layout import Layout
from vllm_scope.program.operations import (
    OP_CHECK,
    OP_SET,
    Op,
    OpsOf,
    Program,
    build_program,
    row_key,
)
from vllm_scope.program.picks import Pick
from vllm_scope.program.ranges import ColumnRange, PicksKey, can_remember
from vllm_scope.program.table_rows import Listed, OpList
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Bank, Head, Told
from vllm_scope.request.nets import Net
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.sites import LEVELS

#: Limits of one request: the number of distinct programs, and the number of operations in all
#: programs. The reason for the limits: the thread that launches the model also writes the programs
#: to the device's tables. If the request edits, or if taps score its rows, the thread writes all
#: programs before the first step. This takes 0.3 us for each operation. If the request only reads,
#: the thread writes a program in the first step that needs it. This takes 15 us for each program
#: and 1.3 us for each operation.
MOST_PROGRAMS, MOST_OPS = 1024, 1 << 14
MOST_PROGRAMS_WITH_EDITS, MOST_OPS_WITH_EDITS = 512, 1 << 13
#: The largest number of bytes of programs that this process keeps, for all specs together.
REMEMBERED_BYTES = 64 << 20
_PROGRAM_BYTES, _OP_BYTES = 2048, 256

#: The cache Compiled.counts has at most MOST_COUNTS entries. A request can have an entry if it has
#: at most MOST_COUNTED_EDITS edits and at most MOST_COUNTED columns.
MOST_COUNTS, MOST_COUNTED_EDITS, MOST_COUNTED = 8, 8, 64

#: The values of all picks of a spec (Pick.values) for one token, [num_picks].
Column = NDArray[np.int32]


def as_columns(columns: Collection[bytes]) -> NDArray[np.int32]:
    """The columns with these bytes, as one array [num_picks, num_columns]."""
    return np.frombuffer(b"".join(columns), np.int32).reshape(len(columns), -1).T


class _Programs:
    """Limits the memory of all built programs. The least recently used programs are dropped first.

    Each Compiled holds its own programs (`built`). When a Compiled is freed, its programs are freed
    too. A dropped program is built again when a request needs it. If a program is dropped here,
    running requests keep this program.
    """

    def __init__(self) -> None:
        self._known: Remembered[tuple[weakref.ref[Compiled], bytes], None]
        self._known = Remembered(REMEMBERED_BYTES)

    def use(self, of: Compiled, column: bytes) -> None:
        self._known.get((of.ref, column))

    def put(self, of: Compiled, column: bytes, program: Program | None) -> None:
        of.built[column] = program
        size = _PROGRAM_BYTES + len(column) + (0 if program is None else _size_of(program))
        for (ref, gone), _ in self._known.put((of.ref, column), None, size):
            owner = ref()
            if owner is not None:
                owner.built.pop(gone, None)

    @property
    def num_bytes(self) -> int:
        return self._known.num_bytes


def _size_of(program: Program) -> int:
    """The estimated bytes of a program's operations and of its copies of replacement rows."""
    ops = [op for _, ops in program.taps for op in ops]
    rows = (len(op.vector.data) for op in ops if op.code == OP_SET and op.vector is not None)
    return _OP_BYTES * len(ops) + sum(rows)


programs = _Programs()


class CompiledEdit(NamedTuple):
    """An edit of a spec.

    Attributes:
        pick: the index of the edit's pick in `Compiled.picks`.
        at: (boundary, group) of the edit's site.
        ops_of: a function that takes the pick's value and returns the edit's operations.
        num_ops: the number of the edit's operations, including the operations of its gate.
        gate: the operations of the edit's gate, each as ((boundary, group), operation). A gate with
            a state has two operations, and a gate without a state has one. Empty if there is no
            gate.
        values: the rows of a replacement. None for edits of other kinds.
    """

    pick: int
    at: tuple[int, int]
    ops_of: OpsOf
    num_ops: int
    gate: tuple[tuple[tuple[int, int], Op], ...] = ()
    values: Array | None = None


@dataclass(frozen=True, eq=False)
class Compiled:
    """A spec's actions at some boundaries, from which the programs for any prompt can be built.
    Requests with equal specs share a Compiled.

    Attributes:
        reads: the values that tokens deliver, as (index of a pick, points, head). A head is a
            computation on rows, such as a codec. For plain rows, the head is None. Each pair of a
            pick and a head has one entry.
        edits: the edits, in the order in which they are applied.
        check: the boundary at which a tap checks that the rows of a request with edits are finite.
            None if the request has no edits, or if another pipeline stage makes the check.
        rows: for each point that an action reads, the first point with the same row
            (`compiler.rows_of`).
        banks: the banks that the worker computes from copied rows, with their nets
            (Resolved.banks_on_rows).
        scored: the linear probes that taps compute, as (index of a pick, point, operations). The
            operations compute the numbers of all these probes (a bank) from the row at the point.
        of_phase: the program of all tokens of a phase, which is the prompt or the generated tokens.
            The key is (True for generated tokens, RequestProgram.begun). This dict has entries only
            if all picks are uniform, that is, if each pick selects all tokens of a phase or none.
        phase_columns: the column of all tokens of a phase, by the keys of `of_phase`.
        built: the program of a column, by the column's bytes. The object `programs` of this module
            removes entries if memory is short.
        counts: for a tuple of columns: (number of programs, number of operations, indices of the
            edits that apply in at least one column). Empty if `_few` is False. Specs of one outline
            share this dict. (Specs of one outline differ only in the layers, vectors and numbers of
            their edits.)
    """

    picks: tuple[Pick, ...]
    reads: tuple[tuple[int, tuple[int, ...], Head | None], ...]
    edits: tuple[CompiledEdit, ...]
    check: int | None
    rows: Mapping[int, int]
    banks: Mapping[Bank, tuple[Net, ...]]
    scored: tuple[tuple[int, int, tuple[Op, ...]], ...] = ()
    of_phase: dict[tuple[bool, frozenset[str]], Program | None] = field(default_factory=dict)
    phase_columns: dict[tuple[bool, frozenset[str]], Column] = field(default_factory=dict)
    built: dict[bytes, Program | None] = field(default_factory=dict)
    counts: dict[tuple[bytes, ...], tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)

    def with_edits(self, edits: tuple[CompiledEdit, ...]) -> Compiled:
        """The Compiled of another spec of the same outline, with the other spec's edits. Neither
        spec reads rows."""
        found = Compiled(
            self.picks, (), edits, self.check, self.rows, self.banks,
            phase_columns=self.phase_columns, counts=self.counts,
        )  # fmt: skip
        found.__dict__.update(self._alike)
        return found

    @cached_property
    def _alike(self) -> dict[str, object]:
        """The cached properties that are equal for all specs of one outline."""
        names = (
            "used", "uses", "firsts", "delivering", "remembers", "uniform", "ops_of_picks",
            "num_actions", "_marks", "picks_key", "_few",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @cached_property
    def ref(self) -> weakref.ref[Compiled]:
        """This object's key in the module's object `programs`. A later Compiled can have the same
        `id`, but never an equal weak reference."""
        return weakref.ref(self)

    @property
    def has_vectors(self) -> bool:
        """True if an operation has a vector: there are edits, or taps compute probes."""
        return bool(self.edits) or bool(self.scored)

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The indices of the picks that `reads` and `edits` use, in ascending order. The other
        picks belong to actions that this rank does not apply. In a column, the values of these
        other picks are 0."""
        found = {read[0] for read in self.reads} | {edit.pick for edit in self.edits}
        return tuple(sorted(found))

    @cached_property
    def picks_key(self) -> PicksKey:
        return PicksKey(self.picks, self.used)

    @cached_property
    def uses(self) -> NDArray[np.bool_]:
        """`used` as a mask, bool [num_picks]."""
        found = np.zeros(len(self.picks), bool)
        found[list(self.used)] = True
        return found

    @cached_property
    def firsts(self) -> frozenset[str]:
        """The names of the first stages: probes for whose verdicts other probes wait."""
        return frozenset(pick.after for pick in self.picks if pick.after is not None)

    def waiting(self, begun: frozenset[str]) -> list[int]:
        """The indices of the picks of actions that still wait for a verdict. `begun` has the names
        of the probes that have a verdict."""
        left = self.firsts - begun
        return [i for i, pick in enumerate(self.picks) if pick.after in left] if left else []

    @cached_property
    def delivering(self) -> list[int]:
        """The indices of the picks that `reads` uses."""
        return sorted({read[0] for read in self.reads})

    @cached_property
    def remembers(self) -> bool:
        """True if the columns of positions can be cached (program.ranges)."""
        return can_remember(self.picks) and not self.firsts

    @cached_property
    def uniform(self) -> bool:
        """True if all tokens of a phase (prompt or generated) get the same program."""
        return all(self.picks[i].uniform for i in self.used)

    def program(self, column: Column) -> Program | None:
        key = column.tobytes()
        # None is a valid entry. Therefore `self` stands for a missing entry. A test with `in`
        # before the access would not be safe, because another thread can remove the key in between.
        known = self.built.get(key, self)
        if not isinstance(known, Compiled):
            programs.use(self, key)
            return known
        found = self.build(column)
        programs.put(self, key, found)
        return found

    @cached_property
    def ops_of_picks(self) -> NDArray[np.int64]:
        """int64 [num_picks]: if a pick selects a token, the pick adds at most this number of
        operations to the token's program."""
        found = np.zeros(len(self.picks), np.int64)
        for pick, points, head in self.reads:
            found[pick] += 0 if isinstance(head, Told) else len(points)
        for pick, _, ops in self.scored:
            found[pick] += len(ops)
        for edit in self.edits:
            found[edit.pick] += edit.num_ops
        return found

    @cached_property
    def num_actions(self) -> int:
        """The sum of three numbers: the edits, the points of `reads`, and the operations of
        `scored`. The first operation of an entry of `scored` is not counted, because `reads` also
        has the entry's point."""
        return (
            len(self.edits) + sum(len(points) for _, points, _ in self.reads)
            + sum(len(ops) - 1 for _, _, ops in self.scored)
        )  # fmt: skip

    @cached_property
    def _marks(self) -> NDArray[np.int64]:
        """Random weights, int64 [num_picks]. Columns are compared by their weighted sums. Different
        columns have equal sums only with negligible probability."""
        return np.frombuffer(secrets.token_bytes(8 * len(self.picks)), np.int64)

    def distinct_in(
        self, columns: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the distinct columns.

        Args:
            columns: [num_picks, n].

        Returns:
            Two arrays. The first array has, in ascending order, the index at which each distinct
            column occurs first. The second array, [n], has for each column its number among the
            distinct columns.
        """
        with np.errstate(over="ignore"):
            sums = self._marks @ columns.astype(np.int64)
        _, firsts, index = np.unique(sums, return_index=True, return_inverse=True)
        # np.unique sorts by the sums, which are random and differ between ranks. All ranks need the
        # same order, and therefore the columns are sorted by their first occurrence.
        order = np.argsort(firsts)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return firsts[order], rank[index]

    def ranged(self, columns: NDArray[np.int32]) -> ColumnRange:
        """Make a ColumnRange of these columns."""
        firsts, index = self.distinct_in(columns)
        each = columns[:, firsts].T
        for made in (columns, index, each):
            made.flags.writeable = False
        return ColumnRange(columns, index, {column.tobytes(): column for column in each})

    def check_size(self, columns: Collection[Column]) -> None:
        """Raise SpecError if these columns need more programs or operations than a request may
        have."""
        most, most_ops = MOST_PROGRAMS, MOST_OPS
        # Only edits cause the lower limits, and scores that taps compute do not. Otherwise an
        # operator's monitor could cause the refusal of a request.
        if self.edits:
            most, most_ops = MOST_PROGRAMS_WITH_EDITS, MOST_OPS_WITH_EDITS
        if len(columns) > most:
            raise SpecError(
                f"the request's tokens are treated in more than {most:,} different ways; "
                "let fewer of its selectors pick single tokens, or send several requests."
            )
        if len(columns) * int(self.ops_of_picks.sum()) <= most_ops:
            return
        num_ops = sum(int((column > 0) @ self.ops_of_picks) for column in columns)
        if num_ops > most_ops:
            raise SpecError(
                f"the request's tokens are treated in {len(columns):,} different ways, with "
                f"{num_ops:,} reads, scores and edits together; at most {most_ops:,}. Send several "
                "requests."
            )

    @cached_property
    def op_list(self) -> OpList:
        """Every operation that a token of the spec can get, as an OpList."""
        listed, seeing = [], dict[tuple[tuple[int, int], Op], list[int]]()
        for pick, (boundary, group), ops_of, _, gate, values in self.edits:
            listed += [Listed(boundary, group + 1, 0, op, (pick,), -1, values) for op in ops_of(1)]
            for one in gate:
                seeing.setdefault(one, []).append(pick)
        for pick, point, ops in self.scored:
            for op in ops:
                seeing.setdefault((divmod(point, LEVELS), op), []).append(pick)
        listed += [Listed(*at, 2, op, picks) for (at, op), picks in seeing.items()]
        if self.check is not None:
            listed.append(Listed(self.check, LEVELS, 0, Op(OP_CHECK), ()))
        return OpList(listed, self.reads, self.rows, len(self.picks))

    def count(self, columns: tuple[bytes, ...]) -> tuple[int, int, list[bytes], set[Head]]:
        """The result of OpList.count for these columns. If `_few` is True, no OpList is made."""
        if not self._few or len(columns) > MOST_COUNTED:
            return self.op_list.count(as_columns(columns))
        known = self.counts.get(columns)
        if known is None:
            if len(self.counts) >= MOST_COUNTS:
                self.counts.clear()
            known = self.counts[columns] = self._counted(columns)
        num_programs, num_ops, some = known
        keys = dict.fromkeys(key for i in some for key in self._keys[i])
        return num_programs, num_ops, list(keys), set()

    @cached_property
    def _few(self) -> bool:
        """True for a spec without reads and with at most MOST_COUNTED_EDITS simple edits. Most
        cells of sweeps have such a spec. Its programs are counted without a list of operations.

        An edit is simple if it has one operation in addition to at most one operation of its gate.
        A `Replace` is simple only if it has one row. An edit whose gate has a state is not simple.
        All edits of this gate at one place share an operation, and therefore the operations cannot
        be counted edit by edit.
        """
        return not self.reads and len(self.edits) <= MOST_COUNTED_EDITS and all(
            edit.num_ops == 1 + len(edit.gate) <= 2
            and (edit.values is None or edit.values.shape[0] == 1)
            for edit in self.edits
        )  # fmt: skip

    def _counted(self, columns: tuple[bytes, ...]) -> tuple[int, int, tuple[int, ...]]:
        """Compute the entry of `counts` for these columns."""
        picks = [edit.pick for edit in self.edits]
        # Tokens with the same edits have the same program.
        has = (as_columns(columns)[picks] > 0).T.tolist()
        checks, num_programs, num_ops = int(self.check is not None), 0, 0
        for one in dict.fromkeys(map(tuple, has)):
            some = [edit for edit, here in zip(self.edits, one, strict=True) if here]
            each = len(some) + len({op for edit in some for op in edit.gate}) + checks
            num_programs, num_ops = num_programs + (each > 0), num_ops + each
        edited = (i for i, each in enumerate(zip(*has, strict=True)) if any(each))
        return num_programs, num_ops, tuple(edited)

    @cached_property
    def takes_most(self) -> bool:
        """True if this spec uses at least as many entries of the device tables as any other spec of
        its outline."""
        # This is true if all vectors in the operations have different keys. The vectors of the
        # edits are not compared: two vectors that differ only in length can become the same unit
        # vector in the operations. The tables then have this unit vector one time.
        keys = [key for some in self._keys for key in some] if self._few else []
        return self._few and len(set(keys)) == len(keys)

    @cached_property
    def _keys(self) -> list[list[bytes]]:
        """For each edit, the keys of the vectors of the edit and of its gate. Use this property
        only if `_few` is True."""
        found = []
        for edit in self.edits:
            ops = [op for _, op in edit.gate]
            values = edit.values
            own = [] if values is None else [row_key(values, 0)]
            ops += edit.ops_of(1) if values is None else ()
            found.append([*own, *(op.vector.digest for op in ops if op.vector is not None)])
        return found

    def _delivered(
        self, column: Column
    ) -> tuple[dict[Head | None, tuple[int, ...]], tuple[tuple[int, int], ...]]:
        """The values that a token with this column delivers. The first result has the points of
        each head (the key None is for plain rows). The second result is the attribute `also` of the
        token's Layout."""
        reads = [(points, head) for pick, points, head in self.reads if column[pick]]
        #: For each row, the first point that the request named.
        labels: dict[int, int] = {}
        for point in sorted(point for points, _ in reads for point in points):
            labels.setdefault(self.rows[point], point)
        points: dict[Head | None, set[int]] = {}
        also: set[tuple[int, int]] = set()
        for named, head in reads:
            rows = [labels[self.rows[point]] for point in named]
            points.setdefault(head, set()).update(rows)
            also |= {pair for pair in zip(named, rows, strict=True) if pair[0] != pair[1]}
        return {head: tuple(sorted(some)) for head, some in points.items()}, tuple(sorted(also))

    def layout(self, column: Column) -> Layout:
        """The layout of a token with this column."""
        points, also = self._delivered(column)
        return Layout(points.pop(None, ()), _listed(points), also)

    def build(self, column: Column) -> Program | None:
        """Build the program of a column. The program is not cached."""
        points, also = self._delivered(column) if self.reads else ({}, ())
        edits: dict[tuple[int, int], list[Op]] = {}
        seeing: dict[tuple[int, int], dict[Op, None]] = {}
        for pick, place, ops_of, _, gate, _ in self.edits:
            if column[pick]:
                edits.setdefault(place, []).extend(ops_of(int(column[pick])))
                for where, op in gate:
                    seeing.setdefault(where, {})[op] = None
        for pick, point, ops in self.scored:
            if column[pick]:
                seeing.setdefault(divmod(point, LEVELS), {}).update(dict.fromkeys(ops))
        if not (points or edits) and self.check is None:
            return None
        plain, listed = points.pop(None, ()), _listed(points)
        return build_program(plain, edits, listed, self.check, also, seeing)


def _listed(
    points: Mapping[Head | None, tuple[int, ...]],
) -> tuple[tuple[Head, tuple[int, ...]], ...]:
    """The points of each head without plain rows (the key None), in the form of Layout.encoded."""
    made = ((head, some) for head, some in points.items() if head is not None)
    return tuple(sorted(made, key=lambda pair: pair[0].text))
