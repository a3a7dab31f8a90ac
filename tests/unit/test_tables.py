"""The tables that taps read: ids of programs, and the programs of a step's tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope import CapacityError
from vllm_scope.program import NO_PROGRAM, OP_READ, Program
from vllm_scope.tap.tables import PROGRAM, SLOT, Tables

CPU = torch.device("cpu")
BOUNDARIES = (0, 2, 3, 7)
PROGRAMS = [
    Program(boundaries)
    for size in range(1, len(BOUNDARIES) + 1)
    for boundaries in itertools.combinations(BOUNDARIES, size)
]


def _tables(num_programs: int = 4, max_rows: int = 16) -> Tables:
    return Tables(BOUNDARIES, max_rows, CPU, num_programs)


def _reads_on_the_device(tables: Tables, program_id: int) -> dict[int, int]:
    """Boundary -> read index, as a tap would find it."""
    found = {}
    for tap, boundary in enumerate(BOUNDARIES):
        first, count = tables.programs[program_id, tap].tolist()
        for op in tables.ops[first : first + count].tolist():
            assert op[0] == OP_READ
            found[boundary] = op[1]
    return found


def _load(tables: Tables, rows: list[int], ids: list[int], slots: list[int]) -> None:
    tables.load_step(
        np.array(rows, np.int64), np.array(ids, np.int32), np.array(slots, np.int64)
    )  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: "-".join(map(str, p.boundaries)))
def test_a_program_reads_its_boundaries_in_order(program):
    tables = _tables()
    found = tables.program_id(program)
    assert _reads_on_the_device(tables, found) == {b: j for j, b in enumerate(program.boundaries)}
    assert tables.num_reads[found] == program.num_reads
    assert tables.program_of(found) == program


def test_an_id_given_to_another_program_forgets_the_first():
    tables = _tables(num_programs=1)
    tables.program_id(Program(BOUNDARIES))
    tables.begin_step()
    found = tables.program_id(Program((3,)))
    assert _reads_on_the_device(tables, found) == {3: 0}
    assert tables.num_reads[found] == 1
    assert tables.program_of(found) == Program((3,))


def test_a_known_program_is_not_uploaded_again():
    tables = _tables()
    first = tables.program_id(Program((0,)))
    uploads = tables.num_uploads
    tables.begin_step()
    assert tables.program_id(Program((0,))) == first
    assert tables.num_uploads == uploads


def test_the_program_unused_for_longest_makes_room():
    tables = _tables(num_programs=2)
    old, new, third = Program((0,)), Program((2,)), Program((3,))
    old_id, new_id = tables.program_id(old), tables.program_id(new)
    tables.begin_step()
    tables.program_id(old)  # used again: now `new` is the older one
    tables.begin_step()
    assert tables.program_id(third) == new_id
    assert tables.program_id(old) == old_id


def test_more_programs_in_one_step_than_ids_is_refused():
    tables = _tables(num_programs=2)
    for program in PROGRAMS[:2]:
        tables.program_id(program)
    with pytest.raises(CapacityError, match="all 2 tap programs are in use; send the request"):
        tables.program_id(PROGRAMS[2])
    assert tables.program_id(PROGRAMS[0]) != tables.program_id(PROGRAMS[1])
    tables.begin_step()
    tables.program_id(PROGRAMS[2])


def test_a_held_id_stays_until_its_last_release():
    tables = _tables(num_programs=1)
    held = tables.program_id(PROGRAMS[0], hold=True)
    assert tables.program_id(PROGRAMS[0], hold=True) == held
    for _ in range(2):
        tables.begin_step()
        with pytest.raises(CapacityError):
            tables.program_id(PROGRAMS[1])
        tables.release(held)
    assert tables.program_id(PROGRAMS[1]) == held


@given(st.data())
def test_programs_that_are_in_use_never_share_an_id(data):
    tables = _tables(num_programs=3)
    held: list[tuple[Program, int]] = []
    this_step: dict[Program, int] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["ask", "ask", "hold", "release", "step"])):
            case "step":
                tables.begin_step()
                this_step = {}
            case "release" if held:
                tables.release(held.pop(data.draw(st.integers(0, len(held) - 1)))[1])
            case action:
                program = data.draw(st.sampled_from(PROGRAMS[:6]))
                in_use = {p for p, _ in held} | set(this_step)
                try:
                    found = tables.program_id(program, hold=action == "hold")
                except CapacityError:
                    assert len(in_use) == 3
                    assert program not in in_use
                    continue
                this_step[program] = found
                if action == "hold":
                    held.append((program, found))
        ids = dict(held) | this_step
        assert len(set(ids.values())) == len(ids)
        for program, found in ids.items():
            assert set(_reads_on_the_device(tables, found)) == set(program.boundaries)
            assert tables.program_of(found) == program


def test_before_and_after_a_step_no_token_has_a_program():
    tables = _tables()
    assert (tables.tokens[:, PROGRAM] == NO_PROGRAM).all()
    _load(tables, [1, 4], [2, 0], [9, 5])
    assert tables.tokens[:, PROGRAM].tolist() == [-1, 2, -1, -1, 0] + [-1] * 11
    assert tables.tokens[[1, 4], SLOT].tolist() == [9, 5]
    tables.clear_step()
    assert (tables.tokens[:, PROGRAM] == NO_PROGRAM).all()


def test_a_smaller_step_keeps_nothing_of_the_larger_one_before_it():
    tables = _tables()
    _load(tables, list(range(16)), [3] * 16, list(range(16)))
    tables.clear_step()
    _load(tables, [2], [1], [7])
    assert tables.tokens[:, PROGRAM].tolist() == [-1, -1, 1] + [-1] * 13


def test_the_tables_keep_their_addresses():
    # CUDA graphs and the taps hold them.
    tables = _tables()
    before = [t.data_ptr() for t in (tables.tokens, tables.programs, tables.ops)]
    _load(tables, [15], [tables.program_id(PROGRAMS[-1])], [3])
    tables.clear_step()
    assert [t.data_ptr() for t in (tables.tokens, tables.programs, tables.ops)] == before


def test_without_a_clear_between_them_a_step_replaces_the_one_before_it():
    tables = _tables()
    _load(tables, list(range(16)), [3] * 16, list(range(16)))
    _load(tables, [2, 5], [1, 0], [7, 8])
    assert tables.tokens[:, PROGRAM].tolist() == [-1, -1, 1, -1, -1, 0] + [-1] * 10
    _load(tables, [0], [2], [4])
    assert tables.tokens[:, PROGRAM].tolist() == [2] + [-1] * 15
    tables.clear_step()
    assert (tables.tokens[:, PROGRAM] == NO_PROGRAM).all()


def test_each_tap_is_told_its_number_by_the_device():
    tables = _tables()
    assert tables.numbers.tolist() == [0, 1, 2, 3]
    assert tables.numbers.dtype == torch.int32


def test_clearing_a_step_that_loaded_nothing_touches_nothing():
    tables = _tables()
    tables.tokens.fill_(77)
    tables.clear_step()
    assert (tables.tokens == 77).all()
