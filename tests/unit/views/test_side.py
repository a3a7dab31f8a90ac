"""Two answers side by side: which tokens differ, and that a colour means the same in both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope.errors import SpecError
from vllm_scope.views import side_by_side, token_strip

TEXTS = st.lists(st.sampled_from(["a", " b", "c\n", "<d>"]), max_size=8)


def items_of(view) -> list[list[dict]]:
    (found,) = [part for part in view.parts() if part["kind"] == "side"]
    return [option["parts"][0]["items"] for option in found["options"]]


@given(TEXTS, TEXTS)
def test_what_has_no_mark_is_the_same_in_both(one, two):
    same = [
        [item["text"] for item in items if "differs" not in item["marks"]]
        for items in items_of(side_by_side(one, two))
    ]
    assert same[0] == same[1]
    if one == two:
        assert len(same[0]) == len(one)
    for items in items_of(side_by_side(one, two)):
        assert all(("differs" in item["said"]) == ("differs" in item["marks"]) for item in items)


def test_a_colour_is_the_same_score_in_both():
    view = side_by_side(
        token_strip(["a", "b"], [0, 1]), token_strip(["a", "c"], [0, -4]), names=("one", "two")
    )
    assert [[item["part"] for item in items] for items in items_of(view)] == [[0, 0.25], [0, -1]]
    assert [part["kind"] for part in view.parts()] == ["text", "legend", "side"]
    assert (
        view.parts()[0]["text"] == "1 of 2 and 1 of 2 tokens differ; different tokens have a frame."
    )
    plain = side_by_side(["a"], ["b"])
    assert [part["kind"] for part in plain.parts()] == ["text", "side"]


def test_two_thresholds_are_refused():
    with pytest.raises(SpecError, match=r"the thresholds 0\.5 and None; a colour"):
        side_by_side(token_strip(["a"], [0], threshold=0.5), token_strip(["a"], [0]))
