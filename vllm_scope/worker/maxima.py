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

#: How many groups one Triton program reads.
GROUPS = 16


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
        _kernel[num_rows, triton.cdiv(num_groups, GROUPS)](
            products, bias, bias if threshold is None else threshold, found, width, num_groups,
            GROUPS, group, threshold is not None,
        )  # fmt: skip
    return found


@triton.jit
def _larger(one, other):  # type: ignore[no-untyped-def]
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    products, bias, threshold, found, width, num_groups,
    num_at_once: tl.constexpr, group: tl.constexpr, thresholds: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * num_at_once + tl.arange(0, num_at_once)
    at = groups[:, None] * group + tl.arange(0, group)[None, :]
    there = at < width
    feature = tl.load(products + row * width + at, there) + tl.load(bias + at, there)
    if thresholds:
        feature = tl.where(feature <= tl.load(threshold + at, there), 0.0, feature)
    largest = tl.reduce(feature, 1, _larger)
    tl.store(found + row * num_groups + groups, largest, groups < num_groups)
