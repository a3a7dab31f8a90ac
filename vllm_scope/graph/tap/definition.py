"""What a tap does to the rows of one step, in plain torch and numpy.

Owns:  the meaning of every opcode. The Triton kernel must equal it.
Runs:  on the CPU, and in tests as the kernel's twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.program.operations import (
    OP_ABLATE,
    OP_ADD,
    OP_ADD_NORM,
    OP_CHECK,
    OP_CLAMP,
    OP_READ,
    OP_SET,
)

#: Columns of the op table. Offsets are in 4-byte words from the token's first slot.
CODE, WORD, WORD_IN_TAP, VECTOR, NUMBER_A, NUMBER_B, NEXT = range(7)
#: Columns of the token table.
PROGRAM, SLOT, TO_HOST, OWNER = range(4)
WORDS_PER_SLOT = SLOT_BYTES // 4
#: A fault is the tap's number + 1. This bit is set if OP_CHECK found it, not an edit.
CHECKED = 1 << 30


def fault_at(fault: int) -> tuple[int, bool]:
    """The tap that reported a fault, and True if an edit's result was not finite there.

    Args:
        fault: not 0.
    """
    return (fault & ~CHECKED) - 1, not fault & CHECKED


def tap_rows(
    hidden: Tensor,
    residual: Tensor | None,
    arena: Tensor,
    tokens: Tensor,
    programs: Tensor,
    ops: Tensor,
    vectors: Tensor,
    tap: Tensor,
    host: Tensor,
    slot_base: int,
    slots_per_token: int,
) -> None:
    """Run each row's program at one tap.

    The row is the residual stream x = hidden + residual, added in float32. READ sees x rounded to
    the model's dtype; edits compute in float32.

    An edited row is written back, rounded once: residual = x and hidden = 0, or hidden = x
    if there is no residual. Two edited rows are not written:

    - A row that its edits left unchanged: rounding the sum would change the next norm's input.
    - A row that is not finite in the model's dtype. Its owner gets a fault, and the model
      goes on with the row from before the edits. Where faults are not read (every pipeline
      stage but the last), the row is written, and OP_CHECK finds it in the last stage.

    OP_CHECK replaces a row that is not finite by zeros. Nobody gets them; without it a
    sampler could turn such logits into a token that does not exist.

    Args:
        hidden: [num_rows, hidden_size], model dtype. Edited rows are written.
        residual: like `hidden`; None if the model has added it already.
        arena: [num_slots, elements of a slot], model dtype. Written in place.
        tokens: [max_rows, 4] int32: program (-1 for none), slot, 1 if the token's slots are
            in host memory, owner. Rows from num_rows on are not looked at.
        programs: [num_programs, num_taps] int32: first op, -1 for none.
        ops: [num_ops, 8] int32: see the columns above. Numbers are float32 bits.
        vectors: [num_vectors, hidden_size] float32.
        tap: scalar int32 tensor: this tap's column in `programs`.
        host: [2] int64: the address of the host's slots (only the kernel writes there), and
            that of the faults, int32 by owner; 0 if nobody reads faults.
        slot_base: first slot of this tap if the step is drained tap by tap, else 0.
        slots_per_token: slots of each token at this tap if the step is drained tap by tap
            (`tokens` then has the token's number instead of its slot), else 0.
    """
    # The tables are small: torch takes ten times as long as numpy.
    table = tokens[: hidden.shape[0]].numpy()
    rows = np.flatnonzero(table[:, PROGRAM] >= 0)
    at = programs.numpy()[table[rows, PROGRAM], int(tap)]
    rows, at = rows[at >= 0], at[at >= 0]
    if not len(rows):
        return
    index = torch.from_numpy(rows)
    came = hidden.index_select(0, index).float()
    if residual is not None:
        came = came + residual.index_select(0, index).float()
    x = came
    edited = np.zeros(len(rows), bool)
    words, numbers = arena.view(torch.int32).view(-1).numpy(), ops.numpy()
    while len(live := np.flatnonzero(at >= 0)):
        told = numbers[at[live]]
        for code in set(told[:, CODE].tolist()):
            mine = told[:, CODE] == code
            here, op = live[mine], told[mine]
            # Most often all rows do the same; a slice copies none.
            some = slice(None) if len(here) == len(rows) else torch.from_numpy(here)
            if code == OP_CHECK:
                bad = here[~x[some].to(hidden.dtype).isfinite().all(1).numpy()]
                if len(bad):
                    x = x.clone() if x is came else x
                    x[torch.from_numpy(bad)] = 0
                    for which, how in (edited[bad], 0), (~edited[bad], CHECKED):
                        _report(host, table[rows[bad[which]], OWNER], how | int(tap) + 1)
                    edited[bad] = True
            elif code == OP_READ:
                slot = table[rows[here], SLOT].astype(np.int64)
                if slots_per_token:
                    slot = slot_base + slot * slots_per_token
                column = WORD_IN_TAP if slots_per_token else WORD
                start = slot * WORDS_PER_SLOT + op[:, column]
                _store(x[some].to(hidden.dtype), words, start)
            else:
                x = x.clone() if x is came else x
                x[some] = _edited(code, x[some], op, vectors)
                edited[here] = True
        at[live] = told[:, NEXT]
    if edited.any():
        told = bool(host[1])
        bad = _write_back(hidden, residual, came, x, index, torch.from_numpy(edited), told)
        _report(host, table[rows[bad], OWNER], int(tap) + 1)


def _write_back(
    hidden: Tensor, residual: Tensor | None, came: Tensor, x: Tensor, index: Tensor,
    edited: Tensor, told: bool,
) -> NDArray[np.bool_]:  # fmt: skip
    """Write the finite rows that changed. Returns by row: True if it is a fault."""
    rounded = x.to(hidden.dtype)
    finite = rounded.isfinite().all(1) | (not told)
    changed = edited & finite & (x != came).any(1)
    index, rounded = index[changed], rounded[changed]
    if residual is not None:
        residual[index] = rounded
        hidden[index] = 0
    else:
        hidden[index] = rounded
    bad: NDArray[np.bool_] = (edited & ~finite).numpy()
    return bad


def _report(host: Tensor, owners: NDArray[np.int32], fault: int) -> None:
    for owner in owners.tolist() if host[1] else ():
        ctypes.c_int32.from_address(int(host[1]) + 4 * owner).value = fault


def _store(x: Tensor, words: np.ndarray, start: np.ndarray) -> None:
    if x.shape[1] * x.element_size() % 4:
        x = torch.nn.functional.pad(x, (0, 1))  # fills the last word; not read
    out = x.contiguous().view(torch.int32).numpy()
    for first, row in zip(start.tolist(), out, strict=True):
        words[first : first + len(row)] = row


def _vectors_of(op: np.ndarray) -> Tensor:
    return torch.from_numpy(op[:, VECTOR].astype(np.int64))


def _number(op: np.ndarray, column: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(op[:, column]).view(np.float32))


def _edited(code: int, x: Tensor, op: np.ndarray, vectors: Tensor) -> Tensor:
    v = vectors[_vectors_of(op)]
    a, b = _number(op, NUMBER_A), _number(op, NUMBER_B)
    along = (x * v).sum(1)
    if code == OP_SET:
        return v
    ways: dict[int, Callable[[], Tensor]] = {
        OP_ADD: lambda: a,
        OP_ADD_NORM: lambda: a * x.norm(dim=1),
        OP_ABLATE: lambda: -along,
        OP_CLAMP: lambda: along.maximum(a).minimum(b) - along,
    }
    return x + ways[code]()[:, None] * v
