"""Computes sums over rows x in one pass: the sum of x x^T for 16-bit rows, and the sum of x.

Owns:  `add_squares`, `column_sums` and `load`, with two Triton kernels.
Runs:  on the threads of worker.device_sums, on GPUs.

Promise: products of 16-bit numbers are exact in float32. But a GPU's matrix unit truncates the sums
that it computes. After 5,000 rows, a sum of the matrix unit would be too small. The relative error
would be 2e-5 for bfloat16 rows and 3e-5 for float16 rows. Therefore the matrix unit adds the
products of at most CHAIN rows. The kernel then adds the sums of the matrix unit in float32, with
rounding. At the end of a call, the kernel adds this total to the float64 sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_scope.program.layout import SLOT_BYTES

#: A matrix unit adds the products of at most this many rows.
CHAIN = 512
#: One Triton program computes TILE x TILE sums, and loads DEPTH rows at a time.
TILE, DEPTH = 128, 64
#: How many rows one Triton program of `column_sums` adds.
ROWS = 512
_OPTIONS: dict[str, Any] = {
    "chain": CHAIN, "depth": DEPTH, "tile": TILE, "num_warps": 8, "num_stages": 4,
}  # fmt: skip
_SUMMED: dict[str, Any] = {"count": ROWS, "depth": DEPTH, "tile": TILE}


def add_squares(rows: Tensor, sums: Tensor) -> None:
    """Add x x^T of each row x to the sums on and above the diagonal, and to some sums below the
    diagonal.

    Args:
        rows: [num_rows, width], bfloat16 or float16, on a GPU. Each row is contiguous.
        sums: float64 [width, width], contiguous. The function changes this tensor in place.
    """
    num_rows, width = rows.shape
    tiles = triton.cdiv(width, TILE)
    if num_rows:
        _kernel[tiles, tiles](rows, sums, num_rows, width, *_steps(rows), **_OPTIONS)


def column_sums(rows: Tensor) -> Tensor:
    """float64 [width], the sum of the rows. Each number is first converted to float64.

    Args:
        rows: [num_rows, width], floats, on a GPU. Each row is contiguous.
    """
    num_rows, width = rows.shape
    num_parts = triton.cdiv(num_rows, ROWS)
    parts = torch.empty((num_parts, width), dtype=torch.float64, device=rows.device)
    if num_rows:
        grid = triton.cdiv(width, TILE), num_parts
        _sums[grid](rows, parts, num_rows, width, *_steps(rows), **_SUMMED)
    return parts.sum(0)


def load(dtype: torch.dtype, width: int) -> None:
    """Compile the kernels for rows of `width` numbers that start at slots, so that no step waits
    for the compiler."""
    unit = SLOT_BYTES // dtype.itemsize
    if dtype.itemsize == 2:
        _kernel.warmup(dtype, torch.float64, 1, width, 1, unit, grid=(1,), **_OPTIONS)
    _sums.warmup(dtype, torch.float64, 1, width, 1, unit, grid=(1,), **_SUMMED)


def _steps(rows: Tensor) -> tuple[int, int]:
    """The distance from one row to the next row, in units, and the number of elements in a unit. If
    the distance is a multiple of a slot, a unit is a slot. Otherwise a unit is one element. The
    kernels are compiled separately for each size of a unit."""
    unit = SLOT_BYTES // rows.element_size()
    step = rows.stride(0)
    return (step // unit, unit) if step % unit == 0 else (step, 1)


@triton.jit(do_not_specialize=["num_rows", "row_step"])
def _kernel(  # type: ignore[no-untyped-def]
    rows, sums, num_rows, width, row_step, unit: tl.constexpr,
    chain: tl.constexpr, depth: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    above, beside = tl.program_id(1), tl.program_id(0)
    if beside < above:
        return
    left = above * tile + tl.arange(0, tile)
    right = beside * tile + tl.arange(0, tile)
    is_left, is_right = left < width, right < width
    some = tl.arange(0, depth)
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for first in range(0, num_rows, chain):
        part = tl.zeros((tile, tile), dtype=tl.float32)
        for at in range(first, min(first + chain, num_rows), depth):
            row = at + some
            there = (row < num_rows)[:, None]
            start = rows + row.to(tl.int64)[:, None] * row_step * unit
            x = tl.load(start + left[None, :], there & is_left[None, :], 0.0)
            y = tl.load(start + right[None, :], there & is_right[None, :], 0.0)
            part = tl.dot(tl.trans(x), y, part)
        total += part
    into = sums + left.to(tl.int64)[:, None] * width + right[None, :]
    written = is_left[:, None] & is_right[None, :]
    tl.store(into, tl.load(into, written, 0.0) + total.to(tl.float64), written)


@triton.jit(do_not_specialize=["num_rows", "row_step"])
def _sums(  # type: ignore[no-untyped-def]
    rows, parts, num_rows, width, row_step, unit: tl.constexpr,
    count: tl.constexpr, depth: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    some = tl.arange(0, depth)
    part = tl.program_id(1)
    first, here = part * count, column < width
    total = tl.zeros((tile,), dtype=tl.float64)
    for at in range(first, min(first + count, num_rows), depth):
        row = at + some
        there = (row < num_rows)[:, None] & here[None, :]
        start = rows + row.to(tl.int64)[:, None] * row_step * unit
        total += tl.sum(tl.load(start + column[None, :], there, 0.0).to(tl.float64), 0)
    tl.store(parts + part * width + column, total, here)
