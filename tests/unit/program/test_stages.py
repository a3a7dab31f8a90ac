"""A request's program, before and after the verdict for which a later stage waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from tests.unit.planned import SITES, Engine, compile_actions, held
from tests.unit.programs import all_programs, on_the_device, program_of, programs_of, runs
from vllm_scope import Add, CapacityError, Probe, Read
from vllm_scope.program.compiler import OVERSHOOT, RequestProgram
from vllm_scope.program.layout import boundaries_of
from vllm_scope.program.operations import OP_ADD, OP_READ, OP_SCORE, Op, Program

V = np.ones(4)
FIRST = Probe(V, layer=1, name="a", threshold=1.0)
SECOND = Probe(V, layer=3, name="b", after="a", threshold=1.0)
THIRD = Probe(V, layers=[1], name="c", after="b")


class Stages(NamedTuple):
    """The probes of each stage, and the operation by which a tap delivers for them."""

    first: list[Probe]
    second: list[Probe]
    third: list[Probe]
    code: int


def _five(probe: Probe) -> list[Probe]:
    """More than a tap makes the numbers of: it copies the row."""
    return [probe, *(replace(probe, name=f"{probe.name} {i}") for i in range(4))]


SCORED = Stages([FIRST], [SECOND], [THIRD], OP_SCORE)
ON_ROWS = Stages(_five(FIRST), _five(SECOND), _five(THIRD), OP_READ)
either = pytest.mark.parametrize("stages", [SCORED, ON_ROWS], ids=["scored", "on-rows"])


def boundaries(program: Program | None, code: int) -> list[int]:
    """Where taps copy rows, or tell numbers of them."""
    if program is None:
        return []
    found = [tap for tap, ops in program.taps if any(op.code == code for op in ops)]
    assert set(found) == boundaries_of(program.layout)
    return found


@either
@pytest.mark.parametrize("more", [[], [Add(V, layer=0, tokens=[6])]], ids=["uniform", "positions"])
def test_a_token_gets_a_later_stage_only_after_the_verdict_and_only_if_it_is_generated(
    more, stages
):
    first, second, third, code = stages
    program = compile_actions(*third, *second, *first, *more)
    begun = program.after(["a"])
    for one, generated in ((program, [4]), (begun, [4, 8]), (begun.after(["b"]), [4, 8])):
        rows = {
            at: boundaries(p, code)
            for first, n, p in runs(one, 0, 8) for at in range(first, first + n)
        }  # fmt: skip
        assert rows == {at: [4] if at < 4 else generated for at in range(8)}
        assert boundaries(one.generated_superset(), code) == generated
    heads = [len(one.generated_superset().layout.encoded) for one in (program, begun)]
    assert heads == [1, 2]
    assert len(program.last_stage.generated_superset().layout.encoded) == 3
    assert program.after([]) is program
    assert begun.after(["a"]) is begun


@either
def test_room_is_counted_with_every_stage(stages):
    """So that a stage that begins does not lack it."""
    edit = Add(V, layer=0, tokens=[6])
    program = compile_actions(*stages.first, *stages.second, edit)
    columns = program.columns(12 + OVERSHOOT)
    known = set(programs_of(program, columns))
    for one in (program, program.after(["a"])):
        assert {p for _, _, p in runs(one, 0, 12)} <= known
    plain = compile_actions(*stages.first, edit)
    assert program.cost(12).programs == 2 * plain.cost(12).programs
    assert set(all_programs(program, 12)) == known
    assert len(known) == program.cost(12).programs


@either
def test_a_planner_reads_for_a_later_stage_from_the_step_after_it_was_told(stages):
    engine = Engine()
    for name in ("flagged", "calm"):
        engine.add(name, *stages.first, *stages.second)
    engine.step(flagged=(0, 4), calm=(0, 4))
    for position in (4, 5):
        plan, _ = engine.step(flagged=(position, 1), calm=(position, 1))
        assert plan.num_slots == 2
    engine.planner.begin_stages("flagged", ("a",))
    for position in (6, 7):
        plan, failures = engine.step(flagged=(position, 1), calm=(position, 1))
        assert failures == []
        layouts = [plan.labels.layouts[at] for at in plan.labels.layout_of]
        assert [boundaries_of(layout) for layout in layouts] == [{4, 8}, {4}]
        assert plan.num_slots == 2 + 1
    # Preempted and computed again. Of tokens of the prompt nothing more is read.
    plan, _ = engine.step(flagged=(0, 8))
    layouts = [plan.labels.layouts[at] for at in plan.labels.layout_of]
    assert [boundaries_of(layout) for layout in layouts] == [{4}] * 4 + [{4, 8}] * 4
    assert plan.num_slots == 4 + 4 * 2
    engine.planner.begin_stages("gone", ("a",))
    for name in ("flagged", "calm"):
        engine.planner.finish_request(name)
    assert len(engine.planner) == 0


@pytest.mark.parametrize("more", [[], [Read("embed", tokens=[5])]], ids=["uniform", "by-position"])
@pytest.mark.parametrize("begins", range(4))
@either
def test_new_scales_and_a_stage_that_begins_hold_together_in_any_order(stages, begins, more):
    probes = *stages.first, *stages.second

    def program(scale: float) -> RequestProgram:
        return compile_actions(*probes, Add(V, layer=0, scale=scale), *more)

    engine = Engine()
    engine.add("a", *probes, Add(V, layer=0), *more)
    reserve = program(1.0).cost_of_change(program(1.0).columns(64 + OVERSHOOT)).programs
    for i, (first, scale) in enumerate([(7, 2.0), (9, 5.0), (9, 3.0), (12, 4.0)]):
        if i == begins:
            engine.planner.begin_stages("a", ("a",))
        new = program(scale)
        engine.planner.change_request("a", first, new, held(new, 64) if more else None)
    # Of 5.0, which no token has, nothing is kept. Each other change takes what was reserved.
    given = len(programs_of(program(1.0), program(1.0).columns(64 + OVERSHOOT)))
    engine.tables._drop_idle_sets()  # they make room when it is needed
    assert len(engine.tables._ops_of) <= given + 3 * reserve
    assert {op.a for op in added(program_of(engine.tables, i) for i in engine.tables._ops_of)} == {
        1.0, 2.0, 3.0, 4.0
    }  # fmt: skip
    scales = [1.0] * 7 + [2.0] * 2 + [3.0] * 3 + [4.0] * 4
    for first, count in ((0, 16), *((at, 1) for at in range(16)), (8, 3)):
        plan, failures = engine.step(a=(first, count))
        assert failures == []
        for at, number in enumerate(plan.program_ids, first):
            one = program_of(engine.tables, number)
            assert [op.a for op in added([one])] == [scales[at]]
            assert len(one.layout.encoded) == (1 if at < 4 else 2)
    engine.planner.finish_request("a")
    engine.tables._drop_idle_sets()
    left = (program_of(engine.tables, i) for i in engine.tables._ops_of)
    assert set().union(*(one.vectors for one in left)) == set()


@pytest.mark.parametrize("more", [[], [Read("embed", tokens=[5])]], ids=["uniform", "by-position"])
@pytest.mark.parametrize("begins", range(3))
@either
def test_stages_and_new_scales_made_at_once_are_those_made_one_by_one(
    stages, begins, more, monkeypatch
):
    actions = *stages.first, *stages.second, *stages.third, *more
    found = []
    for few in (0, 1 << 20):
        monkeypatch.setattr("vllm_scope.program.held._FEW", few)
        engine = Engine()
        engine.add("a", *actions, Add(V, layer=0))
        for i, (first, scale) in enumerate([(7, 2.0), (9, 5.0), (9, 3.0)]):
            if i == begins:
                engine.planner.begin_stages("a", ("a",))
            new = compile_actions(*actions, Add(V, layer=0, scale=scale))
            engine.planner.change_request("a", first, new, held(new, 64) if more else None)
        plans = [engine.step(a=(at, 1)) for at in range(12)]
        assert all(failures == [] for _, failures in plans)
        found.append([
            (on_the_device(engine.tables, int(plan.program_ids[0])), plan.labels.layouts)
            for plan, _ in plans
        ])  # fmt: skip
        engine.planner.finish_request("a")
        assert engine.tables._drop_idle_sets()
        assert engine.tables._sets == {}
        assert list(engine.tables._vector_places.idle()) != []
    assert found[0] == found[1]
    assert len({repr(ops) for ops, _ in found[0][6:]}) == 3


@pytest.mark.parametrize("told", [("a",), ("a", "b"), ("b",)])
@either
def test_every_stage_of_a_longer_cascade_is_held_if_programs_depend_on_positions(stages, told):
    probes = *stages.first, *stages.second, *stages.third
    engine = Engine()
    engine.add("a", *probes, Add(V, layer=0), Read("embed", tokens=[5]))
    for i in range(len(told)):
        engine.planner.begin_stages("a", told[: i + 1])
        for at in (0, 4, 5, 6):
            _, failures = engine.step(a=(at, 1))
            assert failures == []


def added(programs: Iterable[Program]) -> list[Op]:
    """The edits."""
    taps = (tap for one in programs for tap in one.taps)
    return [op for _, ops in taps for op in ops if op.code == OP_ADD]


def test_without_room_a_request_goes_on_as_before():
    engine = Engine(num_programs=4)
    engine.add("a", *ON_ROWS.first, *ON_ROWS.second)
    for i in range(3):
        engine.add(f"r{i}", Read("embed"), Read("resid_post", layers=[i]))
    with pytest.raises(CapacityError):
        engine.planner.begin_stages("a", ("a",))
    plan, failures = engine.step(a=(4, 1))
    assert (failures, plan.num_slots) == ([], 1)
    assert SITES.step_tokens == 1


def test_a_request_whose_taps_score_has_room_for_its_later_stages_from_the_start():
    engine = Engine(num_programs=4)
    engine.add("a", *SCORED.first, *SCORED.second)
    for i in range(2):
        engine.add(f"r{i}", Read("embed"), Read("resid_post", layers=[i]))
    with pytest.raises(CapacityError):
        engine.add("r2", Read("embed"), Read("resid_post", layers=[2]))
    engine.planner.begin_stages("a", ("a",))
    plan, failures = engine.step(a=(4, 1))
    assert (failures, plan.num_slots) == ([], 2)
