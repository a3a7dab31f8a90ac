"""The Triton kernel equals its torch definition, on random programs."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_scope.program import OP_READ
from vllm_scope.tap import definition, kernel

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
POISON = -1280.0


def grid(num_rows, width, generator=None):
    """Numbers whose sums are exact in bf16: the interpreter truncates where a GPU
    rounds. tests/gpu compares the rounding."""
    return torch.randint(-64, 65, (num_rows, width), generator=generator) / 16


@st.composite
def taps(draw):
    """Random tables and streams: some rows without a program, some taps without an op."""
    seed = draw(st.integers(0, 2**31))
    dtype = draw(st.sampled_from(DTYPES))
    hidden_size = draw(st.one_of(st.sampled_from([64, 65, 127, 256]), st.integers(1, 300)))
    num_rows = draw(st.integers(0, 12))
    num_taps, num_programs = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    with_residual = draw(st.booleans())
    strided = draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)

    def stream():
        return grid(num_rows, hidden_size + 7 * strided, generator).to(dtype)[:, :hidden_size]

    programs = torch.zeros(num_programs, num_taps, 2, dtype=torch.int32)
    for entry in programs.view(-1, 2):
        if torch.rand((), generator=generator) < 0.7:
            entry[0] = torch.randint(num_taps, (), generator=generator)
            entry[1] = 1
    ops = torch.zeros(num_taps, 4, dtype=torch.int32)
    ops[:, 0], ops[:, 1] = OP_READ, torch.arange(num_taps)
    tokens = torch.full((num_rows + 3, 4), -1, dtype=torch.int32)
    tokens[:, 0] = torch.randint(-1, num_programs, (num_rows + 3,), generator=generator)
    order = torch.randperm(num_rows + 3, generator=generator)
    layered = draw(st.booleans())
    tokens[:, 1] = order if layered else order * num_taps
    arena = torch.full(((num_rows + 3) * num_taps + 2, hidden_size), POISON, dtype=dtype)
    tap = draw(st.integers(0, num_taps - 1))
    base, stride = (2, 0) if layered else (0, 1)
    residual = stream() if with_residual else None
    tap = torch.tensor(tap, dtype=torch.int32)
    return stream(), residual, arena, tokens, programs, ops, tap, base, stride


@settings(max_examples=150, deadline=None)
@given(taps())
def test_the_kernel_equals_the_definition(case):
    hidden, residual, arena, *rest = case
    expected, written = arena.clone(), arena.clone()
    definition.tap_rows(hidden, residual, expected, *rest)
    kernel.tap_rows(hidden, residual, written, *rest)
    assert torch.equal(written, expected)


def test_wide_rows_are_read_whole():
    for hidden_size in (4096, 5000, 16_384):
        hidden, residual = grid(2, hidden_size).bfloat16(), grid(2, hidden_size).bfloat16()
        tokens = torch.tensor([[0, 1, 0, 0], [-1, 0, 0, 0]], dtype=torch.int32)
        programs = torch.tensor([[[0, 1]]], dtype=torch.int32)
        ops = torch.tensor([[OP_READ, 0, 0, 0]], dtype=torch.int32)
        arena = torch.full((2, hidden_size), POISON, dtype=torch.bfloat16)
        kernel.tap_rows(hidden, residual, arena, tokens, programs, ops, torch.tensor(0), 0, 1)
        assert torch.equal(arena[1], (hidden[0].float() + residual[0].float()).bfloat16())
        assert (arena[0] == POISON).all()
