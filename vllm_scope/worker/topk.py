"""Finds the strongest features of rows in one launch, from the largest feature of each group.

Owns:  `put_pairs` and `fits`, with a Triton kernel.
Runs:  on the threads of worker.held_saes, on GPUs.
From:  maxima (the largest feature of each group).
To:    held_saes (pairs in the format of request.heads.Strongest).

Promise: features are computed in the same way as in held_saes. The strongest feature is first. Of
equal features, the feature with the lowest index is first. A NaN counts as larger than all numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: The kernel finds at most MOST features of a row, in at most MOST_GROUPS groups. More data does
#: not fit into the registers of a Triton program. The kernel has two variants, with n = LEAST and n
#: = MOST. A variant finds up to n features of a row, and compares only the features of n groups.
LEAST, MOST, MOST_GROUPS = 32, 64, 4096
#: Measured on an H100, for 768 rows and 65,536 features: 32 features of each row take 93 us with 2
#: warps and 107 us with 4 warps; 64 features take 232 us with 2 warps and 198 us with 4 warps.
NUM_WARPS = 4
#: This key is smaller than the result of `_key` for every number.
_NO_KEY = tl.constexpr(-(2**63))


def fits(num_groups: int, count: int) -> bool:
    return count <= MOST and num_groups <= MOST_GROUPS


def put_pairs(
    largest: Tensor, products: Tensor, bias: Tensor, threshold: Tensor | None, count: int,
    packed: Tensor, first_value: int,
) -> None:  # fmt: skip
    """Write the `count` strongest features of each row. A negative feature is written as 0.

    Args:
        largest: float32 [num_rows, num_groups], the result of `maxima`.
        products, bias, threshold: The same as for `maxima`.
        packed: int32 [num_rows, ...]. The indices are written to the columns from 0 on. The float32
            values are written to the columns from `first_value` on.
    """
    num_rows, num_groups = largest.shape
    if not num_rows:
        return
    width = products.shape[1]
    some = LEAST if count <= LEAST else MOST
    _kernel[num_rows,](
        largest, products, bias, bias if threshold is None else threshold, packed,
        packed.stride(0), num_groups, width, count, first_value,
        max(some, triton.next_power_of_2(num_groups)), some, width // num_groups,
        threshold is not None, num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit
def _key(value, index):  # type: ignore[no-untyped-def]
    """An int64 sort key. A larger value has a larger key. Of equal values, the value with the lower
    index has the larger key."""
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value == value, order, 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index(key):  # type: ignore[no-untyped-def]
    """The int32 index that a result of `_key` contains."""
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["stride", "num_groups", "count", "first_value"])
def _kernel(  # type: ignore[no-untyped-def]
    largest, products, bias, threshold, packed, stride, num_groups, width, count, first_value,
    size: tl.constexpr, some: tl.constexpr, group: tl.constexpr, thresholds: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, size)
    there = at < num_groups
    key = _key(tl.load(largest + row * num_groups + at, there, 0.0), at)
    groups = _index(tl.topk(tl.where(there, key, _NO_KEY), some))
    at = tl.reshape(groups[:, None] * group + tl.arange(0, group)[None, :], some * group)
    # If the SAE has fewer groups than `some`, the missing groups have the index 0x7FFFFFFF. This
    # index times `group` overflows int32, and the features of the missing groups get negative
    # indices.
    there = (at >= 0) & (at < width)
    feature = tl.load(products + row * width + at, there, 0.0) + tl.load(bias + at, there, 0.0)
    if thresholds:
        feature = tl.where(feature <= tl.load(threshold + at, there, 0.0), 0.0, feature)
    key = tl.topk(tl.where(there, _key(feature, at), _NO_KEY), some)
    order = (key >> 32).to(tl.int32)
    bits = tl.where(order <= 0, 0, order)  # a negative value becomes 0
    place = tl.arange(0, some)
    into = packed + row * stride + place
    tl.store(into, _index(key), place < count)
    tl.store(into + first_value, bits, place < count)
