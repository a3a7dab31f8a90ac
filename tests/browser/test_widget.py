"""The module as a notebook uses it: `render` draws a model, and draws it again when it changes."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from tests.browser import samples
from tests.browser.browser import Browser
from tests.browser.samples import TEXTS
from tests.browser.test_views import CELLS, TOKENS, TOLD
from tests.unit.sweeps.test_plans import METRIC, answer, plan
from vllm_scope import Sweep
from vllm_scope.engine.frontend.sweep_runs import showing
from vllm_scope.views import attention_map, feature_page, token_strip
from vllm_scope.views.document import MODULE, STYLE, View

#: What anywidget does with the module: its default export renders a model into an element.
HARNESS = """
const listeners = new Set();
window.model = {
  view: null,
  get(name) { return this[name]; },
  on(event, listener) { listeners.add(listener); },
  off(event, listener) { listeners.delete(listener); },
  set(view) { this.view = view; for (const listener of listeners) listener(); },
};
window.start = view => {
  window.model.view = view;
  window.end = render({ model: window.model, el: document.querySelector("#output") });
};
"""


@pytest.fixture
def notebook(browser: Browser, tmp_path: Path) -> Browser:
    """A page with the module, its style and the place of an output."""
    script = MODULE.read_text(encoding="utf-8") + HARNESS
    style = STYLE.read_text(encoding="utf-8")
    (tmp_path / "notebook.html").write_text(
        f"<!doctype html><meta charset='utf-8'><style>{style}</style><div id='output'></div>"
        f"<script type='module'>{script}</script>",
        encoding="utf-8",
    )
    browser.open(tmp_path / "notebook.html")
    return browser


def start(notebook: Browser, view: View) -> None:
    notebook.run("window.start(JSON.parse(arguments[0]))", json.dumps(view.data()))


def change(notebook: Browser, view: View) -> None:
    notebook.run("window.model.set(JSON.parse(arguments[0]))", json.dumps(view.data()))


def test_tokens_are_added_while_an_answer_streams_and_the_focus_stays(notebook):
    start(notebook, token_strip([], []))
    assert notebook.run(TOKENS) == []
    assert notebook.run("return document.querySelector('#output').dataset.lmSuppressShortcuts")
    for count in range(1, len(TEXTS) + 1):
        change(notebook, streamed(count))
        assert len(notebook.run(TOKENS)) == count
        if count == 5:
            notebook.press("Tab", "ArrowRight", "ArrowRight")
    assert notebook.run(TOLD) == "0.5, not above the threshold, position 2"
    notebook.press("End")
    assert notebook.run(TOLD) == "no score, position 8"


def streamed(count: int):
    return token_strip(TEXTS[:count], samples.SCORES[:count], threshold=0.5)


def test_cells_fill_while_they_arrive(notebook):
    table = samples.sweep_table()
    values = table.values.copy()
    table.values[:] = np.nan
    start(notebook, table.picture())
    assert {text for row in notebook.run(CELLS) for text in row[1:]} == {""}
    notebook.press("Tab", "ArrowDown", "ArrowRight")
    for index in np.ndindex(2, 3):
        table.values[0][index] = values[0][index]
    change(notebook, table.picture())
    cells = notebook.run(CELLS)
    assert cells[0][1:4] == [f"{value:.3g}" for value in values[0, 0, :3]]
    assert cells[0][4] == ""
    assert notebook.run(TOLD) == f"layer 2, position 1 :: {values[0, 1, 1]:.3g}"


def test_what_is_chosen_and_open_stays_so(notebook):
    weights = samples.attention()
    start(notebook, attention_map(weights))
    notebook.press("Tab", "ArrowDown")
    change(notebook, attention_map(1 - weights))
    assert notebook.run("return document.querySelector('select').selectedIndex") == 1
    assert notebook.run(CELLS)[0][1] == f"{1 - weights[1, 0, 0]:.3f}"
    assert notebook.run("return document.activeElement.tagName") == "SELECT"
    found = samples.max_activating()
    for draw in (start, change):
        draw(notebook, feature_page(found, str, features=[3, 5]))
        notebook.run("document.querySelectorAll('details')[1].open = true")
        opened = "[...document.querySelectorAll('details')].map(one => one.children.length > 1)"
        notebook.until(f"return {opened}.every(filled => filled)")


def test_another_kind_of_view_takes_the_place_of_the_first(notebook):
    start(notebook, attention_map(samples.attention()))
    notebook.press("Tab", "ArrowDown")
    change(notebook, streamed(3))
    assert len(notebook.run(TOKENS)) == 3
    assert notebook.run("return document.querySelector('select')") is None


def test_an_output_that_is_gone_is_drawn_no_more(notebook):
    start(notebook, streamed(2))
    notebook.run("window.end()")
    change(notebook, streamed(3))
    assert len(notebook.run(TOKENS)) == 2


def test_a_widget_has_the_view_and_shows_another():
    pytest.importorskip("anywidget", reason="anywidget is not installed, so there is no widget.")
    widget = streamed(2).widget()
    state = widget.get_state()
    assert state["_esm"] == MODULE.read_text(encoding="utf-8")
    assert state["_css"] == STYLE.read_text(encoding="utf-8")
    assert state["view"] == streamed(2).data()
    sent = []
    widget.observe(lambda change: sent.append(change["new"]), "view")
    widget.show(streamed(3))
    assert sent == [streamed(3).data()]


def test_a_sweep_fills_its_map(monkeypatch):
    pytest.importorskip("anywidget", reason="anywidget is not installed, so there is no widget.")
    from vllm_scope.views.widget import ScopeWidget

    shown: list[object] = []
    seconds = itertools.count(step=0.02)
    monkeypatch.setattr("IPython.display.display", shown.append)
    monkeypatch.setattr("vllm_scope.views.widget.time.monotonic", lambda: next(seconds))
    made = plan(Sweep(["xyzxyzxyz"], metric=METRIC), ["abcabcabc"])
    drawn = []
    with showing(made, "map") as count:
        (widget,) = shown
        assert isinstance(widget, ScopeWidget)
        assert widget.view == made.table.picture().data()
        widget.observe(lambda change: drawn.append(change["new"]), "view")
        for job in made.jobs():
            answer(made, job)
            count()
        assert 1 < len(drawn) < made.num_cells / 2
    assert drawn[-1] == made.table.picture().data()
    assert not np.isnan(made.table.values).any()


def test_a_page_of_ones_own_imports_the_module(window, tmp_path):
    """As docs/views.md shows."""
    for file in (MODULE, STYLE):
        shutil.copy(file, tmp_path)
    data = json.dumps(streamed(3).data()).replace("<", "\\u003c")
    (tmp_path / "own.html").write_text(
        "<!doctype html><link rel='stylesheet' href='scope.css'><link rel='icon' href='data:,'>"
        "<div id='mine'></div><script type='module'>import { draw } from './scope.js';"
        f"draw(document.querySelector('#mine'), {data}, new Map())</script>"
    )
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            window.forget()
            window.load(f"http://127.0.0.1:{server.server_port}/own.html")
            assert window.run(TOKENS) == TEXTS[:3]
            assert window.complaints() == []
        finally:
            server.shutdown()
            thread.join()
