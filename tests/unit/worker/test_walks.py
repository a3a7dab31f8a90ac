"""What the taps are told about the states of a step's rows."""

from __future__ import annotations

import numpy as np

from tests.unit.planned import Engine
from vllm_scope import Add, Gate, Latch, Pid, Read
from vllm_scope.graph.tap.states import INDEX
from vllm_scope.program.compiler import OVERSHOOT

V = [1.0, 2.0, 0.0, -1.0]
GATED = Add(V, layer=2, gate=Gate(V, 1, state=Latch()))
BOTH = (GATED, Add(V, layer=2, gate=Gate(V, 0, state=Pid(0.0, 1.0))))
#: Tokens that a request has places for.
TOKENS = 8 + OVERSHOOT


def walks_of(engine, **step) -> dict[int, tuple[int, ...]]:
    """Row -> start, width, tokens, begin, known, index."""
    plan, failures = engine.step(**step)
    assert failures == []
    if plan.walks is None:
        return {}
    rows, walks = plan.walks
    some = walks[:, : INDEX + 1].tolist()
    return {row: tuple(walk) for row, walk in zip(rows.tolist(), some, strict=True)}


def test_each_request_has_its_places_and_each_row_its_index():
    engine = Engine()
    for name in "ab":
        engine.add(name, *BOTH, num_prompt=2, most=8)
    engine.add("plain", Add(V, layer=2, gate=Gate(V, 1)), Read("embed"))
    engine.add("half", GATED, num_prompt=3, most=8)
    found = walks_of(engine, plain=(9, 1), b=(3, 1), a=(0, 2), half=(5, 3))
    of_b, of_a = (2 * TOKENS, 2, TOKENS, 2, 0), (0, 2, TOKENS, 2, 0)
    of_half = (4 * TOKENS, 1, TOKENS, 3, 0)
    assert found == {
        1: (*of_b, 0), 2: (*of_a, 0), 3: (*of_a, 1), **{4 + i: (*of_half, i) for i in range(3)},
    }  # fmt: skip


def test_a_request_that_was_preempted_has_the_states_of_all_tokens_but_the_last():
    engine = Engine()
    engine.add("a", GATED, num_prompt=4, most=8)
    walks_of(engine, a=(9, 1))
    engine.planner.resume_request("a", 13)
    engine.planner.resume_request("unknown", 13)
    known = [walk[4] for walk in walks_of(engine, a=(0, 3)).values()]
    assert known == [12] * 3


def test_a_step_like_the_one_before_has_the_same_walks():
    engine = Engine()
    engine.add("a", GATED, num_prompt=4)
    engine.add("b", GATED, Read("embed"), num_prompt=4)
    plans = [engine.step(a=(4 + i, 1), b=(9 + i, 1))[0] for i in range(4)]
    assert plans[0].walks is plans[1].walks is plans[3].walks is not None
    assert np.array_equal(plans[0].walks[0], [0, 1])


def test_plans_of_requests_without_states_have_no_walks():
    engine = Engine()
    engine.add("a", Add(V, layer=2, gate=Gate(V, 1)))
    engine.add("b", GATED)
    assert walks_of(engine, a=(5, 1)) == walks_of(engine, a=(6, 1)) == {}
    engine.planner.finish_request("b")
    engine.add("c", Read("embed"))
    assert walks_of(engine, a=(5, 1), c=(4, 2)) == {}
