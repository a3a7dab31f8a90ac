"""The functions of views refuse a wrong argument in one sentence."""

from __future__ import annotations

import numpy as np
import pytest

from tests.browser import samples
from vllm_scope import Read
from vllm_scope.errors import SpecError
from vllm_scope.views import (
    attention_map,
    feature_list,
    feature_page,
    lens_grid,
    monitor_page,
    side_by_side,
    token_page,
    token_strip,
)

WEIGHTS, STRIP = samples.attention(), token_strip(["a", "b"], [0.0, 1.0])
FEATURES, LENS = samples.features(), samples.lens()


@pytest.mark.parametrize(
    ("show", "given", "options", "sentence"),
    [
        (attention_map, [[["a"]]], {},
            r"found is \[\[\['a'\]\]\]; it must be a result with q and k"),
        (attention_map, object(), {}, "found is <object object at .*>; it must be a result"),
        (attention_map, WEIGHTS, {"heads": 1}, "heads is 1; it must be a list of whole numbers"),
        (attention_map, WEIGHTS, {"heads": [True]},
            r"heads is \[True\]; it must be a list of whole"),
        (attention_map, WEIGHTS, {"heads": ["1"]}, r"heads is \['1'\]; it must be a list of whole"),
        (attention_map, WEIGHTS, {"tokens": "abcdef"},
            "tokens is 'abcdef'; it must be a list of texts"),
        (attention_map, WEIGHTS, {"tokens": [1]}, r"tokens is \[1\]; it must be a list of texts"),
        (lens_grid, {"lens": LENS}, {}, r"found is \{'lens': .*; it must be a dict of tokens"),
        (lens_grid, LENS, {"positions": [-1]},
            "positions contains no position with values; the values are at"),
        (lens_grid, LENS, {"positions": 3}, "positions is 3; it must be a list of whole numbers"),
        (lens_grid, LENS, {"tokens": "text"}, "tokens is 'text'; it must be a list of texts"),
        (feature_list, {"toy": FEATURES}, {}, r"found is \{'toy': .*; it must be SparseFeatures"),
        (feature_list, FEATURES, {"positions": [999]},
            "positions contains no position with values"),
        (feature_list, FEATURES, {"labels": ["x"]},
            r"labels is \['x'\]; it must be a dict of texts by number"),
        (feature_list, FEATURES, {"strongest": 0}, "strongest is 0; it must be a whole number"),
        (side_by_side, STRIP, {"other": "text"}, "other is 'text'; it must be a list of texts"),
        (side_by_side, STRIP, {"other": 7}, "other is 7; it must be a list of texts"),
        (side_by_side, STRIP, {"other": STRIP, "names": "ab"},
            "names is 'ab'; it must be a list of"),
        (side_by_side, STRIP, {"other": STRIP, "names": ["a"]}, "a name for each of the two"),
        (token_page, "title", {"strips": STRIP},
            "strips is TokenStrip.*; it must be a list of token"),
        (token_page, "title", {"strips": {"x": ["a"]}},
            "it must be a list of token strips"),
        (token_page, "t", {"strips": [STRIP], "intro": "x"},
            "intro is 'x'; it must be a list of texts"),
        (feature_page, FEATURES, {"decode": str}, "found is .*; it must be a MaxActivating"),
        (attention_map, {"a": 1}, {"layer": 0}, r"found is \{'a': 1\}; it must be a result with q"),
        (lens_grid, LENS, {"tokenizer": 3},
            "tokenizer is 3; it must be an object with `decode`, such as llm"),
        (lens_grid, LENS, {"tokenizer": "gpt2"},
            "tokenizer is 'gpt2'; it must be an object with `decode`"),
        (lens_grid, {0: STRIP}, {},
            r"found is \{0: TokenStrip.*; it must be a dict of tokens by layer, such as"),
        (lens_grid, LENS, {"tokens": np.array(1)},
            r"tokens is array\(1\); it must be a list of texts"),
        (token_strip, ["a"], {"scores": [1], "caption": 3}, "caption is 3; it must be a text"),
        (token_strip, None, {"scores": [1]}, "tokens is None; it must be a list of texts"),
        (token_strip, ["a"], {"scores": [1], "first_position": "x"}, "first_position is 'x'; it"),
        (token_strip, ["a"], {"scores": [1], "threshold": 10**400}, "it must be finite"),
        (side_by_side, STRIP, {"other": STRIP, "title": None}, "title is None; it must be a text"),
        (token_page, None, {"strips": [STRIP]}, "title is None; it must be a text"),
        (token_page, "t", {"strips": {3: [STRIP]}},
            "it must be a list of token strips, or"),
        (monitor_page, {"monitors": {}}, {}, r"activity is \{.*; it must be an Activity, such as"),
        (monitor_page, samples.activity(), {"title": 3}, "title is 3; it must be a text"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_in_one_sentence(show, given, options, sentence):
    with pytest.raises(SpecError, match=sentence):
        show(given, **options)


@pytest.mark.parametrize("show", [lens_grid, feature_list, feature_page, attention_map])
def test_a_result_is_refused_where_a_part_of_it_is_shown(road, show):
    result = road.open(Read("resid_post", layers=[1])).snapshot([5], None)
    options = {feature_page: {"decode": str}, attention_map: {"layer": 1}}.get(show, {})
    with pytest.raises((SpecError, KeyError), match=r"found is .*; it must be |was not asked for"):
        show(result, **options)
    with pytest.raises(SpecError, match="tokenizer is 7; it must be an object with `decode`"):
        result.picture(7)


def test_a_page_of_features_says_what_is_wrong():
    table = samples.max_activating()
    for options, sentence in (
        ({"decode": "x"}, "decode is 'x'; it must be a function"),
        ({"decode": lambda i: i}, "what `decode` returns is [0-9]+; it must be a text"),
        ({"title": 3}, "title is 3; it must be a text"),
        ({"features": [-1]}, "features has -1; the SAE has features 0 to"),
        ({"features": 3}, "features is 3; it must be a list of whole numbers"),
        ({"labels": ["x"]}, "labels is"),
    ):
        with pytest.raises(SpecError, match=sentence):
            feature_page(table, **({"decode": str} | options))
