"""What a saved page shows in a browser is what the results hold, for the eye, the keyboard and
screen readers, in light and in dark."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.browser import samples
from tests.browser.browser import Browser
from tests.browser.samples import SCORES, TEXTS
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
from vllm_scope.views.monitors import time_of

CELLS = """return [...document.querySelectorAll("tbody tr")].map(row =>
  [...row.cells].map(cell => cell.textContent))"""
TOKENS = "return [...document.querySelectorAll('.tokens .text')].map(t => t.textContent)"
PARTS = """return [...document.querySelectorAll(arguments[0])].map(item =>
  item.classList.contains("scored") ? Number(item.style.getPropertyValue("--p")) : null)"""
SAID = """return [...document.querySelectorAll(arguments[0])].map(item =>
  item.getAttribute("aria-label"))"""
BOXES = """return [...document.querySelectorAll(arguments[0])].map(item =>
  item.getBoundingClientRect())"""
MARKED = """return [...document.querySelectorAll(".tokens .t")].flatMap((item, i) =>
  item.classList.contains(arguments[0]) ? [i] : [])"""
TOLD = "return document.activeElement.closest('figure').querySelector('.told').innerText"


@pytest.fixture
def shown(browser: Browser, tmp_path: Path):
    """Save a view and load it; at the end, nothing was loaded beside it and nothing went wrong."""
    paths = []

    def show(view: View) -> Browser:
        path = tmp_path / f"view{len(paths)}.html"
        paths.append(path)
        view.save(path)
        browser.open(path)
        return browser

    yield show
    assert browser.requests() == [path.as_uri() for path in paths]
    assert browser.complaints() == []


def seen(text: str) -> str:
    return text.replace("\n", "⏎")


def said_of_token(i: int) -> str:
    score = SCORES[i]
    if math.isnan(score):
        return f"no score, position {i}"
    above = "above" if score > 0.5 else "not above"
    verdict = ", verdict" if i == 4 else ""
    return f"{score:.4g}, {above} the threshold{verdict}, position {i}"


def test_a_strip_shows_each_token_and_tells_its_score(shown):
    browser = shown(samples.strip())
    assert browser.run(TOKENS) == list(map(seen, TEXTS))
    spread = 2.5 - 0.5
    wanted = [
        None if math.isnan(s) else pytest.approx((s - 0.5) / spread, abs=1e-3) for s in SCORES
    ]
    assert browser.run(PARTS, ".tokens .t") == wanted
    assert browser.run(MARKED, "verdict") == [4]
    assert browser.run(MARKED, "above") == [3, 4, 7]
    spoken = [name for role, name in browser.spoken() if role == "option"]
    assert spoken == [f"{seen(text)}: {said_of_token(i)}" for i, text in enumerate(TEXTS)]
    assert ("listbox", "Answer of Mira") in browser.spoken()


def test_keys_go_from_token_to_token_and_tab_to_the_next_strip(shown):
    page = token_page("Two", [samples.strip(), samples.strip(TEXTS * 40)])
    browser = shown(page)
    browser.press("Tab")
    for i in [0, 1, 2]:
        assert browser.run(TOLD) == said_of_token(i)
        browser.press("ArrowRight")
    browser.press("ArrowLeft", "End")
    assert browser.run(TOLD) == said_of_token(8)
    browser.press("ArrowRight")  # there is no next one
    assert browser.run(TOLD) == said_of_token(8)
    browser.press("Home")
    assert browser.run(TOLD) == said_of_token(0)
    assert browser.run("return document.querySelectorAll('[tabindex=\"0\"]').length") == 2
    browser.press("ArrowRight", "Tab")
    assert browser.run("return document.activeElement.closest('figure').dataset.key") == "strip2"
    place = "const b = document.activeElement.getBoundingClientRect(); return [b.left, b.top]"
    browser.press("ArrowRight", "ArrowRight")
    left, top = browser.run(place)
    browser.press("ArrowDown")
    below = browser.run(place)
    assert below[1] > top
    assert abs(below[0] - left) < 60
    browser.press("ArrowUp")
    assert browser.run(place) == [left, top]


def test_the_pointer_tells_as_the_keyboard_does(shown):
    browser = shown(samples.strip())
    browser.point(".tokens .t:nth-child(3)")
    assert browser.run("return document.querySelector('.told').textContent") == said_of_token(2)


def test_a_heat_map_shows_every_cell_of_the_table(shown, browser, tmp_path):
    table = samples.sweep_table()
    path = tmp_path / "map.html"
    table.save(path)
    assert 'class="vllm-scope-data"' in path.read_text(encoding="utf-8")
    shown(table.picture())
    values = table.values[0]
    text = [["" if math.isnan(v) else f"{v:.3g}" for v in row] for row in values]
    assert browser.run(CELLS) == [
        [f"{layer}", *row] for layer, row in zip(table.layers, text, strict=True)
    ]
    spread = np.nanmax(np.abs(values - 0.125))
    parts = browser.run(PARTS, "tbody td")
    for part, value in zip(parts, values.ravel(), strict=True):
        if math.isnan(value):
            assert part is None
        else:
            assert part == pytest.approx((value - 0.125) / spread, abs=1e-3)
    told = [
        f"layer {layer}, position {i} {name}: {text[r][i] or 'no value'}"
        for r, layer in enumerate(table.layers)
        for i, name in enumerate(map(seen, TEXTS))
    ]
    spoken = browser.spoken()
    cells = [name for role, name in spoken if role == "gridcell"]
    assert cells == [" ".join(one.split()) for one in told]  # a name has no two spaces together
    assert [name for role, name in spoken if role == "rowheader"] == ["0", "2", "5"]
    browser.press("Tab")
    for keys, (r, c) in {
        "ArrowRight": (0, 1), "ArrowDown": (1, 1), "End": (1, 8), "ArrowUp": (0, 8),
        "Control+End": (2, 8), "Home": (2, 0), "Control+Home": (0, 0), "ArrowLeft": (0, 0),
    }.items():  # fmt: skip
        browser.press(keys)
        assert browser.run(TOLD) == told[r * 9 + c]


def test_a_lens_grid_shows_the_likeliest_tokens_by_layer_and_position(shown):
    found, words = samples.lens(), samples.Tokenizer([f" w{i}" for i in range(12)])
    browser = shown(lens_grid(found, tokenizer=words, tokens=TEXTS))

    def best(layer: int, position: int) -> str:
        if position >= len(found[layer]):
            return ""
        return repr(words.decode([found[layer].top(position)[0][0]]))

    assert browser.run(CELLS) == [
        [f"{p} {seen(TEXTS[p])}", best(0, p), best(4, p)] for p in range(5)
    ]
    parts = browser.run(PARTS, "tbody td")
    wanted = [math.exp(found[layer].top(p)[0][1]) for p in range(4) for layer in (0, 4)]
    assert parts[:8] == pytest.approx(wanted, abs=1e-3)
    browser.press("Tab", "ArrowDown", "ArrowRight")
    lines = browser.run(TOLD).splitlines()
    top = [(repr(words.decode([i])), math.exp(v)) for i, v in found[4].top(1)]
    assert lines == [
        f"position 1 :, layer 4: {top[0][0]}",
        *(f"{text} {share:.3f}" for text, share in top),
    ]
    spoken = {name for role, name in browser.spoken() if role == "gridcell"}
    assert "; ".join(lines) in spoken


def test_attention_is_shown_head_by_head(shown):
    weights = samples.attention()
    browser = shown(attention_map(weights, heads=[2, 0], tokens=TEXTS))
    for head, keys in ((2, ["Tab"]), (0, ["ArrowDown"])):
        browser.press(*keys)
        cells = browser.run(CELLS)
        assert [row[0] for row in cells] == [f"{i} {seen(TEXTS[i])}" for i in range(6)]
        for query, row in enumerate(cells):
            shown_weights = [f"{w:.3f}" for w in weights[head, query, : query + 1].tolist()]
            assert row[1:] == shown_weights + [""] * (5 - query)
    browser.press("Tab", "ArrowDown", "ArrowRight")
    assert browser.run(TOLD) == f"query 1 :, key 1 :: {weights[0, 1, 1]:.3f}"


def test_the_features_of_a_token_are_listed_strongest_first(shown):
    browser = shown(feature_list(samples.features(), tokens=TEXTS, labels={6: "six"}))
    assert browser.run(CELLS) == [
        ["1 :", "5: 2", "7: 1", ""], ["2  What", "", "", ""], ["4  it", "6 six: 5", "7: 4", "4: 3"],
    ]  # fmt: skip
    assert browser.run(PARTS, "tbody td") == [0.4, 0.2, *[None] * 4, 1, 0.8, 0.6]
    browser.press("Tab", "Control+End")
    assert browser.run(TOLD) == "position 4  it, rank 3: 4: 3"


def test_two_answers_are_side_by_side_and_what_differs_is_marked(shown):
    plain, steered = ["It", " is", " bad", ".", " So"], ["It", " was", " a", " good", ".", " So"]
    view = side_by_side(
        token_strip(plain, [0, 1, 2, 3, 4], threshold=1),
        token_strip(steered, [0, -3, 2, 3, 4, 5], threshold=1),
    )
    browser = shown(view)
    assert browser.run(TOKENS) == plain + steered
    # Of the first: " is" and " bad"; of the second, which begins at 5: " was", " a" and " good".
    assert browser.run(MARKED, "differs") == [1, 2, 6, 7, 8]
    assert browser.run(PARTS, ".tokens .t") == [
        (score - 1) / 4 for score in [0, 1, 2, 3, 4, 0, -3, 2, 3, 4, 5]
    ]
    assert "2 of 5 and 3 of 6 tokens differ" in browser.run("return document.body.innerText")
    boxes = browser.run(BOXES, ".side > section")
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["right"] <= boxes[1]["left"]
    spoken = [name for role, name in browser.spoken() if role == "option"]
    assert spoken[1] == " is: 1, not above the threshold, differs, position 1"
    assert [name for role, name in browser.spoken() if role == "region"] == ["plain", "steered"]


def test_features_open_and_their_bars_are_the_histogram(shown):
    found = samples.max_activating()
    browser = shown(feature_page(found, lambda i: f" w{i}", features=[3, 5], strongest=2))
    assert browser.run("return document.querySelectorAll('.tokens').length") == 2
    browser.run("document.querySelectorAll('summary')[1].focus()")
    browser.press("Enter")
    browser.until("return document.querySelectorAll('.tokens').length == 4")
    for section, index in enumerate([3, 5]):
        edges, counts = found.histogram(index)
        bars = f"details:nth-of-type({section + 1}) .bars i"
        filled = np.flatnonzero(counts)[-1] + 1
        assert browser.run(SAID, bars) == [
            f"{edges[i]:.4g} to {edges[i + 1]:.4g}: {counts[i]} tokens" for i in range(filled)
        ]
        heights = [box["height"] for box in browser.run(BOXES, bars)]
        wanted = counts[:filled] / counts.max() * max(heights)
        assert heights == pytest.approx(wanted.tolist(), abs=0.5)
        assert max(heights) > 70
    lists = [name for role, name in browser.spoken() if role == "listbox"]
    assert [name for name in lists if name.startswith("Values")] == [
        f"Values above 0 at {found.num_active[i]:,} tokens; the fullest bar has "
        f"{found.histogram(i)[1].max():,} tokens"
        for i in (3, 5)
    ]


def test_a_monitors_scores_are_shown_with_the_threshold_between_them(shown):
    activity = samples.activity()
    browser = shown(monitor_page(activity))
    values, bars = samples.VALUES, "details:first-of-type figure:first-of-type .bars"
    width = activity.monitors["risky"].histogram.width
    said, boxes = browser.run(SAID, f"{bars} i"), browser.run(BOXES, f"{bars} i")
    ranges = [tuple(map(float, one.split(":")[0].split(" to "))) for one in said]
    counts = [sum(low < value <= low + width for value in values) for low, _ in ranges]
    assert [int(one.split(": ")[1].split()[0]) for one in said] == counts
    assert sum(counts) == len(values)
    heights = [count / max(counts) * 80 for count in counts]
    assert [box["height"] for box in boxes] == pytest.approx(heights, abs=0.5)
    (line,) = browser.run(BOXES, f"{bars} .mark")
    assert line["height"] > 70
    for (low, high), box in zip(ranges, boxes, strict=True):
        assert low >= 0.5 or high <= 0.5
        assert box["left"] >= line["right"] if low >= 0.5 else box["right"] <= line["left"]
    colours = browser.run(COLOURS, f"{bars} i")
    for (low, _), colour in zip(ranges, colours, strict=True):
        assert colour == colours[-1 if low >= 0.5 else 0]
    assert colours[0] != colours[-1]
    spoken = browser.spoken()
    assert ("listbox", "Largest value of 10 requests: 4 above the threshold 0.5") in spoken
    browser.press("Tab", "Tab", "Tab", "End")
    assert browser.run(TOLD) == said[-1]
    browser.press("ArrowLeft")
    assert browser.run(TOLD) == said[-2]


COLOURS = """return [...document.querySelectorAll(arguments[0])].map(item =>
  getComputedStyle(item).getPropertyValue("--above"))"""


def test_a_monitors_counts_verdicts_and_the_plugins_state_are_in_tables(shown):
    activity = samples.activity()
    browser = shown(monitor_page(activity))
    tables = browser.run(
        """return [...document.querySelectorAll("table")].map(table => [...table.tBodies[0].rows]
        .map(row => [...row.cells].map(cell => cell.textContent)))"""
    )
    overview, verdicts, plugin, sinks = tables
    now = samples.NOW_S
    minute = (now // 5 - 11) * 5
    requests = sum(now - 20 * i >= minute // 5 * 5 for i in range(10)) / (now - minute)
    assert overview == [
        ["risky", "escalate", "0.5", "10", "4", "40.0%", f"{requests:.3g}", f"{requests:.3g}",
         "2", "1", "0", "1"],
        ["risky, later", "flag", "0.9", "0", "0", "-", "0", "0", "", "", "", ""],
    ]  # fmt: skip
    assert verdicts == [
        ["08:00:07", "cmpl-7-9", "0", "12", "0.9", "escalate"],
        ["07:59:47", "cmpl-7-8", "0", "11", "0.7", "escalate"],
        ["07:59:27", "cmpl-7-7", "0", "10", "0.7", "escalate"],
        ["07:59:07", "cmpl-7-6", "0", "9", "0.55", "escalate"],
    ]
    assert plugin == [
        ["running requests that read, probe or edit", "3"],
        ["requests whose rows are awaited", "2"],
        ["rows and scores held", "3.0 of 64.0 MiB"],
        ["files that wait", "1, 2.0 of 8.0 MiB"],
        ["ring of worker 0", "25.0%, 1.0 of 4.0 MiB, waited 7 ms"],
    ]
    assert [row[:5] for row in sinks] == [
        ["memory", "", "1,000", "", ""], ["filesystem", "12", "", "5", "1"],
    ]  # fmt: skip
    each = browser.run(SAID, "details:first-of-type figure:nth-of-type(2) .bars i")
    filled = [one for one in each if ": 0 requests" not in one]
    assert len(each) == 60
    assert filled == [
        f"{time_of(begin)} to {time_of(begin + 10)}: 1 requests, {int(value > 0.5)} verdicts"
        for i, value in enumerate(samples.VALUES)
        for begin in [(now - 20 * (9 - i)) // 10 * 10]
    ]
    assert "No score yet." in browser.run("return document.body.innerText")


CONTRASTS = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const linear = colour => {
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
};
const light = colour => {
  const [r, g, b] = linear(colour);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
return [...document.querySelectorAll(arguments[0])].map(item => {
  const style = getComputedStyle(item);
  const two = [light(style.color), light(style.backgroundColor)].sort();
  return (two[1] + 0.05) / (two[0] + 0.05);
});"""


def test_every_token_can_be_read_on_its_colour(shown):
    scores = np.linspace(-1, 1, 21)
    browser = shown(token_strip(["word"] * 21, scores))
    contrasts = browser.run(CONTRASTS, ".tokens .scored")
    assert len(contrasts) == 21
    assert min(contrasts) >= 4.5
    assert browser.run(CONTRASTS, "body")[0] >= 7


def test_the_theme_is_the_readers(window, tmp_path):
    samples.strip().save(tmp_path / "strip.html")
    lights = {}
    for theme in ("light", "dark"):
        window.set_theme(theme)
        window.open(tmp_path / "strip.html")
        lights[theme] = window.run("return getComputedStyle(document.body).backgroundColor")
    assert lights == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 21, 25)"}
