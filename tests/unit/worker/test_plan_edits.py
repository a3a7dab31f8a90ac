"""Steps with edits and probes: what takes slots, what is held, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.planned import HIDDEN_SIZE, SITES, Engine, compile_actions, held
from tests.unit.programs import program_of
from vllm_scope import Ablate, Add, CapacityError, Probe, Read, Replace, Spec
from vllm_scope.program.compiler import OVERSHOOT
from vllm_scope.program.layout import Layout
from vllm_scope.program.operations import NO_PROGRAM
from vllm_scope.request.heads import Bank
from vllm_scope.request.sites import point_of
from vllm_scope.worker import plan as planning

V = [1.0, 2.0, 0.0, -1.0]
#: Of which a tap makes the number, and of which it copies the row for a bank.
ONE, FIVE = ([Probe(V, layer=0, name=f"{i}") for i in range(count)] for count in (1, 5))
either = pytest.mark.parametrize("probes", [ONE, FIVE], ids=["scored", "on-rows"])


def bank_of(probes: list[Probe]) -> Bank:
    (found,) = Spec(probes=tuple(probes)).resolve(SITES).banks
    return found


@either
def test_rows_that_are_only_edited_take_no_slots_and_have_no_label(probes):
    engine = Engine()
    engine.add("edits", Add(V, layer=0))
    engine.add("reads", Read("embed"), Read("resid_post", layers=[3], tokens="generated"))
    engine.add("both", Ablate(V, layer=1), Read("embed", tokens=[1]), *probes)
    plan, failures = engine.step(edits=(0, 2), reads=(3, 2), both=(0, 2))
    assert failures == []
    assert plan.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert plan.delivers.tolist() == [False, False, True, True, True, True]
    assert plan.labels.rows.tolist() == [2, 3, 4, 5]
    assert plan.labels.positions.tolist() == [3, 4, 0, 1]
    # A row; two rows; one score, or the row of five; a row and the same.
    assert np.diff([*plan.offsets, plan.num_slots]).tolist() == [0, 0, 1, 2, 1, 2]
    each = 1 if probes is ONE else 2  # slots of the numbers
    assert plan.num_delivered == 1 + 2 + each + (1 + each)
    scores = ((bank_of(probes), (point_of(2, 1),)),)
    assert [plan.labels.layouts[i] for i in plan.labels.layout_of] == [
        Layout((point_of(0, 1),)),
        Layout((point_of(0, 1), point_of(8, 1))),
        Layout((), scores),
        Layout((point_of(0, 1),), scores),
    ]
    assert (plan.program_ids != NO_PROGRAM).all()


def test_a_step_of_edits_alone_delivers_nothing():
    engine = Engine()
    engine.add("a", Add(V, layer=0, tokens="generated"))
    (plan, failures), (later, _) = engine.step(a=(0, 4)), engine.step(a=(4, 2))
    assert failures == []
    # The prompt is checked, what is generated is edited and checked.
    assert plan.rows.tolist() == [0, 1, 2, 3]
    assert set(plan.program_ids) != set(later.program_ids)
    plan = later
    assert plan.num_slots == 0
    assert not plan.delivers.any()
    assert plan.labels.keys.size == plan.labels.layout_of.size == 0
    assert plan.labels.layouts == ()


def test_tokens_of_one_layout_share_it_whatever_edits_they_get():
    engine = Engine()
    engine.add("a", Read("embed"), Add(V, layer=0))
    engine.add("b", Read("embed"), Add([2.0, 0, 0, 0], layer=3))
    plan, _ = engine.step(a=(6, 1), b=(5, 1))
    assert len(set(plan.program_ids.tolist())) == 2
    assert plan.labels.layouts == (Layout((point_of(0, 1),)),)
    assert plan.labels.layout_of.tolist() == [0, 0]


@pytest.mark.parametrize(
    "actions",
    [
        pytest.param([Add(V, layer=0)], id="edits"),
        pytest.param([Add(V, layer=0), Read("embed")], id="edits-and-reads"),
    ],
)
def test_a_step_like_the_one_before_has_the_same_array_of_ids(actions):
    engine = Engine()
    engine.add("a", *actions)
    engine.add("b", *actions, Ablate(V, layer=1))
    first = engine.step(a=(5, 1), b=(9, 1))[0].program_ids
    for n in range(1, 4):
        assert engine.step(a=(5 + n, 1), b=(9 + n, 1))[0].program_ids is first
    assert engine.step(b=(13, 1), a=(9, 1))[0].program_ids is not first
    again = engine.step(b=(14, 1), a=(10, 1))[0].program_ids
    engine.add("c", Add([0.5] * 4, layer=2))  # it may take the place of another program
    assert engine.step(b=(15, 1), a=(11, 1))[0].program_ids is not again


def _program_at(engine, position: int, count: int = 1):
    plan, failures = engine.step(a=(position, count))
    assert failures == []
    return [program_of(engine.tables, i) for i in plan.program_ids]


def _scales_held(engine) -> set[float]:
    """Of adds, in the programs that requests hold."""
    engine.tables._drop_idle_sets()
    programs = (program_of(engine.tables, i) for i in engine.tables._ops_of)
    return {op.a for one in programs for _, ops in one.taps for op in ops if op.vector is not None}


@pytest.mark.parametrize("more", [[], [Read("embed", tokens=[5])]], ids=["uniform", "by-position"])
def test_new_scales_hold_from_their_position_on_however_tokens_are_computed(more):
    def program(scale: float):
        return compile_actions(Add(V, layer=0, scale=scale), *more)

    engine = Engine()
    engine.add("a", Add(V, layer=0, scale=1.0), *more)
    steady = _program_at(engine, 4) + _program_at(engine, 5)
    for first, scale in ((7, 2.0), (9, 3.0), (9, 4.0)):
        new = program(scale)
        engine.planner.change_request("a", first, new, held(new, 64))
    assert _scales_held(engine) == {1.0, 2.0, 4.0}
    scales = [1.0] * 7 + [2.0] * 2 + [4.0] * 7
    for start, count in ((0, 16), (3, 9), (8, 1), (9, 1), (10, 1), (11, 1), (8, 3)):
        found = _program_at(engine, start, count)
        for position, one in enumerate(found, start):
            ((_, ops), *_) = [x for x in one.taps if x[0] == 2]
            assert [op.a for op in ops if op.vector is not None] == [scales[position]]
    assert _program_at(engine, 4) + _program_at(engine, 5) == steady
    engine.planner.finish_request("a")
    assert len(engine.planner) == 0
    assert _scales_held(engine) == set()


def test_a_request_with_vectors_holds_every_program_from_the_start():
    engine = Engine(num_programs=4)
    engine.add(
        "a", Replace([V, [1, 1, 1, 1]], positions=[0, 3], layer=0), Read("embed", tokens=[1])
    )
    with pytest.raises(CapacityError):
        engine.add("b", Add(V, layer=0))
    for position in range(4):
        engine.tables.begin_step()
        plan, failures = engine.step(a=(position, 1))
        assert failures == []
        assert plan.rows.tolist() == [0]
    engine.planner.finish_request("a")
    engine.add("b", Add(V, layer=0))


def test_programs_past_the_end_are_held_for_steps_that_overshoot():
    engine = Engine()
    last = 8 + OVERSHOOT - 1
    engine.add("a", Add(V, layer=0, tokens=[last]), Add(V, layer=1, tokens=[last + 1]), most=8)
    plan, failures = engine.step(a=(last, 1))
    assert (plan.rows.tolist(), failures) == ([0], [])
    # vLLM never computes so far past the end; what was not held is refused, not wrong.
    plan, ((name, error),) = engine.step(a=(last + 1, 1))
    assert (plan, name) == (None, "a")
    assert "never held" in str(error)


@pytest.mark.parametrize("limit", ["programs", "vectors"])
def test_a_request_that_finds_no_room_leaves_nothing_held(limit):
    mib = 2 * HIDDEN_SIZE * 4 / 2**20
    engine = Engine(num_programs=3) if limit == "programs" else Engine(vectors_mib=mib)
    three = Replace([V, [1, 1, 1, 1], [2, 2, 2, 2]], positions=[0, 1, 2], layer=0)
    for _ in range(3):
        with pytest.raises(CapacityError, match="in use; send the request again"):
            engine.add("large", three)
        assert "large" not in engine.planner
        two = Replace([[3, 3, 3, 3], [4, 4, 4, 4]], positions=[0, 1], layer=0)
        engine.add("small", two)
        plan, failures = engine.step(small=(0, 4))
        assert (plan.rows.tolist(), failures) == ([0, 1, 2, 3], [])
        assert len(set(plan.program_ids[:3].tolist())) == 3
        engine.planner.finish_request("small")


def test_requests_with_equal_vectors_share_their_programs():
    engine = Engine(num_programs=1)
    for name in "abc":
        engine.add(name, Add(V, layer=0))
    plan, failures = engine.step(a=(4, 1), b=(0, 2), c=(9, 1))
    assert failures == []
    assert len(set(plan.program_ids.tolist())) == 1
    engine.planner.finish_request("b")
    engine.planner.finish_request("a")
    assert engine.step(c=(10, 1))[0].rows.tolist() == [0]


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(Read("embed", tokens="last_prompt"), id="last-of-the-prompt"),
        pytest.param(Read("embed", tokens=[9]), id="one-position"),
        pytest.param(Read("embed", tokens="last"), id="last"),
    ],
)  # fmt: skip
def test_where_positions_are_guessed_an_edited_request_still_reads_a_few_tokens(read):
    engine = Engine()
    engine.add("a", read, Add(V, layer=0, tokens="generated"))
    plan, failures = engine.step(optimistic=True, a=(7, 3))
    assert failures == []
    assert plan.rows.tolist() == [0, 1, 2]


@either
def test_where_positions_are_guessed_probes_of_single_tokens_are_all_scored(probes):
    engine = Engine()
    some = (replace(probe, tokens=[8]) for probe in probes)
    engine.add("a", *some, Read("embed", tokens=[9]))
    plan, failures = engine.step(optimistic=True, a=(7, 3))
    assert failures == []
    made = ((bank_of(probes), (point_of(2, 1),)),)
    assert plan.labels.layouts == (Layout((point_of(0, 1),), made),)


def test_a_request_that_enters_has_room_where_the_last_step_read_much():
    engine = Engine(num_programs=8)
    # Its prompt's 8 tokens have 8 programs, which nobody holds.
    reads = [
        Read("resid_post", layers=[k], tokens=[p for p in range(8) if (p + 1) >> k & 1])
        for k in range(4)
    ]
    engine.add("reads", *reads, num_prompt=8, most=10)
    _, failures = engine.step(reads=(0, 8))
    assert failures == []
    engine.add("edits", Add(V, layer=1), most=8)
    plan, failures = engine.step(reads=(8, 1), edits=(0, 4))
    assert failures == []
    assert plan.rows.tolist() == [1, 2, 3, 4]


# Owners of faults


def test_each_row_of_an_edited_request_carries_its_number_and_others_none():
    engine = Engine()
    engine.add("reads", Read("embed"))
    engine.add("a", Add(V, layer=0, tokens="generated"))
    engine.add("b", Add(V, layer=0))
    plan, _ = engine.step(a=(2, 3), reads=(0, 1), b=(5, 1))
    owners = plan.owners.tolist()
    assert [engine.planner.owners.get(n) for n in owners] == ["a", "a", "a", None, "b"]
    assert owners[3] == 0


def test_an_owner_number_is_not_reused_while_a_step_may_still_report_it():
    engine = Engine()
    numbers = []
    for _ in range(50):
        engine.add("a", Add(V, layer=0))
        numbers.append(int(engine.step(a=(0, 1))[0].owners[0]))
        engine.planner.finish_request("a")
        assert engine.planner.owners.get(numbers[-1]) is None
    assert len(set(numbers)) == 50


def test_owner_numbers_in_use_are_skipped_after_all_have_been_used(monkeypatch):
    monkeypatch.setattr(planning, "MOST_OWNERS", 5)
    engine = Engine()
    engine.add("stays", Add(V, layer=0))
    for _ in range(9):
        engine.add("a", Add(V, layer=0))
        plan, _ = engine.step(stays=(0, 1), a=(0, 1))
        first, second = plan.owners.tolist()
        assert (engine.planner.owners.get(first), engine.planner.owners.get(second)) == (
            "stays",
            "a",
        )
        assert 0 < second < 5
        # What it reported too late is nothing of the next one's.
        assert not engine.tables.faults[second]
        engine.tables.faults[second] = 7
        engine.planner.finish_request("a")
