"""A result shows its status, its counts and its scores, in a notebook and as a page."""

from __future__ import annotations

from tests.browser.samples import Tokenizer
from tests.unit.roads import number_of
from tests.unit.views.reading import Element, read_html
from tests.unit.views.test_strip import text_of
from vllm_scope import LensTopK, Probe, Read
from vllm_scope.program.layout import Layout
from vllm_scope.request.sites import point_of

POINT = point_of(4, 1)


def rows_of(root: Element) -> list[list[str]]:
    return [
        [cell.text for cell in row.children if isinstance(cell, Element)]
        for row in root.tagged("tr")
    ]


def test_a_result_shows_what_arrived_and_a_strip_of_each_probe(road):
    probe = Probe([1.0] * 4, layer=1, name="risk", threshold=80 + POINT)
    pending = road.open(probe)
    (bank,) = pending.asked.banks
    road.send([(pending.key, p, Layout((), ((bank, (POINT,)),)), 0) for p in range(4)])
    road.finish(pending)
    result = pending.snapshot([5, 6], "stop")
    scores = [number_of(POINT, 0, p, 0) for p in range(4)]
    assert result.scores["risk"].tolist() == scores
    root = read_html(result._repr_html_())
    assert root.tagged("p")[0].text == "complete: 4 of 4 values arrived."
    assert rows_of(root)[1:] == [
        ["risk", "scores", f"4 positions, verdict {scores[3]:.4g} at position 3"]
    ]
    tokens = root.tokens()
    assert [text_of(token) for token in tokens] == ["1 ", "1 ", "1 ", "5 ", "6 "]
    said = [token.attributes["title"] for token in tokens]
    assert said == [
        *(f"{score:.4g}, not above the threshold, position {p}"
          for p, score in enumerate(scores[:3])),
        f"{scores[3]:.4g}, above the threshold, verdict, position 3",
        "no score, position 4",
    ]  # fmt: skip
    words = Tokenizer([f" w{i}" for i in range(9)])
    shown = read_html(result.picture(words)._repr_html_()).tokens()
    assert [text_of(token) for token in shown] == [" w1", " w1", " w1", " w5", " w6"]


def test_what_is_missing_and_what_went_wrong_is_said(road):
    pending = road.open(Read("resid_post", layers=[1]), LensTopK(top_k=2, layers=[0, 1]))
    running = pending.snapshot([5], None)
    assert running.picture().parts()[0]["text"].startswith("streaming: 0 of ")
    road.finish(pending, error="<b>no room</b>")
    result = pending.snapshot([5], "stop")
    root = read_html(result._repr_html_())
    said = [each.text for each in root.tagged("p")]
    assert (
        said[0] == f"failed: 0 of {result.expected} values arrived, {result.dropped} are missing."
    )
    assert "<b>no room</b>" in said[1]
    assert not root.tagged("b")
    assert rows_of(root)[1:] == [
        ["resid_post 1", "rows", "0 by 4"], ["lens", "lens", "2 layers at 0 positions"],
    ]  # fmt: skip


def test_a_long_result_shows_its_first_tokens(road):
    pending = road.open(Probe([1.0] * 4, layer=1, name="risk"), num_prompt=600)
    parts = pending.snapshot([5], None).picture().parts()
    (strip,) = [part for part in parts if part["kind"] == "strip"]
    assert len(strip["items"]) == 512
    assert (
        parts[-1]["text"] == "At most 4 probes and 512 tokens are shown; `scores` has all scores."
    )


def test_a_strip_shows_the_aggregate_that_its_threshold_is_of(road):
    probe = Probe([1.0] * 4, layer=1, name="mean", aggregate="mean", threshold=1e9)
    pending = road.open(probe)
    (bank,) = pending.asked.banks
    road.send([(pending.key, p, Layout((), ((bank, (POINT,)),)), 0) for p in range(4)])
    road.finish(pending)
    result = pending.snapshot([5, 6], "stop")
    said = [token.attributes["title"] for token in read_html(result._repr_html_()).tokens()]
    shown = [float(one.split(",")[0]) for one in said[:4]]
    assert shown == [float(f"{value:.4g}") for value in result.aggregates["mean"].tolist()]
    assert shown != [float(f"{value:.4g}") for value in result.scores["mean"].tolist()]
