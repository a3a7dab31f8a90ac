"""A request takes no more of the tables than EngineCore counts, also if rows of a replacement are
equal, and however its programs are made: one by one, or as rows of the tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope import Add, Replace
from vllm_scope.graph.tap.program_tables import MOST_IDLE_SETS
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.held import Held
from vllm_scope.program.layout import Widths
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Spec

HIDDEN_SIZE = 8
BOUNDARIES = tuple(range(5))
SITES = Sites(2, HIDDEN_SIZE, "float32", BOUNDARIES)


def _tables(*every: Held) -> Tables:
    """With room for all of these, as EngineCore counts it."""
    vectors = {key for held in every for key in held.vectors}
    return Tables(
        BOUNDARIES, 1, HIDDEN_SIZE, Widths((4 * HIDDEN_SIZE,)), torch.device("cpu"),
        len(vectors) * HIDDEN_SIZE * 4 / 2**20, sum(h.num_programs for h in every),
        sum(held.num_ops for held in every),
    )  # fmt: skip


def _held(numbers: list[int], num_adds: int) -> Held:
    """What a request holds that replaces the rows of the first positions, one for each number, and
    adds vectors at every token."""
    rows = np.repeat(np.array(numbers, np.float32)[:, None], HIDDEN_SIZE, axis=1)
    edits = [Replace(rows, positions=list(range(len(numbers))), layer=0)]
    adds = [Add([float(i + 100)] * HIDDEN_SIZE, layer=1) for i in range(num_adds)]
    asked = Spec(edits=(*edits, *adds)).resolve(SITES)
    program = RequestProgram.compile(asked, SITES, frozenset(BOUNDARIES), 24, range(24))
    return program.held(program.columns(28), repr((numbers, num_adds)).encode())


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=18), st.integers(0, 2)),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_the_tables_take_what_engine_core_counts(requests):
    every = [_held(*one) for one in requests]
    most = _tables(*every)
    for _ in range(2):  # the second time, in what was released
        most.begin_step()
        for held in every:
            most.hold(held)  # raises CapacityError if there is no room
        for held in every:
            most.release_set(held)


@pytest.mark.parametrize("numbers", [[0], list(range(12))], ids=["few", "many"])
def test_programs_that_a_request_has_left_travel_to_the_device_once(numbers):
    held, other = _held(numbers, 1), _held([3], 2)
    tables = _tables(held, other)
    tables.hold(held)
    tables._flush()
    before = tables.num_uploads
    for _ in range(3):
        tables.release_set(held)
        ids = tables.hold(held)
        tables._flush()
    assert tables.num_uploads == before
    assert (tables.programs[ids[ids >= 0].tolist()] >= 0).any()


@pytest.mark.parametrize("numbers", [[0], list(range(12))], ids=["few", "many"])
def test_programs_that_no_request_holds_make_room(numbers):
    one, other = _held(numbers, 1), _held([n + 20 for n in numbers], 2)
    tables = _tables(other)
    for held in (one, other, one, other):
        tables.begin_step()
        tables.hold(held)  # raises CapacityError if there is no room
        tables.release_set(held)


def test_a_large_set_that_no_request_holds_does_not_stay(monkeypatch):
    held = _held(list(range(12)), 1)
    tables = _tables(held)
    for most, stays in ((4 * HIDDEN_SIZE * len(held.vectors), True), (4 * HIDDEN_SIZE, False)):
        monkeypatch.setattr("vllm_scope.graph.tap.program_tables.MOST_IDLE_BYTES", most)
        tables.hold(held)
        tables.release_set(held)
        assert (held in tables._sets) is stays


def test_few_sets_stay_that_no_request_holds():
    every = [_held([i], 1) for i in range(MOST_IDLE_SETS + 5)]
    tables = _tables(*every)
    for held in every:
        tables.hold(held)
    for held in every:
        tables.release_set(held)
    assert list(tables._sets) == every[5:]
