"""What monitors found is counted when the callers have their answers, all of it and soon."""

from __future__ import annotations

import json
import logging
import math
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.unit.waiting import until
from vllm_scope.control.backlog import MOST_WAITING, Backlog
from vllm_scope.control.tally import Tally
from vllm_scope.engine import judge
from vllm_scope.engine.judge import Judge
from vllm_scope.engine.monitors import Monitor
from vllm_scope.engine.webhook import Webhook
from vllm_scope.request.actions import Probe

NAME = "monitor/one"


class Scores(dict):
    def positions(self, name):
        return torch.arange(len(self[name]))


class Result:
    """What a Judge reads of a ScopeResult."""

    def __init__(self, scores):
        self.scores = Scores({NAME: torch.tensor(scores)})
        self.verdicts, self.begun, self.aggregates = {}, {}, {}

    def num_lost(self, name):
        return 0

    def monitored(self):
        found = Result([])
        found.scores = Scores({name: values.clone() for name, values in self.scores.items()})
        return found


@pytest.fixture
def monitor():
    probe = Probe([1.0, 0.0], layer=1, name=NAME, threshold=0.0)
    return Monitor("one", probe, Tally(0.0))


def ended(result, reason="stop"):
    return SimpleNamespace(finish_reason=reason, index=0, scope=result)


def tell(monitor, result, name="r", **more):
    Judge((monitor,), None, None).told(SimpleNamespace(request_id=name), ended(result, **more))


@pytest.fixture
def idle(monkeypatch):
    """A backlog whose thread does not wake."""
    monkeypatch.setattr(Backlog, "_run", lambda self: None)
    found = Backlog()
    monkeypatch.setattr(judge, "backlog", found)
    return found


def test_nothing_is_counted_before_the_answer_and_everything_for_who_asks(idle, monitor):
    for value in (0.5, 1.5, 2.5):
        tell(monitor, Result([value]))
    assert not monitor.tally._requests
    assert judge.tallied([monitor])["one"].requests == 3


def test_the_thread_counts_without_being_asked(monitor):
    for _ in range(5):
        tell(monitor, Result([0.5]))
    until(lambda: monitor.tally._requests == 5, 60)


def test_a_running_completion_is_not_counted_and_an_ended_one_once(idle, monitor):
    one, output = Judge((monitor,), None, None), SimpleNamespace(request_id="r")
    for reason in (None, None, "stop", "stop"):
        one.told(output, ended(Result([0.5]), reason))
    assert judge.tallied([monitor])["one"].requests == 1


def test_a_result_is_not_held_until_it_is_counted(idle, monitor):
    result = Result([0.5])
    seen = weakref.ref(result)
    tell(monitor, result)
    del result
    assert seen() is None
    assert judge.tallied([monitor])["one"].requests == 1


def test_what_the_caller_does_with_its_scores_is_not_counted(idle, monitor):
    seen, result = [], Result([0.5])
    Judge((monitor,), seen.append, None).told(SimpleNamespace(request_id="r"), ended(result))
    result.scores[NAME].mul_(-100)
    judge.backlog.work_off()
    assert [one.value for one in seen] == [0.5]


def test_a_completion_is_counted_in_the_time_in_which_it_has_ended(idle, monkeypatch):
    probe = Probe([1.0, 0.0], layer=1, name=NAME, threshold=0.0)
    one = Monitor("one", probe, Tally(0.0))
    result = Result([0.5])
    result.verdicts[NAME] = SimpleNamespace(position=0, value=0.5)
    result.monitored = lambda: result
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now - 60)
        tell(one, result)
    found = judge.tallied([one])["one"]
    assert [flagged.time_s for flagged in found.recent] == [now - 60]
    assert [piece.begin_s <= now - 60 for piece in found.slices] == [True]


def test_a_flood_is_counted_as_it_comes_and_holds_few_results(idle, monitor):
    for _ in range(MOST_WAITING + 10):
        tell(monitor, Result([0.5]))
    assert idle.waiting == MOST_WAITING
    assert monitor.tally._requests == 10
    assert judge.tallied([monitor])["one"].requests == MOST_WAITING + 10


def test_an_error_is_logged_and_the_others_are_counted(idle, monitor, caplog):
    broken = Result([0.5])
    del broken.scores[NAME]
    tell(monitor, broken)
    tell(monitor, Result([0.5]))
    with caplog.at_level(logging.ERROR):
        logging.getLogger("vllm.vllm_scope").addHandler(caplog.handler)
        try:
            assert judge.tallied([monitor])["one"].requests == 1
        finally:
            logging.getLogger("vllm.vllm_scope").removeHandler(caplog.handler)
    assert "was not counted" in caplog.text


def test_an_observation_has_the_time_of_the_end(idle, monitor):
    seen = []
    output = SimpleNamespace(request_id="r")
    before = time.time()
    Judge((monitor,), seen.append, None).told(output, ended(Result([0.5, 2.0, 1.0])))
    after = time.time()
    time.sleep(0.05)
    judge.tallied([monitor])
    (one,) = seen
    assert before <= one.time_s <= after
    assert (one.request_id, one.name, one.value, one.position) == ("r", "one", 2.0, 1)


@pytest.mark.parametrize(("value", "sent"), [(0.5, 0.5), (math.inf, None), (math.nan, None)])
def test_a_webhook_gets_json_whatever_the_value_of_a_verdict_is(value, sent, monitor, monkeypatch):
    hook = Webhook("http://127.0.0.1:1/nobody-listens")
    monkeypatch.setattr(hook, "_start", lambda: None)
    result = Result([value])
    result.verdicts[NAME] = SimpleNamespace(position=0, value=value)
    result.monitored = lambda: result
    tell(replace(monitor, webhook=hook), result)
    judge.backlog.work_off()
    text, _ = hook._waiting.get_nowait()
    told = json.loads(text, parse_constant=pytest.fail)  # which gets Infinity and NaN
    assert told["value"] == sent
