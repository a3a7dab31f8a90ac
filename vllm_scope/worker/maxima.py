"""Computes the largest feature of each group of an SAE's features. The kernel reads the products of
rows and weights one time.

Owns:  `maxima`, with a Triton kernel.
Runs:  on GPUs, on the thread that computes features (see worker.held_saes).

Promise: features are computed from products, bias and threshold in the same way as in held_saes. If
a group has a NaN, the group's maximum is NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: How many groups of how many rows one Triton program reads. The program reads the groups' bias and
#: thresholds one time for all of these rows.
GROUPS, ROWS = 16, 8


def maxima(products: Tensor, bias: Tensor, threshold: Tensor | None, group: int) -> Tensor:
    """The largest feature of each group, float32 [num_rows, d_sae / group].

    Args:
        products: float32 [num_rows, d_sae], contiguous, without the bias.
        bias, threshold: float32 [d_sae]. A feature at or below its threshold is 0. `threshold` is
            None if the SAE has no thresholds.
        group: a power of two that divides d_sae.
    """
    num_rows, width = products.shape
    num_groups = width // group
    found = torch.empty((num_rows, num_groups), dtype=torch.float32, device=products.device)
    if num_rows:
        _kernel[triton.cdiv(num_rows, ROWS), triton.cdiv(num_groups, GROUPS)](
            products, bias, bias if threshold is None else threshold, found, num_rows, width,
            num_groups, ROWS, GROUPS, group, threshold is not None,
        )  # fmt: skip
    return found


@triton.jit
def _larger(one, other):  # type: ignore[no-untyped-def]
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(  # type: ignore[no-untyped-def]
    products, bias, threshold, found, num_rows, width, num_groups,
    rows_at_once: tl.constexpr, groups_at_once: tl.constexpr, group: tl.constexpr,
    thresholds: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows_at_once
    groups = tl.program_id(1) * groups_at_once + tl.arange(0, groups_at_once)
    at = groups[:, None] * group + tl.arange(0, group)[None, :]
    there = at < width
    offset = tl.load(bias + at, there)
    least = tl.load(threshold + at, there) if thresholds else 0.0
    for _ in tl.static_range(rows_at_once):
        feature = tl.load(products + row * width + at, there & (row < num_rows)) + offset
        if thresholds:
            feature = tl.where(feature <= least, 0.0, feature)
        largest = tl.reduce(feature, 1, _larger)
        into = found + row * num_groups + groups
        tl.store(into, largest, (groups < num_groups) & (row < num_rows))
        row += 1
