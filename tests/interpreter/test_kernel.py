"""The Triton kernel equals its torch definition, on random programs of all operations.

The interpreter truncates where a GPU rounds, so values lie on a grid whose copies and
sums are exact in every dtype; tests/gpu compares the rounding.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.taps import CODES, COPIES, OVERFLOWING, POISON, check, outcome, random_tap
from tests.unit.walking import advanced
from vllm_scope.graph.tap import definition, kernel
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program import operations as program
from vllm_scope.program.layout import Widths

#: Of a case in which rows are read and edited.
SEED = 11
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = {
    "seed": st.integers(0, 1 << 31),
    "hidden_size": st.sampled_from([1, 2, 3, 64, 65, 127, 256]) | st.integers(1, 300),
    "dtype": st.sampled_from(DTYPES),
    "num_rows": st.integers(0, 8),
    "with_residual": st.booleans(),
    "tap_by_tap": st.booleans(),
    "strided": st.booleans(),
}


@settings(max_examples=150, deadline=None)
@given(st.builds(dict, **SHAPES))
def test_the_kernel_equals_the_definition(arguments):
    before = random_tap(**arguments)
    twin = random_tap(**arguments).run(definition.tap_rows)
    ran = random_tap(**arguments).run(kernel.tap_rows)
    check(ran, before, outcome(before), twin)


@settings(max_examples=80, deadline=None)
@given(st.builds(dict, **SHAPES))
def test_what_is_read_and_what_is_set_is_equal_bit_by_bit(arguments):
    before = random_tap(**arguments, codes=COPIES)
    expected = outcome(before)
    assert not any(stored.slack.any() for stored in expected.stored)
    twin = random_tap(**arguments, codes=COPIES).run(definition.tap_rows)
    check(random_tap(**arguments, codes=COPIES).run(kernel.tap_rows), before, expected, twin)


@settings(max_examples=80, deadline=None)
@given(st.builds(dict, **SHAPES, codes=st.just(OVERFLOWING), huge=st.just(True)))
def test_rows_that_overflow_are_reported_and_left_as_they_were(arguments):
    before = random_tap(**arguments)
    twin = random_tap(**arguments).run(definition.tap_rows)
    ran = random_tap(**arguments).run(kernel.tap_rows)
    assert torch.equal(ran.faults, twin.faults)
    check(ran, before, outcome(before), twin)


@settings(max_examples=40, deadline=None)
@given(st.builds(dict, **SHAPES, codes=st.just(OVERFLOWING), huge=st.just(True)))
def test_where_nobody_reads_faults_rows_that_overflow_go_on(arguments):
    ran, twin = (
        random_tap(**arguments).unreported().run(run)
        for run in (kernel.tap_rows, definition.tap_rows)
    )
    for name in ("wide_hidden", "wide_residual"):
        mine, other = getattr(ran, name), getattr(twin, name)
        assert mine is other is None or torch.equal(mine.isfinite(), other.isfinite())


@pytest.mark.parametrize("code", program.ADVANCING)
def test_states_have_the_same_bits_for_one_row_at_a_time_and_several(code):
    scores = torch.randn(24, generator=torch.Generator().manual_seed(3))
    whole = advanced(kernel.tap_rows, code, scores, [1] * 24)
    torch.testing.assert_close(whole, advanced(definition.tap_rows, code, scores, [1] * 24))
    for sizes, replays in (([24], 0), ([5, 1, 7, 1, 10], 0), ([12, 11, 1], 12)):
        again = advanced(kernel.tap_rows, code, scores, sizes, replays=replays)
        assert torch.equal(again, whole)
    drafted = advanced(kernel.tap_rows, code, scores, [2, 1, 4, 1, 3, 2, 1, 4, 3, 3], rejected=3)
    assert torch.equal(drafted, whole)


@pytest.mark.parametrize("hidden_size", [4096, 5000, 16_384])
def test_wide_rows_are_done_whole(hidden_size):
    for codes in (COPIES, CODES):
        before = random_tap(SEED, hidden_size, torch.bfloat16, num_rows=6, codes=codes)
        expected = outcome(before)
        assert expected.stored
        assert expected.edited
        twin = before.to("cpu").run(definition.tap_rows)
        check(before.to("cpu").run(kernel.tap_rows), before, expected, twin)


def test_slots_in_host_memory_are_written_there_and_not_in_the_arena():
    before = random_tap(SEED, 65, torch.bfloat16, num_rows=6)
    expected = outcome(before)
    assert expected.stored
    host = before.arena.clone()
    tokens = before.tokens.clone()
    tokens[:, definition.TO_HOST] = 1
    there = before.to("cpu")
    address = torch.cat([torch.tensor([host.data_ptr()]), there.host[1:]])
    ran = replace(there, tokens=tokens, host=address).run(kernel.tap_rows)
    assert (ran.arena.view(torch.int32) == POISON).all()
    twin = before.to("cpu").run(definition.tap_rows)
    there = replace(ran, arena=host, tokens=before.tokens, host=before.host)
    check(there, before, expected, twin)


def test_every_variant_is_launched_once_and_writes_nothing(monkeypatch):
    """The stream with and without a residual, other rows aligned and not."""
    tables = Tables((0, 2), 4, 24, Widths((48, 16)), torch.device("cpu"))
    arena = torch.full((8, 8), 3.0, dtype=torch.bfloat16)
    launched, run = set(), kernel.tap_rows

    def record(hidden, residual, *rest):
        offset = hidden.storage_offset()
        launched.add((hidden.shape[1], offset, residual is not None))
        run(hidden, residual, *rest)

    monkeypatch.setattr(kernel, "tap_rows", record)
    kernel.load_variants(arena, tables, (24, 8))
    assert launched == {(24, 0, False), (24, 0, True), (8, 0, False), (8, 1, False)}
    assert (arena == 3.0).all()


def test_the_kernels_operations_have_the_programs_numbers():
    names = [name for name in vars(program) if name.startswith("OP_")]
    assert len(names) == len(CODES)
    assert kernel.CHECKED.value == definition.CHECKED
    assert kernel.TOKEN_COLUMNS.value == definition.NUM_TOKEN_COLUMNS
    for name in ("SLOT", "TO_HOST", "OWNER", "SINCE", "STRIDE", "STEPS"):
        assert getattr(kernel, f"TOKEN_{name}").value == getattr(definition, name), name
    for name in names:
        assert getattr(kernel, name).value == getattr(program, name), name
