"""Which taps a replayed graph leaves out, and when it pays to make such a graph."""

from __future__ import annotations

from types import UnionType

import numpy as np
import pytest
import torch

from vllm_scope.graph.tap import graphs
from vllm_scope.graph.tap.graphs import MOST, PAYS, Variants

NUM_TAPS = 100
#: Of all taps of a model, those of one captured graph.
TAPS = list(range(3, 3 + NUM_TAPS))


def _acting(*taps: int) -> np.ndarray:
    found = np.zeros(200, bool)
    found[list(taps)] = True
    return found


class _Made:
    """The graphs that exist, as tuples of the taps that they have."""

    def __init__(self) -> None:
        self.now: list[tuple[int, ...]] = []
        self.variants = Variants(TAPS, self._make, self.now.remove)

    def _make(self, acting: np.ndarray) -> tuple[int, ...]:
        self.now.append(tuple(TAPS[i] for i in np.flatnonzero(acting)))
        return self.now[-1]

    def replays(self, acting: np.ndarray | None, times: int) -> list[tuple[int, ...] | None]:
        return [self.variants.of(acting) for _ in range(times)]


def test_a_graph_without_idle_taps_is_made_once_it_pays():
    made = _Made()
    assert made.replays(None, PAYS + 2) == [None] * (PAYS - 1) + [()] * 3
    assert made.now == [()]


@pytest.mark.parametrize("same", [True, False], ids=["same-array", "equal-arrays"])
def test_taps_of_other_graphs_do_not_count(same):
    made, acting = _Made(), _acting(1, 7, 150)
    for _ in range(PAYS):
        found = made.variants.of(acting if same else acting.copy())
    assert found == (7,)
    assert made.now == [(7,)]


def test_until_then_the_smallest_that_has_all_acting_taps_is_taken():
    made = _Made()
    for acting in (_acting(3, 4, 5, 6), _acting(3, 4), _acting(9)):
        made.replays(acting, PAYS)
    assert made.replays(_acting(3), 3) == [(3, 4)] * 3
    assert made.replays(_acting(5, 6), 3) == [(3, 4, 5, 6)] * 3
    assert made.replays(_acting(5, 9), 3) == [None] * 3
    assert made.replays(_acting(9), 3) == [(9,)] * 3


def test_a_graph_whose_taps_all_act_is_the_whole_one():
    made = _Made()
    assert set(made.replays(_acting(*TAPS), 3 * PAYS)) == {None}
    assert made.now == []


def test_the_graph_that_was_not_used_for_longest_goes():
    made = _Made()
    for tap in range(3, 3 + MOST):
        made.replays(_acting(tap), PAYS)
    made.replays(_acting(3), 1)
    made.replays(_acting(50), PAYS)
    assert sorted(made.now) == [(3,), *[(tap,) for tap in range(5, 3 + MOST)], (50,)]
    made.variants.clear()
    assert made.now == []
    assert made.replays(_acting(50), 1) == [None]


def test_sets_of_taps_that_do_not_come_back_leave_nothing():
    made, rng = _Made(), np.random.default_rng(0)
    for _ in range(2000):
        made.variants.of(rng.random(200) < 0.5)
    assert made.now == []
    assert len(made.variants._in_vain) <= 16 * MOST


def test_where_there_is_no_room_for_a_graph_the_whole_one_is_taken_and_room_is_asked_for_again():
    made, asked = _Made(), []
    make, made.variants._make = made.variants._make, asked.append
    assert made.replays(None, 3 * PAYS) == [None] * 3 * PAYS
    assert len(asked) == 3
    made.variants._make = make
    assert made.replays(None, PAYS)[-1] == ()


def test_what_stands_in_for_the_class_is_a_class(monkeypatch):
    made = []
    monkeypatch.setattr(graphs, "TappedGraph", lambda **options: made.append(options))
    stand_in = graphs._Captured
    assert isinstance(stand_in | None, UnionType)
    for options in ({}, {"keep_graph": False}):
        stand_in(**options)
    assert made == [{"keep_graph": True}] * 2
    assert not isinstance(3, stand_in)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a driver")
def test_without_a_driver_graphs_are_captured_as_ever():
    stock = torch.cuda.CUDAGraph
    with graphs.captured():
        assert torch.cuda.CUDAGraph is stock
