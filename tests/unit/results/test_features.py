"""Features of a result: by name, sparse, and what is missing of them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.unit.roads import number_of
from tests.unit.views.reading import Element, read_html
from vllm_scope import Features, FileError, Probe
from vllm_scope.batch.sparse import SparseRows, sparse_rows
from vllm_scope.program.layout import Layout
from vllm_scope.request.actions import HeldSae
from vllm_scope.request.heads import Strongest
from vllm_scope.request.read_features import ReadFeatures
from vllm_scope.request.resolved import Cell, ResolvedFeatures
from vllm_scope.request.selectors import Word
from vllm_scope.request.sites import Place, point_of
from vllm_scope.results.cursor import Cursor
from vllm_scope.results.features import SparseFeatures

POINT = point_of(4, 1)
PLACE = {"site": "resid_post", "layer": 1}
#: The second feature is active from position 1 on: its numbers are 1024 + 32 * position + POINT.
ROWS = {"encoder": [[1.0] * 4] * 2, "bias": [0, 0], "threshold": [0, 1024 + 16 + POINT]}
SOME = Features(ROWS, indices=[9, 4], name="some", **PLACE)


def words(indices: list[list[int]], values: list[list[float]]) -> torch.Tensor:
    bits = torch.tensor(indices, dtype=torch.int32).view(torch.float32)
    return torch.cat([bits, torch.tensor(values)], dim=1)


def strongest(**more) -> ResolvedFeatures:
    cell = Cell(Place("resid_post", 1), None, Strongest.of_sae("s", 3), 0)
    return ResolvedFeatures("s", Word("all"), (cell,), 99, **more)


def test_what_a_worker_made_becomes_features():
    made = words([[7, 2, 5], [1, 0, 3], [4, 6, 8]], [[3.0, 2, 1], [2, 0, 0], [np.nan, 1, 0.5]])
    for more, wanted in (
        ({}, [[7, 2, 5], [1, -1, -1], [4, 6, 8]]),
        ({"threshold": 1.0}, [[7, 2, 5], [1, -1, -1], [4, 6, -1]]),
        ({"indices": (2, 1, 6)}, [[-1, 2, -1], [1, -1, -1], [-1, 6, -1]]),
    ):
        found = sparse_rows(strongest(**more), made)
        assert found.indices.tolist() == wanted
        assert found.counts.tolist() == [sum(i >= 0 for i in row) for row in wanted]
        assert (found.values[found.indices < 0] == 0).all()
    assert sparse_rows(strongest(), made).values[2, 0].isnan()


def test_rows_know_which_features_were_read_also_after_they_are_cut():
    made = words([[7, 2, 5], [1, 0, 3]], [[3.0, 2, 1], [2, 0, 0]])
    for indices in (None, (2, 1)):
        found = sparse_rows(strongest(indices=indices), made)
        for rows in (found, found[1:], found[torch.tensor([0])]):
            assert rows.read == ReadFeatures(99, indices)


@pytest.fixture
def found() -> SparseFeatures:
    rows = SparseRows(
        torch.tensor([[7, -1, 5], [-1, -1, -1], [4, 6, 7]], dtype=torch.int32),
        torch.tensor([[1.0, 0, 2], [0, 0, 0], [3, 5, 4]]),
        read=ReadFeatures(99),
    )
    return SparseFeatures(rows, torch.tensor([10, 11, 20]))


def test_features_are_a_sparse_matrix(found, tmp_path):
    assert found.positions.tolist() == [10, 10, 20, 20, 20]
    assert found.indices.tolist() == [5, 7, 6, 7, 4]
    assert found.values.tolist() == [2, 1, 5, 4, 3]
    assert found.dense(7).tolist() == [1, 0, 4]
    assert found.dense(50).tolist() == [0, 0, 0]
    assert found.top(20) == [(6, 5.0), (7, 4.0), (4, 3.0)]
    assert found.top(11) == []
    with pytest.raises(KeyError, match="position 12 has no features"):
        found.top(12)
    assert repr(found) == "SparseFeatures(5 values at 3 positions of 99 features)"
    rows = [
        [cell.text for cell in row.children if isinstance(cell, Element)]
        for row in read_html(found._repr_html_()).tagged("tr")
    ]
    assert rows[2:] == [
        ["10", "5: 2", "7: 1", ""],
        ["11"] + [""] * 3,
        ["20", "6: 5", "7: 4", "4: 3"],
    ]
    found.save(tmp_path / "f.safetensors")
    (tmp_path / "other").touch()  # has the mode that the umask gives
    assert (tmp_path / "f.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    stored = load_file(tmp_path / "f.safetensors")
    assert set(stored) == {"positions", "indices", "values", "tokens"}
    assert all(torch.equal(stored[name], getattr(found, name)) for name in stored)
    with safe_open(tmp_path / "f.safetensors", "pt") as file:
        assert file.metadata() == {"num_features": "99"}
    for name in ("f", "f.csv"):
        with pytest.raises(FileError, match=r"does not end with .safetensors or .parquet"):
            found.save(tmp_path / name)
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("index", [-1, 99, 9999, "7", True, 1.5])
def test_a_feature_that_no_sae_has_is_not_a_row_of_zeros(found, index):
    with pytest.raises(KeyError, match=r"is not there; .*features (0 to 98|are whole numbers)"):
        found.dense(index)


def test_a_feature_that_was_not_read_is_not_a_row_of_zeros(road):
    pending = road.open(SOME)
    (bank,) = pending.asked.banks
    road.send([(pending.key, 0, Layout((), ((bank, (POINT,)),)), 0)])
    road.finish(pending)
    some = pending.snapshot([5], "stop").features["some"]
    for found in (some, pickle.loads(pickle.dumps(some))):
        assert found.dense(9).shape == found.dense(np.int64(4)).shape == (1,)
        for index in (3, 9999):
            with pytest.raises(KeyError, match=rf"{index} was not read; the read named \[9, 4\]"):
                found.dense(index)


def test_features_are_found_by_name_beside_scores(road):
    pending = road.open(Probe([1.0] * 4, layer=1, name="p"), SOME)
    (bank,) = pending.asked.banks
    road.send([(pending.key, p, Layout((), ((bank, (POINT,)),)), 0) for p in range(4)])
    road.finish(pending)
    result = pending.snapshot([5, 6], "stop")
    assert (list(result.scores), list(result.features)) == (["p"], ["some"])
    assert (result.status, result.expected, result.delivered) == ("complete", 8, 8)
    assert repr(result) == "ScopeResult(complete, 0 streams, 1 probes, 1 features, 8 of 8 values)"
    alone, whole = (pickle.loads(pickle.dumps(one)) for one in (result.features, result))
    some = result.features["some"]
    # The probe has the first number of the bank.
    assert some.dense(9).tolist() == [number_of(POINT, 1, p, 0) for p in range(4)]
    assert some.dense(4).tolist() == [number_of(POINT, 2, p, 0) for p in range(4)]
    for again in (alone["some"], whole.features["some"]):
        assert torch.equal(again.values, some.values)
    with pytest.raises(KeyError, match="no features of this request are called 'p'; it has: some"):
        result.features["p"]


def test_a_position_without_features_is_not_a_missing_one(road):
    pending = road.open(SOME)
    (bank,) = pending.asked.banks
    road.send([(pending.key, p, Layout((), ((bank, (POINT,)),)), 0) for p in (0, 2)])
    road.finish(pending)
    result = pending.snapshot([5], "stop")
    assert (result.status, result.expected, result.dropped) == ("incomplete", 3, 1)
    assert result.features["some"].tokens.tolist() == [0, 2]
    assert result.features["some"].dense(4).tolist() == [0, number_of(POINT, 1, 2, 0)]


def test_a_stream_has_each_feature_once(road):
    top = Features(HeldSae("s", 99, 4, None), top_k=2, name="top", **PLACE)
    pending = road.open(SOME, top)
    layout = Layout((), tuple((one.cells[0].bank, (POINT,)) for one in pending.asked.features))
    cursor = Cursor(rows=False)
    seen: dict[str, list[int]] = {"some": [], "top": []}
    for first, last in ((0, 2), (2, 3), (3, 5)):
        road.send([(pending.key, p, layout, 0) for p in range(first, last)])
        road.settle()
        cursor.look(pending.snapshot([5] * last, None))
        columns = cursor.take()
        assert [column.label for column in columns] == ["some", "top"]
        for column in columns:
            seen[column.label] += column.positions.tolist()
            assert isinstance(column.source, SparseRows)
            assert column.source.shape == (last - first, 2)
    assert seen == {"some": list(range(5)), "top": list(range(5))}
    road.finish(pending)
    assert all(not len(c.positions) for c in cursor.rest(pending.snapshot([5] * 3, "stop")))
