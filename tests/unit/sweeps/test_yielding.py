"""When a sweep may send cells while others have requests."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_scope import Add
from vllm_scope.engine.frontend.alike import Alike
from vllm_scope.engine.frontend.connection import Connection
from vllm_scope.engine.frontend.sweeping import Sweeping, params_of
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.request.answers import Answers
from vllm_scope.request.sites import Sites
from vllm_scope.sweeps.plan import Job
from vllm_scope.sweeps.yielding import LINGER_S, LONGEST_PAUSE_S, Yielding


def sent(found, clock, seconds, others=True):
    """Cells are sent, and have ended after so long."""
    assert not found.waits(0, others)
    found.send()
    clock.now += seconds
    return found.waits(0, others)


@pytest.mark.parametrize(("share", "times"), [(1.0, 4), (0.5, 9), (0.25, 19)])
def test_a_fifth_of_the_share_of_the_time_has_cells_in_the_engine(share, times, clock):
    found = Yielding(share)
    assert sent(found, clock, 0.25)
    clock.now += times * 0.25 - 0.01
    assert found.waits(0, True)
    assert found.pause == pytest.approx(0.01)
    clock.now += 0.02
    assert found.pause == 0
    assert not found.waits(0, True)


def test_a_pause_ends_sooner_when_the_share_becomes_larger(clock):
    found = Yielding(0.05)
    assert sent(found, clock, 0.1)
    clock.now += 1
    assert found.waits(0, True)
    found.share = 0.5
    assert not found.waits(0, True)


def test_cells_that_waited_long_are_followed_by_a_pause_of_ten_seconds(clock):
    found = Yielding(0.5)
    assert sent(found, clock, 600)
    clock.now += LONGEST_PAUSE_S - 0.1
    assert found.waits(0, True)
    clock.now += 0.2
    assert not found.waits(0, True)


def test_cells_that_run_keep_others_back(clock):
    found = Yielding(0.5)
    assert not found.waits(0, True)
    found.send()
    clock.now += 1
    found.send()  # of the same cells
    assert found.waits(4, True)
    assert found.waits(0, True)
    assert found.pause == pytest.approx(1.0), "until the others no longer count as there"
    clock.now += 8.9
    assert found.waits(0, True)
    clock.now += 0.2
    assert not found.waits(0, True)


def test_others_count_as_there_for_a_second(clock):
    found = Yielding(0.5)
    assert not found.look(False)
    assert found.look(True)
    clock.now += LINGER_S - 0.01
    assert found.look(False)
    clock.now += 0.02
    assert not found.look(False)


def test_what_was_sent_before_the_others_left_is_followed_by_no_pause(clock):
    found = Yielding(0.5)
    assert not found.waits(0, True)
    found.send()
    clock.now += 2
    assert not found.waits(16, False)
    clock.now += 20
    assert not found.waits(0, True)
    assert found.pause == 0


def test_nobody_waits_without_others(clock):
    found = Yielding(0.5)
    for num_running in (0, 64):
        assert not found.waits(num_running, False)
    assert found.pause == 0


def test_requests_of_other_front_ends_are_there_until_an_answer_says_otherwise(clock):
    found = Yielding(0.5)
    found.elsewhere = True
    assert sent(found, clock, 0.5, others=False)
    assert found.pause == pytest.approx(4.5), "longer than others of this process count"
    clock.now += 4.4
    assert found.waits(0, False)
    clock.now += 0.2
    assert not found.waits(0, False)
    found.elsewhere = False
    assert not found.look(False)


def test_a_sweep_of_one_cell_in_each_request_hears_that_the_other_requests_have_gone(clock):
    taken = []
    found = Sweeping.__new__(Sweeping)  # as its constructor leaves it
    limits = Limits((16,), 0, 100, 100, 100, 100, False)
    found._alike = Alike(
        Connection(Sites(2, 4, "float32", (0, 2, 4)), None, 1, 1.0, limits, {}, {})
    )
    found._yielding = Yielding(0.5)
    found.plan = SimpleNamespace(token_ids=[(7, 3)], take=lambda *came: taken.append(came))
    found._params = {(7, 3): params_of((7, 3))}
    jobs = [Job(0, [5] * 200, (i,), (Add([1.0, 2.0, 0.0, float(i)], layer=0),)) for i in range(3)]

    def answer(request, logprobs, others=None):
        """An answer with `others` is one to variants, one without is vLLM's own."""
        each = [SimpleNamespace(logprob=value) for value in logprobs[0]]
        completion = SimpleNamespace(
            finish_reason="length", scope=None, logprobs=[dict(zip((7, 3), each, strict=True))]
        )
        told = None
        if others is not None:
            told = Answers(np.array(logprobs, np.float32), {}, others).encode()
        return list(
            found.take(request, SimpleNamespace(outputs=[completion], kv_transfer_params=told))
        )

    answer(found._request(tuple(jobs[:2])), [[-1.0, -2.0], [-3.0, -4.0]], others=True)
    assert found._yielding.look(False)
    alone = found._request(tuple(jobs[2:]))
    assert [one.edits for one in alone.prepared.variants] == [jobs[2].actions]
    answer(alone, [[-5.0, -6.0]], others=False)
    assert not found._yielding.look(False)
    plain = found._request(tuple(jobs[2:]))
    assert not plain.prepared.variants
    answer(plain, [[-5.0, -6.0]])
    assert [one[0] for one in taken] == [*jobs, jobs[2]]
    assert [one[1].tolist() for one in taken] == [[-1, -2], [-3, -4], [-5, -6], [-5, -6]]
