"""What is kept about objects of vLLM's."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from vllm_scope.engine.beside import Beside


@dataclass
class Equal:
    """Without a hash, and equal to every other."""


def test_each_object_has_a_state_of_its_own_while_it_lives():
    states: Beside[int] = Beside()
    one, other = Equal(), Equal()
    assert states.put(one, 1) == 1
    states.put(other, 2)
    assert (states.of(one), states.of(other), states.of(Equal())) == (1, 2, None)
    assert states.put(one, 3) == states.of(one) == 3
    assert (states.pop(one), states.pop(one)) == (3, None)
    del other
    gc.collect()
    assert len(states) == 0


def test_an_object_that_gets_the_place_of_another_gets_nothing_of_it():
    states: Beside[int] = Beside()
    for i in range(1000):
        one = Equal()
        assert states.of(one) is None
        states.put(one, i)
    del one
    gc.collect()
    assert len(states) == 0


def test_a_state_that_was_replaced_goes_with_its_object_alone():
    states: Beside[int] = Beside()
    one = Equal()
    for i in range(3):
        states.put(one, i)
    gc.collect()
    assert states.of(one) == 2
