"""The attention map has the weights of each head, and refuses what it cannot show."""

from __future__ import annotations

import numpy as np
import pytest

from tests.browser import samples
from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.request.actions import Read
from vllm_scope.views import attention_map


def heads_of(view) -> dict[str, dict]:
    (found,) = [part for part in view.parts() if part["kind"] == "choice"]
    return {option["name"]: option["parts"][0] for option in found["options"]}


def test_each_head_has_its_weights_and_no_cell_of_the_future():
    weights = samples.attention()
    for head, grid in heads_of(attention_map(weights)).items():
        for query, row in enumerate(grid["cells"]):
            for key, cell in enumerate(row):
                if key > query:
                    assert cell is None
                else:
                    weight = weights[int(head), query, key].item()
                    assert cell == {
                        "text": f"{weight:.3f}",
                        "part": pytest.approx(weight, abs=1e-3),
                    }


def test_fewer_queries_are_the_last_positions():
    weights = samples.attention()[:, 4:]
    grid = heads_of(attention_map(weights, heads=[3], tokens=list("abcdef")))["3"]
    assert grid["rows"] == ["4 e", "5 f"]
    assert len(grid["columns"]) == 6
    assert [cell is None for cell in grid["cells"][0]] == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        (samples.attention()[0], {},
            r"weights have the shape \[6, 6\]; it must be \[heads, queries"),
        (samples.attention(), {"heads": [4]}, "heads has 4; the layer has heads 0 to 3"),
        (samples.attention(300), {}, "4 heads of 300 queries and 300 keys are more than 262,144"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused(given, options, sentence):
    with pytest.raises(SpecError, match=sentence):
        attention_map(given, **options)


def test_a_result_needs_a_layer_and_all_its_rows(road):
    pending = road.open(Read("resid_post", layers=[1]))
    result = pending.snapshot([5], None)
    with pytest.raises(SpecError, match="layer is None; name a layer"):
        attention_map(result)
    with pytest.raises((KeyError, ScopeError), match="was not asked for"):
        attention_map(result, 1)


def test_a_weight_that_is_no_number_has_no_colour():
    weights = np.full((1, 2, 2), 0.5, np.float32)
    weights[0, 1, 0] = np.nan
    assert "nan" in attention_map(weights).page()
