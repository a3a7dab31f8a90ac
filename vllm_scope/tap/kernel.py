"""The tap in Triton: one program instance per token row, early exit.

Owns:  the kernel and its launcher.
Runs:  on the GPU, inside captured CUDA graphs: no host sync, no allocation,
       shapes fixed per graph; only the contents of the tables change.
Must equal: tap/definition.py, on random programs (a property test).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

OP_READ = tl.constexpr(1)


# One variant serves all taps: a second one would be compiled in a graph capture.
@triton.jit(
    do_not_specialize=[
        "hidden_row_stride", "residual_row_stride", "num_taps", "slot_base", "read_stride",
    ]
)  # fmt: skip
def _tap_kernel(
    hidden_ptr,
    residual_ptr,
    arena_ptr,
    tokens_ptr,
    programs_ptr,
    ops_ptr,
    tap_ptr,
    hidden_row_stride,
    residual_row_stride,
    hidden_size,
    num_taps,
    slot_base,
    read_stride,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    program = tl.load(tokens_ptr + row * 4)
    if program < 0:
        return
    entry = programs_ptr + (program.to(tl.int64) * num_taps + tl.load(tap_ptr)) * 2
    first = tl.load(entry).to(tl.int64)
    count = tl.load(entry + 1)
    if count == 0:
        return
    token_slot = tl.load(tokens_ptr + row * 4 + 1)
    for k in range(count):
        op = ops_ptr + (first + k) * 4
        if tl.load(op) == OP_READ:
            slot = slot_base + token_slot + tl.load(op + 1) * read_stride
            out_ptr = arena_ptr + slot.to(tl.int64) * hidden_size
            for start in range(0, hidden_size, BLOCK):
                at = start + tl.arange(0, BLOCK)
                keep = at < hidden_size
                x = tl.load(hidden_ptr + row * hidden_row_stride + at, keep).to(tl.float32)
                if HAS_RESIDUAL:
                    x += tl.load(residual_ptr + row * residual_row_stride + at, keep).to(tl.float32)
                tl.store(out_ptr + at, x.to(arena_ptr.dtype.element_ty), keep)


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
    """Launch the kernel; arguments as in `definition.tap_rows`.

    Columns must be contiguous; rows of `hidden` and `residual` may be strided.
    """
    num_rows, hidden_size = hidden.shape
    if num_rows == 0:
        return
    block = min(triton.next_power_of_2(hidden_size), 4096)
    _tap_kernel[(num_rows,)](
        hidden,
        hidden if residual is None else residual,
        arena,
        tokens,
        programs,
        ops,
        tap,
        hidden.stride(0),
        hidden.stride(0) if residual is None else residual.stride(0),
        hidden_size,
        programs.shape[1],
        slot_base,
        read_stride,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )
