"""Rows of several parts, joined."""

from __future__ import annotations

import pytest
import torch

from vllm_scope.batch.by_position import joined_rows

TABLE = torch.randn(5, 3, 4)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([TABLE[:2, 1], TABLE[3:, 0]], id="columns-of-tables"),
        pytest.param([TABLE[:0, 1], TABLE[:0, 2]], id="no-rows"),
        pytest.param([TABLE[:2].bfloat16(), TABLE[:0].bfloat16()], id="one-without-rows"),
        pytest.param([TABLE[:, :, 0], TABLE[:, :, 1]], id="numbers-at-a-distance"),
        pytest.param([torch.zeros(3), torch.ones(2)], id="scores"),
    ],
)
def test_rows_are_joined_as_torch_joins_them(pieces):
    joined, expected = joined_rows(pieces), torch.cat(pieces)
    assert torch.equal(joined, expected)
    assert (joined.shape, joined.dtype) == (expected.shape, expected.dtype)
