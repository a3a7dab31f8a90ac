"""Which taps a replayed graph leaves out, and when it pays to make such a graph."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace, UnionType

import numpy as np
import pytest
import torch

from vllm_scope.graph.tap import driver, graphs
from vllm_scope.graph.tap.graphs import LEAST_FREE, MOST, PAYS, TappedGraph, Variants

NUM_TAPS, NUM_NODES = 100, 400
#: Of all taps of a model, those of one captured graph.
TAPS = list(range(3, 3 + NUM_TAPS))
#: Replays after which a graph without its taps is made, if all of them are idle.
TIMES = PAYS * NUM_NODES // NUM_TAPS


def _acting(*taps: int) -> np.ndarray:
    found = np.zeros(200, bool)
    found[list(taps)] = True
    return found


class _Made:
    """The graphs that exist, as tuples of the taps that they have."""

    def __init__(self) -> None:
        self.now: list[tuple[int, ...]] = []
        self.has_room = True
        self._variants = Variants(TAPS, NUM_NODES, self.now.remove)

    def _make(self, acting: np.ndarray) -> tuple[int, ...] | None:
        if not self.has_room:
            return None
        self.now.append(tuple(TAPS[i] for i in np.flatnonzero(acting)))
        return self.now[-1]

    def replays(self, acting: np.ndarray | None, times: int) -> list[tuple[int, ...] | None]:
        return [self._variants.of(acting, self._make) for _ in range(times)]

    def clear(self) -> None:
        self._variants.clear()


def test_a_graph_without_idle_taps_is_made_once_it_pays():
    made = _Made()
    assert made.replays(None, TIMES + 2) == [None] * (TIMES - 1) + [()] * 3
    assert made.now == [()]


def test_few_idle_taps_take_longer_to_pay():
    made, all_but_two = _Made(), _acting(*TAPS[2:])
    found = made.replays(all_but_two, PAYS * NUM_NODES // 2 + 2)
    assert found[-4:] == [None, *[tuple(TAPS[2:])] * 3]
    assert set(found[:-3]) == {None}


@pytest.mark.parametrize("same", [True, False], ids=["same-array", "equal-arrays"])
def test_taps_of_other_graphs_do_not_count(same):
    made, acting = _Made(), _acting(1, 7, 150)
    for _ in range(2 * TIMES):
        (found,) = made.replays(acting if same else acting.copy(), 1)
    assert found == (7,)
    assert made.now == [(7,)]


def test_until_then_the_smallest_that_has_all_acting_taps_is_taken():
    made = _Made()
    for acting in (_acting(3, 4, 5, 6), _acting(3, 4), _acting(9)):
        made.replays(acting, 2 * TIMES)
    assert made.replays(_acting(3), 3) == [(3, 4)] * 3
    assert made.replays(_acting(5, 6), 3) == [(3, 4, 5, 6)] * 3
    assert made.replays(_acting(5, 9), 3) == [None] * 3
    assert made.replays(_acting(9), 3) == [(9,)] * 3


def test_a_graph_whose_taps_all_act_is_the_whole_one():
    made = _Made()
    assert set(made.replays(_acting(*TAPS), 30 * TIMES)) == {None}
    assert made.now == []


def test_the_graph_that_was_not_used_for_longest_goes():
    made = _Made()
    for tap in range(3, 3 + MOST):
        made.replays(_acting(tap), 2 * TIMES)
    made.replays(_acting(3), 1)
    made.has_room = False
    assert set(made.replays(_acting(50), 2 * TIMES)) == {None}
    assert len(made.now) == MOST  # none goes for one that cannot be made
    made.has_room = True
    made.replays(_acting(50), 2 * TIMES)
    assert sorted(made.now) == [(3,), *[(tap,) for tap in range(5, 3 + MOST)], (50,)]
    made.clear()
    assert made.now == []
    assert made.replays(_acting(50), 1) == [None]


def test_sets_of_taps_that_do_not_come_back_leave_nothing():
    made, rng = _Made(), np.random.default_rng(0)
    for _ in range(2000):
        made.replays(rng.random(200) < 0.5, 1)
    assert made.now == []
    assert len(made._variants._in_vain) <= 16 * MOST


def test_where_there_is_no_room_for_a_graph_the_whole_one_is_taken_and_room_is_asked_for_again():
    made = _Made()
    made.has_room = False
    assert made.replays(None, 3 * TIMES) == [None] * 3 * TIMES
    made.has_room = True
    assert made.replays(None, TIMES)[-1] == ()


class _Driver:
    """In place of CUDA: a graph is a list of its kernels' numbers, and a replay notes what ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: list[int] = []
        self.ran: list[list[int]] = []
        self.free, self.offset, self.drawn, self.fails = 2 * LEAST_FREE, 0, 0, False
        stock = torch.cuda.graphs.CUDAGraph

        def replay(graph: object) -> None:
            self.ran.append(list(self.kernels))
            self.offset += self.drawn

        for name, call in {
            "capture_begin": lambda graph: None, "capture_end": lambda graph: None,
            "instantiate": lambda graph: None, "replay": replay, "reset": lambda graph: None,
            "raw_cuda_graph": lambda graph: 1,
        }.items():  # fmt: skip
            monkeypatch.setattr(stock, name, call)
        generator = SimpleNamespace(get_offset=lambda: self.offset)
        monkeypatch.setattr(torch.cuda, "default_generators", [generator])
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 1 << 40))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
        monkeypatch.setattr(driver, "last_kernel", lambda stream: self.kernels[-1])
        monkeypatch.setattr(driver, "num_nodes", lambda graph: len(self.kernels))
        monkeypatch.setattr(driver, "without", self._without)

    def _without(self, graph: int, nodes: list[int]) -> SimpleNamespace:
        if self.fails:
            raise driver.DriverError("refused")
        left = [one for one in self.kernels if one not in nodes]
        return SimpleNamespace(
            launch=lambda stream: self.ran.append(left), destroy=lambda: None
        )  # fmt: skip

    def captured(self, route: object, taps: list[int | None]) -> TappedGraph:
        """Each tap after a kernel of the model, numbered from 100; None launches none."""
        graph = object.__new__(TappedGraph)
        graph.capture_begin()
        for i, tap in enumerate(taps):
            self.kernels.append(100 + i)
            with graphs.noted(route, i if tap is None else tap):
                if tap is not None:
                    self.kernels.append(i)
        graph.capture_end()
        return graph


@pytest.fixture
def cuda(monkeypatch):
    return _Driver(monkeypatch)


def _replays(graph: TappedGraph, cuda: _Driver, times: int = 400) -> list[list[int]]:
    del cuda.ran[:]
    for _ in range(times):
        graph.replay()
    return cuda.ran


def test_a_graph_replays_the_models_kernels_and_the_taps_that_act(cuda):
    route = SimpleNamespace(acting=None)
    graph = cuda.captured(route, [0, 1, 2, 3, 4])
    model, whole = [100, 101, 102, 103, 104], list(cuda.kernels)
    ran = _replays(graph, cuda)
    assert ran[0] == whole
    assert ran[-1] == model
    route.acting = _acting(1, 3)
    assert _replays(graph, cuda)[-1] == [100, 101, 1, 102, 103, 3, 104]
    assert all({1, 3} < set(one) for one in cuda.ran)
    route.acting = _acting(0)
    assert _replays(graph, cuda, 1) == [whole]
    route.acting = None
    assert _replays(graph, cuda, 1) == [model]
    graph.reset()
    assert _replays(graph, cuda, 1) == [whole]


@pytest.mark.parametrize(
    "taps", [[0, 1, 2, None, 4], [0, 1, 2, 3, 2], [0, 1]], ids=["no-kernel", "twice", "few-taps"]
)
def test_a_graph_whose_taps_are_not_sure_is_replayed_as_a_whole(taps, cuda):
    graph = cuda.captured(SimpleNamespace(acting=None), taps)
    assert all(one == cuda.kernels for one in _replays(graph, cuda))


def test_a_graph_that_draws_random_numbers_is_replayed_as_a_whole(cuda):
    graph = cuda.captured(SimpleNamespace(acting=None), [0, 1, 2, 3, 4])
    cuda.drawn = 4
    assert all(one == cuda.kernels for one in _replays(graph, cuda))


def test_where_the_driver_refuses_or_memory_is_short_a_graph_is_replayed_as_a_whole(cuda):
    route = SimpleNamespace(acting=None)
    graph = cuda.captured(route, [0, 1, 2, 3, 4])
    cuda.free = LEAST_FREE - 1
    assert all(one == cuda.kernels for one in _replays(graph, cuda))
    cuda.free = LEAST_FREE
    assert len(_replays(graph, cuda)[-1]) == 5
    cuda.fails, route.acting = True, _acting(1)
    assert all(one == cuda.kernels for one in _replays(graph, cuda))
    cuda.fails = False  # it is not asked again
    assert all(one == cuda.kernels for one in _replays(graph, cuda))


@pytest.mark.long
def test_a_graph_that_was_captured_is_freed_with_its_last_reference(cuda):
    graph = cuda.captured(SimpleNamespace(acting=None), [0, 1, 2, 3, 4])
    _replays(graph, cuda)
    freed = weakref.ref(graph)
    gc.collect()
    del graph
    assert freed() is None


def test_what_stands_in_for_the_class_is_a_class(monkeypatch):
    made = []
    monkeypatch.setattr(graphs, "TappedGraph", lambda **options: made.append(options))
    stand_in = graphs._Captured
    assert isinstance(stand_in | None, UnionType)
    for options in ({}, {"keep_graph": False}):
        stand_in(**options)
    assert made == [{"keep_graph": True}] * 2
    assert not isinstance(3, stand_in)
    assert stand_in.capture_begin is torch.cuda.CUDAGraph.capture_begin


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a driver")
def test_without_a_driver_graphs_are_captured_as_ever():
    stock = torch.cuda.CUDAGraph
    with graphs.captured():
        assert torch.cuda.CUDAGraph is stock
