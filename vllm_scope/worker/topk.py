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
#: How many neighbours are compared first. The n largest of some numbers are always in the n sets of
#: PART neighbours with the largest maxima, so that only the numbers of these sets are sorted.
PART = 8
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
        max(some, triton.next_power_of_2(num_groups)), some, width // num_groups, PART,
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


@triton.jit
def _largest_sets(key, count: tl.constexpr, part: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sets of `part` neighbours with the `count` largest maxima.

    Args:
        key: The keys of numbers whose indices begin, in each set, with a multiple of `part`.
    """
    sets = tl.reshape(key, key.numel // part, part)
    return _index(tl.topk(tl.max(sets, 1), count)) // part


@triton.jit
def _within(sets, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """The indices of the numbers in sets of `size` neighbours."""
    at = sets[:, None] * size + tl.arange(0, size)[None, :]
    return tl.reshape(at, at.numel)


@triton.jit
def _group_key(largest, at, num_groups):  # type: ignore[no-untyped-def]
    there = at < num_groups
    return tl.where(there, _key(tl.load(largest + at, there, 0.0), at), _NO_KEY)


@triton.jit
def _feature_key(  # type: ignore[no-untyped-def]
    products, bias, threshold, at, width, thresholds: tl.constexpr
):
    # If the SAE has fewer groups than the kernel compares, the missing groups have the index
    # 0x7FFFFFFF. This index times the size of a group overflows int32, and the features of the
    # missing groups get negative indices.
    there = (at >= 0) & (at < width)
    feature = tl.load(products + at, there, 0.0) + tl.load(bias + at, there, 0.0)
    if thresholds:
        feature = tl.where(feature <= tl.load(threshold + at, there, 0.0), 0.0, feature)
    return tl.where(there, _key(feature, at), _NO_KEY)


@triton.jit(do_not_specialize=["stride", "num_groups", "count", "first_value"])
def _kernel(  # type: ignore[no-untyped-def]
    largest, products, bias, threshold, packed, stride, num_groups, width, count, first_value,
    size: tl.constexpr, some: tl.constexpr, group: tl.constexpr, part: tl.constexpr,
    thresholds: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest += row * num_groups
    products += row * width
    key = _group_key(largest, tl.arange(0, size), num_groups)
    if size > some * part:
        key = _group_key(largest, _within(_largest_sets(key, some, part), part), num_groups)
    at = _within(_index(tl.topk(key, some)), group)
    key = _feature_key(products, bias, threshold, at, width, thresholds)
    at = _within(_largest_sets(key, some, part), part)
    key = tl.topk(_feature_key(products, bias, threshold, at, width, thresholds), some)
    order = (key >> 32).to(tl.int32)
    bits = tl.where(order <= 0, 0, order)  # a negative value becomes 0
    place = tl.arange(0, some)
    into = packed + row * stride + place
    tl.store(into, _index(key), place < count)
    tl.store(into + first_value, bits, place < count)
