"""Modes take turns both ways round, and a ratio is of turns that are neighbours."""

from __future__ import annotations

import pytest

from benchmarks.turns import order, ratio_of


def test_every_other_turn_is_the_other_way_round():
    modes = {"plain": 0, "idle": 1, "read": 2}
    assert order(modes, 1) == ["plain", "idle", "read"]
    assert order(modes, 2) == ["read", "idle", "plain"]


def test_what_slows_a_turn_of_both_is_not_in_the_ratio():
    others = [100.0, 40.0, 80.0, 10.0, 60.0]
    exact = ratio_of([0.9 * x for x in others], others)
    assert exact == pytest.approx((0.9, 0.9, 0.9))
    noisy = ratio_of([90.0, 40.0, 64.0, 9.0, 45.0], others)
    assert noisy.median == pytest.approx(0.9)
    assert 0.75 <= noisy.low < 0.9 < noisy.high <= 1.0
    assert str(noisy).startswith(" 0.900 (0.")
