"""The admission says there is room exactly where the workers' tables have it, and the weights of
probes fit beside the vectors there."""

from __future__ import annotations

import random
import statistics
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope import Add, Mlp, Probe, Spec
from vllm_scope.core.admission import Admission, Ranges
from vllm_scope.errors import CapacityError
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program import held as held_programs
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.held import Held
from vllm_scope.program.layout import Widths
from vllm_scope.program.operations import Cost
from vllm_scope.request.sites import Sites

SIZE, MOST = 4, Cost(5, 4, 10)
#: Vectors that a weight of two layers counts for.
ROWS = 2 + 1
BOUNDARIES = (0, 2)
SITES = Sites(2, SIZE, "float32", BOUNDARIES)
#: Of one token: (layer, or -1 for the embedding; number of a vector; who has it: False for an
#: edit, True for a probe whose bank works on rows, "scored" for one whose number a tap makes).
Ops = list[tuple[int, int, bool | str]]


def _held(*programs: Ops) -> Held:
    """What a request holds, each of whose first tokens has a program of its own."""
    adds, probes = [], []
    for position, ops in enumerate(programs):
        for layer, number, probed in ops:
            where = {"site": "embed"} if layer < 0 else {"layers": [layer]}
            where["tokens"] = [position]
            if probed == "scored":
                probes.append(Probe([number] * SIZE, name=f"{len(probes)}", **where))
            elif probed:
                weight = Mlp([([[number] * SIZE] * 2, [0, 0]), ([[number] * 2], [0])])
                probes.append(Probe(weight, name=f"{len(probes)}", **where))
            else:
                adds.append(Add([number] * SIZE, **where))
    asked = Spec((), tuple(probes), tuple(adds)).resolve(SITES)
    count = len(programs)
    program = RequestProgram.compile(asked, SITES, frozenset(BOUNDARIES), count, [1] * count)
    return program.held(program.columns(count), str(programs))


OPS = st.tuples(
    st.sampled_from([-1, 0]), st.integers(1, 4), st.sampled_from([False, True, "scored"])
)
HELD = st.lists(st.lists(OPS, min_size=1, max_size=3), min_size=1, max_size=2)


class _Named:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


def test_a_request_waits_while_the_lenses_of_others_leave_no_room():
    admission, one = Admission(MOST + Cost(lens_rows=100)), _held([(0, 1, False)])
    rows = {"a": 70, "b": 31, "c": 30, "large": 500}
    entered = {
        name: admission.enter(_Named(name), one, reserve=Cost(lens_rows=count))
        for name, count in rows.items()
    }
    # "c" would fit, and does not overtake.
    assert entered == {"a": True, "b": False, "c": False, "large": False}
    assert admission.held == one.cost + Cost(lens_rows=70)
    assert admission.enter(_Named("d"), one), "a request without a lens does not wait for theirs"
    assert [each.request_id for each in admission.waiting] == ["b", "c", "large"]
    assert [each.request_id for each in admission.take_out({"large"})] == ["large"]
    assert not admission.enter(_Named("b"), None), "a further piece of what waits"
    admission.release("d")
    admission.release("a")
    assert admission.admit("b", one, reserve=Cost(lens_rows=31))
    assert admission.admit("c", one, reserve=Cost(lens_rows=30))
    assert not admission.admit("large", one, reserve=Cost(lens_rows=500))
    for name in ("b", "c"):
        admission.release(name)
    assert admission.held == Cost()
    assert admission.admit("large", one, reserve=Cost(lens_rows=500)), "alone it never waits"


def test_what_a_request_may_take_later_is_kept_for_it():
    admission, one = Admission(MOST), _held([(0, 1, False)])
    taken = one.cost + Cost(0, 1, 1)
    assert admission.enter(_Named("a"), one, reserve=Cost(0, 1, 1))
    assert admission.held == taken
    left = MOST.programs - taken.programs, MOST.ops - taken.ops
    for programs, ops, fits in ((1, 0, False), (0, 1, False), (0, 0, True)):
        reserve = Cost(0, left[0] + programs, left[1] + ops)
        assert admission.admit("b", one, reserve=reserve) is fits
    admission.release("b")
    assert admission.held == taken
    admission.release("a")
    assert admission.held == Cost()


def _tables() -> Tables:
    return Tables(
        BOUNDARIES, 4, SIZE, Widths((SIZE * 4,)), torch.device("cpu"),
        MOST.vectors * SIZE * 4 / 2**20, MOST.programs, MOST.ops,
    )  # fmt: skip


def _fit(some: list[Held]) -> bool:
    """Whether the vectors and weights of programs fit together."""
    vectors = {key: count for held in some for key, count in held.vectors.items()}
    return sum(vectors.values()) <= MOST.vectors


@pytest.mark.parametrize("few", [0, 16], ids=["at-once", "one-by-one"])
@given(st.data())
def test_there_is_room_exactly_where_the_tables_have_it_and_weights_fit(few, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_programs, "_FEW", few)
        _check_room(data, exactly=few == 0)


def _check_room(data: st.DataObject, exactly: bool) -> None:
    """
    Args:
        exactly: False if the tables let requests share more than the admission counts.
    """
    admission, tables = Admission(MOST), _tables()
    running: dict[str, Held] = {}
    for i in range(data.draw(st.integers(1, 12))):
        if running and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(running)))
            tables.release_set(running.pop(name))
            assert admission.release(name)
            assert not admission.release(name)
        held = data.draw(HELD.map(lambda some: _held(*some)).filter(lambda x: x.cost.fits(MOST)))
        fit = _fit([*running.values(), held])
        tables.begin_step()
        if admission.admit(str(i), held):
            assert fit
            tables.hold(held)
            running[str(i)] = held
        elif fit and exactly:
            with pytest.raises(CapacityError):
                tables.hold(held)
        assert admission.held.fits(MOST)
    for name in running:
        assert admission.release(name)
    assert admission.held == Cost()


def test_a_request_keeps_its_places_and_one_request_always_enters():
    large = _held([(0, number, False) for number in range(1, 7)])
    small = _held([(-1, 1, False)])
    admission = Admission(MOST)
    assert admission.admit("large", large)  # its like is refused by front-ends
    # Each token is checked; those behind the first one have a program for that alone.
    assert admission.held == Cost(6, 2, 6 + 2)
    assert admission.admit("large", small)
    assert admission.held == Cost(6, 2, 6 + 2)
    assert not admission.admit("small", small)
    assert not admission.release("small")
    assert admission.release("large")
    assert admission.admit("small", small)


def test_equal_weights_of_several_requests_have_one_place():
    admission = Admission(MOST)
    one, two = _held([(-1, 1, True)]), _held([(-1, 1, True), (0, 1, True), (0, 7, False)])
    assert admission.admit("one", one)
    assert admission.held == Cost(ROWS, 1, 1)
    assert admission.admit("two", two)
    # Drafts of its tokens would all be probed, and checked: a program more.
    assert admission.held == Cost(ROWS + 1, 3, 1 + 4 + 3)
    assert not admission.admit("other", _held([(-1, 2, True)]))
    assert admission.release("one")
    assert admission.held == Cost(ROWS + 1, 2, 4 + 3)
    assert admission.release("two")
    assert admission.admit("other", _held([(-1, 2, True)]))


def test_the_weights_of_probes_that_taps_score_have_places_among_the_vectors():
    admission = Admission(MOST)
    one = _held([(-1, 1, "scored"), (-1, 2, "scored")], [(-1, 3, "scored")])
    assert admission.admit("one", one)
    # One bank: each of the two tokens gets all three numbers.
    assert admission.held == Cost(3, 1, 3)
    assert admission.admit("equal", _held([(-1, 1, "scored"), (-1, 2, "scored")]))
    assert admission.held == Cost(3, 2, 5)
    assert not admission.admit("other", _held([(-1, number, "scored") for number in (4, 5, 6)]))
    assert admission.release("one")
    assert admission.held == Cost(2, 1, 2)
    assert admission.admit("other", _held([(-1, number, "scored") for number in (4, 5, 6)]))


def test_requests_with_equal_programs_hold_them_together():
    admission = Admission(MOST)
    for name in "abc":
        assert admission.admit(name, _held([(0, 1, False)]))
    assert admission.held == Cost(1, 2, 3)
    for name in "abc":
        assert admission.held == Cost(1, 2, 3)
        assert admission.release(name)
    assert admission.held == Cost()


def test_the_time_to_admit_a_request_does_not_grow_with_what_is_held():
    admission, took = Admission(Cost(1 << 20, 1 << 20, 1 << 20)), []
    for i in range(512):
        held = _held([(0, 64 * i + j + 1, False) for j in range(64)])
        assert held.cost.vectors == 64  # counted on another thread
        started = time.thread_time()
        assert admission.admit(str(i), held)
        took.append(time.thread_time() - started)
    assert admission.held.vectors == 64 * 512
    assert statistics.median(took[-64:]) < 5 * statistics.median(took[:64])


# The log of states


def test_a_request_without_a_range_of_the_log_waits_for_one():
    admission, program = Admission(MOST, 100), _held([(0, 1, False)])
    assert [admission.admit(name, program, 40) for name in "abc"] == [True, True, False]
    assert (admission.log_start("a"), admission.log_start("b")) == (0, 40)
    assert admission.admit("plain", program)
    assert admission.log_start("plain") == 0
    admission.release("a")
    assert not admission.admit("c", program, 60)
    assert admission.admit("c", program, 30)
    assert admission.log_start("c") == 0
    for name in ("b", "c"):
        admission.release(name)
    assert admission.admit("d", program, 100)


def test_ranges_never_overlap_and_join_again():
    rng, ranges, taken = random.Random(0), Ranges(1000), {}
    for i in range(2000):
        if taken and rng.random() < 0.5:
            ranges.give_back(*taken.pop(rng.choice(list(taken))))
            continue
        size = rng.randint(1, 120)
        start = ranges.take(size)
        if start is not None:
            taken[i] = start, size
        used = np.zeros(1000, int)
        for start, size in taken.values():
            used[start : start + size] += 1
        assert used.max(initial=0) <= 1
    for some in taken.values():
        ranges.give_back(*some)
    assert ranges.take(1000) == 0
