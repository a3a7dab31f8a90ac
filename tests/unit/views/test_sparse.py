"""The lens grid and the feature list have the numbers of results, of an engine and of a client."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.browser import samples
from vllm_scope import client
from vllm_scope.batch.sparse import SparseRows
from vllm_scope.request.read_features import ReadFeatures
from vllm_scope.results.features import SparseFeatures
from vllm_scope.results.lens import LensTokens, TopTokens
from vllm_scope.views import feature_list, lens_grid
from vllm_scope.views.document import View


def grid_of(view: View) -> dict:
    (found,) = [part for part in view.parts() if part["kind"] == "grid"]
    return found


def of_client(lens: LensTokens) -> dict[int, client.TopTokens]:
    return {
        layer: client.TopTokens(*(np.asarray(getattr(one, name)) for name in (
            "positions", "token_ids", "log_probs"
        )))
        for layer, one in lens.items()
    }  # fmt: skip


@pytest.mark.parametrize(
    "found", [samples.lens(), of_client(samples.lens())], ids=["own", "client"]
)
def test_a_lens_grid_has_all_tokens_of_each_row(found):
    grid = grid_of(lens_grid(found, tokens=["a", "b"]))
    assert grid["rows"] == ["0 a", "1 b", "2", "3", "4"]
    assert grid["columns"] == ["0", "4"]
    for position, row in enumerate(grid["cells"]):
        for layer, cell in zip((0, 4), row, strict=True):
            if position == len(found[layer].positions):
                assert cell is None
                continue
            top = [(i, math.exp(value)) for i, value in found[layer].top(position)]
            assert cell["text"] == f"{top[0][0]}"
            assert cell["part"] == pytest.approx(top[0][1], abs=1e-3)
            assert [line["text"] for line in cell["more"]] == [f"{i} {p:.3f}" for i, p in top]
            assert [line["part"] for line in cell["more"]] == [
                pytest.approx(p, abs=1e-3) for _, p in top
            ]


def test_a_notebook_shows_the_lens_of_a_result():
    lens = samples.lens()
    words = samples.Tokenizer([f" w{i}" for i in range(12)])
    shown = grid_of(lens.decoded(words).picture())["cells"][0][0]["text"]
    assert shown == repr(words.decode([lens[0].top(0)[0][0]]))


def test_numbers_that_json_lacks_have_no_colour():
    rows = SparseRows(torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[torch.nan, -1.0]]))
    lens = LensTokens({0: TopTokens.of_rows(rows, torch.tensor([0]))})
    assert grid_of(lens_grid(lens))["cells"][0][0]["part"] is None
    lens_grid(lens).page()
    values = SparseRows(rows.indices, torch.tensor([[torch.inf, torch.nan]]), read=ReadFeatures(9))
    (row,) = grid_of(feature_list(SparseFeatures(values, torch.tensor([0]))))["cells"]
    assert sorted((cell["text"], cell["part"]) for cell in row if cell["part"] is not None) == [
        ("1: inf", 1.0)
    ]
    assert len(row) == 2


def test_a_feature_list_has_the_strongest_of_each_position():
    found = samples.features()
    grid = grid_of(feature_list(found, labels={6: "six"}, strongest=2))
    assert grid["rows"] == ["1", "2", "4"]
    assert [[cell and cell["text"] for cell in row] for row in grid["cells"]] == [
        ["5: 2", "7: 1"], [None, None], ["6 six: 5", "7: 4"],
    ]  # fmt: skip
    named = grid_of(feature_list(found, positions=[4, 3, 1]))
    assert named["rows"] == ["4", "1"]  # position 3 was not encoded


def test_many_positions_are_shown_when_they_are_named():
    lens = samples.lens(num_positions=100)
    view = lens_grid(lens)
    assert len(grid_of(view)["rows"]) == 64
    assert (
        view.parts()[0]["text"]
        == "The first 64 of 100 positions are shown; the argument `positions` selects others."
    )
    assert grid_of(lens_grid(lens, positions=range(90, 100)))["rows"] == [
        f"{i}" for i in range(90, 100)
    ]
