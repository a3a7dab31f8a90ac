"""When a sweep may send cells while others have requests."""

from __future__ import annotations

import pytest

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
