"""The device tables that say what each tap does, and their updates before each step.

Owns:  Tables (device tensors of fixed size and address, with the program of each row of a step).
Runs:  in every worker. The host writes the tables, and taps read the tables.
From:  plan, program_tables.   To: op.

Promise: if a forward has no plan, the program of every token is -1. Therefore taps do nothing in
dummy runs, graph captures and idle steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.errors import ScopeError
from vllm_scope.graph.tap.definition import (
    ACTS,
    NUM_TAP_COLUMNS,
    NUM_TOKEN_COLUMNS,
    NUMBER,
    OWNER,
    PROGRAM,
    SINCE,
    SLOT,
    STEPS,
    STRIDE,
    TO_HOST,
)
from vllm_scope.graph.tap.program_tables import FREE_PROGRAMS, HELD_PROGRAMS, ProgramTables
from vllm_scope.graph.tap.staging import Staging
from vllm_scope.graph.tap.states import NUM_WALK_COLUMNS
from vllm_scope.program.layout import Widths
from vllm_scope.program.operations import NO_PROGRAM, REGISTERS, STATE_NUMBERS

#: The number of owners. `Tables.faults` has one word for each owner.
MOST_OWNERS = 1 << 16


def log_places(states_mib: float) -> int:
    """The number of places in the log of states."""
    return int(states_mib * 2**20) // (4 * STATE_NUMBERS)


class Repeat(NamedTuple):
    """The data with which taps can repeat a step without an upload. The repeated step has the same
    rows, and each row is one position later.

    Attributes:
        since: int64 [num_rows], the position of each row. For a row without slots, the number is
            not used.
        stride: the number of slots between the tokens of two adjacent positions.
        steps: how many times the step can be repeated before the end of the arena or the ring.
    """

    since: NDArray[np.int64]
    stride: int
    steps: int


class Tables(ProgramTables):
    """Persistent device tables: the program tables, and the tables of the current step.

    Attributes:
        tokens: [max_rows, 8] int32, the rows of the step. tap.definition lists the columns.
        taps: [num_taps, 4] int32. Column 0 is the tap's number. Column 1 is 0 if the tap does
            nothing in the step that was loaded last, else 1 (also before the first step). The other
            two columns are not used. Each tap gets a view of its own row.
        registers: [max_rows, REGISTERS] float32, the registers of each row.
        walks: [max_rows, 8] int32, for rows whose gates have states. tap.states lists the columns.
        log: [num_places, STATE_NUMBERS] float32, the states of gates.
        host: [6] int64, six addresses. Two are addresses of host memory: the ring's slots (0 if
            taps do not write to the ring) and `faults` (0 if this rank reports no faults). Four are
            addresses of device memory: `registers`, `walks`, `log`, and the rows' positions (0
            before the first `point_at`).
        faults: int32 [MOST_OWNERS] in host memory. The entry of an owner is 0 if there is no fault,
            else the argument of `definition.fault_at`. Taps write faults. Any thread can read and
            clear faults.
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
        states_mib: float = 1.0,
    ) -> None:
        super().__init__(
            boundaries, hidden_size, widths, device, vectors_mib, num_programs, num_ops
        )
        self.hidden_size = hidden_size
        num_taps = self.programs.shape[1]

        def table(shape: tuple[int, ...], fill: int) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        self.tokens = table((max_rows, NUM_TOKEN_COLUMNS), NO_PROGRAM)
        self.taps = table((num_taps, NUM_TAP_COLUMNS), 1)
        self.taps[:, NUMBER] = torch.arange(num_taps)
        pinned = device.type == "cuda"
        self._faults = torch.zeros(MOST_OWNERS, dtype=torch.int32, pin_memory=pinned)
        self.faults: NDArray[np.int32] = self._faults.numpy()
        reported = self._faults.data_ptr() if reports else 0
        self.registers = torch.zeros((max_rows, REGISTERS), device=device)
        self.walks = table((max_rows, NUM_WALK_COLUMNS), -1)
        self.log = torch.zeros((log_places(states_mib), STATE_NUMBERS), device=device)
        on_device = (table.data_ptr() for table in (self.registers, self.walks, self.log))
        addresses = [0, reported, *on_device, 0]
        self.host = torch.tensor(addresses, dtype=torch.int64, device=device)

        self._staging, self._walk_staging = Staging(self.tokens), Staging(self.walks)
        self._tap_staging = Staging(self.taps)
        self._rows_written = 0
        #: The walks from the last `load_walks`, and the address of the rows' positions.
        self._walks: NDArray[np.int32] | None = None
        self._positions = 0
        #: The program ids of the last `load_step`. None if no step is loaded.
        self._loaded: NDArray[np.int32] | None = None
        #: Three facts of the last `load_step`: whether its slots are in host memory, its stride,
        #: and the first slot that `move_on` expects in the next step.
        self._to_host, self._stride, self._next_slot = False, 0, 0
        #: bool [num_taps], the ACTS column of `taps`.
        self._acts = np.ones(num_taps, bool)

    def load_step(
        self,
        rows: NDArray[np.int64],
        program_ids: NDArray[np.int32],
        owners: NDArray[np.int32],
        slots: NDArray[np.int64],
        to_host: bool = False,
        repeat: Repeat | None = None,
    ) -> None:
        """Set the programs of these rows for the next forward. All other rows have no program.

        The table keeps the programs until the next `load_step` or `clear_step`.

        Args:
            rows: indices of the rows, ascending.
            program_ids, owners: the program and the owner of each row. The owner 0 means that the
                row has no owner.
            slots: the first slot of each row's token. But if the step is drained tap by tap,
                `slots` has the index of each row's token among the tokens that deliver.
            to_host: True if the slots are in host memory, not in the arena.
            repeat: the data with which `move_on` can repeat the step. None if the step cannot be
                repeated. With `repeat`, the taps read the rows' positions. The caller must
                therefore call `point_at` first.
        """
        if self._is_stale:
            self._flush()
        buffer = self._staging.next()
        if buffer.holds is not program_ids or buffer.to_host != to_host:
            buffer.array[: buffer.num_rows, PROGRAM] = NO_PROGRAM
            buffer.array[rows, PROGRAM] = program_ids
            buffer.array[rows, TO_HOST] = to_host
            buffer.array[rows, OWNER] = owners
            buffer.holds, buffer.to_host, buffer.rows = program_ids, to_host, _as_slice(rows)
            buffer.num_rows = int(rows[-1]) + 1
        stride = 0 if repeat is None else repeat.stride
        buffer.array[buffer.rows, SLOT] = slots
        buffer.array[buffer.rows, STRIDE] = stride
        if repeat is not None:
            buffer.array[buffer.rows, SINCE] = repeat.since
            buffer.array[buffer.rows, STEPS] = repeat.steps
        self._staging.upload(buffer, max(buffer.num_rows, self._rows_written))
        self._rows_written = buffer.num_rows
        if self._loaded is not program_ids:
            self._load_acts(program_ids)
        self._loaded, self._to_host, self._stride = program_ids, to_host, stride
        self._next_slot = int(slots[0]) + stride
        self.num_uploads += 1

    def move_on(self, program_ids: NDArray[np.int32], slot: int, to_host: bool) -> bool:
        """True if the next forward can use the table unchanged. This method then counts the use.
        The caller guarantees that the next forward has the same rows, each one position later.

        Args:
            program_ids: the argument of `load_step`, which must be the same array object.
            slot: the first slot of the next step.
        """
        if (
            self._loaded is not program_ids
            or not self._stride
            or slot != self._next_slot
            or to_host != self._to_host
            or self._is_stale
        ):
            return False
        self._next_slot += self._stride
        return True

    def point_at(self, positions: Tensor) -> bool:
        """Let taps read the rows' positions from this tensor. Returns False if taps cannot read it.

        Args:
            positions: [num_rows or more], the true position of each batch row, on the device. Taps
                need a contiguous int64 tensor, and read its memory during the forward.
        """
        if positions.data_ptr() == self._positions:
            return True
        if positions.dtype != torch.int64 or not positions.is_contiguous():
            return False
        self._positions = positions.data_ptr()
        self.host[5] = self._positions
        return True

    def load_walks(
        self, rows: NDArray[np.int64], walks: NDArray[np.int32], positions: Tensor
    ) -> None:
        """Write the walks of these rows for the next forward. The table keeps the walks until the
        next call with other walks.

        Args:
            rows: indices of the rows, ascending.
            walks: [num_rows, 8], the walk of each of these rows.
            positions: the argument of `point_at`.

        Raises:
            ScopeError: taps cannot read these positions.
        """
        if not self.point_at(positions):
            raise ScopeError(
                f"positions are {positions.dtype} with strides {positions.stride()}; states need a "
                "contiguous int64 tensor."
            )
        if self._walks is walks:
            return
        self._walks = walks
        buffer = self._walk_staging.next()
        buffer.array[rows] = walks
        self._walk_staging.upload(buffer, int(rows[-1]) + 1)
        self.num_uploads += 1

    def has_loaded(self, program_ids: NDArray[np.int32]) -> bool:
        """True if the last `load_step` had this array of ids, and the table still has the ids."""
        return self._loaded is program_ids

    def _load_acts(self, program_ids: NDArray[np.int32]) -> None:
        """Write to the table of taps whether each tap does something for at least one row. Without
        this information, each row would look up its program at each tap. On a GPU, a tap that does
        nothing would then take twice as long."""
        alike = bool((program_ids == program_ids[0]).all())  # the usual case, which is fast
        used = program_ids[:1] if alike else np.unique(program_ids)
        acts = (self._host_programs[used[used != NO_PROGRAM]] >= 0).any(axis=0)
        if np.array_equal(acts, self._acts):
            return
        self._acts = acts
        buffer = self._tap_staging.next()
        buffer.array[:, NUMBER] = range(len(acts))
        buffer.array[:, ACTS] = acts
        self._tap_staging.upload(buffer, len(acts))
        self.num_uploads += 1

    @property
    def acting(self) -> NDArray[np.bool_] | None:
        """bool [num_taps], True for taps that do something in the step that was loaded last. None
        if no step is loaded. If the values change, the property returns a new array object."""
        return None if self._loaded is None else self._acts

    def clear_step(self) -> None:
        """Remove the programs of all rows. After this call, `acting` is None, and `move_on` returns
        False."""
        self._loaded = None
        if self._rows_written:
            self.tokens[: self._rows_written].fill_(NO_PROGRAM)
            self._rows_written = 0


def _as_slice(rows: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """The indices `rows` as a slice if they are consecutive, else `rows` itself."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 else rows
