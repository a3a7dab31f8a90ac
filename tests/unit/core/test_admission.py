"""The admission says there is room exactly where the workers' tables have it, and the weights of
probes fit beside the vectors there."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope.core.admission import Admission
from vllm_scope.errors import CapacityError
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import Widths
from vllm_scope.program.operations import OP_ADD, Cost, Op, Program, build_program
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Bank
from vllm_scope.request.sites import point_of

SIZE, MOST = 4, Cost(3, 4, 6)
#: Vectors that a weight counts for.
ROWS = 2
BOUNDARIES = (0, 2)


def _vector(number: int) -> Array:
    return Array((SIZE,), np.full(SIZE, number, "<f4").tobytes())


def _weight(number: int) -> Array:
    return Array((ROWS, SIZE), np.full(ROWS * SIZE, number, "<f4").tobytes())


def _program(ops: list[tuple[int, int, bool]]) -> Program:
    """Of (boundary, vector, whether a probe has it)."""
    edits, probed = {}, {}
    for boundary, vector, probes in ops:
        if probes:
            probed.setdefault(_weight(vector), set()).add(point_of(boundary, 0))
        else:
            edits.setdefault((boundary, 0), []).append(Op(OP_ADD, 0, _vector(vector), 1.0))
    encoded = tuple(
        (Bank.of([weight.digest], ROWS), tuple(sorted(points))) for weight, points in probed.items()
    )
    return build_program((), edits, encoded, weights=frozenset(probed))


OPS = st.tuples(st.sampled_from(BOUNDARIES), st.integers(1, 4), st.booleans())
PROGRAMS = st.lists(st.lists(OPS, min_size=1, max_size=3).map(_program), min_size=1, max_size=2)


def _tables() -> Tables:
    return Tables(
        BOUNDARIES, 4, SIZE, Widths((SIZE * 4,)), torch.device("cpu"),
        MOST.vectors * SIZE * 4 / 2**20, MOST.programs, MOST.ops,
    )  # fmt: skip


def _hold(tables: Tables, programs: list[Program]) -> list[int]:
    held: list[int] = []
    tables.begin_step()
    try:
        for program in dict.fromkeys(programs):
            held.append(tables.program_id(program, hold=True))
    except CapacityError:
        for number in held:
            tables.release(number)
        raise
    return held


def _fit(programs: set[Program]) -> bool:
    """Whether the vectors and weights of programs fit together."""
    vectors = {vector for program in programs for vector in program.vectors}
    weights = {weight for program in programs for weight in program.weights}
    return len(vectors) + ROWS * len(weights) <= MOST.vectors


@given(st.data())
def test_there_is_room_exactly_where_the_tables_have_it_and_weights_fit(data):
    admission, tables = Admission(MOST), _tables()
    running: dict[str, tuple[list[int], list[Program]]] = {}
    for i in range(data.draw(st.integers(1, 12))):
        if running and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(running)))
            for number in running.pop(name)[0]:
                tables.release(number)
            assert admission.release(name)
            assert not admission.release(name)
        programs = data.draw(PROGRAMS.filter(lambda some: Cost.of(set(some)).fits(MOST)))
        beside = {program for _, some in running.values() for program in some}
        if admission.admit(str(i), programs):
            assert _fit({*beside, *programs})
            running[str(i)] = _hold(tables, programs), programs
        elif _fit({*beside, *programs}):
            with pytest.raises(CapacityError):
                _hold(tables, programs)
        assert admission.held.fits(MOST)
    for name in running:
        assert admission.release(name)
    assert admission.held == Cost()


def test_a_request_keeps_its_places_and_one_request_always_enters():
    large = _program([(0, 1, False), (0, 2, False), (2, 3, False), (2, 4, False)])
    small = _program([(0, 1, False)])
    admission = Admission(MOST)
    assert admission.admit("large", [large])  # its like is refused by front-ends
    assert admission.held == Cost(4, 1, 4)
    assert admission.admit("large", [small])
    assert admission.held == Cost(4, 1, 4)
    assert not admission.admit("small", [small])
    assert not admission.release("small")
    assert admission.release("large")
    assert admission.admit("small", [small])


def test_equal_weights_of_several_requests_have_one_place():
    admission = Admission(MOST)
    one, two = _program([(0, 1, True)]), _program([(0, 1, True), (2, 1, True), (2, 7, False)])
    assert admission.admit("one", [one])
    assert admission.held == Cost(ROWS, 1, 1)
    assert admission.admit("two", [two])
    assert admission.held == Cost(ROWS + 1, 2, 4)
    assert not admission.admit("other", [_program([(0, 2, True)])])
    assert admission.release("one")
    assert admission.held == Cost(ROWS + 1, 1, 3)
    assert admission.release("two")
    assert admission.admit("other", [_program([(0, 2, True)])])


def test_the_time_to_admit_a_request_does_not_grow_with_what_is_held():
    admission, took = Admission(Cost(1 << 20, 1 << 20, 1 << 20)), []
    for i in range(512):
        program = _program([(0, 64 * i + j + 1, False) for j in range(64)])
        started = time.perf_counter()
        assert admission.admit(str(i), (program,))
        took.append(time.perf_counter() - started)
    assert admission.held.vectors == 64 * 512
    assert statistics.median(took[-64:]) < 5 * statistics.median(took[:64])
