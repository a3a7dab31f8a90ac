"""A later stage of a cascade is begun in time, and judged as the front-end judges it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.watching import LENGTH, Request, Running, Worker, probe, rising
from vllm_scope import Ema, Policy, Probe
from vllm_scope.control import Decided
from vllm_scope.worker.watch import Judged


def flag(name: str, threshold: float, layers: int, **fields: object) -> Probe:
    return probe(name, threshold, layers, action="flag", **fields)


def test_a_first_stage_is_told_once_and_then_nothing_waits_for_the_request():
    one = rising(flag("cheap", 1.0, 1), flag("dear", 1.0, 0, after="cheap"), scores={1: {5: 2.0}})
    worker = Worker(one)
    for positions, found in ((range(4), {}), ([4], {}), ([5], {"r1": Judged(None, ("cheap",))})):
        worker.forward((one, positions, 0))
        assert worker.judged() == found
    assert not worker.watch


def test_a_second_stage_stops_its_request_and_what_it_scored_too_early_does_not_count():
    """The verdict is at 5. The step of 6 was planned with the second stage; 7 is its first."""
    scores = {1: {5: 2.0}, 0: {6: 9.0, 8: 3.0}}
    one = rising(flag("cheap", 1.0, 1), probe("dear", 1.0, 0, after="cheap"), scores=scores)
    worker = Worker(one)
    worker.forward((one, range(4), 0))
    worker.forward((one, range(4, 6), 0))
    assert worker.judged() == {"r1": Judged(None, ("cheap",))}
    one.begun = frozenset(["cheap"])
    for position in (6, 7):
        worker.forward((one, [position], 0))
        assert worker.judged() == {}
    # A preemption: all positions come again, with the second stage.
    worker.forward((one, range(8), 0))
    assert worker.judged() == {}
    worker.forward((one, [8], 0))
    assert worker.judge() == {"r1": "probe 'dear': 3 at position 8"}
    assert not worker.watch


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_chain_is_told_stage_by_stage(stages):
    names = [f"s{i}" for i in range(stages)]
    chain = [flag(name, 1.0, 1, after=names[i - 1] if i else None) for i, name in enumerate(names)]
    # A first stage may stand behind those that wait for it.
    one = rising(*reversed(chain), scores={1: dict.fromkeys(range(LENGTH), 2.0)})
    worker, told = Worker(one), {}
    for position in range(20):
        worker.forward((one, [position], 0))
        for judged in worker.judged().values():
            told |= dict.fromkeys(judged.firsts, position)
            one.begun |= set(judged.firsts)
    # The prompt has 4 tokens; then each stage begins at the second token after a verdict.
    assert told == dict(zip(names[:-1], [0, 5, 7], strict=False))


class Follows:
    """In place of a policy's Steering: the last score of a probe is the scale from the next one."""

    name, over = "policy", False

    def __init__(self) -> None:
        self.seen: dict[int, set[str]] = {}

    def begin_step(self) -> None:
        pass

    def observe(self, position: int, scores: dict[str, float]) -> Decided:
        self.seen[position] = set(scores)
        return Decided(position, position + 1, {"e": float(position)})


def test_a_policy_sees_every_stage_from_its_first_position_on_and_verdicts_end_nothing_for_it():
    chain = [
        flag("cheap", 1.0, 1), flag("dear", 1.0, 0, after="cheap"), flag("other", 1.0, 0),
    ]  # fmt: skip
    scores = {1: {5: 2.0}, 0: dict.fromkeys(range(LENGTH), 2.0)}
    one = rising(*chain, scores=scores, policy=Policy("p"))
    worker, steering = Worker(), Follows()
    worker.watch.add_request(1, "r1", one.num_prompt, one.asked, steering)
    for position in range(10):
        worker.forward((one, [position], 0))
        # No probe waits for "dear" or "other", so their verdicts are not told.
        firsts = ("cheap",) if position == 5 else ()
        scales = ((position + 1, {"e": float(position)}),)
        assert worker.judged() == {"r1": Judged(None, firsts, scales)}
        one.begun |= set(firsts)
    early, late = {"cheap", "other"}, {"cheap", "other", "dear"}
    assert steering.seen == {at: early if at < 7 else late for at in range(10)}
    steering.over = True
    worker.forward((one, [10], 0))
    assert worker.judged() == {}
    assert not worker.watch


AGGREGATES = [None, "max", "mean", Ema(0.5)]


@given(
    st.lists(
        st.tuples(
            st.integers(-8, 8), st.sampled_from(AGGREGATES),
            st.sampled_from(["all", "prompt", "generated"]), st.integers(0, 10),
            st.sampled_from(AGGREGATES), st.integers(1, 8),
        ),
        min_size=1, max_size=3,
    ),
    st.lists(
        st.lists(
            st.tuples(st.sampled_from([1, 1, 1, 2, 3, 5, 0]), st.integers(0, 3)),
            min_size=3, max_size=3,
        ),
        min_size=1, max_size=14,
    ),
    st.integers(0, 1), st.booleans(), st.booleans(),
)  # fmt: skip
def test_every_request_is_stopped_by_its_second_stage_as_the_front_end_would_find(
    asked, turns, lag, drafts, by_tap
):
    """`lag` steps are in flight when a verdict is told; requests are preempted, drafts rejected."""
    requests = [
        Request(
            key,
            [
                flag("first", low / 4, 1, aggregate=aggregate, tokens=tokens),
                probe("second", high / 4, 0, after="first", aggregate=another),
            ],
            num_prompt,
            step_tokens=6 if drafts else 1,
        )
        for key, (low, aggregate, tokens, high, another, num_prompt) in enumerate(asked)
    ]
    running, worker = [Running(one) for one in requests], Worker(*requests, drafts=drafts)
    stopped: set[int] = set()
    news = [dict[str, Judged]()] * (lag + 1)
    for each in [*turns, *([[(1, 0)] * 3] * 3)]:
        for name, judged in news[-1 - lag].items():
            requests[int(name[1:])].begun |= set(judged.firsts)
        computed = []
        for one, (count, num_accepted) in zip(running, each, strict=False):
            if not count:
                one.num_computed = min(one.num_computed, 2 * num_accepted)
            elif one.num_known < LENGTH - 10:
                computed.append((one.request, *one.forward(count, num_accepted, drafts)))
        worker.forward(*computed, by_tap=by_tap)
        news.append(worker.judged())
        stops = {name: judged.stops for name, judged in news[-1].items() if judged.stops}
        here = [one for one in requests if one.key not in stopped and one.reason]
        assert stops == {f"r{one.key}": one.reason for one in here}
        stopped |= {one.key for one in here}
    assert all(lease.free for lease in worker.leases)
