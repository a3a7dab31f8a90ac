"""A verdict is the one that the front-end finds in the same scores, as soon as it can be known."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.delivered import labels_of
from tests.unit.watching import LENGTH, READ, Request, Running, Worker, probe, rising
from vllm_scope import AttentionPool, Ema, Policy, Probe, RollingMean
from vllm_scope.batch.readout import Readout
from vllm_scope.control import Decided
from vllm_scope.program.layout import Layout
from vllm_scope.transport.ring import Lease
from vllm_scope.worker.watch import Judged


def test_a_request_is_stopped_once_with_the_step_that_brought_the_verdict():
    one = rising(probe("p", 1.0), scores={1: {2: 0.5, 5: 2.0, 6: 3.0}})
    worker = Worker(one)
    for positions, found in (
        (range(4), {}), ([4], {}), ([5], {"r1": "probe 'p': 2 at position 5"}), ([6], {})
    ):  # fmt: skip
        worker.forward((one, positions, 0))
        assert worker.judge() == found
    assert not worker.watch
    assert "r1" not in worker.watch
    assert all(lease.free for lease in worker.leases)


def test_of_several_probes_the_first_position_above_is_told():
    one = rising(probe("late", 1.0), probe("early", 2.0, 0), scores={1: {3: 2.0}, 0: {1: 4.0}})
    for by_tap in (False, True):
        worker = Worker(one)
        worker.forward((one, range(4), 0), by_tap=by_tap)
        assert worker.judge() == {"r1": "probe 'early': 4 at position 1"}


class Sees:
    """In place of a policy's Steering."""

    name, over = "policy", False

    def __init__(self, stop: int = -1):
        self.stop, self.seen = stop, []

    def begin_step(self):
        pass

    def observe(self, position, scores):
        self.seen.append((position, scores))
        first = max(position, 3) + 1
        return Decided(position, first, {"e": float(position)}, position == self.stop)


@pytest.mark.parametrize("by_tap", [False, True])
def test_a_policy_sees_each_position_once_in_order_however_tokens_are_computed(by_tap):
    every = probe("every", 1e9, tokens="all", action="flag")
    late = probe("late", 1e9, 0, tokens="generated", action="flag", aggregate="max")
    one = Request(1, [every, late], policy=Policy("p"))
    told = []
    worker, steering = Worker(tell=lambda *x: told.append(x)), Sees()
    found: list[Judged] = []
    worker.watch.add_request(1, "r1", one.num_prompt, one.asked, steering)
    for positions in (range(3), range(3), range(2, 4), [4], [5], range(3), range(3, 7)):
        worker.forward((one, positions, 0), by_tap=by_tap)
        found += worker.judged().values()
    assert [position for position, _ in steering.seen] == list(range(7))
    readouts = {each.name: Readout(each) for each in one.asked.watched}
    for position, scores in steering.seen:
        assert set(scores) == ({"every"} if position < 4 else {"every", "late"})
        for each in one.asked.watched:
            if each.name in scores:
                (cell,) = each.cells
                numbers = torch.from_numpy(one.numbers[cell.bank, cell.place.point()][[position]])
                read = readouts[each.name].read(numbers[:, cell.first :], np.array([position]))
                value = read.scores if read.aggregates is None else read.aggregates
                assert scores[each.name] == float(value)
    changes = [(position + 1, {"e": float(position)}) for position in range(3, 7)]
    assert [each[:2] for each in found] == [(None, ())] * len(found)
    assert dict(change for each in found for change in each.scales) == dict(changes)
    assert [key for key, _ in told] == [1] * 7
    assert [decided.position for _, decided in told] == list(range(7))


@pytest.mark.parametrize(("stop", "last"), [(2, 2), (5, 4), (-1, 4)])
def test_a_policy_sees_nothing_after_the_position_that_ends_its_request(stop, last):
    """A probe ends it at position 4."""
    one = rising(probe("p", 1.0), scores={1: {4: 2.0}}, num_prompt=8, policy=Policy("p"))
    worker, steering = Worker(), Sees(stop)
    worker.watch.add_request(1, "r1", one.num_prompt, one.asked, steering)
    worker.forward((one, range(8), 0))
    reason = "policy 'policy' at position 2" if last == 2 else "probe 'p': 2 at position 4"
    assert worker.judge() == {"r1": reason}
    assert steering.seen[-1][0] == last


def test_a_position_that_is_computed_again_counts_once():
    one = rising(probe("p", 1.5, aggregate=RollingMean(2)), scores={1: {2: 2.0, 3: 1.0, 4: 3.0}})
    worker = Worker(one)
    for positions in (range(3), range(3), [2], range(2)):
        worker.forward((one, positions, 0))
        assert worker.judge() == {}
    worker.forward((one, range(2, 4), 0))
    worker.forward((one, [4], 0))
    assert worker.judge() == {"r1": "probe 'p': 2 at position 4"}


def test_a_rejected_draft_does_not_count_whatever_else_is_read_there():
    """The draft at 6 has a layout of its own; 5 is a draft of the same step."""
    one = rising(probe("p", 1.0), scores={}, read=frozenset([6]))
    worker = Worker(one, drafts=True)
    worker.forward((one, range(4), 0))
    worker.forward((one, range(4, 8), 3))
    assert worker.judge() == {}
    worker.forward((one, range(5, 9), 3))
    assert worker.judge() == {}


@pytest.mark.parametrize("tokens", ["all", "prompt"])
def test_a_prompt_is_judged_with_its_step_though_later_tokens_may_be_drafts(tokens):
    """If only the prompt is probed, no later row tells that its end was accepted."""
    one = rising(probe("p", 1.0, tokens=tokens), scores={1: {3: 2.0}})
    worker = Worker(one, drafts=True)
    worker.forward((one, range(4), 0))
    assert worker.judge() == {"r1": "probe 'p': 2 at position 3"}


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("steps", [[[0]], [range(4)], [range(4), range(2)]], ids=str)
def test_a_verdict_is_never_late(steps, drafts):
    """Of tokens in several layouts, and if the request is preempted before anybody looks."""
    one = rising(probe("p", 1.0), scores={1: {max(steps[0]): 2.0}}, read=frozenset([1]))
    worker = Worker(one, drafts=drafts)
    for positions in steps:
        worker.forward((one, positions, 0))
    worker.settle()
    assert worker.judge() == {"r1": f"probe 'p': 2 at position {max(steps[0])}"}


def test_a_position_that_lost_the_rows_of_one_layer_is_left_out():
    """As the front-end does."""
    asked = probe("p", 1.0, [0, 1], weight=np.ones((2, 4)), aggregate="mean")
    one = rising(asked, scores={0: {1: 9.0, 2: 1.0}, 1: {2: 2.0}})
    worker = Worker(one)
    worker.forward((one, range(2), 0), by_tap=True, lost=4)
    worker.forward((one, range(2, 4), 0), by_tap=True)
    assert worker.judge() == {"r1": "probe 'p': 3 at position 2"}


def test_labels_are_asked_for_after_the_rows_are_there():
    one, calls = rising(probe("p", 1.0), scores={}), []
    lease = Lease(0, 1, torch.zeros(1, 16, dtype=torch.uint8), threading.Lock())
    watch = Worker(one).watch
    watch.add(lambda: calls.append("labels"), lambda: calls.append("wait"), lease, None)
    assert watch.judge(watch.take()) == {}
    assert calls == ["wait", "labels"]


def test_a_request_that_has_ended_or_whose_rows_were_lost_has_no_verdict():
    one, other = (Request(key, [probe("p", -9.0)]) for key in (1, 2))
    worker = Worker(one, other)
    worker.forward((one, range(4), 0), (other, range(4), 0))
    worker.watch.finish_request(1)
    assert list(worker.judge()) == ["r2"]
    worker = Worker(one)
    worker.show(None, [np.zeros(4, np.float32)])
    assert worker.judge() == {}
    assert all(lease.free for lease in worker.leases)


def test_a_fault_in_one_step_costs_no_other_request_its_verdict(caplog):
    one = rising(probe("p", 1.0), scores={1: {3: 2.0}})
    worker = Worker(one)
    broken = worker.show(labels_of([1], [0], layouts=(Layout(), Layout((READ,)))), [np.zeros(8)])
    worker.forward((one, range(4), 0))
    assert worker.judge() == {"r1": "probe 'p': 2 at position 3"}
    assert broken.free
    assert "verdicts of a step could not be made" in caplog.text


def test_rows_that_cannot_be_read_do_not_end_the_step_that_needs_room(caplog):
    """`settle` runs while the worker waits for the ring."""
    worker = Worker(rising(probe("p", 1.0), scores={}))
    lease = worker.show(labels_of([1], [0], layouts=(Layout(), Layout((READ,)))), [np.zeros(8)])
    worker.watch.settle()
    assert lease.free
    assert "verdicts of a step could not be made" in caplog.text


def test_requests_may_end_on_another_thread_while_one_is_looked_for():
    watch = Worker(*(Request(key, [probe("p", 1.0)]) for key in range(3))).watch

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            watch.finish_request(2)
            return str.__eq__(self, other)

    assert Name("r9") not in watch
    assert Name("r1") in watch


def test_what_was_read_is_not_kept():
    one = rising(probe("p", 1.0, [0, 1], weight=np.ones((2, 4))), scores={})
    worker = Worker(one)
    worker.forward((one, range(4), 0))
    for position in range(4, LENGTH):
        worker.forward((one, [position], 0))
        worker.judge()
    assert [some for some in worker.watch._watched[1].probes[0].waiting if some] == []


AGGREGATES = [None, "max", "mean", Ema(0.5), RollingMean(3), RollingMean(3, "max")]


@st.composite
def probes(draw: st.DrawFn) -> list[Probe]:
    found = []
    for i in range(draw(st.integers(1, 3))):
        pool = AttentionPool(np.ones(4), np.ones(4))
        weight, layers = draw(
            st.sampled_from([(np.ones(4), [1]), (np.ones((2, 4)), [0, 1]), (pool, [0])])
        )
        found.append(
            Probe(
                weight, layers=layers, name=f"p{i}", threshold=draw(st.integers(0, 10)) / 4,
                action=draw(st.sampled_from(["stop", "stop", "flag"])),
                aggregate=draw(st.sampled_from(AGGREGATES)),
                tokens=draw(st.sampled_from(["all", "prompt", "generated"])),
            )
        )  # fmt: skip
    return found


#: Of one request in one step: tokens to compute (0 to be preempted), drafts that are accepted.
TURNS = st.tuples(st.sampled_from([1, 1, 1, 2, 3, 5, 0]), st.integers(0, 3))


@given(
    st.lists(st.tuples(probes(), st.integers(1, 8), st.frozensets(st.integers(0, 20)))
             , min_size=1, max_size=3),
    st.lists(
        st.tuples(st.lists(TURNS, min_size=3, max_size=3), st.booleans(), st.booleans(),
                  st.booleans()),
        min_size=1, max_size=12,
    ),
    st.booleans(),
)  # fmt: skip
def test_every_request_is_stopped_as_soon_as_the_front_end_would_find_a_verdict(
    asked, steps, drafts
):
    requests = [Request(key, *one) for key, one in enumerate(asked)]
    running, worker = [Running(one) for one in requests], Worker(*requests, drafts=drafts)
    stopped: set[int] = set()
    for turns, by_tap, settles, judges in [*steps, ([(1, 0)] * 3, False, False, True)]:
        computed = []
        for one, (count, num_accepted) in zip(running, turns, strict=False):
            if not count:
                one.num_computed = min(one.num_computed, 2 * num_accepted)
            elif one.num_known < LENGTH - 10:
                computed.append((one.request, *one.forward(count, num_accepted, drafts)))
        worker.forward(*computed, by_tap=by_tap)
        if settles:
            worker.settle()
        if judges:
            here = [one for one in requests if one.key not in stopped and one.reason]
            assert worker.judge() == {f"r{one.key}": one.reason for one in here}
            stopped |= {one.key for one in here}
    assert all(lease.free for lease in worker.leases)
