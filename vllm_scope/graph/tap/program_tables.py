"""The programs and vectors of requests on the device.

Owns:  ProgramTables (the ids of programs, and the tables of operations and vectors); `capacity`.
Runs:  in every worker. The host writes the tables, and taps read the tables.
From:  worker.plan (the held programs of requests). To: tables.

Promise: all writes to the device tables are enqueued on the model's stream. Therefore an earlier
step never sees the new content of a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.errors import CapacityError, ScopeError
from vllm_scope.graph.tap.definition import (
    CODE,
    NEXT,
    NUM_COLUMNS,
    NUMBER_A,
    NUMBER_B,
    NUMBER_C,
    NUMBER_D,
    NUMBER_E,
    REGISTER,
    SOURCE,
    VECTOR,
    WORD,
    WORD_IN_TAP,
    WORDS_PER_SLOT,
)
from vllm_scope.graph.tap.places import FreePlaces, Places
from vllm_scope.program.held import Held
from vllm_scope.program.layout import Layout, Widths, boundaries_of
from vllm_scope.program.operations import NO_PROGRAM, OP_READ, Cost, Op, Program
from vllm_scope.program.table_rows import TableRows
from vllm_scope.request.heads import Head
from vllm_scope.request.sites import STREAM, boundary_of_point

#: The number of places for programs that requests hold, and the number of places for programs that
#: only read.
HELD_PROGRAMS, FREE_PROGRAMS = 8192, 4096
#: Up to MOST_IDLE_SETS sets of programs stay on the device after their last request has ended. If a
#: later request has an equal set, the worker uploads no programs for it. For example, requests that
#: have only the same monitor have equal sets. A set with more than MOST_IDLE_BYTES of vectors does
#: not stay. If a set has few operations (`Held.few`), its
#: bytes are not counted.
MOST_IDLE_SETS, MOST_IDLE_BYTES = 16, 1 << 20
#: The number of places for the ops of held programs. In addition, the table has a place for each
#: tap of each program that only reads.
HELD_OPS = 1 << 17


def capacity(vector_size: int, vectors_mib: float) -> Cost:
    """The number of places that all requests together can hold in each table.

    Args:
        vector_size: the number of elements of a vector (an attribute of Sites).
    """
    return Cost(max(1, int(vectors_mib * 2**20) // (4 * vector_size)), HELD_PROGRAMS, HELD_OPS)


class _Words(NamedTuple):
    """Where the operations of a token store their results, for tokens with one layout. Addresses
    count words of 4 bytes.

    Attributes:
        rows: for each point of the arena's layout, the address of the point's row, in two forms.
            The first form counts from the token's first slot. The second form is for a step that is
            drained tap by tap. It counts from the token's first slot for the point's own tap.
        told: for each bank and point in the layout, the address of the first number of the bank, in
            the same two forms.
        num_slots, num_delivered: the number of slots of a token in the arena, and the number of
            slots after the token's rows are encoded.
    """

    rows: list[tuple[int, int]]
    told: dict[tuple[Head, int], tuple[int, int]]
    num_slots: int
    num_delivered: int

    def of(self, op: Op, layout: Layout) -> tuple[int, int]:
        """The address at which an operation stores its result, in the two forms of `rows`. (-1, -1)
        if the operation stores nothing."""
        if op.code == OP_READ:
            return self.rows[op.at]
        if op.told is None:
            return (-1, -1)
        place, bank, index = op.told
        # On a rank that delivers nothing, there is no slot for the number, and the operation stores
        # nothing.
        first = self.told.get((bank, layout.row_of(place.point())))
        return (-1, -1) if first is None else (first[0] + index, first[1] + index)


@lru_cache(maxsize=4096)  # cached, because many requests have equal layouts
def _words_of(layout: Layout, widths: Widths) -> _Words:
    arena = layout.arena
    slots = arena.row_slots(widths)
    here = {boundary: arena.at(boundary).row_slots(widths) for boundary in boundaries_of(arena)}
    rows = [
        (slots[p] * WORDS_PER_SLOT, here[boundary_of_point(p)][p] * WORDS_PER_SLOT)
        for p in arena.points
    ]
    told = {}
    for bank, points, first, num_slots in arena.encoded_at(widths):
        for i, point in enumerate(points):
            tap = arena.at(boundary_of_point(point))
            in_tap = tap.made_at(bank, point, widths)
            assert in_tap is not None
            told[bank, point] = (
                (first + i * num_slots) * WORDS_PER_SLOT,
                in_tap * WORDS_PER_SLOT,
            )
    return _Words(rows, told, arena.slots(widths), layout.slots(widths))


_FLOATS, _AS_INTS = Struct("=5f"), Struct("=5i")


def _numbers_of(op: Op) -> tuple[int, ...]:
    """The bits of an operation's numbers as float32. Raises OverflowError if a number is too
    large."""
    return _AS_INTS.unpack(_FLOATS.pack(op.a, op.b, op.c, op.d, op.e))


#: The columns of the op table that TableRows.fixed fills.
_FIXED = [CODE, REGISTER, SOURCE, NUMBER_A, NUMBER_B, NUMBER_C, NUMBER_D, NUMBER_E]


@dataclass
class _HeldSet:
    """The places that the programs of one `Held` have in the tables. Several requests can share a
    `Held`.

    Attributes:
        ids: the program ids that `Tables.hold` returns.
        numbers, ops, vectors: the places of these programs, their operations and their vectors.
        single: the ids of the programs that are held one by one.
        holders: the number of requests that hold the programs.
    """

    ids: NDArray[np.int32]
    numbers: Sequence[int] = ()
    ops: NDArray[np.int32] | None = None
    vectors: Sequence[int] = ()
    single: Sequence[int] = ()
    holders: int = 0


class ProgramTables:
    """The programs, operations and vectors that requests hold on the device.

    Attributes:
        boundaries: the boundaries of the taps, in the order of the taps.
        widths: the sizes of raw rows.
        tap_of: the number of each boundary's tap, which is the tap's column in `programs`.
        programs: [num_programs, num_taps] int32, the index of a program's first op at each tap, or
            -1.
        ops: [num_ops, NUM_COLUMNS] int32. tap.definition lists the columns.
        vectors: [num_vectors, number of elements of the widest row] float32.
        num_slots: for each program id, the number of slots of a token in the arena.
        num_delivered: for each program id, the number of slots of a token after its rows are
            encoded.
        num_uploads: the number of copies to the device so far.
    """

    def __init__(
        self,
        boundaries: tuple[int, ...],
        hidden_size: int,
        widths: Widths,
        device: torch.device,
        vectors_mib: float,
        num_programs: int,
        num_ops: int | None,
    ) -> None:
        self.boundaries = boundaries
        self.num_uploads = 0
        self.tap_of = {boundary: tap for tap, boundary in enumerate(boundaries)}
        self._taps_of = np.full(max(boundaries, default=-1) + 1, -1, np.int64)
        self._taps_of[list(boundaries)] = range(len(boundaries))
        self.widths = widths
        self._device = device
        num_taps = max(len(boundaries), 1)
        num_ops = num_ops or HELD_OPS + min(FREE_PROGRAMS, num_programs) * num_taps

        self.programs = torch.full((num_programs, num_taps), -1, dtype=torch.int32, device=device)
        self.ops = torch.zeros((num_ops, NUM_COLUMNS), dtype=torch.int32, device=device)
        size = hidden_size * max(widths.row_bytes) // widths.row_bytes[STREAM]
        num_vectors = capacity(size, vectors_mib).vectors
        self.vectors = torch.zeros((num_vectors, size), device=device)

        self._programs = Places[Program](num_programs)
        #: The places of vectors. The key of a vector is its Array.digest, or a key of TableRows.
        self._vector_places = Places[bytes](num_vectors)
        self._sets: dict[Held, _HeldSet] = {}
        #: The sets of programs that no request holds. The set that is idle longest comes first.
        self._idle_sets: dict[Held, None] = {}
        #: Maps the id of a program to the program's set, and to the program's index in the set.
        self._set_at: dict[int, tuple[Held, int]] = {}
        self._free_ops = FreePlaces(num_ops)
        self._ops_of: dict[int, NDArray[np.int32]] = {}
        self._last_used = np.full(num_programs, -1, np.int64)
        self._step = 0
        self.num_slots = np.zeros(num_programs, np.int64)
        self.num_delivered = np.zeros(num_programs, np.int64)
        #: The host's copies of `programs` and `ops`, and the places to copy to the device.
        self._host_programs = np.full((num_programs, num_taps), -1, np.int32)
        self._host_ops = np.zeros((num_ops, NUM_COLUMNS), np.int32)
        self._stale_programs = np.zeros(num_programs, bool)
        self._stale_ops = np.zeros(num_ops, bool)
        self._is_stale = False
        self._pending_vectors: dict[int, NDArray[np.float32]] = {}
        #: The ops that must be written to `_host_ops`, by their places.
        self._pending_ops: dict[int, tuple[int, ...]] = {}

    def begin_step(self) -> None:
        """Begin a step. A program that is used after this call counts as used in this step."""
        self._step += 1

    def program_id(self, program: Program, hold: bool = False) -> int:
        """The id of a program. The next `load_step` writes a new program to the device.

        Args:
            hold: if True, the id and the program's vectors are kept until `release`. If False, the
                id is valid only in this step. A program with vectors must be held.

        Raises:
            CapacityError: every place of a table is held or is used in this step.
            ScopeError: a new program has vectors, and `hold` is False.
            OverflowError: a number of a new program is too large for float32.
        """
        found = self._programs.find(program)
        if found is None and hold:
            found = self._hold_new(program)
        elif found is None:
            if program.vectors:
                raise ScopeError(
                    "a program with vectors was planned, but its request never held the program."
                )
            found = self._place(program)
        if hold:
            self._programs.hold(found)
        self._last_used[found] = self._step
        return found

    def layout_of(self, program_id: int) -> Layout:
        """The layout of a token with this program."""
        known = self._set_at.get(program_id)
        if known is not None:
            return known[0].layout(known[1])
        return self._programs.content(program_id).layout

    def hold(self, held: Held) -> NDArray[np.int32]:
        """Hold all programs of a request until `release_set`.

        Returns:
            int32 [len(held)], the ids of the programs. An entry without a program is NO_PROGRAM.

        Raises:
            CapacityError: every place of a table is held or is used in this step.
        """
        known = self._sets.get(held)
        if known is None:
            known = self._hold_few(held) if held.few else self._hold_new_set(held)
            self._sets[held] = known
        self._idle_sets.pop(held, None)
        known.holders += 1
        return known.ids

    def _hold_few(self, held: Held) -> _HeldSet:
        """Hold the programs one by one. If there are few operations, this takes half as long as
        `_hold_new_set`."""
        single: list[int] = []
        ids = [NO_PROGRAM] * len(held)
        try:
            for i, program in enumerate(held.programs):
                if program is not None:
                    ids[i] = self.program_id(program, hold=True)
                    single.append(ids[i])
        except Exception:
            for number in single:
                self.release(number)
            raise
        return _HeldSet(np.array(ids, np.int32), single=single)

    def _hold_new_set(self, held: Held) -> _HeldSet:
        rows = held.rows(self.widths)
        vectors = self._hold_vectors(rows.keys, rows.vectors)
        exists = np.flatnonzero(rows.exists)
        try:
            self._make_room(len(exists), rows.num_ops)
        except Exception:
            self._vector_places.release_all(vectors)
            raise
        numbers, ops = self._programs.take(len(exists)), self._free_ops.take(rows.num_ops)
        ids = np.full(len(rows.exists), NO_PROGRAM, np.int32)
        ids[exists] = numbers
        of_columns = ids[rows.index]
        # Several columns can have the same program, and then have the same layout. Therefore any of
        # these columns gives the right layout.
        self._set_at.update((number, (held, i)) for i, number in enumerate(of_columns.tolist()))
        self._set_at.pop(NO_PROGRAM, None)
        self._write_rows(rows, ids, numbers, ops, vectors)
        return _HeldSet(of_columns, numbers, ops, vectors)

    def _write_rows(
        self, rows: TableRows, ids: NDArray[np.int32], numbers: list[int],
        ops: NDArray[np.int32], vectors: list[int],
    ) -> None:  # fmt: skip
        self._settle_ops()
        # The last entry of `op_at` and of `vector_at` is -1. Therefore the index -1 (none) gives
        # -1.
        op_at, vector_at = np.append(ops, np.int32(-1)), np.array([*vectors, -1], np.int32)
        table = np.zeros((len(ops), NUM_COLUMNS), np.int32)
        table[:, _FIXED] = rows.fixed
        table[:, WORD : WORD_IN_TAP + 1] = rows.words
        table[:, VECTOR] = vector_at[rows.vector]
        table[:, NEXT] = op_at[rows.following]
        self._host_ops[ops] = table
        self._stale_ops[ops] = True
        self._host_programs[numbers] = -1
        taps = self._taps_of[rows.head_boundary]
        self._host_programs[ids[rows.head_program], taps] = op_at[rows.heads]
        self._stale_programs[numbers] = self._is_stale = True
        self.num_slots[numbers] = rows.num_slots[rows.exists]
        self.num_delivered[numbers] = rows.num_delivered[rows.exists]

    def release_set(self, held: Held) -> None:
        """Undo one `hold`. When no hold is left, a small set stays on the device for a later
        request. This set is dropped when its places are needed, or after MOST_IDLE_SETS other sets
        have become idle."""
        known = self._sets[held]
        known.holders -= 1
        if not known.holders:
            self._idle_sets[held] = None
            if len(known.vectors) * 4 * self.vectors.shape[1] > MOST_IDLE_BYTES:
                self._drop_set(held)
            elif len(self._idle_sets) > MOST_IDLE_SETS:
                self._drop_set(next(iter(self._idle_sets)))

    def _drop_idle_sets(self) -> bool:
        """Drop all sets of programs that no request holds. Returns False if there is none."""
        found = list(self._idle_sets)
        for held in found:
            self._drop_set(held)
        return bool(found)

    def _drop_set(self, held: Held) -> None:
        del self._idle_sets[held]
        known = self._sets.pop(held)
        for number in known.single:
            self.release(number)
        for number in known.numbers:
            del self._set_at[number]
        self._programs.give_back(known.numbers)
        if known.ops is not None:
            self._free_ops.give_back(known.ops)
        self._vector_places.release_all(known.vectors)

    def release(self, program_id: int) -> None:
        """Undo one hold of a program. If no holds are left, a program with vectors is dropped."""
        if self._programs.release(program_id) == 0:
            vectors = self._programs.content(program_id).vectors
            if vectors:
                self._drop(program_id)
            for vector in vectors:
                place = self._vector_places.find(vector.digest)
                assert place is not None
                self._vector_places.release(place)

    def _hold_new(self, program: Program) -> int:
        vectors = list(program.vectors)
        held = self._hold_vectors([v.digest for v in vectors], [v.numpy for v in vectors])
        try:
            return self._place(program)
        except Exception:
            self._vector_places.release_all(held)
            raise

    def _hold_vectors(self, keys: list[bytes], vectors: Sequence[NDArray[np.float32]]) -> list[int]:
        found = self._vector_places.hold_all(keys)
        if found is None and self._drop_idle_sets():
            found = self._vector_places.hold_all(keys)
        if found is None:
            raise CapacityError(
                f"all {len(self.vectors)} vectors of additional_config['scope'].vectors_mib are in "
                "use; send the request again when other requests have ended, or raise vectors_mib."
            )
        places, new = found
        for i in new:
            self._pending_vectors[places[i]] = self._padded(vectors[i])
        return places

    def _padded(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        missing = self.vectors.shape[1] - len(vector)
        return np.pad(vector, (0, missing)) if missing else vector

    def _make_room(self, num_programs: int, num_ops: int) -> None:
        """Drop programs until the tables have room for new programs. Programs that are held or used
        in this step stay."""
        programs = self._programs
        while programs.num_free < num_programs or self._free_ops.count < num_ops:
            idle = next((i for i in programs.idle() if self._last_used[i] != self._step), None)
            if idle is None and self._drop_idle_sets():
                continue
            if idle is None:
                raise CapacityError(
                    "all tap programs are in use; send the request again when other "
                    "requests have ended, or give requests the same reads."
                )
            self._drop(idle)

    def _place(self, program: Program) -> int:
        self._make_room(1, program.num_ops)
        # `_numbers_of` can raise, and must run before any part of the program is in the tables.
        numbers = [[_numbers_of(op) for op in ops] for _, ops in program.taps]
        found = self._programs.put(program)
        self._write(found, program, numbers)
        return found

    def _drop(self, program_id: int) -> None:
        self._programs.drop(program_id)
        self._free_ops.give_back(self._ops_of.pop(program_id))

    def _write(
        self, program_id: int, program: Program, numbers: list[list[tuple[int, ...]]]
    ) -> None:
        entry = self._host_programs[program_id]
        entry.fill(-1)
        taken = self._free_ops.take(program.num_ops)
        free, written = iter(taken.tolist()), self._pending_ops
        words, place_of = _words_of(program.layout, self.widths), self._vector_places.find
        for (boundary, ops), numbers_here in zip(program.taps, numbers, strict=True):
            following = -1
            for op, bits in zip(reversed(ops), reversed(numbers_here), strict=True):
                at = next(free)
                vector = None if op.vector is None else place_of(op.vector.digest)
                written[at] = (
                    op.code, *words.of(op, program.layout), -1 if vector is None else vector,
                    *bits[:2], following, op.register, op.source, *bits[2:],
                )  # fmt: skip
                following = at
            entry[self.tap_of[boundary]] = following
        self._ops_of[program_id] = taken
        self._stale_programs[program_id] = self._is_stale = True
        self.num_slots[program_id] = words.num_slots
        self.num_delivered[program_id] = words.num_delivered

    def _settle_ops(self) -> None:
        """Write the ops of all programs that were added since the last call. One write for all
        programs takes half as long as one write per program."""
        if self._pending_ops:
            places = np.fromiter(self._pending_ops, np.int64, len(self._pending_ops))
            self._host_ops[places] = np.array(list(self._pending_ops.values()), np.int32)
            self._stale_ops[places] = True
            self._pending_ops.clear()

    def _flush(self) -> None:
        """Copy changed programs, ops and vectors to the device, with one copy for each table."""
        if self._pending_vectors:
            vectors = self._pending_vectors
            self._send(self.vectors, np.array(list(vectors)), list(vectors.values()))
            self._pending_vectors.clear()
        self._settle_ops()
        for table, host, stale in (
            (self.ops, self._host_ops, self._stale_ops),
            (self.programs, self._host_programs, self._stale_programs),
        ):
            places = np.flatnonzero(stale)
            if places.size:
                self._send(table, places, host[places])
                stale[places] = False
        self._is_stale = False

    def _send(
        self, table: Tensor, places: NDArray[np.int64], rows: np.ndarray | list[np.ndarray]
    ) -> None:
        self.num_uploads += 1
        # numpy is used, because torch's threads take longer to start than these copies take.
        if not table.is_cuda:
            _put(table.numpy(), places, rows)
            return
        # The memory is pinned, because a copy from pageable memory would wait for the whole stream.
        index = torch.empty(len(places), dtype=torch.int64, pin_memory=True)
        values = torch.empty((len(places), table.shape[1]), dtype=table.dtype, pin_memory=True)
        index.numpy()[:] = places
        _put(values.numpy(), np.arange(len(places)), rows)
        index, values = (one.to(self._device, non_blocking=True) for one in (index, values))
        table.index_copy_(0, index, values)


def _put(table: np.ndarray, places: NDArray[np.int64], rows: np.ndarray | list[np.ndarray]) -> None:
    """Write rows to places of a table. If `rows` is a list, its rows are copied one by one."""
    if isinstance(rows, np.ndarray):
        table[places] = rows
        return
    for place, row in zip(places.tolist(), rows, strict=True):
        table[place] = row
