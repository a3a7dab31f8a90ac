"""Memory of rows comes back once nobody looks at it, and not before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope.files.buffers import SMALL_BYTES, Buffers, _size_class, copy_rows

SHAPE = (16, 4096)


def test_memory_is_used_again_only_after_its_last_view_is_gone():
    buffers = Buffers(1 << 30)
    first = buffers.empty(SHAPE, torch.bfloat16)
    view = first[3:5]
    place = first.data_ptr()
    del first
    second = buffers.empty(SHAPE, torch.bfloat16)
    assert second.data_ptr() != place
    view.fill_(7.0)
    second.zero_()
    assert bool((view == 7).all())
    del view
    third = buffers.empty((15, 4096), torch.bfloat16)
    assert third.data_ptr() == place
    assert (third.shape, third.dtype) == ((15, 4096), torch.bfloat16)


def test_memory_beyond_the_limit_is_freed():
    buffers = Buffers(2 * 16 * 4096 * 4)
    tensors = [buffers.empty(SHAPE, torch.float32) for _ in range(5)]
    del tensors
    assert sum(len(free) for free in buffers._free.values()) == 2


@given(st.integers(SMALL_BYTES, 1 << 40))
def test_a_block_gets_at_most_a_quarter_more_than_it_needs(num_bytes):
    assert num_bytes <= _size_class(num_bytes) <= num_bytes * 1.25 + 4096


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(torch.randn(4, 6).bfloat16(), id="contiguous"),
        pytest.param(torch.randn(4, 3, 6).half()[:, 1], id="one-of-three-streams"),
        pytest.param(torch.randn(6, 4).T, id="transposed"),
        pytest.param(torch.randn(0, 6), id="none"),
        pytest.param(torch.randn(4, 6, requires_grad=True), id="with-a-gradient"),
    ],
)
def test_rows_of_any_stride_are_copied(rows):
    into = torch.full(rows.shape, torch.nan, dtype=rows.dtype)
    copy_rows(into, rows)
    assert torch.equal(into, rows)
    assert not into.requires_grad
