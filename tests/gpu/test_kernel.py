"""The compiled kernel equals the definition: copies bit for bit, sums within rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.taps import CODES, COPIES, OVERFLOWING, POISON, check, outcome, random_tap
from tests.unit.walking import advanced
from vllm_scope.program.operations import ADVANCING, OP_ADD, OP_ADD_FEATURE, OP_READ, SETTERS

pytestmark = pytest.mark.gpu
#: Of a case in which rows are read and edited.
SEED = 11
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [64, 127, 896, 4096, 5000, 8191, 16_384]
#: Programs of reads, of copies, and of everything.
MIXES = [(OP_READ,), COPIES, CODES]


def _case(number: int, hidden_size: int, dtype: torch.dtype, codes: tuple[int, ...]):
    return random_tap(
        hidden_size + number, hidden_size, dtype, num_rows=1 + 3 * number, codes=codes,
        with_residual=number % 3 > 0, tap_by_tap=number % 2 > 0, strided=number % 4 > 1,
        on_grid=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", SIZES)
def test_the_kernel_equals_the_definition(hidden_size, dtype):
    from vllm_scope.graph.tap import definition, kernel

    for number in range(8):
        for codes in MIXES:
            before = _case(number, hidden_size, dtype, codes)
            twin = before.to("cpu").run(definition.tap_rows)
            ran = before.to("cuda").run(kernel.tap_rows)
            torch.cuda.synchronize()
            ran = ran.to("cpu")
            check(ran, before, outcome(before), twin)


@pytest.mark.parametrize("hidden_size", [2048, 8192])
def test_an_operation_sees_the_register_that_the_one_before_it_set(hidden_size):
    """One thread of a row's program stores it, and all load it: with many rows, a thread that did
    not wait would see what was there before."""
    from vllm_scope.graph.tap import definition, kernel

    codes = (*SETTERS, OP_ADD, OP_ADD_FEATURE)
    for seed in range(6):
        before = random_tap(seed, hidden_size, torch.bfloat16, num_rows=400, codes=codes)
        twin, expected = before.to("cpu").run(definition.tap_rows), outcome(before)
        for _ in range(20):
            ran = before.to("cuda").run(kernel.tap_rows)
            torch.cuda.synchronize()
            check(ran.to("cpu"), before, expected, twin)


@pytest.mark.parametrize("code", ADVANCING)
def test_states_have_the_same_bits_for_one_row_at_a_time_and_several(code):
    from vllm_scope.graph.tap import definition, kernel

    scores = torch.randn(200, generator=torch.Generator().manual_seed(3))
    whole = advanced(kernel.tap_rows, code, scores, [1] * 200, "cuda")
    twin = advanced(definition.tap_rows, code, scores, [1] * 200)
    torch.testing.assert_close(whole, twin, rtol=1e-4, atol=1e-5)
    for sizes, replays in (([200], 0), ([5, 1, 94, 1, 99], 0), ([100, 99, 1], 100)):
        assert torch.equal(advanced(kernel.tap_rows, code, scores, sizes, "cuda", replays), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", [64, 4096, 5000])
def test_rows_that_overflow_are_reported_and_left_as_they_were(hidden_size, dtype):
    from vllm_scope.graph.tap import definition, kernel

    for seed in range(12):
        before = random_tap(
            seed, hidden_size, dtype, num_rows=8, codes=OVERFLOWING, huge=True,
            with_residual=seed % 2 > 0,
        )  # fmt: skip
        twin = before.to("cpu").run(definition.tap_rows)
        ran = before.to("cuda").run(kernel.tap_rows)
        torch.cuda.synchronize()
        check(ran.to("cpu"), before, outcome(before), twin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_in_host_memory_are_written_there_and_not_in_the_arena(dtype):
    from vllm_scope.graph.tap import definition, kernel

    before = random_tap(SEED, 4096, dtype, num_rows=6, on_grid=False)
    expected = outcome(before)
    assert expected.stored
    host = before.arena.clone().pin_memory()
    tokens = before.tokens.clone()
    tokens[:, definition.TO_HOST] = 1
    address = torch.cat([torch.tensor([host.data_ptr(), 0]), before.host[2:]])
    ran = replace(before, tokens=tokens, host=address).to("cuda").run(kernel.tap_rows)
    torch.cuda.synchronize()
    assert (ran.arena.view(torch.int32) == POISON).all()
    there = replace(ran.to("cpu"), arena=host, tokens=before.tokens, host=before.host)
    check(there, before, expected, before.to("cpu").run(definition.tap_rows))
