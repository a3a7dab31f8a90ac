"""What a tap does to the rows of one step, in plain torch and numpy.

Owns:  the meaning of every opcode. The Triton kernel must equal it.
Runs:  on the CPU, and in tests as the kernel's twin.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_scope.layout import SLOT_BYTES
from vllm_scope.program import OP_ABLATE, OP_ADD, OP_ADD_NORM, OP_CLAMP, OP_DOT, OP_READ, OP_SET

#: Columns of the op table. Offsets are in 4-byte words from the token's first slot.
CODE, WORD, WORD_IN_TAP, VECTOR, NUMBER_A, NUMBER_B, NEXT = range(7)
#: Columns of the token table.
PROGRAM, SLOT, TO_HOST = 0, 1, 2
WORDS_PER_SLOT = SLOT_BYTES // 4


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

    The row is the residual stream x = hidden + residual, added in float32. READ and
    DOT see x rounded to the model's dtype; edits compute in float32. An edited row is
    written back, rounded once: residual = x and hidden = 0, or hidden = x where there
    is no residual.

    Args:
        hidden: [num_rows, hidden_size], model dtype. Edited rows are written.
        residual: like `hidden`; None where the model has added it already.
        arena: [num_slots, elements of a slot], model dtype. Written in place.
        tokens: [max_rows, 4] int32: program (-1 none), slot, 1 where the token's slots
            are in host memory, reserved. Rows at and after num_rows are not looked at.
        programs: [num_programs, num_taps] int32: first op, -1 for none.
        ops: [num_ops, 8] int32: see the columns above; numbers are float32 bits.
        vectors: [num_vectors, hidden_size] float32.
        tap: scalar int32 tensor: this tap's column in `programs`.
        host: [1] int64: address of the host's slots. The kernel alone writes there.
        slot_base: added to every slot; 0 unless the step is drained tap by tap.
        slots_per_token: 0, and a token's slot is in `tokens`; or, drained tap by tap,
            what each token takes at this tap, and `tokens` has its number.
    """
    # The tables' arithmetic in numpy: of so few numbers, torch takes ten times as long.
    table = tokens[: hidden.shape[0]].numpy()
    rows = np.flatnonzero(table[:, PROGRAM] >= 0)
    at = programs.numpy()[table[rows, PROGRAM], int(tap)]
    rows, at = rows[at >= 0], at[at >= 0]
    if not len(rows):
        return
    index = torch.from_numpy(rows)
    x = hidden.index_select(0, index).float()
    if residual is not None:
        x = x + residual.index_select(0, index).float()
    edited = np.zeros(len(rows), bool)
    words, numbers = arena.view(torch.int32).view(-1).numpy(), ops.numpy()
    while len(live := np.flatnonzero(at >= 0)):
        told = numbers[at[live]]
        for code in set(told[:, CODE].tolist()):
            mine = told[:, CODE] == code
            here, op = live[mine], told[mine]
            # Most often all rows do the same, and none is copied to single it out.
            some = slice(None) if len(here) == len(rows) else torch.from_numpy(here)
            if code in (OP_READ, OP_DOT):
                slot = table[rows[here], SLOT].astype(np.int64)
                if slots_per_token:
                    slot = slot_base + slot * slots_per_token
                column = WORD_IN_TAP if slots_per_token else WORD
                start = slot * WORDS_PER_SLOT + op[:, column]
                _store(code, x[some].to(hidden.dtype), op, vectors, words, start)
            else:
                x[some] = _edited(code, x[some], op, vectors)
                edited[here] = True
        at[live] = told[:, NEXT]
    if not edited.any():
        return
    changed, index = x[torch.from_numpy(edited)].to(hidden.dtype), index[torch.from_numpy(edited)]
    if residual is not None:
        residual[index] = changed
        hidden[index] = 0
    else:
        hidden[index] = changed


def _store(
    code: int, x: Tensor, op: np.ndarray, vectors: Tensor, words: np.ndarray, start: np.ndarray
) -> None:
    if code == OP_READ:
        if x.shape[1] * x.element_size() % 4:
            x = torch.nn.functional.pad(x, (0, 1))  # half a word; nobody reads it
        out = x.contiguous().view(torch.int32).numpy()
        for first, row in zip(start.tolist(), out, strict=True):
            words[first : first + len(row)] = row
    else:
        score = (x.float() * vectors[_vectors_of(op)]).sum(1) + _number(op, NUMBER_A)
        words[start] = score.view(torch.int32).numpy()


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
    phi = {
        OP_ADD: lambda: a,
        OP_ADD_NORM: lambda: a * x.norm(dim=1),
        OP_ABLATE: lambda: -along,
        OP_CLAMP: lambda: along.maximum(a).minimum(b) - along,
    }[code]()
    return x + phi[:, None] * v
