"""The kernel that adds x x^T equals float64. The interpreter multiplies no bfloat16; a GPU does in
tests/gpu/test_moments.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_scope.batch.sums import upper_blocks
from vllm_scope.worker.squares import add_squares


@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (70, 200), (600, 136), (5, 1100)])
def test_squares_are_added_to_the_upper_blocks(num_rows, width):
    generator = torch.Generator().manual_seed(num_rows)
    # A view of wider rows.
    rows = torch.randn(num_rows, width + 8, generator=generator).half()[:, :width]
    sums = torch.randn(width, width, generator=generator, dtype=torch.float64)
    before, x = sums.numpy().copy(), rows.double().numpy()
    add_squares(rows, sums)
    expected = before.copy()
    for block in upper_blocks(width):
        expected[block] += (x.T @ x)[block]
    upper = np.zeros((width, width), bool)
    for block in upper_blocks(width):
        upper[block] = True
    np.testing.assert_allclose(sums.numpy()[upper], expected[upper], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(sums.numpy()[~upper], before[~upper])


def test_no_rows_change_nothing():
    sums = torch.ones(16, 16, dtype=torch.float64)
    add_squares(torch.zeros(0, 16, dtype=torch.float16), sums)
    assert (sums == 1).all()
