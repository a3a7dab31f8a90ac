"""Without a script, each view is HTML of a few elements, and no text in it is markup."""

from __future__ import annotations

import importlib.util

import pytest

from tests.browser.test_inert import VIEWS
from tests.unit.views.reading import read_html
from vllm_scope.errors import ConfigError
from vllm_scope.views import token_strip

TAGS = {
    "div", "style", "p", "span", "i", "b", "h2", "h3", "figure", "figcaption", "table", "tr", "th",
    "td", "details", "summary",
}  # fmt: skip
ATTRIBUTES = {
    "class", "role", "dir", "tabindex", "title", "style", "aria-hidden", "scope", "colspan", "open",
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_no_text_becomes_markup(view):
    html = view._repr_html_()
    assert all(c.isprintable() or c == "\n" for c in html)
    root = read_html(html)
    assert {each.tag for each in root.below()} <= TAGS
    assert {name for each in root.below() for name in each.attributes} <= ATTRIBUTES
    assert "window.ran" in root.text


@pytest.mark.skipif(importlib.util.find_spec("anywidget") is not None, reason="anywidget is there")
def test_a_widget_without_anywidget_says_what_to_install():
    with pytest.raises(ConfigError, match=r"pip install 'vllm-scope\[notebook\]'"):
        token_strip(["a"], [1]).widget()
