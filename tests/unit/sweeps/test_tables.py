"""The table of a sweep: its names, its files, its picture."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from vllm_scope import ConfigError, FileError, SpecError
from vllm_scope.sweeps.table import SweepTable

TOKENS = [["The", " capital", " of"], [" <b>", " of"]]


@pytest.fixture
def table():
    found = SweepTable.empty(
        TOKENS, [0, 4], [0, 1, 2], None, "logit difference", "resid_pre", "patch"
    )
    found.values[:] = np.arange(12).reshape(2, 2, 3)
    found.values[1, :, 2] = np.nan
    found.plain[:], found.source[:] = [1, 2], [3, 6]
    return found


def test_names_are_those_of_the_dimensions(table):
    assert table.values.shape == (2, 2, 3)
    assert table.coords == {"prompt": (0, 1), "layer": (0, 4), "position": (0, 1, 2)}
    together = SweepTable.empty(TOKENS, [0], None, [1, 3], "m", "z", "patch")
    assert together.values.shape == (2, 1, 2)
    assert list(together.coords) == ["prompt", "layer", "head"]


def test_normalised_values_are_0_without_an_edit_and_1_at_the_source(table):
    found = table.normalised()
    assert found.values[0, 0].tolist() == [-0.5, 0, 0.5]
    assert found.values[1, 0, 0] == 1
    assert (found.plain == 0).all()
    assert (found.source == 1).all()
    table.source[:] = np.nan
    with pytest.raises(SpecError, match="does not have the metric of each source prompt"):
        table.normalised()
    table.source[:] = [table.plain[0] + 1, table.plain[1]]
    with pytest.raises(SpecError, match=r"the metric of prompts\[1\] is .* leave this prompt out"):
        table.normalised()


def test_a_safetensors_file_has_all(table, tmp_path):
    from safetensors import safe_open

    table.errors[0, 1, 2] = "too large"
    table.save(tmp_path / "x.safetensors")
    (tmp_path / "other").touch()  # has the mode that the umask gives
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        np.testing.assert_array_equal(file.get_tensor("values"), table.values)
        np.testing.assert_array_equal(file.get_tensor("plain"), table.plain)
        told = file.metadata()
    assert json.loads(told["coords"])["layer"] == [0, 4]
    assert json.loads(told["tokens"]) == TOKENS
    assert json.loads(told["errors"]) == [[[0, 1, 2], "too large"]]
    assert told["metric"] == "logit difference"


def test_a_parquet_file_has_a_row_for_each_cell(table, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    table.save(tmp_path / "x.parquet")
    rows = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert len(rows) == 12
    for row in rows:
        i, position = row["prompt"], row["position"]
        value = table.values[i, [0, 4].index(row["layer"]), position]
        assert row["value"] == value or (np.isnan(value) and np.isnan(row["value"]))
        assert row["token"] == (TOKENS[i][position] if position < len(TOKENS[i]) else None)
        assert row["plain"] == table.plain[i]


def test_without_pyarrow_a_sentence_says_what_to_install(table, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"the package pyarrow; pip install .*, or save a \.safe"):
        table.save(tmp_path / "x.parquet")


def test_another_ending_is_refused(table, tmp_path):
    with pytest.raises(FileError, match=r"\.parquet, \.safetensors, \.html"):
        table.save(tmp_path / "x.csv")
    with pytest.raises(FileError, match="nowhere is no folder"):
        table.save(tmp_path / "nowhere" / "x.parquet")


def test_xarray_has_the_same_names(table):
    pytest.importorskip("xarray")
    found = table.to_xarray()
    assert found.dims == ("prompt", "layer", "position")
    assert float(found.sel(prompt=1, layer=4, position=0)) == 9


class _Cells(HTMLParser):
    """Texts of <td> and <th>."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag, attrs):
        if tag in ("td", "th"):
            self.found.append((tag, ""))

    def handle_data(self, data):
        if self.found and data.strip():
            tag, text = self.found[-1]
            self.found[-1] = tag, text + data


def test_the_picture_shows_the_mean_of_the_prompts(table):
    reader = _Cells()
    reader.feed(table._repr_html_())
    shown = [text for tag, text in reader.found if tag == "td"][1:]
    # Of the third position, the first prompt alone has a token.
    assert shown == ["3", "4", "2", "6", "7", "5"]
    names = [text for tag, text in reader.found if tag == "th"]
    assert names[2:5] == ["0", "1", "2  of"]
    assert "<b>" not in table._repr_html_()


def test_a_picture_of_heads_and_of_an_empty_table():
    table = SweepTable.empty(TOKENS, [0, 1], [0, -1], [2, 3], "m", "z", "patch")
    assert table.picture().values.shape == (4, 2)
    assert table.picture().rows == ("0.2", "0.3", "1.2", "1.3")
    assert "without a value" in repr(table)
    table.values[:, 1, 0, 1] = 5
    assert table.picture().values[3].tolist()[0] == 5
    together = SweepTable.empty(TOKENS, [0, 1], None, None, "m", "embed", "add")
    assert together.picture().values.shape == (2, 1)
