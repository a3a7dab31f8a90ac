"""Texts of models and users are never markup or script in a browser, and a page loads nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.browser import samples
from tests.browser.browser import Browser
from tests.browser.samples import HOSTILE, Tokenizer
from vllm_scope.harvests.manifest import HarvestManifest
from vllm_scope.saes.max_activating import MaxActivating
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
from vllm_scope.views.document import View
from vllm_scope.views.harvest import HarvestPage

BAD = "".join(HOSTILE)
#: All that a view is made of. None loads, links or runs anything.
TAGS = {
    "MAIN", "P", "H2", "H3", "SPAN", "I", "B", "FIGURE", "FIGCAPTION", "DIV", "OL", "LI", "TABLE",
    "THEAD", "TBODY", "TR", "TH", "TD", "DETAILS", "SUMMARY", "SECTION", "LABEL", "SELECT",
    "OPTION",
}  # fmt: skip
ATTRIBUTES = {
    "class", "role", "dir", "aria-label", "aria-orientation", "aria-hidden", "aria-readonly",
    "tabindex", "style", "title", "scope", "colspan", "id", "open", "value", "data-key",
}  # fmt: skip
ALL = "[document.querySelector('main'), ...document.querySelectorAll('main *')]"


def features() -> MaxActivating:
    made = MaxActivating(len(HOSTILE), 2, 1, 1)
    for i, text in enumerate(HOSTILE):
        label = text.encode("utf-8", "replace").decode()
        made.add(label, [i, i], np.arange(2), np.full((2, 1), i, np.int32),
                 np.ones((2, 1), np.float32))  # fmt: skip
    return made


def harvest() -> HarvestPage:
    empty = dict.fromkeys(("rows", "rows_not_finite", "norm_of_mean"), 1)
    norm = dict.fromkeys(("mean", "sd", "min", "max"), 1.0)
    variance = dict.fromkeys(("total", "median", "max"), 1.0)
    outliers = {"values": 1, "rows": 1, "dimensions": {BAD: 1}}
    stream = {**empty, "norm": norm, "variance": variance, "outliers": outliers}
    manifest = SimpleNamespace(
        dataset=BAD, totals={BAD: 1}, streams={BAD: stream}, settings={BAD: BAD}, complete=True,
        runs=[SimpleNamespace(started=BAD, versions={BAD: BAD})], shards={},
    )  # fmt: skip
    assert set(vars(manifest)) <= set(HarvestManifest.__struct_fields__)
    return HarvestPage(manifest)


VIEWS: dict[str, View] = {
    "strip": token_strip(HOSTILE, [0.1] * len(HOSTILE), caption=BAD),
    "page": token_page(BAD, {BAD: [token_strip(HOSTILE, [0.1] * len(HOSTILE))]}, intro=[BAD]),
    "side": side_by_side(HOSTILE, HOSTILE[::-1], names=(BAD, BAD), title=BAD),
    "map": samples.sweep_table(HOSTILE).picture(),
    "lens": lens_grid(samples.lens(), tokenizer=Tokenizer(HOSTILE), tokens=HOSTILE),
    "features": feature_list(
        samples.features(), tokens=HOSTILE, labels=dict(enumerate(HOSTILE))
    ),
    "attention": attention_map(samples.attention(), tokens=HOSTILE),
    "feature-page": feature_page(
        features(), lambda i: HOSTILE[i], title=BAD, intro=[BAD], labels=dict(enumerate(HOSTILE))
    ),
    "harvest": harvest(),
    "monitors": monitor_page(samples.activity(BAD, BAD), title=BAD),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_no_text_becomes_markup_and_no_request_leaves_the_page(browser, tmp_path, view):
    path = tmp_path / "view.html"
    view.save(path)
    browser.open(path)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.until("return [...document.querySelectorAll('details')].every(d => d.children[1])")
    for key in ("Tab", "Tab", "ArrowRight", "Tab", "ArrowRight", "Enter"):
        browser.press(key)
    assert set(browser.run(f"return {ALL}.map(each => each.tagName)")) <= TAGS
    named = browser.run(f"return {ALL}.flatMap(each => each.getAttributeNames())")
    assert set(named) <= ATTRIBUTES
    assert len(browser.run("return [...document.scripts].map(each => each.type)")) == 2
    assert browser.run("return window.ran ?? null") is None
    text = browser.run("return document.body.textContent")
    assert not [c for c in text if not c.isprintable() and c != "\n" and c not in "\u2028"]
    shown = browser.run("return document.querySelector('main').textContent")
    assert "window.ran" in shown  # the text is there, as text
    assert browser.requests() == [path.as_uri()]
    assert browser.complaints() == []


def _loading(path: Path, policy: str = "") -> None:
    """A page that tries to run a script and to load a picture."""
    path.with_name("there.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    path.write_text(
        f"<!doctype html><head>{policy}</head><script>window.ran = 1</script>"
        "<img src='there.svg' onload='window.ran = 2'>"
    )


def test_a_request_would_be_seen(window: Browser, tmp_path):
    """What the tests above look for is found where there is something to find."""
    _loading(tmp_path / "page.html")
    window.forget()
    window.open(tmp_path / "page.html")
    window.until("return window.ran == 2")
    assert (tmp_path / "there.svg").as_uri() in window.requests()


def test_a_page_forbids_every_other_script_and_every_load(window: Browser, tmp_path):
    html = VIEWS["strip"].page()
    policy = html[html.index("<meta http-equiv") : html.index("<meta name=")]
    _loading(tmp_path / "page.html", policy)
    window.forget()
    window.open(tmp_path / "page.html")
    assert window.run("return window.ran ?? null") is None
    said = [message for message in window.complaints() if "Content Security Policy" in message]
    assert any("there.svg" in message for message in said)
    assert any("script" in message for message in said)


def test_data_of_another_program_are_drawn_as_text(window: Browser, tmp_path):
    """Somebody else's JSON has the fields, and texts without signs for control characters."""
    item = {"text": BAD, "part": None, "said": BAD, "marks": []}
    cell = {"text": BAD, "part": 0.5, "more": [{"text": BAD, "part": 1}]}
    parts = [
        {"kind": "text", "text": BAD},
        {"kind": "strip", "caption": BAD, "items": [item]},
        {"kind": "grid", "caption": BAD, "titles": [BAD, BAD], "rows": [BAD], "columns": [BAD],
         "cells": [[cell]]},
    ]  # fmt: skip
    page = VIEWS["strip"].page()
    first, last = page.index('vllm-scope-data">') + len('vllm-scope-data">'), page.index("</script")
    data = json.dumps({"parts": parts}).replace("<", "\\u003c")
    (tmp_path / "page.html").write_text(page[:first] + data + page[last:], encoding="utf-8")
    window.forget()
    window.open(tmp_path / "page.html")
    window.press("Tab", "Tab")
    assert set(window.run(f"return {ALL}.map(each => each.tagName)")) <= TAGS
    assert window.run("return window.ran ?? null") is None
    told = "document.querySelector('.told ol').textContent"
    assert window.run(f"return {told}.includes(arguments[0])", HOSTILE[0])
    assert window.complaints() == []
