"""The garbage collector beside a computation of many requests."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from tests import collector
from vllm_scope.engine import heap
from vllm_scope.engine.heap import frozen_heap


class State:
    """vLLM's RequestState."""


@pytest.fixture
def usual(monkeypatch):
    """The thresholds of collections before a computation."""
    monkeypatch.setattr(heap, "seldom", heap._Seldom())
    before, callbacks = gc.get_threshold(), gc.callbacks[:]
    gc.set_threshold(701, 11, 12)
    yield 701, 11, 12
    gc.set_threshold(*before)
    gc.callbacks[:] = callbacks


def after_a_collection():
    gc.collect(0)
    return gc.get_threshold()


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
    assert after_a_collection() == usual


def test_a_heap_that_was_frozen_before_stays_so(usual):
    with collector.frozen_heap():
        with frozen_heap():
            assert gc.get_freeze_count()
            assert gc.get_threshold() != usual
        assert gc.get_freeze_count()
    assert after_a_collection() == usual


def test_collections_are_seldom_until_the_last_end(usual):
    heap.seldom.begin()
    first = gc.get_threshold()
    assert first == (heap._FIRST, *usual[1:])
    heap.seldom.begin()
    heap.seldom.end()
    assert after_a_collection() == first
    heap.seldom.end()
    assert after_a_collection() == usual


def test_the_last_end_causes_no_collection_at_once(usual):
    heap.seldom.begin()
    gc.collect(0)
    collections = []
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    kept: list[list[int]] = [[] for _ in range(5_000)]
    heap.seldom.end()
    kept += [[] for _ in range(1_000)]
    assert not collections
    kept += [[] for _ in range(2 * heap._MORE)]
    assert collections
    assert gc.get_threshold() == usual


def test_collections_are_rarer_again_if_a_request_begins_before_the_next_collection(usual):
    for _ in range(2):
        with heap.seldom:
            assert gc.get_threshold()[0] == heap._FIRST
    assert after_a_collection() == usual


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
    assert after_a_collection() == usual


@pytest.mark.parametrize("given", [(0, 10, 10), (900, 10, 10)], ids=["off", "others"])
def test_what_somebody_else_sets_meanwhile_stays(given, usual):
    heap.seldom.begin()
    gc.set_threshold(*given)
    heap.seldom.end()
    assert after_a_collection() == given


def test_collections_that_are_switched_off_stay_so(usual):
    gc.set_threshold(0, 11, 12)
    heap.seldom.begin()
    assert gc.get_threshold()[0] == 0
    heap.seldom.end()
    assert gc.get_threshold() == (0, 11, 12)


def test_collections_are_seldom_until_the_last_owner_is_freed(usual):
    owners = [State(), State()]
    for owner in owners:
        heap.seldom.begin_for(owner)
    del owner
    for _ in range(2):
        assert after_a_collection() == (heap._FIRST, *usual[1:])
        owners.pop()
    assert after_a_collection() == usual


def test_an_owner_that_a_collection_frees_ends_within_the_collection(usual):
    owner = State()
    owner.itself = owner
    heap.seldom.begin_for(owner)
    del owner
    gc.collect()
    assert heap.seldom._num == 0
    assert after_a_collection() == usual


def test_an_end_too_many_changes_nothing(usual):
    heap.seldom.end()
    with heap.seldom:
        assert gc.get_threshold()[0] == heap._FIRST
    assert after_a_collection() == usual


def test_a_begin_within_the_restoring_waits_for_it(usual, monkeypatch):
    """Otherwise it would take its own thresholds for those of before."""
    started, set_threshold = threading.Event(), gc.set_threshold

    def slow(*thresholds):
        set_threshold(*thresholds)
        if thresholds == usual:
            other.start()
            started.wait(10)
            other.join(0.2)

    def again():
        started.set()
        heap.seldom.begin()

    other = threading.Thread(target=again)
    with heap.seldom:
        pass
    with monkeypatch.context() as patch:
        patch.setattr(heap.gc, "set_threshold", slow)
        gc.collect(0)
        other.join(10)
    assert gc.get_threshold()[0] == heap._FIRST
    heap.seldom.end()
    assert after_a_collection() == usual


def test_a_fork_begins_with_usual_collections(usual):
    heap.seldom.begin()
    child = os.fork()
    if not child:
        is_usual = gc.get_threshold() == usual
        with heap.seldom:
            is_usual &= gc.get_threshold()[0] == heap._FIRST
        os._exit(0 if is_usual and after_a_collection() == usual else 1)
    assert os.waitpid(child, 0)[1] == 0
    heap.seldom.end()
