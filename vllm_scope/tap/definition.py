"""What a tap does to the rows of one step, in plain torch.

Owns:  the meaning of every opcode. The Triton kernel must equal it.
Runs:  on the CPU, and in tests as the kernel's twin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_scope.program import OP_READ


def tap_rows(
    hidden: Tensor,
    residual: Tensor | None,
    arena: Tensor,
    tokens: Tensor,
    programs: Tensor,
    ops: Tensor,
    tap: Tensor,
    slot_base: int,
    read_stride: int,
) -> None:
    """Run each row's program at one tap.

    The row is the residual stream x = hidden + residual, added in float32.
    READ stores x, rounded once to the arena's dtype, at slot
    `slot_base + token_slot + read_index * read_stride`.

    Args:
        hidden: [num_rows, hidden_size], model dtype.
        residual: like `hidden`; None where the model has added it already.
        arena: [num_slots, hidden_size]. Written in place.
        tokens: [max_rows, 4] int32: program (-1 none), slot, and two reserved.
            Rows at and after num_rows are not looked at.
        programs: [num_programs, num_taps, 2] int32: first op and number of ops.
        ops: [num_ops, 4] int32: opcode and its operands.
        tap: scalar int32 tensor: this tap's column in `programs`.
        slot_base: added to every slot; 0 unless the step is drained tap by tap.
        read_stride: slots between two reads of one token; 0 when drained tap by tap.
    """
    table = tokens[: hidden.shape[0]]
    rows = torch.nonzero(table[:, 0] >= 0).flatten()
    if rows.numel() == 0:
        return
    first, count = programs[table[rows, 0].long(), int(tap)].long().unbind(1)
    x = hidden[rows].float()
    if residual is not None:
        x = x + residual[rows].float()
    for k in range(int(count.max())):
        live = count > k
        op = ops[(first + k)[live]].long()
        read = op[:, 0] == OP_READ
        at = rows[live][read]
        slots = slot_base + table[at, 1].long() + op[read, 1] * read_stride
        arena.index_copy_(0, slots, x[live][read].to(arena.dtype))
