"""The tables that tell every tap what to do, and how they are refilled.

Owns:  Tables (device tensors, fixed size, fixed address), the ids of programs, and
       which rows of the vector table are taken.
Runs:  in every worker. The host writes; taps read.
From:  plan.   To: op.

Promise: in a forward that was not planned every token's program is -1, so that dummy runs,
graph captures and idle steps do nothing. A place in a table may get a new content while
earlier steps still run: writes reach the device in stream order.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.errors import CapacityError, ScopeError
from vllm_scope.graph.tap.definition import (
    NUM_COLUMNS,
    OWNER,
    PROGRAM,
    SLOT,
    TO_HOST,
    WORDS_PER_SLOT,
)
from vllm_scope.graph.tap.places import Places
from vllm_scope.graph.tap.staging import Staging
from vllm_scope.program.layout import Layout, Widths, boundaries_of
from vllm_scope.program.operations import NO_PROGRAM, OP_READ, REGISTERS, Cost, Op, Program
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Head
from vllm_scope.request.sites import STREAM, boundary_of_point

#: Programs that requests with edits may hold, and further ones for programs that only read.
HELD_PROGRAMS, FREE_PROGRAMS = 8192, 4096
#: Owners: number of requests whose faults have a word each.
MOST_OWNERS = 1 << 16
#: Ops of held programs. Programs that only read have one more per tap each.
HELD_OPS = 1 << 17


def capacity(vector_size: int, vectors_mib: float) -> Cost:
    """What all requests together may hold of the tables.

    Args:
        vector_size: numbers of a vector, as in Sites.
    """
    return Cost(max(1, int(vectors_mib * 2**20) // (4 * vector_size)), HELD_PROGRAMS, HELD_OPS)


class _Words(NamedTuple):
    """Where the operations of a layout store, in words of 4 bytes.

    Attributes:
        rows: of each point of the arena's layout, in the token's slots and in those of one tap.
        told: (bank, its point in the layout) -> the same of the numbers that taps tell.
        num_slots, num_delivered: slots of a token, in the arena and encoded.
    """

    rows: list[tuple[int, int]]
    told: dict[tuple[Head, int], tuple[int, int]]
    num_slots: int
    num_delivered: int

    def of(self, op: Op, layout: Layout) -> tuple[int, int]:
        """-1 for an operation that stores nothing."""
        if op.code == OP_READ:
            return self.rows[op.at]
        if op.told is None:
            return (-1, -1)
        place, bank, index = op.told
        # A rank that delivers nothing has no room for it.
        first = self.told.get((bank, layout.row_of(place.point())))
        return (-1, -1) if first is None else (first[0] + index, first[1] + index)


@lru_cache(maxsize=4096)  # many requests have the same layouts
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


_FLOATS, _AS_INTS = Struct("=4f"), Struct("=4i")


def _numbers_of(program: Program) -> dict[Op, tuple[int, ...]]:
    """The numbers of a program's operations, as bits of float32.

    Raises:
        OverflowError: a number that float32 cannot hold.
    """
    ops = {op for _, some in program.taps for op in some}
    return {op: _AS_INTS.unpack(_FLOATS.pack(op.a, op.b, op.c, op.d)) for op in ops}


class Tables:
    """Persistent device tables.

    Attributes:
        tokens: [max_rows, 4] int32: program, slot, 1 for host memory, owner.
        programs: [num_programs, num_taps] int32: first op or -1.
        ops: [num_ops, NUM_COLUMNS] int32: tap.definition's columns.
        vectors: [num_vectors, numbers of the widest row] float32.
        numbers: [num_taps] int32: 0, 1, ...; a tap's number is a view of one.
        registers: [max_rows, REGISTERS] float32: values of conditions in one forward.
        host: [3] int64: addresses of memory that taps write. Of the host: of slots, or 0; of
            `faults`, or 0 if nobody reads them. Of the device: of `registers`.
        faults: int32 [MOST_OWNERS], host: owner -> 0, or a fault for `definition.fault_at`.
            Taps write; any thread may read and clear.
        num_uploads: copies to the device so far.
    """

    def __init__(
        self,
        boundaries: tuple[int, ...],
        max_rows: int,
        hidden_size: int,
        widths: Widths,
        device: torch.device,
        vectors_mib: float = 1.0,
        num_programs: int = HELD_PROGRAMS + FREE_PROGRAMS,
        num_ops: int | None = None,
        reports: bool = True,
    ) -> None:
        self.boundaries = boundaries
        self.num_uploads = 0
        self._tap_of = {boundary: tap for tap, boundary in enumerate(boundaries)}
        self._widths = widths
        self._device = device
        num_taps = max(len(boundaries), 1)
        num_ops = num_ops or HELD_OPS + min(FREE_PROGRAMS, num_programs) * num_taps

        def table(shape: tuple[int, ...], fill: int) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        self.tokens = table((max_rows, 4), NO_PROGRAM)
        self.programs = table((num_programs, num_taps), -1)
        self.ops = table((num_ops, NUM_COLUMNS), 0)
        self.hidden_size = hidden_size
        size = hidden_size * max(widths.row_bytes) // widths.row_bytes[STREAM]
        num_vectors = capacity(size, vectors_mib).vectors
        self.vectors = torch.zeros((num_vectors, size), device=device)
        self.numbers = torch.arange(num_taps, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._faults = torch.zeros(MOST_OWNERS, dtype=torch.int32, pin_memory=pinned)
        self.faults: NDArray[np.int32] = self._faults.numpy()
        reported = self._faults.data_ptr() if reports else 0
        self.registers = torch.zeros((max_rows, REGISTERS), device=device)
        addresses = [0, reported, self.registers.data_ptr()]
        self.host = torch.tensor(addresses, dtype=torch.int64, device=device)

        self._programs = Places[Program](num_programs)
        self._vector_places = Places[Array](num_vectors)
        self._free_ops = list(range(num_ops - 1, -1, -1))
        self._ops_of: dict[int, list[int]] = {}
        self._last_used = np.full(num_programs, -1, np.int64)
        self._step = 0
        #: Program id -> arena slots of a token.
        self.num_slots = np.zeros(num_programs, np.int64)
        #: Program id -> slots of a token once its rows are encoded.
        self.num_delivered = np.zeros(num_programs, np.int64)
        self._pending_programs: dict[int, NDArray[np.int32]] = {}
        self._pending_ops: dict[int, tuple[int, ...]] = {}
        self._pending_vectors: dict[int, NDArray[np.float32]] = {}
        self._staging = Staging(self.tokens)
        self._rows_written = 0
        self._loaded: NDArray[np.int32] | None = None
        #: The program ids for which `acts_at` was last worked out, and the taps that do anything
        #: for them.
        self._acting_of: NDArray[np.int32] | None = None
        self._acting: set[int] = set()

    def begin_step(self) -> None:
        self._step += 1

    # Programs and vectors

    def program_id(self, program: Program, hold: bool = False) -> int:
        """The id of a program, written to the device the first time.

        Args:
            hold: keep the id and the program's vectors until `release`; else the id is
                valid in this step only. A program with vectors must be held.

        Raises:
            CapacityError: a table is full of contents that are held or used in this step.
        """
        found = self._programs.find(program)
        if found is None and hold:
            found = self._hold_new(program)
        elif found is None:
            if program.vectors:
                raise ScopeError("a program with vectors was planned that its request never held.")
            found = self._place(program)
        if hold:
            self._programs.hold(found)
        self._last_used[found] = self._step
        return found

    def program_of(self, program_id: int) -> Program:
        return self._programs.content(program_id)

    def release(self, program_id: int) -> None:
        """Undo one hold. A program with vectors is then dropped at once, to free them."""
        if self._programs.release(program_id) == 0:
            vectors = self._programs.content(program_id).vectors
            if vectors:
                self._drop(program_id)
            for vector in vectors:
                self._vector_places.release(self._vector_places.at(vector))

    def _hold_new(self, program: Program) -> int:
        held: list[int] = []
        try:
            for vector in program.vectors:
                held.append(self._vector_place(vector))
                self._vector_places.hold(held[-1])
            return self._place(program)
        except Exception:
            for place in held:
                self._vector_places.release(place)
            raise

    def _vector_place(self, vector: Array) -> int:
        places = self._vector_places
        found = places.find(vector)
        if found is None:
            if places.full and (idle := next(places.idle(), None)) is not None:
                places.drop(idle)
            if places.full:
                raise CapacityError(
                    f"all {len(self.vectors)} vectors of additional_config['scope'].vectors_mib "
                    "are in use; send the request again when others have finished, or raise it."
                )
            found = places.put(vector)
            self._pending_vectors[found] = self._padded(vector.numpy)
        return found

    def _padded(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        missing = self.vectors.shape[1] - len(vector)
        return np.pad(vector, (0, missing)) if missing else vector

    def _place(self, program: Program) -> int:
        while self._programs.full or len(self._free_ops) < program.num_ops:
            idle = next(
                (i for i in self._programs.idle() if self._last_used[i] != self._step), None
            )
            if idle is None:
                raise CapacityError(
                    "all tap programs are in use; send the request again when others have "
                    "finished, or give requests the same reads."
                )
            self._drop(idle)
        numbers = _numbers_of(program)
        found = self._programs.put(program)
        self._write(found, program, numbers)
        return found

    def _drop(self, program_id: int) -> None:
        self._programs.drop(program_id)
        self._free_ops += self._ops_of.pop(program_id)
        self._pending_programs.pop(program_id, None)

    def _write(
        self, program_id: int, program: Program, numbers_of: dict[Op, tuple[int, ...]]
    ) -> None:
        entry = np.full(self.programs.shape[1], -1, np.int32)
        taken: list[int] = []
        words = _words_of(program.layout, self._widths)
        for boundary, ops in program.taps:
            following = -1
            for op in reversed(ops):
                taken.append(self._free_ops.pop())
                vector = -1 if op.vector is None else self._vector_places.at(op.vector)
                numbers = numbers_of[op]
                self._pending_ops[taken[-1]] = (
                    op.code, *words.of(op, program.layout), vector, *numbers[:2], following,
                    op.register, op.source, *numbers[2:], 0,
                )  # fmt: skip
                following = taken[-1]
            entry[self._tap_of[boundary]] = following
        self._ops_of[program_id] = taken
        self._pending_programs[program_id] = entry
        self.num_slots[program_id] = words.num_slots
        self.num_delivered[program_id] = words.num_delivered

    def _flush(self) -> None:
        """Copy what changed in programs, ops and vectors to the device, one copy each."""
        for table, pending in (
            (self.vectors, self._pending_vectors),
            (self.ops, self._pending_ops),
            (self.programs, self._pending_programs),
        ):
            if pending:
                self._send(table, list(pending), np.array(list(pending.values())))
                pending.clear()

    def _send(self, table: Tensor, places: list[int], rows: np.ndarray) -> None:
        index = torch.from_numpy(np.array(places))
        values = torch.as_tensor(rows, dtype=table.dtype)
        if table.is_cuda:
            # A copy from pageable memory would wait for the whole stream.
            index = index.pin_memory().to(self._device, non_blocking=True)
            values = values.pin_memory().to(self._device, non_blocking=True)
        table.index_copy_(0, index, values)
        self.num_uploads += 1

    # Steps

    def load_step(
        self,
        rows: NDArray[np.int64],
        program_ids: NDArray[np.int32],
        owners: NDArray[np.int32],
        slots: NDArray[np.int64],
        to_host: bool = False,
    ) -> None:
        """Give these rows of the next forward their programs, and all others none.

        The table keeps them until the next `load_step` or `clear_step`.

        Args:
            rows: ascending.
            program_ids, owners: of each row; owner 0 for none.
            slots: first slot of each row's token.
            to_host: True if the slots are in host memory, not in the arena.
        """
        if self._pending_programs:
            self._flush()
        buffer = self._staging.next()
        if buffer.holds is not program_ids or buffer.to_host != to_host:
            buffer.array[: buffer.num_rows, PROGRAM] = NO_PROGRAM
            buffer.array[rows, PROGRAM] = program_ids
            buffer.array[rows, TO_HOST] = to_host
            buffer.array[rows, OWNER] = owners
            buffer.holds, buffer.to_host, buffer.rows = program_ids, to_host, _as_slice(rows)
            buffer.num_rows = int(rows[-1]) + 1
        buffer.array[buffer.rows, SLOT] = slots
        self._staging.upload(buffer, max(buffer.num_rows, self._rows_written))
        self._rows_written = buffer.num_rows
        self._loaded = program_ids
        self.num_uploads += 1

    def has_loaded(self, program_ids: NDArray[np.int32]) -> bool:
        """True if the table still has these ids (the same array) from the last `load_step`."""
        return self._loaded is program_ids

    def acts_at(self, tap: int) -> bool:
        """True if some row of the step that was loaded last does anything at a tap."""
        if self._acting_of is not self._loaded:
            self._acting_of = self._loaded
            ids = () if self._loaded is None else np.unique(self._loaded).tolist()
            self._acting = {self._tap_of[b] for i in ids for b, _ in self.program_of(i).taps}
        return tap in self._acting

    def clear_step(self) -> None:
        """Give no row a program. Does nothing if that is so already."""
        self._loaded = None
        if self._rows_written:
            self.tokens[: self._rows_written].fill_(NO_PROGRAM)
            self._rows_written = 0


def _as_slice(rows: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """The rows as a slice if they are consecutive."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 else rows
