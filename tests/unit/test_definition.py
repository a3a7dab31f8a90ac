"""What a tap does to rows, against a loop over them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_scope.program import OP_READ
from vllm_scope.tap.definition import tap_rows

HIDDEN_SIZE = 3
NUM_TAPS = 3
NUM_PROGRAMS = 4
MAX_ROWS = 10
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _tap_by_loop(
    hidden: Tensor,
    residual: Tensor | None,
    arena: Tensor,
    tokens: Tensor,
    programs: Tensor,
    ops: Tensor,
    tap: Tensor,
    slot_base: int,
    read_stride: int,
) -> None:
    for row in range(len(hidden)):
        program, slot = tokens[row, :2].tolist()
        if program < 0:
            continue
        x = hidden[row].float()
        if residual is not None:
            x = x + residual[row].float()
        first, count = programs[program, int(tap)].tolist()
        for opcode, read_index, *_ in ops[first : first + count].tolist():
            assert opcode == OP_READ
            arena[slot_base + slot + read_index * read_stride] = x.to(arena.dtype)


@st.composite
def taps(draw):
    """Arguments of a tap whose reads all go to different slots."""
    num_rows = draw(st.integers(0, MAX_ROWS))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def random_rows() -> Tensor:
        return (torch.randn(num_rows, HIDDEN_SIZE, generator=generator) * 100).to(dtype)

    # Operation lists of length 0 to 3 anywhere among the operations; READ j as its own
    # entry, in any order, so that a program may read one row into several slots.
    read_indices = draw(st.permutations(range(4)))
    ops = torch.tensor([[OP_READ, j, -9, -9] for j in read_indices], dtype=torch.int32)
    spans = st.integers(0, 4).flatmap(lambda a: st.tuples(st.just(a), st.integers(0, 4 - a)))
    size = NUM_PROGRAMS * NUM_TAPS
    programs = torch.tensor(draw(st.lists(spans, min_size=size, max_size=size)))
    # Four slots for each token, far enough apart for any read of any stride.
    stride = draw(st.integers(1, 3))
    places = draw(st.permutations(range(MAX_ROWS)))
    tokens = torch.full((MAX_ROWS, 4), -9, dtype=torch.int32)
    some_program = st.integers(-1, NUM_PROGRAMS - 1)
    tokens[:, 0] = torch.tensor(draw(st.lists(some_program, min_size=10, max_size=10)))
    tokens[:, 1] = torch.tensor(places) * 12
    # Rows after the batch look alive; taps must not look at them.
    tokens[num_rows:, 0] = NUM_PROGRAMS - 1
    return {
        "hidden": random_rows(),
        "residual": random_rows() if draw(st.booleans()) else None,
        "arena": torch.full((MAX_ROWS * 12 + 20, HIDDEN_SIZE), torch.nan, dtype=dtype),
        "tokens": tokens,
        "programs": programs.view(NUM_PROGRAMS, NUM_TAPS, 2).int(),
        "ops": ops,
        "tap": torch.tensor(draw(st.integers(0, NUM_TAPS - 1)), dtype=torch.int32),
        "slot_base": draw(st.integers(0, 10)),
        "read_stride": stride,
    }


@given(taps())
def test_a_tap_does_to_its_rows_what_a_loop_would(arguments):
    inputs = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    expected = arguments["arena"].clone()
    _tap_by_loop(**(arguments | {"arena": expected}))
    tap_rows(**arguments)
    assert torch.equal(arguments["arena"].isnan(), expected.isnan())
    assert torch.equal(arguments["arena"].nan_to_num(), expected.nan_to_num())
    for name in set(inputs) - {"arena"}:
        assert torch.equal(arguments[name], inputs[name]), f"{name} was changed"


def _arguments(dtype: torch.dtype) -> dict:
    return {
        "arena": torch.full((6, HIDDEN_SIZE), torch.nan, dtype=dtype),
        "programs": torch.tensor([[[0, 1]]], dtype=torch.int32),
        "ops": torch.tensor([[OP_READ, 0, 0, 0]], dtype=torch.int32),
        "tap": torch.tensor(0, dtype=torch.int32),
        "slot_base": 0,
        "read_stride": 1,
    }


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_the_stream_is_the_sum_in_the_arenas_dtype(dtype):
    hidden = torch.tensor([[1.0, 0.1, 60000.0]]).to(dtype)
    residual = torch.tensor([[0.0040, 0.2, -59900.0]]).to(dtype)
    arguments = _arguments(dtype)
    tokens = torch.tensor([[0, 2, -1, -1]], dtype=torch.int32)
    tap_rows(hidden, residual, tokens=tokens, **arguments)
    exact = (hidden.double() + residual.double()).float().to(dtype)
    assert torch.equal(arguments["arena"][2], exact[0])
    assert arguments["arena"][[0, 1, 3, 4, 5]].isnan().all()


def test_without_a_residual_the_row_is_copied_bit_by_bit():
    hidden = torch.randn(3, HIDDEN_SIZE).to(torch.bfloat16)
    arguments = _arguments(torch.bfloat16)
    tokens = torch.tensor([[-1, 0, 0, 0], [0, 4, 0, 0], [-1, 1, 0, 0]], dtype=torch.int32)
    tap_rows(hidden, None, tokens=tokens, **arguments)
    assert torch.equal(arguments["arena"][4], hidden[1])
    assert arguments["arena"][[0, 1, 2, 3, 5]].isnan().all()


def test_rows_without_a_program_leave_the_arena_alone():
    arguments = _arguments(torch.float32)
    tokens = torch.full((3, 4), -1, dtype=torch.int32)
    tap_rows(torch.ones(3, HIDDEN_SIZE), None, tokens=tokens, **arguments)
    assert arguments["arena"].isnan().all()


def test_a_program_without_an_operation_at_this_tap_leaves_the_arena_alone():
    arguments = _arguments(torch.float32)
    arguments["programs"] = torch.tensor([[[0, 0]]], dtype=torch.int32)
    tokens = torch.zeros((3, 4), dtype=torch.int32)
    tap_rows(torch.ones(3, HIDDEN_SIZE), None, tokens=tokens, **arguments)
    assert arguments["arena"].isnan().all()


def test_tap_by_tap_all_reads_of_a_token_share_its_slot():
    arguments = _arguments(torch.float32) | {"slot_base": 3, "read_stride": 0}
    arguments["ops"] = torch.tensor([[OP_READ, 7, 0, 0]], dtype=torch.int32)
    tokens = torch.tensor([[0, 1, 0, 0]], dtype=torch.int32)
    tap_rows(torch.ones(1, HIDDEN_SIZE), None, tokens=tokens, **arguments)
    assert (arguments["arena"][4] == 1).all()
    assert arguments["arena"][[0, 1, 2, 3, 5]].isnan().all()
