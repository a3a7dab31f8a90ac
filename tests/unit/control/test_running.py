"""What holds of a running policy's decisions, and what becomes of one that fails."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_scope import Add, Policy, Probe, Spec, SpecError
from vllm_scope.control import Decided, Decision
from vllm_scope.control.policy_options import Loaded, PolicyOptions
from vllm_scope.control.running import Policies
from vllm_scope.request.sites import Sites

SITES = Sites(2, 4, "float32", (0, 2, 4))
ASKED = Spec(
    probes=(Probe([1.0] * 4, layer=0, name="p"),),
    edits=(Add([1.0] * 4, layer=0, name="one"), Add([2.0] * 4, layer=1, name="two")),
    policy=Policy("mine"),
).resolve(SITES)


class Says:
    """Returns what it is given, one after another."""

    def __init__(self, *says):
        self.says = list(says)

    def check(self, options):
        pass

    def start(self, request):
        self.request = request
        return self

    def observe(self, position, scores):
        return self.says.pop(0)


class Slow(Says):
    """Takes its time."""

    def observe(self, position, scores):
        time.sleep(0.04)


def steering(*says, lag=0, **options):
    loaded = Loaded("mine", PolicyOptions(**options), Says(*says))
    return Policies({"mine": loaded}, lag).begin(ASKED, "r", 2, 8)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_decision_holds_from_the_next_token_that_no_step_has_begun(lag):
    scale = {"one": 0.5}
    for position, first in ((0, 8), (6, 8), (7, 8), (8, 9), (30, 31)):
        found = steering(Decision(scale), lag=lag).observe(position, {"p": 0.0})
        assert found == Decided(position, first + lag, scale)


def test_a_scale_that_is_in_force_is_no_change():
    one = steering(
        Decision({"one": 0.5, "two": 1}), Decision({"one": 0.5}), None,
        Decision({"one": 0.5, "two": 2.0}), Decision(),
    )  # fmt: skip
    told = [one.observe(position, {}) for position in range(8, 13)]
    assert told[0].scale == {"one": 0.5, "two": 1.0}
    assert told[1:3] == [None, None]
    assert told[3] == Decided(11, 12, {"two": 2.0})
    assert told[4] is None


def test_without_a_policy_there_is_no_running_policy():
    plain = Spec(probes=(Probe([1.0] * 4, layer=0, name="p"),)).resolve(SITES)
    assert Policies({}, 0).begin(plain, "r", 0, 8) is None
    assert plain.watched == ()


@pytest.mark.parametrize(
    "decision",
    [
        Decision({"one": math.nan}),
        Decision({"one": True}),
        Decision({"three": 1.0}),
        Decision({1: 1.0}),
        Decision(flag=""),
        Decision(stop=None),
        {"scale": {"one": 1.0}},
    ],
    ids=str,
)
def test_nothing_of_a_decision_that_is_not_possible_holds_and_the_running_policy_is_done(decision):
    one = steering(Decision({"one": 2.0}), decision, Decision({"one": 3.0}))
    assert one.observe(8, {}).error is None
    failed = one.observe(9, {})
    assert "does not control this request any more, because" in failed.error
    assert failed == Decided(9, error=failed.error)
    assert one.over
    assert one.observe(10, {}) is None


class Panic(BaseException):
    """As an extension in Rust raises it."""


class Raises(Says):
    def observe(self, position, scores):
        raise self.says[0]


@pytest.mark.parametrize("error", [ValueError("x"), Panic("x"), SystemExit(3)], ids=repr)
def test_a_running_policy_that_raises_anything_is_done_and_raises_nothing_further(error):
    loaded = Loaded("mine", PolicyOptions(), Raises(error))
    one = Policies({"mine": loaded}, 0).begin(ASKED, "r", 0, 8)
    with ThreadPoolExecutor(1) as output_thread:
        found = output_thread.submit(one.observe, 8, {}).result()
    assert f"because it raised {type(error).__name__}" in found.error
    assert one.over


def test_a_signal_that_ends_the_process_while_a_policy_decides_is_passed_on():
    loaded = Loaded("mine", PolicyOptions(), Raises(SystemExit()))
    one = Policies({"mine": loaded}, 0).begin(ASKED, "r", 0, 8)
    with pytest.raises(SystemExit):
        one.observe(8, {})


def test_all_that_is_decided_in_the_prompt_is_one_change():
    one = steering(*(Decision({"one": float(i)}) for i in range(9)), most_changes=2)
    told = [one.observe(position, {}) for position in range(9)]
    assert [x.acts_from for x in told] == [8] * 8 + [9]
    assert [x.error for x in told] == [None] * 9


def test_the_number_of_changes_is_bounded():
    one = steering(*(Decision({"one": float(i)}) for i in range(4)), most_changes=3)
    told = [one.observe(position, {}) for position in range(8, 12)]
    assert [x.error is None for x in told] == [True, True, True, False]
    assert "more than 3 times" in told[3].error


def test_the_positions_of_one_step_share_the_time():
    loaded = Loaded("mine", PolicyOptions(timeout_s=0.1), Slow())
    one = Policies({"mine": loaded}, 0).begin(ASKED, "r", 0, 8)
    for position in range(6):
        one.begin_step()
        assert one.observe(position, {}) is None
    assert not one.over
    one.begin_step()
    told = [one.observe(position, {}) for position in range(6, 12)]
    (error,) = [one.error for one in told if one is not None]
    assert "in one step; at most 0.1 (timeout_s)" in error
    assert one.over


def test_a_policy_sees_a_bounded_number_of_scores():
    def asked(count):
        probes = tuple(Probe([1.0] * 4, layer=0, name=f"p{i}") for i in range(count))
        return Spec(probes=probes, policy=Policy("mine")).resolve(SITES)

    assert len(asked(32).watched) == 32
    with pytest.raises(SpecError, match="33 probes, gates and doses; at most 32"):
        asked(33)
