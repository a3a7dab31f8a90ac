"""What a tap does to the rows of one step, in plain torch and numpy.

Owns:  the meaning of every opcode. The Triton kernel must compute the same results.
Runs:  on the CPU; tests compare the kernel with this code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.graph.tap import states
from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.program.operations import (
    ADVANCING,
    OP_ABLATE,
    OP_ADD,
    OP_ADD_BOUND,
    OP_ADD_FEATURE,
    OP_ADD_NORM,
    OP_CHECK,
    OP_CLAMP,
    OP_FEATURE,
    OP_GATE,
    OP_GATE_COSINE,
    OP_READ,
    OP_SCORE,
    OP_SET,
    REGISTERS,
    SETTERS,
)

#: Columns of the op table. WORD is the offset of an operation's result from the token's first slot,
#: in words of 4 bytes. WORD_IN_TAP is the same offset in a step that is drained tap by tap. If an
#: operation stores nothing, both offsets are -1.
(
    CODE, WORD, WORD_IN_TAP, VECTOR, NUMBER_A, NUMBER_B, NEXT, REGISTER, SOURCE, NUMBER_C, NUMBER_D,
    NUMBER_E,
) = range(12)  # fmt: skip
NUM_COLUMNS = 12
#: Columns of the token table. A row of this table has 32 bytes, so that all rows have the same
#: alignment in the kernel. One column is not used.
PROGRAM, SLOT, TO_HOST, OWNER, SINCE, STRIDE, STEPS = range(7)
NUM_TOKEN_COLUMNS = 8
#: Columns of the table of taps. A row of this table has 16 bytes, so that all rows have the same
#: alignment in the kernel. Two columns are not used.
NUMBER, ACTS = range(2)
NUM_TAP_COLUMNS = 4
WORDS_PER_SLOT = SLOT_BYTES // 4
#: A tap reports a fault as a number: the tap's number plus 1. If OP_CHECK found the fault in a row
#: that this tap did not edit, the reported number also has the bit CHECKED.
CHECKED = 1 << 30


def fault_at(fault: int) -> tuple[int, bool]:
    """The number of the tap that reported a fault, and a bool. The bool is True if this tap edited
    the row and the result was not finite. The bool is False if OP_CHECK found the fault in a row
    that this tap did not edit.

    Args:
        fault: the number (not 0) that the tap reported.
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
    """Run the program of each row at one tap.

    A row is x = hidden + residual, which is added in float32. Without a residual, x = hidden.
    OP_READ rounds x to the model's dtype and stores the result. Edits compute in float32.

    An edited row x is rounded and written back. If there is a residual, then residual = x and
    hidden = 0. Otherwise hidden = x. An edited row is not written in two cases:

    - The edits did not change the row. A write would replace hidden + residual by the rounded sum.
    - The row is not finite in the model's dtype. The tap reports a fault for the row's owner, and
      the model continues with the row from before the edits. But only taps of the last pipeline
      stage report faults. In the other stages the tap writes the row, and OP_CHECK finds the row in
      the last stage.

    If a row is not finite, OP_CHECK sets the row to zeros. Otherwise a sampler could return a token
    that does not exist. No caller gets these zeros.

    Args:
        hidden: [num_rows, hidden_size], model dtype. Edited rows are written here.
        residual: shape and dtype of `hidden`. None if `hidden` already contains the residual.
        arena: [num_slots, elements of a slot], model dtype. Written in place.
        tokens: [max_rows, 8] int32. The columns are: program (-1 for none); slot; 1 if the token's
            slots are in host memory, else 0; owner; since; stride; steps; a column that is not
            used. The token's first slot is slot + min(max(position - since, 0), steps) * stride.
            This slot is always inside the arena or the ring. Only the first num_rows rows are read.
        programs: [num_programs, num_taps] int32, the index of the program's first op at each tap,
            or -1 for none.
        ops: [num_ops, NUM_COLUMNS] int32. The columns are listed at the top of this file. The
            columns NUMBER_A to NUMBER_E contain the bits of float32 numbers.
        vectors: [num_vectors, hidden_size or more] float32.
        tap: [4] int32. The first number is this tap's column in `programs`. The second number is 0
            if this tap does nothing in this step, else 1. With 0, the tap returns before it reads
            `programs`. The other two numbers are not used.
        host: [6] int64, six addresses. The first two are addresses of host memory: of the ring's
            slots, which only the kernel writes, and of the faults, int32 by owner. The address of
            the faults is 0 if this rank reports no faults. The other four are addresses of tables
            on the rows' device: the registers, float32 [max_rows, REGISTERS]; the walks, int32
            [max_rows, 8]; the log of states, float32; and the rows' positions, int64. The positions
            are read only for rows with a stride, and for operations in ADVANCING.
        slot_base: if the step is drained tap by tap, the first slot of this tap; else 0.
        slots_per_token: if the step is drained tap by tap, the number of slots of each token at
            this tap; else 0. If `slots_per_token` is not 0, the slot column of `tokens` contains
            the token's index instead of a slot.
    """
    number, acts = int(tap[NUMBER]), int(tap[ACTS])
    if not acts:
        return
    # numpy is used for the tables, because torch takes ten times as long for small tables.
    table = tokens[: hidden.shape[0]].numpy()
    rows = np.flatnonzero(table[:, PROGRAM] >= 0)
    at = programs.numpy()[table[rows, PROGRAM], number]
    rows, at = rows[at >= 0], at[at >= 0]
    if not len(rows):
        return
    index = torch.from_numpy(rows)
    came = hidden.index_select(0, index).float()
    if residual is not None:
        came = came + residual.index_select(0, index).float()
    x, rounded = came, None
    edited = np.zeros(len(rows), bool)
    words, numbers = arena.view(torch.int32).view(-1).numpy(), ops.numpy()
    registers = states.array_at(ctypes.c_float, int(host[2]), (len(tokens), REGISTERS))
    vectors = vectors[:, : hidden.shape[1]]
    first = _first_slots(table, rows, host, slot_base, slots_per_token)
    while len(live := np.flatnonzero(at >= 0)):
        told = numbers[at[live]]
        for code in set(told[:, CODE].tolist()):
            mine = told[:, CODE] == code
            here, op = live[mine], told[mine]
            # Usually all rows have the same operation. In this case a slice is used, which copies
            # no row.
            some = slice(None) if len(here) == len(rows) else torch.from_numpy(here)
            column = WORD_IN_TAP if slots_per_token else WORD
            start = first[here] * WORDS_PER_SLOT + op[:, column]
            if code in SETTERS:
                values, score = _condition(code, x[some], op, vectors)
                if code != OP_FEATURE and (kept := op[:, SOURCE] >= 0).any():
                    registers[rows[here[kept]], op[kept, SOURCE]] = score[kept]
                registers[rows[here], op[:, REGISTER]] = values
                _tell(values, words, start, op[:, column] >= 0)
            elif code in ADVANCING:
                values = states.advance(code, rows[here], op, registers, host)
                _tell(values, words, start, op[:, column] >= 0)
            elif code == OP_CHECK:
                bad = here[~x[some].to(hidden.dtype).isfinite().all(1).numpy()]
                if len(bad):
                    x = x.clone() if x is came else x
                    x[torch.from_numpy(bad)], rounded = 0, None
                    for which, how in (edited[bad], 0), (~edited[bad], CHECKED):
                        _report(host, table[rows[bad[which]], OWNER], how | number + 1)
                    edited[bad] = True
            elif code == OP_READ:
                _store(x[some].to(hidden.dtype), words, start)
            elif code == OP_SCORE:
                if rounded is None:
                    rounded = x.to(hidden.dtype).float()
                same = (op[:, VECTOR] == op[0, VECTOR]).all()
                along = _dot(rounded[some], vectors[_vectors_of(op[:1] if same else op)])
                _tell((along + _number(op, NUMBER_B)).numpy(), words, start, op[:, column] >= 0)
            else:
                x = x.clone() if x is came else x
                register = op[:, REGISTER]
                part = np.where(register < 0, np.float32(1), registers[rows[here], register])
                old = x[some]
                source = torch.from_numpy(registers[rows[here], op[:, SOURCE]])
                new = _edited(code, old, op, vectors, torch.from_numpy(part), source)
                if (wanted := op[:, column] >= 0).any():
                    _tell(_relative(new - old, old), words, start, wanted)
                x[some], rounded = new, None
                edited[here] |= part != 0
        at[live] = told[:, NEXT]
    if edited.any():
        told = bool(host[1])
        bad = _write_back(hidden, residual, came, x, index, torch.from_numpy(edited), told)
        _report(host, table[rows[bad], OWNER], number + 1)


def _write_back(
    hidden: Tensor, residual: Tensor | None, came: Tensor, x: Tensor, index: Tensor,
    edited: Tensor, told: bool,
) -> NDArray[np.bool_]:  # fmt: skip
    """Write the rows that are finite and changed to the model's tensors. Returns bool [num_rows],
    True for a row with a fault.

    Args:
        told: True if this rank reports faults. If False, rows that are not finite are written too.
    """
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


def _first_slots(
    table: NDArray[np.int32], rows: NDArray[np.int64], host: Tensor, base: int, per_token: int
) -> NDArray[np.int64]:
    """The first slot of each of these rows, computed from the token table."""
    columns = table[rows]
    first = columns[:, SLOT].astype(np.int64)
    if per_token:
        return base + first * per_token
    stride = columns[:, STRIDE]
    if stride.any():
        steps = np.maximum(states.positions_of(rows, host) - columns[:, SINCE], 0)
        first += np.minimum(steps, columns[:, STEPS]) * stride
    return first


def _tell(
    values: NDArray[np.float32], words: np.ndarray, at: np.ndarray, told: NDArray[np.bool_]
) -> None:
    words[at[told]] = values[told].view(np.int32)


def _relative(change: Tensor, x: Tensor) -> NDArray[np.float32]:
    """The length of each row's change, divided by the length of the row. 0 for a row of zeros."""
    length = _norm(x)
    found = torch.where(length > 0, _norm(change) / length, torch.zeros_like(length))
    return found.numpy()


def _store(x: Tensor, words: np.ndarray, start: np.ndarray) -> None:
    if x.shape[1] * x.element_size() % 4:
        x = torch.nn.functional.pad(x, (0, 1))  # fills the last word of each row
    out = x.contiguous().view(torch.int32).numpy()
    for first, row in zip(start.tolist(), out, strict=True):
        words[first : first + len(row)] = row


def _vectors_of(op: np.ndarray) -> Tensor:
    return torch.from_numpy(op[:, VECTOR].astype(np.int64))


def _number(op: np.ndarray, column: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(op[:, column]).view(np.float32))


def _dot(x: Tensor, v: Tensor) -> Tensor:
    """The dot product of each row with its vector, [num_rows]. If `v` has only one vector, all rows
    use this vector. numpy computes the products, because with torch the last bit of a row's result
    can depend on the other rows."""
    rows, vectors = x.detach().numpy(), v.numpy()
    if len(vectors) == 1:
        return torch.from_numpy(np.einsum("ij,j->i", rows, vectors[0]))
    return torch.from_numpy(np.einsum("ij,ij->i", rows, vectors))


def _norm(x: Tensor) -> Tensor:
    return _dot(x, x).sqrt()


def _condition(
    code: int, x: Tensor, op: np.ndarray, vectors: Tensor
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The values of a gate or of a feature, [num_rows], and the scores from which these values are
    computed, [num_rows]."""
    v = vectors[_vectors_of(op)]
    a, b, c, d = (_number(op, n) for n in (NUMBER_A, NUMBER_B, NUMBER_C, NUMBER_D))
    along = _dot(x, v)
    if code in (OP_GATE, OP_FEATURE):
        score = along + b
    else:
        w = v if code == OP_GATE_COSINE else torch.tanh(along[:, None] * v)
        lengths = _norm(x) * _norm(w)
        score = torch.where(lengths > 0, _dot(x, w) / lengths, torch.zeros_like(lengths))
    if code == OP_FEATURE:
        return torch.where(score > c, score, torch.zeros_like(score)).numpy(), score.numpy()
    return states.compared(score.numpy(), a.numpy(), c.numpy(), d.numpy()), score.numpy()


def _edited(
    code: int, x: Tensor, op: np.ndarray, vectors: Tensor, part: Tensor, source: Tensor
) -> Tensor:
    """The rows after an edit, [num_rows, hidden_size].

    Args:
        part: [num_rows], the value from 0 to 1 by which the edit's change is multiplied.
        source: [num_rows], the activation of the feature that the edit changes. Not used by other
            edits.
    """
    v, part = vectors[_vectors_of(op)], part[:, None]
    if code == OP_SET:
        return torch.where(part == 1, v, torch.where(part == 0, x, x + part * (v - x)))
    a, b, d = (_number(op, n) for n in (NUMBER_A, NUMBER_B, NUMBER_D))
    along = _dot(x, v)

    def bounded() -> Tensor:
        most = b * _norm(x)
        return a.maximum(-most).minimum(most)

    def of_feature() -> Tensor:
        return torch.where((b > 0) & (source <= 0), torch.zeros_like(a), a + d * source)

    ways: dict[int, Callable[[], Tensor]] = {
        OP_ADD_BOUND: bounded,
        OP_ADD_FEATURE: of_feature,
        OP_ADD: lambda: a,
        OP_ADD_NORM: lambda: a * _norm(x),
        OP_ABLATE: lambda: -along,
        OP_CLAMP: lambda: along.maximum(a).minimum(b) - along,
    }
    return torch.where(part == 0, x, x + part * ways[code]()[:, None] * v)
