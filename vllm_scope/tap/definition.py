"""What a tap does to the rows of one step, in plain torch.

Owns:  the meaning of every opcode. The Triton kernel must equal it.
Runs:  on the CPU, and in tests as the kernel's twin.
"""

from __future__ import annotations

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
    table = tokens[: hidden.shape[0]]
    rows = torch.nonzero(table[:, PROGRAM] >= 0).flatten()
    if rows.numel() == 0:
        return
    at = programs[table[rows, PROGRAM].long(), int(tap)].long()
    rows, at = rows[at >= 0], at[at >= 0]
    if rows.numel() == 0:
        return
    x = hidden[rows].float()
    if residual is not None:
        x = x + residual[rows].float()
    edited = torch.zeros(rows.shape, dtype=torch.bool)
    words = arena.view(torch.int32).view(-1)
    while True:
        live = torch.nonzero(at >= 0).flatten()
        if live.numel() == 0:
            break
        for code in ops[at[live], CODE].unique().tolist():
            here = live[ops[at[live], CODE] == code]
            op = ops[at[here]]
            if code in (OP_READ, OP_DOT):
                slot = table[rows[here], SLOT].long()
                if slots_per_token:
                    slot = slot_base + slot * slots_per_token
                column = WORD_IN_TAP if slots_per_token else WORD
                start = slot * WORDS_PER_SLOT + op[:, column].long()
                _store(code, x[here].to(hidden.dtype), op, vectors, words, start)
            else:
                x[here] = _edited(code, x[here], op, vectors)
                edited[here] = True
        at[live] = ops[at[live], NEXT].long()
    changed, rows = x[edited].to(hidden.dtype), rows[edited]
    if rows.numel() and residual is not None:
        residual[rows] = changed
        hidden[rows] = 0
    elif rows.numel():
        hidden[rows] = changed


def _store(code: int, x: Tensor, op: Tensor, vectors: Tensor, words: Tensor, start: Tensor) -> None:
    if code == OP_READ:
        if x.shape[1] * x.element_size() % 4:
            x = torch.nn.functional.pad(x, (0, 1))  # half a word; nobody reads it
        out = x.contiguous().view(torch.int32)
    else:
        score = (x.float() * vectors[op[:, VECTOR].long()]).sum(1) + _number(op, NUMBER_A)
        out = score.view(torch.int32)[:, None]
    words[start[:, None] + torch.arange(out.shape[1])] = out


def _number(op: Tensor, column: int) -> Tensor:
    return op[:, column].contiguous().view(torch.float32)


def _edited(code: int, x: Tensor, op: Tensor, vectors: Tensor) -> Tensor:
    v = vectors[op[:, VECTOR].long()]
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
