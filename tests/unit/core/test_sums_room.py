"""Which sums there is room for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope.batch.sums import bytes_of
from vllm_scope.core.sums_room import SumsRoom
from vllm_scope.errors import CapacityError, SpecError
from vllm_scope.request.resolved import ResolvedMoments
from vllm_scope.request.selectors import Word
from vllm_scope.request.sites import Place, Sites

SITES = Sites(4, 64, "bfloat16", (0, 2, 4, 6, 8))
ONE = bytes_of(64, 2, True, False)


def moments(name="m", by="a", layers=(0,), covariance=True, target=None) -> ResolvedMoments:
    places = tuple(Place("resid_post", layer) for layer in layers)
    return ResolvedMoments(name, places, Word("all"), by, target, covariance)


def test_equal_sums_count_once_and_dropping_gives_the_room_back():
    room = SumsRoom(SITES, 4 * ONE / 2**20)
    for _ in range(3):
        room.enter((moments(layers=(0, 1)), moments(by="b")))
    assert room.num_bytes == 3 * ONE
    with pytest.raises(CapacityError, match=r"the sums of 'm' take .* Drop some of them"):
        room.enter((moments("other", layers=(0, 1)),))
    with pytest.raises(SpecError, match=r"the request's Moments take .* this engine has"):
        room.enter((moments("other", layers=range(4)), moments("third")))
    room.enter((moments("other"),))
    assert room.num_bytes == 4 * ONE
    assert room.drop("m")
    assert not room.drop("m")
    assert room.num_bytes == ONE
    room.enter((moments(covariance=False, target=1.0),))


def test_a_request_that_begins_takes_room_again_or_says_that_rows_will_be_missing(caplog):
    room, asked = SumsRoom(SITES, 2 * ONE / 2**20), (moments(),)
    room.enter(asked)
    room.enter_again(asked)
    assert room.num_bytes == ONE
    room.drop("m")
    room.enter_again(asked)
    assert room.num_bytes == ONE
    assert not caplog.text
    room.drop("m")
    room.enter((moments(target=1.0),))
    room.enter_again(asked)
    assert "rows of a request will be missing: moments[0] is called 'm'" in caplog.text
    room.drop("m")
    room.enter((moments("other", layers=(0, 1)),))
    room.enter_again(asked)
    assert "Drop some of them" in caplog.text
    assert room.num_bytes == 2 * ONE


@pytest.mark.parametrize("other", [{"covariance": False}, {"target": 2.0}])
def test_all_requests_of_a_name_have_the_same_options(other):
    room = SumsRoom(SITES, 1)
    with pytest.raises(SpecError, match=r"moments\[1\] is called 'm', and the sums of that name"):
        room.enter((moments(), moments(**other)))
    assert room.num_bytes == 0
    room.enter((moments(),))
    text = r"have covariance true and no target; take the same options"
    with pytest.raises(SpecError, match=text):
        room.enter((moments(**other),))
    room.drop("m")
    room.enter((moments(**other),))


NAMES, LABELS, LAYERS = st.sampled_from("mn"), st.sampled_from("ab"), st.integers(0, 3)


@given(st.lists(st.tuples(NAMES, LABELS, st.sets(LAYERS, min_size=1)), max_size=8))
def test_what_has_entered_fits(asked):
    room, held = SumsRoom(SITES, 5 * ONE / 2**20), set()
    for name, by, layers in asked:
        new = held | {(name, by, layer) for layer in layers}
        try:
            room.enter((moments(name, by, sorted(layers)),))
        except CapacityError:
            assert len(new) > 5
        else:
            held = new
        assert room.num_bytes == len(held) * ONE <= 5 * ONE
