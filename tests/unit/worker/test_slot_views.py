"""Views of slots have the rows that a loop over slots has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_scope.worker.slot_views import WORDS, Grid, gathered

WORDS_OF_ALL = torch.arange(60 * WORDS).view(60, WORDS)


def looped(firsts, num_slots):
    return torch.stack([WORDS_OF_ALL[int(at) : int(at) + num_slots].flatten() for at in firsts])


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("firsts", [[7], [0, 5, 10, 15], [2, 2, 2], [3, 4, 5]])
def test_a_slot_of_each_token_is_viewed_where_it_lies(firsts, num_slots):
    grid = Grid.of_tokens(np.array(firsts))
    found = grid.rows(WORDS_OF_ALL, num_slots)
    assert torch.equal(found, looped(firsts, num_slots))
    assert found.untyped_storage().data_ptr() == WORDS_OF_ALL.untyped_storage().data_ptr()


@pytest.mark.parametrize("firsts", [[0, 5, 11], [10, 5, 0]])
def test_slots_without_a_regular_distance_have_no_grid_and_are_gathered(firsts):
    assert Grid.of_tokens(np.array(firsts)) is None
    assert torch.equal(gathered(WORDS_OF_ALL, torch.tensor(firsts), 2), looped(firsts, 2))


def test_the_last_row_of_the_arena_can_be_gathered():
    assert torch.equal(gathered(WORDS_OF_ALL, torch.tensor([57]), 3), looped([57], 3))


def test_a_grid_has_parts_then_tokens_then_points():
    places = np.array([[0, 2], [4, 6]])
    grid = Grid.of(10, 3, 8, places)
    wanted = [10 + place + 8 * token for part in places for token in range(3) for place in part]
    assert torch.equal(grid.rows(WORDS_OF_ALL, 2), looped(wanted, 2))


@pytest.mark.parametrize("places", [[[0, 2, 5]], [[2, 0]], [[4], [0]]])
def test_irregular_and_descending_places_have_no_grid(places):
    assert Grid.of(0, 2, 8, np.array(places)) is None
