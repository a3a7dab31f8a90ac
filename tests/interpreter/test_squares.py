"""The kernels that add x x^T and x equal float64. The interpreter multiplies no bfloat16; a GPU
does, in tests/gpu/test_moments.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_scope.worker.squares import add_squares, column_sums


@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (70, 200), (600, 136), (5, 1100)])
def test_squares_are_added_to_the_upper_sums(num_rows, width):
    generator = torch.Generator().manual_seed(num_rows)
    # A view of wider rows.
    rows = torch.randn(num_rows, width + 8, generator=generator).half()[:, :width]
    sums = torch.randn(width, width, generator=generator, dtype=torch.float64)
    before, x = sums.numpy().copy(), rows.double().numpy()
    add_squares(rows, sums)
    found, expected = np.triu(sums.numpy()), np.triu(before + x.T @ x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_no_rows_change_nothing():
    sums = torch.ones(16, 16, dtype=torch.float64)
    add_squares(torch.zeros(0, 16, dtype=torch.float16), sums)
    assert (sums == 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "width"), [(0, 16), (1, 8), (70, 200), (1300, 136)])
def test_columns_are_summed_in_float64(num_rows, width, dtype):
    generator = torch.Generator().manual_seed(num_rows)
    # A view of wider rows.
    rows = (1e3 * torch.randn(num_rows, width + 8, generator=generator)).to(dtype)[:, 4:-4]
    expected = rows.double().sum(0)
    torch.testing.assert_close(column_sums(rows), expected, rtol=1e-13, atol=1e-9)
