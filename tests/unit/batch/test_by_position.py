"""Rows of several parts, joined."""

from __future__ import annotations

import pytest
import torch

from vllm_scope.batch.by_position import joined_rows

TABLE = torch.randn(5, 3, 4)
WIDE = torch.randn(9, 3, 8192).bfloat16()


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([TABLE[:2, 1], TABLE[3:, 0]], id="columns-of-tables"),
        pytest.param([TABLE[:0, 1], TABLE[:0, 2]], id="no-rows"),
        pytest.param([TABLE[:2].bfloat16(), TABLE[:0].bfloat16()], id="one-without-rows"),
        pytest.param([TABLE[:, :, 0], TABLE[:, :, 1]], id="numbers-at-a-distance"),
        pytest.param([torch.zeros(3), torch.ones(2)], id="scores"),
        pytest.param([WIDE[:3, 1], WIDE[5:, 0]], id="so-many-that-torch-would-use-its-threads"),
        pytest.param([WIDE[:, 2]], id="one-piece"),
        pytest.param([WIDE[:, 1].to(torch.float8_e4m3fn)] * 2, id="float8"),
        pytest.param([torch.arange(9)[::9], torch.arange(40_000)], id="one-number-at-a-distance"),
    ],
)
def test_rows_are_joined_as_torch_joins_them(pieces):
    joined, expected = joined_rows(pieces), torch.cat(pieces)
    assert torch.equal(joined.view(torch.uint8), expected.view(torch.uint8))
    assert joined.data_ptr() not in [piece.data_ptr() for piece in pieces if len(piece)]
    assert (joined.shape, joined.dtype) == (expected.shape, expected.dtype)
