"""The garbage collector beside a computation of many requests."""

from __future__ import annotations

import gc
import threading

import pytest

from tests import collector
from vllm_scope.engine import heap
from vllm_scope.engine.heap import frozen_heap


@pytest.fixture
def usual(monkeypatch):
    """The thresholds of collections before a computation."""
    monkeypatch.setattr(heap, "seldom", heap._Seldom())
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    yield 701, 11, 12
    gc.set_threshold(*before)


def test_the_heap_is_frozen_inside_also_if_the_computation_fails(usual):
    def fail() -> None:
        with frozen_heap():
            found.append(gc.get_freeze_count())
            assert gc.get_threshold() != usual
            raise KeyError

    found = [gc.get_freeze_count()]
    with pytest.raises(KeyError):
        fail()
    before, inside = found
    assert before == gc.get_freeze_count() == 0
    assert inside > 0
    assert gc.get_threshold() == usual


def test_a_heap_that_was_frozen_before_stays_so(usual):
    with collector.frozen_heap():
        with frozen_heap():
            assert gc.get_freeze_count()
            assert gc.get_threshold() != usual
        assert gc.get_freeze_count()
    assert gc.get_threshold() == usual


def test_collections_are_seldom_until_the_last_end(usual):
    heap.seldom.begin()
    first = gc.get_threshold()
    assert first == (heap._FIRST, *usual[1:])
    heap.seldom.begin()
    heap.seldom.end()
    assert gc.get_threshold() == first
    heap.seldom.end()
    assert gc.get_threshold() == usual


def test_collections_that_are_rarer_already_stay_so(usual):
    gc.set_threshold(1_000_000, 11, 12)
    heap.seldom.begin()
    assert gc.get_threshold() == (1_000_000, 11, 12)
    heap.seldom.end()
    assert gc.get_threshold() == (1_000_000, 11, 12)


def test_an_object_that_a_collection_frees_can_end_inside_of_another_end(usual):
    """As a scheduler in a cycle, if Python collects while `seldom` holds its lock."""

    def collected():
        with heap.seldom._lock:
            heap.seldom.end()

    heap.seldom.begin()
    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for itself"
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("given", [(0, 10, 10), (900, 10, 10)], ids=["off", "others"])
def test_what_somebody_else_sets_meanwhile_stays(given, usual):
    heap.seldom.begin()
    gc.set_threshold(*given)
    heap.seldom.end()
    assert gc.get_threshold() == given


def test_collections_that_are_switched_off_stay_so(usual):
    gc.set_threshold(0, 11, 12)
    heap.seldom.begin()
    assert gc.get_threshold()[0] == 0
    heap.seldom.end()
    assert gc.get_threshold() == (0, 11, 12)
