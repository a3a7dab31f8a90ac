"""The token strip: what its HTML says of each token is what the data says."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.views.reading import Element, read_html
from vllm_scope.batch.readout import Verdict
from vllm_scope.errors import SpecError
from vllm_scope.views import TokenStrip, token_strip

HOSTILE = [
    "<script>alert(1)</script>", '" onfocus="alert(1)', "' x='", "&lt;b&gt;", "</span></div>",
    "<!--", "]]>", "</style>", "\x00", "\x1b[2J", "\r\n", "\n", "\t", "\u202eevil", "\ud800",
    "\u2028", "", " ", "👩\u200d👩\u200d👧", "🏴", "é", "مرحبا", "\ufffd", "{{7*7}}", "${x}", "\\n",
]  # fmt: skip
#: The elements and attributes that a fragment is made of. None loads, links or runs anything.
TAGS = {"div", "style", "p", "span", "i", "figure", "figcaption"}
ATTRIBUTES = {"class", "role", "dir", "tabindex", "title", "style", "aria-hidden"}


def read(strip: TokenStrip) -> Element:
    return read_html(strip._repr_html_())


def text_of(token: Element) -> str:
    (text,) = token.marked("text")
    return text.text


def part_of(token: Element) -> float | None:
    """Where its colour is, -1 to 1; None without a colour."""
    style = token.attributes.get("style")
    return None if style is None else float(style.removeprefix("--p:"))


def test_tokens_values_and_marks_are_those_of_the_data():
    tokens = ["The", " lie", " ends", " here", "."]
    scores = torch.tensor([0.5, 0.1, 0.75, 1.0])
    tokens = read(token_strip(tokens, scores, threshold=0.5, verdict=2)).tokens()
    assert [text_of(token) for token in tokens] == ["The", " lie", " ends", " here", "."]
    assert [token.attributes["title"] for token in tokens] == [
        "0.5, not above the threshold, position 0",
        "0.1, not above the threshold, position 1",
        "0.75, above the threshold, verdict, position 2",
        "1, above the threshold, position 3",
        "no score, position 4",
    ]
    assert [sorted(token.marks - {"t"}) for token in tokens] == [
        ["scored"], ["scored"], ["above", "scored", "verdict"], ["above", "scored"], ["unscored"],
    ]  # fmt: skip
    assert [part_of(token) for token in tokens] == [0, -0.8, 0.5, 1, None]


def test_each_token_has_the_focus_in_turn_and_its_value_is_text_in_it():
    tokens = read(token_strip(["a", "b", "c"], [1, None, 3], verdict=0)).tokens()
    for token in tokens:
        assert token.attributes["tabindex"] == "0"
        (value,) = token.marked("value")
        assert value.text.strip() == token.attributes["title"]
        assert "aria-hidden" not in value.attributes
    assert [len(token.marked("flag")) for token in tokens] == [1, 0, 0]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(lambda v: v, id="list"),
        pytest.param(np.array, id="float64"),
        pytest.param(lambda v: np.array(v, np.float32), id="float32"),
        pytest.param(torch.tensor, id="torch"),
        pytest.param(lambda v: [None if math.isnan(x) else x for x in v], id="None"),
    ],
)
def test_scores_of_every_kind_are_the_same(kind):
    strip = token_strip(list("abcd"), kind([0.25, math.nan, -1.5, math.inf]))
    said = [token.attributes["title"] for token in read(strip).tokens()]
    assert said == [f"{v}, position {i}" for i, v in enumerate(["0.25", "no score", "-1.5", "inf"])]
    assert [part_of(token) for token in read(strip).tokens()] == [0.167, None, -1, 1]


def test_a_token_is_above_the_threshold_as_the_engine_judges_it():
    # float32(0.1) is more than 0.1, and the engine compares float32.
    strip = token_strip(
        ["a", "b"], np.float32([0.1, np.nextafter(np.float32(0.1), 1)]), threshold=0.1
    )
    assert ["above" in token.marks for token in read(strip).tokens()] == [False, True]


@pytest.mark.parametrize(
    "verdict",
    [
        pytest.param(8, id="position"),
        pytest.param(np.int64(8), id="numpy"),
        pytest.param(torch.tensor(8), id="torch"),
        pytest.param(Verdict(8, 0.9), id="result"),
        pytest.param(SimpleNamespace(position=8), id="client"),
    ],
)
def test_a_verdict_is_at_a_position_of_the_request(verdict):
    strip = token_strip(["a", "b", "c"], [0, 1, 2], verdict=verdict, first_position=7)
    tokens = read(strip).tokens()
    assert ["verdict" in token.marks for token in tokens] == [False, True, False]
    assert tokens[1].attributes["title"] == "1, verdict, position 8"


@pytest.mark.parametrize("scores", [[], [None, None], [0.5, 0.5]], ids=["none", "nan", "equal"])
def test_scores_without_a_spread_have_the_middle_colour(scores):
    strip = token_strip(["a"] * len(scores), scores, threshold=0.5)
    assert {part_of(token) for token in read(strip).tokens()} <= {None, 0}


@example(HOSTILE, "".join(HOSTILE))
@given(st.lists(st.text(st.characters(), max_size=8), max_size=5), st.text(st.characters()))
def test_no_text_becomes_markup_and_no_control_character_is_left(texts, caption):
    strip = token_strip(texts, [0.5] * len(texts), threshold=0.2, caption=caption)
    html = strip._repr_html_()
    assert all(c.isprintable() or c == "\n" for c in html)
    root = read_html(html)
    assert {each.tag for each in root.below()} <= TAGS
    assert {name for each in root.below() for name in each.attributes} <= ATTRIBUTES
    for text, token in zip(texts, root.tokens(), strict=True):
        assert text_of(token).count("⏎") == text.count("\n") + text.count("⏎")
        if text and text.isprintable():
            assert text_of(token) == text


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\n", "a⏎"), ("\r\n", "\\r⏎"), ("\n\n", "⏎\n⏎"), ("\u202eb", "\\u202eb"),
        ("\x1b[2J", "\\x1b[2J"), ("\ud800", "\\ud800"), ("👩\u200d👧", "👩\\u200d👧"), ("", "∅"),
        (" é", " é"), ("<b>", "<b>"), (" ", " "), ("\u2028", "\\u2028"), ("\x00", "\\x00"),
    ],
)  # fmt: skip
def test_what_is_not_printed_is_shown_as_a_sign(text, seen):
    root = read(token_strip([text], [1]))
    (token,) = root.tokens()
    assert text_of(token) == seen
    # A line ends behind the token, not in its frame.
    (line,) = root.marked("tokens")
    assert line.text.endswith("\n") == text.endswith("\n")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        pytest.param(("text", [1]), "tokens is 'text'; it must be a list of texts", id="one-text"),
        pytest.param(
            ([17, 4], [1, 2]),
            r"tokens is \[17, 4\]; it must be a list of texts",
            id="ids",
        ),
        pytest.param((["a"], ["x"]), r"scores are \['x'\]; pass a list of numbers", id="words"),
        pytest.param(
            (["a"], [[1.0]]), r"shape \[1, 1\]; 1 tokens have 1 scores, or 0", id="matrix"
        ),
        pytest.param((["a"] * 3, [1]), r"shape \[1\]; 3 tokens have 3 scores, or 2", id="short"),
        pytest.param((["a"], [1, 2]), r"shape \[2\]; 1 tokens have 1", id="long"),
    ],
)
def test_tokens_and_scores_that_do_not_fit_are_refused(given, sentence):
    with pytest.raises(SpecError, match=sentence):
        token_strip(*given)


@pytest.mark.parametrize("verdict", [6, 9])
def test_a_verdict_at_no_token_is_refused(verdict):
    with pytest.raises(SpecError, match=f"position {verdict}; the 2 tokens begin at position 7"):
        token_strip(["a", "b"], [1, 2], verdict=verdict, first_position=7)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("threshold", math.nan, "threshold is nan; it must be finite"),
        ("threshold", "high", "threshold is 'high'; it must be a number"),
        ("verdict", 0.7, "verdict is 0.7; pass a position or a Verdict"),
    ],
)
def test_a_threshold_or_verdict_of_another_kind_is_refused(name, value, sentence):
    with pytest.raises(SpecError, match=sentence):
        token_strip(["a"], [1], **{name: value})
