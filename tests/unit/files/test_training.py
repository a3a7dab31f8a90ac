"""A data set for training: each row once an epoch, whoever reads it and wherever it was stopped."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import vllm_scope
from tests.unit.files.test_files import put, writer_of
from vllm_scope.errors import FileError
from vllm_scope.files import RowDataset, iterate

STREAM = ("resid_post", 2)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A folder of two shards, and its rows, each of which is different."""
    root = tmp_path_factory.mktemp("captured")
    rows = []
    for half in range(2):
        with writer_of(root) as writer:
            for seed in range(30):
                found = put(writer, 100 * half + seed, dtype=torch.float32, num_prompt=5 + seed)[1]
                rows.append(found[STREAM])
    return root, as_set(rows)


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(iterate, "RUN_ROWS", 16)
    monkeypatch.setattr(iterate, "POOL_RUNS", 8)


def as_set(batches):
    return {tuple(row) for batch in batches for row in batch.tolist()}


def check_once(batches, rows):
    assert as_set(batches) == rows
    assert sum(map(len, batches)) == len(rows)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_every_row_comes_once_in_an_epoch(captured, shuffle, num_workers):
    root, rows = captured
    dataset = RowDataset(root, *STREAM, 32, shuffle=shuffle, seed=4)
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    batches = list(loader)
    check_once(batches, rows)
    assert sum(len(batch) < 32 for batch in batches) <= max(num_workers, 1)


def test_parts_of_several_processes_are_the_whole(captured):
    root, rows = captured
    parts = [list(RowDataset(root, *STREAM, 20, part=(i, 3))) for i in range(3)]
    check_once([batch for part in parts for batch in part], rows)
    assert min(len(part) for part in parts) > 0


def test_epochs_differ_and_a_seed_repeats_them(captured):
    root, rows = captured
    dataset, same = RowDataset(root, *STREAM, 50, seed=1), RowDataset(root, *STREAM, 50, seed=1)
    first, second = list(dataset), list(dataset)
    check_once(second, rows)
    assert not torch.equal(torch.cat(first), torch.cat(second))
    again = pickle.loads(pickle.dumps(same))
    assert torch.equal(torch.cat(first), torch.cat(list(again)))


@pytest.mark.parametrize("persistent", [True, False])
def test_each_epoch_of_workers_has_another_order(captured, persistent):
    root, rows = captured

    def epochs():
        dataset = RowDataset(root, *STREAM, 50, seed=1)
        loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
        for epoch in range(3):
            if not persistent:
                dataset.set_epoch(epoch)
            batches = list(loader)
            check_once(batches, rows)
            yield torch.cat(batches).tolist()

    first, second, third = epochs()
    assert first != second != third != first
    assert list(epochs()) == [first, second, third]


def test_an_epoch_that_is_set_is_the_one_that_comes_after_those_before_it(captured):
    root, _ = captured
    dataset, other = (RowDataset(root, *STREAM, 50, seed=1) for _ in range(2))
    epochs = [torch.cat(list(dataset)) for _ in range(3)]
    next(iter(other))  # an epoch that is not ended
    other.set_epoch(2)
    assert torch.equal(torch.cat(list(other)), epochs[2])


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(st.integers(0, 80), st.integers(1, 90), st.booleans(), st.integers(1, 3))
def test_a_loaded_state_goes_on_with_the_same_batches(captured, taken, size, shuffle, parts):
    root, _ = captured

    def made():
        return RowDataset(root, *STREAM, size, shuffle=shuffle, seed=7, part=(parts - 1, parts))

    undisturbed = made()
    whole, second = list(undisturbed), list(undisturbed)
    taken = min(taken, len(whole) - 1)
    dataset = made()
    batches = iter(dataset)
    for _ in range(taken):
        next(batches)
    later = made()
    later.load_state_dict(pickle.loads(pickle.dumps(dataset.state_dict())))
    assert [batch.tolist() for batch in later] == [batch.tolist() for batch in whole[taken:]]
    assert [batch.tolist() for batch in later] == [batch.tolist() for batch in second]


def test_a_state_that_was_kept_as_json_is_taken(captured):
    root, _ = captured
    dataset = RowDataset(root, *STREAM, 32)
    whole = list(dataset)
    batches = iter(dataset)
    next(batches)
    later = RowDataset(root, *STREAM, 32)
    later.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert sum(map(len, later)) == sum(map(len, whole)) - 32


def test_a_state_of_another_order_is_refused(captured):
    root, _ = captured
    state = RowDataset(root, *STREAM, 32).state_dict()
    with pytest.raises(FileError, match="the state is of batch_size 32, and this data set has 16"):
        RowDataset(root, *STREAM, 16).load_state_dict(state)
    with pytest.raises(FileError, match=r"the state is of part \(0, 1\)"):
        RowDataset(root, *STREAM, 32, part=(1, 2)).load_state_dict(state)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"part": (2, 2)}, r"part is \(2, 2\); it must be"),
        ({"part": (-1, 2)}, r"part is \(-1, 2\); it must be"),
        ({"part": (0, 0)}, r"part is \(0, 0\); it must be"),
        ({"skip": -1}, "skip is -1; it must be at least 0"),
    ],
)
def test_a_part_or_a_skip_that_would_lose_rows_is_refused(options, sentence, shuffle, captured):
    root, _ = captured
    with pytest.raises(ValueError, match=sentence):
        vllm_scope.open(root).iter_rows(*STREAM, 8, shuffle=shuffle, **options)


@pytest.mark.parametrize(
    ("size", "part", "sentence"),
    [
        (0, (0, 1), "batch_size is 0"),
        (8, (2, 2), r"part is \(2, 2\)"),
        (8, (-1, 2), "the index must be"),
    ],
)
def test_a_part_that_is_none_and_an_empty_batch_are_refused(size, part, sentence):
    with pytest.raises(FileError, match=sentence):
        RowDataset("rows", *STREAM, size, part=part)
