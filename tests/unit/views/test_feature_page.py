"""A page of features shows the numbers of the table, and no text becomes markup."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.unit.saes.test_max_activating import NUM_FEATURES, documents, table, unique
from tests.unit.views.reading import read_html
from tests.unit.views.test_strip import text_of
from vllm_scope.errors import SpecError
from vllm_scope.saes.max_activating import MaxActivating
from vllm_scope.saes.neuronpedia import neuronpedia_features
from vllm_scope.views import feature_page


def decode(token: int) -> str:
    return f" w{token}"


@pytest.fixture
def found():
    return table(unique(documents(7)))


def sections_of(page):
    return [part for part in page.parts() if part["kind"] == "section"]


def test_the_page_shows_the_strongest_tokens_with_their_values(found):
    page = feature_page(found, decode, labels={3: "three"}, strongest=4, title="Title")
    assert page.heading() == "Title"
    sections = sections_of(page)
    assert [one["open"] for one in sections] == [True] + [False] * (len(sections) - 1)
    assert len(sections) == NUM_FEATURES
    assert (sections[0]["title"], sections[0]["name"]) == ("3", "three")
    for section in sections:
        index = int(section["title"])
        assert section["id"] == f"feature-{index}"
        top = found.top(index)
        assert section["facts"].startswith(f"active at {found.density[index]:.3%} of tokens, at")
        assert f"at most {top[0].value:.4g}" in section["facts"]
        strips = [one for one in section["parts"] if one["kind"] == "strip"]
        assert len(strips) == min(4, len(top))
        for strip, strong in zip(strips, top, strict=False):
            assert strip["caption"] == f"{strong.value:.4g}, request {strong.label}"
            items = strip["items"]
            assert [one["text"] for one in items] == [decode(i) for i in strong.tokens.tolist()]
            for i, (item, value) in enumerate(zip(items, strong.values.tolist(), strict=True)):
                assert (item["part"] is None) == np.isnan(value)
                if item["part"] is not None:
                    assert item["part"] == pytest.approx(value / top[0].value, abs=1e-3)
                assert ("verdict" in item["marks"]) == (i == strong.at)
                assert ("strongest" in item["said"]) == (i == strong.at)
                assert item["said"].endswith(f"position {strong.position - strong.at + i}")


def test_the_bars_are_the_histogram(found):
    for section in sections_of(feature_page(found, decode)):
        index = int(section["title"])
        edges, counts = found.histogram(index)
        (bars,) = [one for one in section["parts"] if one["kind"] == "bars"]
        filled = np.flatnonzero(counts)[-1] + 1
        assert [(one["said"], one["part"]) for one in bars["bars"]] == [
            (
                f"{edges[i]:.4g} to {edges[i + 1]:.4g}: {counts[i]} tokens",
                pytest.approx(counts[i] / counts.max(), abs=1e-4),
            )
            for i in range(filled)
        ]
        assert f"{found.num_active[index]:,} tokens" in bars["said"]


def test_without_a_script_a_notebook_shows_features_that_open(found):
    page = feature_page(found, decode, labels={3: "three"}, strongest=4)
    root = read_html(page._repr_html_())
    sections = root.tagged("details")
    assert ["open" in one.attributes for one in sections] == [True] + [False] * (len(sections) - 1)
    assert sections[0].tagged("summary")[0].text.startswith("3 three active at")
    assert {each.tag for each in root.below()} == {
        "style", "p", "span", "figure", "figcaption", "div", "details", "summary", "b", "i",
    }  # fmt: skip
    shown = [text_of(token) for token in sections[0].tokens()]
    assert shown == [decode(i) for one in found.top(3)[:4] for i in one.tokens.tolist()]


def test_which_features_are_shown(found):
    shown = [one.index for one in feature_page(found, decode, features=[5, 2]).features]
    assert shown == [5, 2]
    often = [one.index for one in feature_page(found, decode, labels={4: "x", 99: "y"}).features]
    counts = found.num_active[often[1:]]
    assert often[0] == 4
    assert counts.tolist() == sorted(counts, reverse=True)
    with pytest.raises(SpecError, match="features has 12; the SAE has features 0 to 11"):
        feature_page(found, decode, features=[12])
    with pytest.raises(SpecError, match="no feature is active"):
        feature_page(MaxActivating(3), decode)


def test_neuronpedias_json_has_the_table(found):
    some = neuronpedia_features(found, decode, model="toy", source="0-res", labels={1: "one"})
    bodies = json.loads(json.dumps(list(some)))
    assert [body["index"] for body in bodies] == [str(i) for i in range(NUM_FEATURES)]
    for index, body in enumerate(bodies):
        top = found.top(index)
        assert (body["modelId"], body["layer"]) == ("toy", "0-res")
        assert body["explanations"] == ([{"description": "one"}] if index == 1 else [])
        assert body["maxActApprox"] == pytest.approx(top[0].value, abs=1e-4)
        assert body["frac_nonzero"] == found.num_active[index] / found.num_tokens
        edges, counts = found.histogram(index)
        heights, values = (body[f"freq_hist_data_bar_{name}"] for name in ("heights", "values"))
        assert heights == counts[: len(heights)].tolist()
        assert sum(heights) == found.num_active[index]
        assert values == pytest.approx((edges[1:] + edges[:-1])[: len(values)] / 2, abs=1e-4)
        assert len(values) == len(heights)
        for one, strong in zip(body["activations"], top, strict=True):
            assert one["tokens"] == [decode(i) for i in strong.tokens.tolist()]
            assert one["values"] == pytest.approx(np.nan_to_num(strong.values), abs=1e-4)
            assert one["values"][one["maxValueTokenIndex"]] == one["maxValue"] == max(one["values"])
            assert one["minValue"] == min(one["values"])
            assert one["values"][one["qualifyingTokenIndex"]] == pytest.approx(
                strong.value, abs=1e-4
            )
