"""A page of strips: one scale, one legend, nothing from elsewhere, and colours that can be read."""

from __future__ import annotations

import base64
import hashlib
import re

import numpy as np
import pytest

from tests.unit.views.reading import data_of, read_html, read_page
from tests.unit.views.test_strip import HOSTILE, part_of
from vllm_scope.errors import SpecError
from vllm_scope.views import token_page, token_strip
from vllm_scope.views.document import MODULE, STYLE


def strip(scores, threshold=0.5, caption=""):
    return token_strip(["a"] * len(scores), scores, threshold=threshold, caption=caption)


@pytest.fixture
def saved(tmp_path):
    def save(view):
        view.save(tmp_path / "page.html")
        return (tmp_path / "page.html").read_text(encoding="utf-8")

    return save


def test_a_colour_is_the_same_score_in_every_strip_and_the_legend_says_which():
    page = token_page("Title", [strip([0.5, 1.0]), strip([0.5, 2.5, -0.5])])
    root = read_html(page._repr_html_())
    assert [part_of(token) for token in root.tokens()] == [0, 0.25, 0, 1, -0.5]
    (legend,) = root.marked("legend")
    assert "-1.5" in legend.text
    assert "2.5: the middle is the threshold, 0.5" in legend.text


def test_headings_captions_and_strips_are_in_their_order(saved):
    groups = {
        "One": [strip([1], caption="first"), strip([2])],
        "Two": [strip([3], caption="third")],
    }
    page = token_page("Title", groups, intro=["A word.", "Another."])
    root = read_html(page._repr_html_())
    assert [(each.tag, each.text) for each in root.below() if each.tag in ("h2", "figcaption")] == [
        ("h2", "One"), ("figcaption", "first"), ("h2", "Two"), ("figcaption", "third"),
    ]  # fmt: skip
    assert [p.text for p in root.tagged("p")][:2] == ["A word.", "Another."]
    assert [t.attributes["title"][0] for t in root.tokens()] == ["1", "2", "3"]
    named = [each for each in read_page(saved(page)).below() if each.tag in ("title", "h1")]
    assert [each.text for each in named] == ["Title", "Title"]


def test_a_file_has_the_data_of_the_view(saved):
    page = token_page("Title", [strip([1])])
    assert data_of(saved(page)) == page.data()
    one = strip([1], caption="Mira")
    assert read_page(saved(one)).tagged("title")[0].text == "Mira"
    assert data_of(saved(one)) == one.data()


def test_nothing_refers_to_the_network_and_no_text_is_markup(saved):
    bad = "".join(HOSTILE)
    tokens = token_strip(HOSTILE, [0.1] * len(HOSTILE), threshold=0, caption=bad)
    view = token_page(bad, {bad: [tokens]}, intro=[bad])
    page = saved(view)
    root = read_page(page)
    assert {each.tag for each in root.below()} == {
        "html", "head", "meta", "title", "style", "body", "h1", "noscript", "script",
    }  # fmt: skip
    static = read_html(view._repr_html_())
    assert {each.tag for each in static.below()} == {
        "div", "style", "p", "span", "i", "h2", "figure", "figcaption",
    }  # fmt: skip
    for found in (root, static):
        named = {name for each in found.below() for name in each.attributes}
        assert not [n for n in named if n.startswith("on") or n in ("src", "href", "srcset")]
    assert data_of(page) == view.data()
    assert not re.search(r"https?:|url\(|@import|@font-face|import\(|fetch|XMLHttp", page)


def test_a_page_allows_one_script_by_its_hash_and_no_load(saved):
    root = read_page(saved(strip([1])))
    policy = [m.attributes for m in root.tagged("meta") if "http-equiv" in m.attributes]
    assert [each["http-equiv"] for each in policy] == ["Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy[0]["content"].split("; "))
    (script,) = [s for s in root.tagged("script") if s.attributes["type"] == "module"]
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    assert rules == {
        "default-src": "'none'", "style-src": "'unsafe-inline'",
        "script-src": f"'sha256-{digest}'",
    }  # fmt: skip


def test_the_module_makes_no_markup_of_text_and_does_not_end_its_element():
    module = MODULE.read_text(encoding="utf-8")
    assert "</script" not in module
    assert "<!--" not in module
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", module
    )


@pytest.mark.parametrize("strips", [[], {}, {"a": []}, [strip([1]), strip([1], threshold=0.6)]])
def test_a_page_needs_one_threshold(strips):
    with pytest.raises(SpecError, match=r"the strips have [02] thresholds; a page has one legend"):
        token_page("Title", strips)


# --- Colours ---

_TO_LMS = np.array(
    [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
     [0.0883024619, 0.2817188376, 0.6299787005]]
)  # fmt: skip


def linear(colour: str) -> np.ndarray:
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def mixed(one: np.ndarray, other: np.ndarray, part: float) -> np.ndarray:
    """In oklab, which is linear in the cube roots of LMS, as `color-mix` does."""
    roots = np.cbrt(_TO_LMS @ one) * (1 - part) + np.cbrt(_TO_LMS @ other) * part
    return np.linalg.solve(_TO_LMS, roots**3)


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    luminances = sorted(np.array([0.2126, 0.7152, 0.0722]) @ each for each in (one, other))
    return (luminances[1] + 0.05) / (luminances[0] + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_on_every_colour(theme):
    pairs = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", STYLE.read_text())
    colours = {name: linear(dark if theme == "dark" else light) for name, light, dark in pairs}
    for end in ("low", "high"):
        for part in np.linspace(0, 1, 21):
            assert contrast(colours["ink"], mixed(colours["mid"], colours[end], part)) >= 4.5
    assert contrast(colours["ink"], colours["paper"]) >= 7
    assert contrast(colours["muted"], colours["paper"]) >= 4.5


def test_a_page_is_no_picture_file(tmp_path):
    with pytest.raises(SpecError, match=r"strip\.png'; a page's name must end in \.html"):
        token_strip(["a"], [1.0]).save(tmp_path / "strip.png")
