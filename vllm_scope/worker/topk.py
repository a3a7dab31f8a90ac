"""The strongest features of rows, from the largest feature of each group, in two launches.

Owns:  `put_pairs` and `fits`, with two Triton kernels.
Runs:  as worker.held_saes, on GPUs.
From:  maxima (the largest of each group).   To: the pairs that request.heads.Strongest describes.

Promise: a feature is computed as held_saes computes it. The strongest comes first; of equal
features, the one with the lowest index. A feature that is NaN counts as larger than all numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: At most MOST features of a row, and at most MOST_GROUPS groups: one Triton program sorts them in
#: its registers. For up to LEAST features, the features of LEAST groups are sorted, else of MOST
#: groups. So there are two variants of each kernel.
LEAST, MOST, MOST_GROUPS = 32, 64, 4096
#: Smaller than the `_key` of every number.
_LEAST = tl.constexpr(-(2**63))


def fits(num_groups: int, count: int) -> bool:
    return count <= MOST and num_groups <= MOST_GROUPS


def put_pairs(
    largest: Tensor, products: Tensor, bias: Tensor, threshold: Tensor | None, count: int,
    packed: Tensor, first_value: int,
) -> None:  # fmt: skip
    """Write the `count` strongest features of each row, a negative feature as 0.

    Args:
        largest: float32 [num_rows, num_groups], as `maxima` makes it.
        products, bias, threshold: as for `maxima`.
        packed: int32 [num_rows, ...]. The indices are written to its first columns, the float32
            values to those from `first_value` on.
    """
    num_rows, num_groups = largest.shape
    if not num_rows:
        return
    width = products.shape[1]
    some = LEAST if count <= LEAST else MOST
    best = torch.empty((num_rows, some), dtype=torch.int32, device=largest.device)
    _groups[num_rows,](
        largest, best, num_groups, max(some, triton.next_power_of_2(num_groups)), some,
        num_warps=8,
    )  # fmt: skip
    _pairs[num_rows,](
        products, bias, bias if threshold is None else threshold, best, packed,
        packed.stride(0), width, count, first_value, some, width // num_groups,
        threshold is not None, num_warps=8,
    )  # fmt: skip


@triton.jit
def _key(value, index):  # type: ignore[no-untyped-def]
    """int64, to sort by: larger for a larger value, and among equal values for a lower index."""
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value == value, order, 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit(do_not_specialize=["num_groups"])
def _groups(  # type: ignore[no-untyped-def]
    largest, best, num_groups, size: tl.constexpr, count: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, size)
    there = at < num_groups
    key = _key(tl.load(largest + row * num_groups + at, there, 0.0), at)
    key = tl.sort(tl.where(there, key, _LEAST), descending=True)
    index = 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)
    tl.store(best + row * count + at, index, at < count)


@triton.jit(do_not_specialize=["stride", "count", "first_value"])
def _pairs(  # type: ignore[no-untyped-def]
    products, bias, threshold, best, packed, stride, width, count, first_value,
    num_groups: tl.constexpr, group: tl.constexpr, thresholds: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.load(best + row * num_groups + tl.arange(0, num_groups))
    at = tl.reshape(groups[:, None] * group + tl.arange(0, group)[None, :], num_groups * group)
    # If the SAE has fewer groups than num_groups, the other indices are out of range.
    there = (at >= 0) & (at < width)
    feature = tl.load(products + row * width + at, there, 0.0) + tl.load(bias + at, there, 0.0)
    if thresholds:
        feature = tl.where(feature <= tl.load(threshold + at, there, 0.0), 0.0, feature)
    key = tl.sort(tl.where(there, _key(feature, at), _LEAST), descending=True)
    order = (key >> 32).to(tl.int32)
    bits = tl.where(order <= 0, 0, order)  # the bits of a value that is not negative
    place = tl.arange(0, num_groups * group)
    into = packed + row * stride + place
    tl.store(into, 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32), place < count)
    tl.store(into + first_value, bits, place < count)
