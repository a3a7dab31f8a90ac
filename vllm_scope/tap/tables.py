"""The tables that tell every tap what to do, and how they are refilled.

Owns:  Tables (device tensors, fixed size, fixed address) and the ids of programs.
Runs:  in every worker. The host writes; taps read.
From:  plan.   To: op.

Promise: for a forward that was not planned every token's program is -1, so dummy
runs, graph captures and idle steps read nothing. An id may be given to another program
while earlier steps still run: writes go to the device in stream order.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.errors import CapacityError
from vllm_scope.program import NO_PROGRAM, OP_READ, Program

#: Columns of the token table.
PROGRAM, SLOT = 0, 1
#: Steps that may be in flight before their upload buffer is written again.
UPLOADS_IN_FLIGHT = 8


class Tables:
    """Persistent device tables.

    Attributes:
        tokens: [max_rows, 4] int32: program, slot, two reserved.
        programs: [num_programs, num_taps, 2] int32: first op, number of ops.
        ops: [num_ops, 4] int32: opcode, operands.
        numbers: [num_taps] int32: 0, 1, ...; a tap is told its number by a view of it.
        num_uploads: copies to the device so far, for the idle test.
    """

    def __init__(
        self,
        boundaries: tuple[int, ...],
        max_rows: int,
        device: torch.device,
        num_programs: int = 4096,
    ) -> None:
        self.boundaries = boundaries
        self.num_uploads = 0
        self._tap_of = {boundary: tap for tap, boundary in enumerate(boundaries)}
        num_taps = max(len(boundaries), 1)
        self.tokens = torch.full((max_rows, 4), NO_PROGRAM, dtype=torch.int32, device=device)
        self.programs = torch.zeros((num_programs, num_taps, 2), dtype=torch.int32, device=device)
        # READ j for every j: the op list of any tap is one of these.
        ops = torch.zeros((num_taps, 4), dtype=torch.int32)
        ops[:, 0] = OP_READ
        ops[:, 1] = torch.arange(num_taps)
        self.ops = ops.to(device)
        self.numbers = torch.arange(num_taps, dtype=torch.int32, device=device)

        self._ids: OrderedDict[Program, int] = OrderedDict()
        self._program_of: dict[int, Program] = {}
        self._free = list(range(num_programs - 1, -1, -1))
        self._references = np.zeros(num_programs, np.int64)
        self._last_used = np.full(num_programs, -1, np.int64)
        self._step = 0
        #: Arena slots that a token under each program takes, by program id.
        self.num_reads = np.zeros(num_programs, np.int64)
        self._staging = _Staging((max_rows, 4), device)
        self._rows_written = 0

    def begin_step(self) -> None:
        self._step += 1

    def program_id(self, program: Program, hold: bool = False) -> int:
        """The id of a program, written to the device the first time.

        Args:
            program: what the tokens do.
            hold: keep the id until `release`; else it is good for this step.

        Raises:
            CapacityError: every id is held, or used in this step.
        """
        found = self._ids.get(program)
        if found is None:
            found = self._take_id()
            self._write(found, program)
            self._ids[program] = found
            self._program_of[found] = program
        self._ids.move_to_end(program)
        self._last_used[found] = self._step
        if hold:
            self._references[found] += 1
        return found

    def program_of(self, program_id: int) -> Program:
        return self._program_of[program_id]

    def release(self, program_id: int) -> None:
        self._references[program_id] -= 1

    def _take_id(self) -> int:
        if self._free:
            return self._free.pop()
        for program, found in self._ids.items():
            if not self._references[found] and self._last_used[found] != self._step:
                del self._ids[program]
                return found
        raise CapacityError(
            f"all {len(self._references)} tap programs are in use; "
            "send the request again when others have finished, or give requests the same reads."
        )

    def _write(self, program_id: int, program: Program) -> None:
        entry = np.zeros(self.programs.shape[1:], np.int32)
        for j, boundary in enumerate(program.boundaries):
            entry[self._tap_of[boundary]] = (j, 1)
        staged = torch.from_numpy(entry)
        if self.programs.is_cuda:
            # From pageable memory the copy would wait for the whole stream.
            staged = staged.pin_memory()
        self.programs[program_id].copy_(staged, non_blocking=True)
        self.num_reads[program_id] = program.num_reads
        self.num_uploads += 1

    def load_step(
        self, rows: NDArray[np.int64], program_ids: NDArray[np.int32], slots: NDArray[np.int64]
    ) -> None:
        """Give rows of the coming forward their programs, and no other row one.

        They stay until the next `load_step` or `clear_step`.
        """
        last = max(int(rows[-1]) + 1, self._rows_written)
        with self._staging.next() as staged:
            staged[:last, PROGRAM] = NO_PROGRAM
            staged[rows, PROGRAM] = program_ids
            staged[rows, SLOT] = slots
            self._staging.upload(self.tokens, last)
        self._rows_written = int(rows[-1]) + 1
        self.num_uploads += 1

    def clear_step(self) -> None:
        """No row has a program. Free when that is so already."""
        if self._rows_written:
            self.tokens[: self._rows_written].fill_(NO_PROGRAM)
            self._rows_written = 0


class _Staging:
    """A ring of host buffers for uploads; pinned, and fenced by events, on a GPU.

    Several steps are in flight at once under async scheduling: a buffer that is
    written again before its copy ran would change the plan of an earlier step.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        count = UPLOADS_IN_FLIGHT if self._cuda else 1
        self._buffers = [
            torch.full(shape, NO_PROGRAM, dtype=torch.int32, pin_memory=self._cuda)
            for _ in range(count)
        ]
        self._events = [torch.cuda.Event() if self._cuda else None for _ in range(count)]
        self._at = 0

    def next(self) -> _Staging:
        self._at = (self._at + 1) % len(self._buffers)
        return self

    def __enter__(self) -> NDArray[np.int32]:
        event = self._events[self._at]
        if event is not None:
            event.synchronize()
        return self._buffers[self._at].numpy()

    def upload(self, to: Tensor, num_rows: int) -> None:
        to[:num_rows].copy_(self._buffers[self._at][:num_rows], non_blocking=True)

    def __exit__(self, *_: object) -> None:
        event = self._events[self._at]
        if event is not None:
            event.record()
