"""A page of features shows the numbers of the table, and no text becomes markup."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.unit.saes.test_max_activating import NUM_FEATURES, documents, table, unique
from tests.unit.views.reading import read_html
from tests.unit.views.test_strip import HOSTILE, part_of, text_of
from vllm_scope.errors import SpecError
from vllm_scope.saes.max_activating import MaxActivating
from vllm_scope.saes.neuronpedia import neuronpedia_features
from vllm_scope.views import feature_page


def decode(token: int) -> str:
    return f" w{token}"


@pytest.fixture
def found():
    return table(unique(documents(7)))


def saved(page, path):
    page.save(path)
    return read_html(path.read_text(encoding="utf-8").removeprefix("<!doctype html>"))


def test_the_page_shows_the_strongest_tokens_with_their_values(found, tmp_path):
    page = feature_page(found, decode, labels={3: "three"}, strongest=4, title="Title")
    root = saved(page, tmp_path / "p.html")
    assert root.tagged("h1")[0].text == "Title"
    sections = root.tagged("details")
    assert ["open" in one.attributes for one in sections] == [True] + [False] * (len(sections) - 1)
    assert len(sections) == NUM_FEATURES
    assert sections[0].attributes["id"] == "feature-3"
    assert sections[0].tagged("summary")[0].text.startswith("3 three active at")
    for section in sections:
        index = int((section.attributes["id"] or "").removeprefix("feature-"))
        top = found.top(index)
        (summary,) = section.tagged("summary")
        assert f"active at {found.density[index]:.3%} of tokens" in summary.text
        assert f"at most {top[0].value:.4g}" in summary.text
        strips = [one for one in section.tagged("figure") if "bars" not in one.marks]
        assert len(strips) == min(4, len(top))
        for strip, strong in zip(strips, top, strict=False):
            caption = strip.tagged("figcaption")[0].text
            assert caption == f"{strong.value:.4g}, request {strong.label}"
            tokens = strip.tokens()
            assert [text_of(one) for one in tokens] == [decode(i) for i in strong.tokens.tolist()]
            for i, (token, value) in enumerate(zip(tokens, strong.values.tolist(), strict=True)):
                part = part_of(token)
                assert (part is None) == np.isnan(value)
                if part is not None:
                    assert part == pytest.approx(value / top[0].value, abs=1e-3)
                assert ("verdict" in token.marks) == (i == strong.at)
                said = token.attributes["title"] or ""
                assert ("strongest" in said) == (i == strong.at)
                assert said.endswith(f"position {strong.position - strong.at + i}")
                assert token.attributes["tabindex"] == "0"


def test_the_bars_are_the_histogram(found, tmp_path):
    root = saved(feature_page(found, decode), tmp_path / "p.html")
    for section in root.tagged("details"):
        index = int((section.attributes["id"] or "").removeprefix("feature-"))
        edges, counts = found.histogram(index)
        bars = section.tagged("rect")
        assert len(bars) == np.flatnonzero(counts)[-1] + 1
        for i, bar in enumerate(bars):
            wanted = f"{edges[i]:.4g} to {edges[i + 1]:.4g}: {counts[i]} tokens"
            assert bar.text == wanted
            height = float(bar.attributes["height"] or "")
            assert height == pytest.approx(80 * counts[i] / counts.max(), abs=0.01)
            assert height + float(bar.attributes["y"] or "") == pytest.approx(80, abs=0.02)
        (picture,) = section.tagged("svg")
        assert f"{found.num_active[index]:,} tokens" in (picture.attributes["aria-label"] or "")


def test_no_text_is_markup_and_nothing_comes_from_elsewhere(tmp_path):
    made = MaxActivating(len(HOSTILE), 2, 1, 1)
    for i, text in enumerate(HOSTILE):
        label = text.encode("utf-8", "replace").decode()
        made.add(label, [i, i], np.arange(2), np.full((2, 1), i, np.int32),
                 np.ones((2, 1), np.float32))  # fmt: skip
    bad = "".join(HOSTILE)
    page = feature_page(
        made, lambda i: HOSTILE[i], title=bad, intro=[bad], labels=dict(enumerate(HOSTILE))
    )
    root = saved(page, tmp_path / "p.html")
    assert {each.tag for each in root.below()} == {
        "html", "head", "meta", "title", "style", "body", "h1", "p", "span", "figure", "figcaption",
        "div", "details", "summary", "b", "q", "svg", "rect",
    }  # fmt: skip
    assert len(root.tagged("details")) == len(HOSTILE)
    named = {name for each in root.below() for name in each.attributes}
    assert not [n for n in named if n.startswith("on") or n in ("src", "href", "srcset", "action")]
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert not re.search(r"//|url\(|@import|@font-face", text)
    assert page.body() in page._repr_html_()


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
