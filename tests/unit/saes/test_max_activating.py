"""The table of the strongest tokens equals one made by sorting every value, in any order."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from vllm_scope.errors import ConfigError, FileError
from vllm_scope.saes import max_activating
from vllm_scope.saes.max_activating import (
    MaxActivating,
    table_bytes,
)
from vllm_scope.saes.max_activating_files import encode_table, load_max_activating
from vllm_scope.saes.strongest import LABEL_BYTES, NUM_BARS

NUM_FEATURES, K, BEFORE, AFTER = 12, 5, 3, 2


def documents(seed=0, count=30, ties=True):
    """(label, token ids, positions, dense values [n, NUM_FEATURES])."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        ids = rng.integers(0, 50, rng.integers(1, 14))
        positions = np.flatnonzero(rng.random(len(ids)) < 0.8)
        dense = rng.exponential(size=(len(positions), NUM_FEATURES)) * 10.0 ** (i % 3)
        if ties:
            dense = np.round(dense)
        dense[rng.random(dense.shape) < 0.6] = 0
        found.append((f"d{rng.integers(0, 20)}", ids, positions, dense.astype(np.float32)))
    return found


def sparse(dense, places=NUM_FEATURES):
    """[n, places]: the strongest features of each token, in any order."""
    order = np.argsort(-dense, axis=1, kind="stable")[:, :places]
    values = np.take_along_axis(dense, order, 1)
    indices = np.where(values > 0, order, -1).astype(np.int32)
    return indices, values


def table(some, **sizes):
    made = MaxActivating(**({"num_features": NUM_FEATURES, "k": K, "before": BEFORE,
                             "after": AFTER} | sizes))  # fmt: skip
    for label, ids, positions, dense in some:
        made.add(label, ids.tolist(), positions, *sparse(dense))
    return made


def brute(some, feature):
    """Sorts all values of all documents."""
    every = []
    for label, ids, positions, dense in some:
        value_at = dict(zip(positions.tolist(), dense[:, feature].tolist(), strict=True))
        for position, value in value_at.items():
            if not value > 0:
                continue
            first, last = max(0, position - BEFORE), min(len(ids), position + AFTER + 1)
            values = [value_at.get(p, np.nan) for p in range(first, last)]
            ids_here = ids[first:last].tolist()
            every.append((-value, label, position, ids_here, values, position - first))
    return sorted(every, key=lambda one: one[:3])[:K]


def check(made, some):
    for feature in range(NUM_FEATURES):
        wanted, got = brute(some, feature), made.top(feature)
        assert [(-one[0], one[1], one[2]) for one in wanted] == [
            (one.value, one.label, one.position) for one in got
        ]
        values = np.concatenate([dense[:, feature] for *_, dense in some])
        active = values[values > 0]
        assert made.num_active[feature] == len(active)
        edges, counts = made.histogram(feature)
        np.testing.assert_array_equal(counts, np.histogram(active, edges)[0])
        if len(active):
            assert active.max() < edges[-1] <= 2 * active.max()
    assert made.num_tokens == sum(len(positions) for _, _, positions, _ in some)
    np.testing.assert_array_equal(made.density, made.num_active / made.num_tokens)


def check_context(made, some):
    """Only if no two documents have one label, so that each entry is of one document."""
    for feature in range(NUM_FEATURES):
        for wanted, got in zip(brute(some, feature), made.top(feature), strict=True):
            assert got.tokens.tolist() == wanted[3]
            np.testing.assert_array_equal(got.values, np.array(wanted[4], np.float32))
            assert (got.at, got.values[got.at]) == (wanted[5], got.value)


def ordered(made):
    """All that a table has, as bytes."""
    return [
        (one.value, one.label, one.position, one.at, one.tokens.tobytes(), one.values.tobytes())
        for index in range(NUM_FEATURES)
        for one in made.top(index)
    ]


def unique(some):
    return [(f"{i}", *rest) for i, (_, *rest) in enumerate(some)]


@pytest.mark.parametrize("ties", [False, True])
def test_the_table_is_that_of_every_value(ties):
    some = documents(ties=ties)
    check(table(some), some)
    check_context(table(unique(some)), unique(some))


def test_the_order_of_documents_and_of_places_changes_nothing():
    some = documents(1)
    first = table(some)
    for seed in range(3):
        mixed = some.copy()
        random.Random(seed).shuffle(mixed)
        other = MaxActivating(NUM_FEATURES, K, BEFORE, AFTER)
        for label, ids, positions, dense in mixed:
            indices, values = sparse(dense)
            places = np.random.default_rng(seed).permutation(NUM_FEATURES)
            other.add(label, ids, positions, indices[:, places], values[:, places])
        assert ordered(other) == ordered(first)
        np.testing.assert_array_equal(other.bars, first.bars)
        np.testing.assert_array_equal(other.exponents, first.exponents)


def test_tables_are_merged_as_if_one_had_seen_all():
    some = documents(2, 40)
    whole, one, two = table(some), table(some[:3]), table(some[3:])
    one.merge(two)
    assert ordered(one) == ordered(whole)
    for name in ("bars", "exponents", "num_active", "num_tokens", "num_documents", "num_full"):
        np.testing.assert_array_equal(getattr(one, name), getattr(whole, name))
    with pytest.raises(
        ConfigError, match=r"k is 5 and 4; only tables of equal sizes can be merged\."
    ):
        one.merge(table([], k=4))


def arrays_of(made):
    own = [*made.entries.values(), *vars(made).values()]
    return [one for one in own if isinstance(one, np.ndarray)]


def test_its_bytes_are_fixed_and_said():
    made = table([])
    before = sum(array.nbytes for array in arrays_of(made))
    per_token = 8 * (BEFORE + 1 + AFTER) + 8 + LABEL_BYTES
    assert before == made.nbytes == NUM_FEATURES * (K * per_token + 8 * NUM_BARS + 14)
    assert before == table_bytes(NUM_FEATURES, K, BEFORE, AFTER)
    for label, ids, positions, dense in documents(3, 200):
        made.add(label, ids, positions, *sparse(dense))
    assert sum(array.nbytes for array in arrays_of(made)) == before


def test_numbers_that_are_not_finite_are_left_out():
    made = MaxActivating(3, 2, 1, 1)
    values = np.array([[np.nan, np.inf], [2.0, 0.5]], np.float32)
    made.add("d", [7, 8], np.arange(2), np.array([[0, 1], [1, 2]], np.int32), values)
    assert made.num_active.tolist() == [0, 1, 1]
    assert [made.top(i) for i in (0,)] == [[]]
    (strong,) = made.top(1)
    assert (strong.value, strong.tokens.tolist(), strong.values.tolist()) == (2, [7, 8], [0, 2])
    assert made.num_full == 2


def test_a_table_is_saved_and_loaded(tmp_path):
    some = documents(4, 25)
    one = table(some[:10], sae="toy")
    two = table(some[10:], sae="toy")
    (tmp_path / "a.safetensors").write_bytes(encode_table(one))
    (tmp_path / "b.safetensors").write_bytes(encode_table(two))
    again = load_max_activating(tmp_path / "a.safetensors")
    assert ordered(again) == ordered(one)
    assert repr(again) == repr(one)
    assert "'toy': 12 features, 5 tokens each" in repr(one)
    check(load_max_activating(tmp_path), some)
    (tmp_path / "c.safetensors").write_bytes(encode_table(table([], sae="other")))
    check(load_max_activating(tmp_path, "toy"), some)
    with pytest.raises(FileError, match="nowhere does not exist"):
        load_max_activating(tmp_path / "nowhere")
    with pytest.raises(FileError, match=r"has tables of 'other', 'toy'; give the name"):
        load_max_activating(tmp_path)
    with pytest.raises(FileError, match=r"has tables of 'other', 'toy', not of 'no'"):
        load_max_activating(tmp_path, "no")


def test_a_damaged_file_is_refused(tmp_path):
    made = table(documents(5, 5))
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode_table(made))
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    save_file(tensors | {"values": tensors["values"][:4].copy()}, path, metadata)
    with pytest.raises(FileError, match=r"the sizes .* contradict the file's tensors"):
        load_max_activating(path)
    save_file(tensors, path, {"format": "another"})
    with pytest.raises(FileError, match="is no table of strongest tokens of this version"):
        load_max_activating(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FileError, match="cannot be read"):
        load_max_activating(path)


def test_a_file_that_claims_more_than_its_size_is_refused_before_memory_is_taken(tmp_path):
    path, num_features = tmp_path / "a.safetensors", 100_000
    facts = {"num_features": num_features, "k": 1, "before": 0, "after": 0, "sae": "toy"}
    tensors = {
        "values": np.zeros((num_features, 1, 1), np.uint8),
        "bars": np.zeros((num_features, NUM_BARS), np.uint8),
    }
    metadata = {"format": "vllm_scope.max_activating.1", "max_activating": json.dumps(facts)}
    save_file(tensors, path, metadata)
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match=r"the sizes .* contradict the file's tensors"):
            load_max_activating(path)
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size
    finally:
        tracemalloc.stop()


def test_a_file_of_no_features_is_refused(tmp_path):
    facts = {"num_features": 0, "k": 1, "before": 0, "after": 0, "sae": "toy"}
    tensors = {"values": np.zeros((0, 1, 1), np.float32), "bars": np.zeros((0, NUM_BARS), np.int64)}
    metadata = {"format": "vllm_scope.max_activating.1", "max_activating": json.dumps(facts)}
    save_file(tensors, tmp_path / "a.safetensors", metadata)
    with pytest.raises(FileError, match="cannot be read: num_features is 0"):
        load_max_activating(tmp_path / "a.safetensors")


@pytest.mark.parametrize(("name", "value"), [("num_features", 0), ("k", 0), ("k", True),
                                             ("before", -1), ("after", 1.0)])  # fmt: skip
def test_a_wrong_size_is_refused(name, value):
    with pytest.raises(
        ConfigError,
        match=rf"{name} is {value}; it must be a whole number from [01]\.",
    ):
        MaxActivating(**({"num_features": 4} | {name: value}))


@pytest.mark.parametrize("sizes", [{}, {"k": 1, "before": 0, "after": 0}, {"before": 20}])
def test_blocks_and_parts_of_any_size_make_one_table(sizes, monkeypatch):
    some = documents(6)
    whole = table(some, **sizes)
    for block in (1, 1500, 6000):
        monkeypatch.setattr(max_activating, "BLOCK_BYTES", block)
        monkeypatch.setattr(max_activating, "_PART_BYTES", block // 4)
        one, two = table(some[:7], **sizes), table(some[7:], **sizes)
        one.merge(two)
        for made in (table(some, **sizes), one):
            assert ordered(made) == ordered(whole)
            np.testing.assert_array_equal(made.bars, whole.bars)
            np.testing.assert_array_equal(made.num_active, whole.num_active)
            np.testing.assert_array_equal(made._least, whole._least)


def test_a_long_document_needs_little_memory_beside_the_table(monkeypatch):
    """As large as the table, whose entries it all fills, and then equals or improves."""
    monkeypatch.setattr(max_activating, "BLOCK_BYTES", 1 << 18)
    rng, shape = np.random.default_rng(0), (4096, 32)
    made = MaxActivating(4096, 20, 16, 8)
    for array in arrays_of(made):
        array[...] = array  # the pages are there now
    indices = rng.integers(0, 4096, shape, np.int32)
    values = np.round(rng.exponential(size=shape) * 8).astype(np.float32)
    ids, positions = rng.integers(0, 50, len(values)), np.arange(len(values))
    for label in ("b", "a", "c"):
        tracemalloc.start()
        made.add(label, ids, positions, indices, values)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 20 * indices.size + (8 << 20) < made.nbytes / 2


def test_only_entries_that_stay_get_a_context(monkeypatch):
    made, contexts = MaxActivating(4, 2, 3, 3), []
    entries = MaxActivating._entries

    def counted(self, *args):
        contexts.append(len(args[-1]))
        return entries(self, *args)

    monkeypatch.setattr(MaxActivating, "_entries", counted)
    indices = np.tile(np.arange(4, dtype=np.int32), (1000, 1))
    values = np.random.default_rng(0).permutation(4000).reshape(1000, 4) + 1.0
    made.add("a", range(1000), np.arange(1000), indices, values.astype(np.float32))
    assert sum(contexts) == 4 * 2
    made.add("b", range(1000), np.arange(1000), indices, np.full((1000, 4), 0.5, np.float32))
    assert sum(contexts) == 4 * 2


@pytest.mark.parametrize(
    ("tokens", "positions", "indices", "sentence"),
    [
        pytest.param(0, [0, 1], [[1], [2]], r"has 0 tokens; positions must ascend", id="no-tokens"),
        pytest.param(2, [0, 2], [[1], [2]], r"positions are \[0, 2\], and the doc", id="too-far"),
        pytest.param(2, [-1, 0], [[1], [2]], r"positions are \[-1, 0\], and", id="negative"),
        pytest.param(
            2,
            [1, 0],
            [[1], [2]],
            r"positions must ascend, and must be from 0 to 1",
            id="descending",
        ),
        pytest.param(2, [0, 1], [[1], [3]], r"indices have 3; .* 0 to 2", id="no-such-feature"),
        pytest.param(2, [0, 1], [[1]], r"shapes \[2\], \[1, 1\] and \[1, 1\]; they", id="shape"),
    ],
)
def test_a_document_that_cannot_be_changes_nothing(tokens, positions, indices, sentence):
    made = MaxActivating(3, 2, 1, 1)
    made.add("a", [1], np.arange(1), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
    before = {name: copy.copy(value) for name, value in vars(made).items()}
    before["entries"] = {name: array.copy() for name, array in made.entries.items()}
    places = np.array(indices, np.int32)
    with pytest.raises(ConfigError, match=sentence):
        made.add("b", [1] * tokens, np.array(positions), places, np.ones(places.shape, np.float32))
    np.testing.assert_equal(vars(made), before)
