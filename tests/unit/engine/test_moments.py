"""The sums of all replicas and stages, added in the front-end."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from vllm_scope import SpecError
from vllm_scope.batch.sums import Packed, Sums
from vllm_scope.engine.moments import _every, _one

KEY = ("resid_post", 0, "a")


def packed(count: int, xx: bool, missing: int = 0) -> dict[str, object]:
    numbers = np.full(2, float(count))
    products = np.full((2, 2), float(count)).tobytes() if xx else b""
    arrays = numbers.tobytes(), b"", products
    return msgspec.structs.asdict(Packed(count, missing, 0.0, 0.0, arrays))


def one_of(*replicas: dict[str, object] | None) -> Sums:
    asking = _one("m", KEY)
    assert next(asking) == ("scope_moments", ("m", *KEY))
    with pytest.raises(StopIteration) as end:
        asking.send([[one] for one in replicas])
    found: Sums = end.value.value
    return found


def test_a_replica_without_room_tells_how_many_rows_are_missing():
    """The others' covariance stays."""
    for some in ((packed(0, False, 7), packed(3, True)), (packed(3, True), packed(0, False, 7))):
        found = one_of(None, *some)
        assert (found.count, found.missing, found.xx.tolist()) == (3, 7, [[3.0, 3.0]] * 2)
    assert one_of(packed(0, False, 7), packed(0, False, 2)).missing == 9


def test_replicas_with_sums_of_several_kinds_are_refused():
    with pytest.raises(SpecError, match=r"disagree on the sums called 'm' .* Drop them, and give"):
        one_of(packed(3, True), packed(2, False))


def test_a_name_without_sums_is_told_which_there_are():
    for held, words in (([["mood"], ["other"]], "'mood', 'other'"), ([[], []], "none")):
        asking = _every("misspelt")
        assert next(asking) == ("scope_names_of_moments", ("misspelt",))
        assert asking.send([[[], []]]) == ("scope_held_moments", ())
        with pytest.raises(SpecError) as caught:
            asking.send([held])
        assert f"no sums called 'misspelt'; this engine has: {words}. A name" in str(caught.value)
