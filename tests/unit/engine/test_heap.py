"""The garbage collector beside a computation of many requests."""

from __future__ import annotations

import gc

import pytest

from tests import collector
from vllm_scope.engine.frontend.heap import frozen_heap


def test_the_heap_is_frozen_inside_also_if_the_computation_fails():
    def fail() -> None:
        with frozen_heap():
            found.append(gc.get_freeze_count())
            raise KeyError

    found = [gc.get_freeze_count()]
    with pytest.raises(KeyError):
        fail()
    before, inside = found
    assert before == gc.get_freeze_count() == 0
    assert inside > 0


def test_a_heap_that_was_frozen_before_stays_so():
    with collector.frozen_heap():
        with frozen_heap():
            assert gc.get_freeze_count()
        assert gc.get_freeze_count()
