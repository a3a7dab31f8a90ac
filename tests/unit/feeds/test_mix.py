"""Each row is in one batch, in a slot of its own while it waits, and nobody's speed matters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_scope.feeds.mix import Mix


def fed(num_rows, num_slots, size, seed, chosen):
    """The rows of each batch, with a feeder and a trainer whose turns are random."""
    feeder, trainer = (Mix(num_slots, size, seed) for _ in range(2))
    memory = np.full(num_slots, -1)  # slot -> row
    written, batches, ends = 0, [], None
    while True:
        if written < num_rows and chosen.random() < 0.5:
            while feeder.num_drawn < trainer.num_drawn:
                feeder.draw()
            some = min(num_rows - written, feeder.num_writable - written)
            some = int(chosen.integers(some + 1))
            slots = feeder.slots(written, written + some)
            assert (memory[slots] == -1).all(), "a row that waits was overwritten"
            memory[slots] = np.arange(written, written + some)
            written += some
            continue
        if ends is None and written >= trainer.num_needed:
            slots = trainer.draw()
        elif written == num_rows:
            ends = trainer.rest(num_rows) if ends is None else ends
            if (slots := next(ends, None)) is None:
                return batches
        else:
            continue
        batches.append(memory[slots].copy())
        assert (batches[-1] >= 0).all()
        memory[slots] = -1


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 300), st.integers(1, 20), st.integers(0, 60), st.integers(0, 99), st.data())
def test_each_row_comes_once_and_speed_changes_nothing(num_rows, size, more, seed, data):
    num_slots = 2 * size + more
    turns = [np.random.default_rng(data.draw(st.integers(0, 99))) for _ in range(2)]
    first, second = (fed(num_rows, num_slots, size, seed, one) for one in turns)
    assert [one.tolist() for one in first] == [one.tolist() for one in second]
    assert sorted(np.concatenate([*first, []]).tolist()) == list(range(num_rows))
    assert all(len(one) == size for one in first[:-1])
    for k, batch in enumerate(first):
        assert batch.max() < min(num_rows, num_slots // 2 + k * size)


def test_a_batch_mixes_rows_of_the_whole_buffer_and_a_seed_repeats_it():
    chosen = np.random.default_rng(0)
    batches = fed(4000, 800, 50, 3, chosen)
    assert [one.tolist() for one in fed(4000, 800, 50, 3, chosen)] == [
        one.tolist() for one in batches
    ]
    assert batches[0].tolist() != fed(4000, 800, 50, 4, chosen)[0].tolist()
    assert batches[0].min() < 50
    assert batches[0].max() > 350
    # Neighbours come far from each other.
    order = np.concatenate(batches)
    place = np.argsort(order)
    assert np.median(np.abs(np.diff(place))) > 100


@pytest.mark.parametrize("num_rows", [0, 1, 7, 100])
def test_a_feed_that_is_smaller_than_the_buffer_is_mixed_as_a_whole(num_rows):
    mix = Mix(200, 10, 0)
    rest = np.concatenate([*mix.rest(num_rows), []])
    assert sorted(rest.tolist()) == list(range(num_rows))
    if num_rows == 100:
        assert rest.tolist() != list(range(100))
