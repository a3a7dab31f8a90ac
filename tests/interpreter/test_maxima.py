"""The largest feature of each group, as torch finds it."""

from __future__ import annotations

import pytest
import torch

from vllm_scope.worker.held_saes import GROUP
from vllm_scope.worker.maxima import maxima


@pytest.mark.parametrize("num_groups", [1, 16, 21])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 11])
@pytest.mark.parametrize("thresholds", [True, False])
def test_the_largest_of_each_group(thresholds, num_rows, num_groups):
    generator = torch.Generator().manual_seed(num_groups)
    products = torch.randn(num_rows, num_groups * GROUP, generator=generator) - 2
    bias, threshold = torch.randn(2, num_groups * GROUP, generator=generator)
    if num_rows >= 3:
        products[1, 3], products[-1] = torch.nan, -torch.inf
    features = products + bias
    if thresholds:
        features = features.masked_fill(features <= threshold, 0)
    expected = features.view(num_rows, num_groups, GROUP).amax(2)
    found = maxima(products, bias, threshold if thresholds else None, GROUP)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
