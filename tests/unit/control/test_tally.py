"""What a monitor has found: exact counts, and bounded memory, whatever comes."""

from __future__ import annotations

import copy
import math

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_scope.control.activity import SLICE_S, Found
from vllm_scope.control.tally import MOST_ID, MOST_RANGES, MOST_SLICES, MOST_VERDICTS, Tally, joined

FLOATS = st.floats(width=32, allow_nan=False)


class Clock:
    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def told(tally) -> Found:
    return tally.found("resid_post", "flag", [2], None, {"sent": 1})


def count(tally, value, threshold, i=0):
    above = value > threshold
    tally.add(value, f"r{i}", 0, (i, value) if above else None)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(FLOATS, max_size=60), threshold=FLOATS.filter(math.isfinite))
@example(values=[0.5, 0.5, math.nextafter(0.5, 1)], threshold=0.5)
@example(values=[1e-40, 3e38, -3e38, math.inf, -math.inf], threshold=0.0)
def test_every_value_is_in_the_range_that_has_it_and_the_threshold_is_an_end(values, threshold):
    tally = Tally(threshold)
    for value in values:
        count(tally, value, threshold)
    found = told(tally)
    finite = [value for value in values if math.isfinite(value)]
    above = sum(value > threshold for value in values)
    assert (found.requests, found.verdicts) == (len(values), above)
    assert found.not_finite == len(values) - len(finite)
    histogram = found.histogram
    assert len(histogram.counts) <= MOST_RANGES
    below = -histogram.first if histogram.first < 0 else 0
    assert sum(histogram.counts[below:]) == sum(value > threshold for value in finite)
    assert sum(histogram.counts) == len(finite)
    if finite and histogram.first <= 0 <= histogram.first + len(histogram.counts):
        ends = [low for low, _, _ in histogram.ranges(threshold)]
        ends.append(histogram.ranges(threshold)[-1][1])
        assert threshold in ends
    if not finite:
        return
    # Distances as the tally has them: exact up to the subtraction.
    distances = np.array([value - threshold for value in finite])
    for i, one in enumerate(histogram.counts):
        low, high = ((histogram.first + i + j) * histogram.width for j in (0, 1))
        assert one == int(((distances > low) & (distances <= high)).sum())


def test_ranges_are_fine_where_values_are_near_the_threshold():
    tally = Tally(0.5)
    for value in np.random.default_rng(0).uniform(0, 1, 500).tolist():
        count(tally, value, 0.5)
    histogram = told(tally).histogram
    assert histogram.width == 1 / 64
    assert (histogram.first, len(histogram.counts)) == (-32, 64)


def test_a_flood_of_verdicts_stays_bounded():
    clock = Clock()
    tally = Tally(0.0, clock=clock)
    for i in range(20_000):
        clock.now += 0.5
        tally.add(float(i), "x" * 5000 + "\ud800", i % 3, (i, float(i)))
    found = told(tally)
    assert (found.requests, found.verdicts) == (20_000, 20_000)
    assert len(found.recent) == MOST_VERDICTS
    assert [one.position for one in found.recent] == list(range(19_999, 19_999 - MOST_VERDICTS, -1))
    assert {len(one.request_id) for one in found.recent} == {MOST_ID}
    assert len(found.slices) == MOST_SLICES
    assert sum(one.requests for one in found.slices) == MOST_SLICES * SLICE_S * 2 - 9
    assert len(found.histogram.counts) <= MOST_RANGES
    assert len(msgspec.json.encode(found)) < 40_000


def test_rates_are_of_the_last_minute():
    clock = Clock(1000.0)
    tally = Tally(0.0, clock=clock)
    for second in range(300):
        clock.now = 1000.0 + second
        tally.add(1.0 if second % 5 == 0 else -1.0, "r", 0, (0, 1.0) if second % 5 == 0 else None)
    requests, verdicts = told(tally).rates(1299.5)
    assert requests == pytest.approx(1, abs=0.02)
    assert verdicts == pytest.approx(0.2, abs=0.02)
    assert told(tally).rates(1400.0) == (0, 0)
    clock.now = 900.0  # the clock was set back
    tally.add(1.0)
    assert [one.begin_s for one in told(tally).slices] == list(range(1000, 1300, 5))


def test_slices_are_of_the_last_ten_minutes_also_if_few_requests_end():
    clock = Clock(1000.0)
    tally, other = (Tally(0.0, clock=clock) for _ in range(2))
    for now in (1000.0, 1300.0, 1604.9):
        clock.now = now
        tally.add(1.0)
    assert [one.begin_s for one in told(tally).slices] == [1300, 1600], "1005 to 1605"
    other.add(1.0)
    before = told(other)  # told by another process, in which nothing has ended since
    clock.now = 1900.0
    assert [one.begin_s for one in told(tally).slices] == [1600]
    clock.now = 2300.0
    assert told(tally).slices == joined([told(tally), before], clock.now).slices == []
    assert joined([before], clock.now).slices == []
    assert told(tally).requests == 3


def test_what_is_not_finite_is_told_as_json():
    tally = Tally(0.0)
    tally.add(math.inf, "a", 0, (3, math.inf))
    tally.add(math.nan)
    tally.add(None)
    found = told(tally)
    assert (found.requests, found.not_finite, found.recent[0].value) == (2, 2, None)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Found) == found


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.tuples(st.integers(0, 2), st.floats(-1e3, 1e3, width=32)), max_size=60),
    threshold=st.floats(-10, 10, width=32),
)
def test_processes_together_have_what_one_would_have(values, threshold):
    clock = Clock()
    parts = [Tally(threshold, clock=clock) for _ in range(3)]
    whole = Tally(threshold, clock=clock)
    for i, (part, value) in enumerate(values):
        clock.now += 1.0
        for tally in (parts[part], whole):
            count(tally, value, threshold, i)
    found = joined([told(part) for part in parts], clock.now)
    alone = told(whole)
    assert found.escalations == {"sent": 3}
    for name in ("requests", "verdicts", "not_finite", "slices", "recent", "histogram"):
        assert getattr(found, name) == getattr(alone, name), name


def test_a_copy_of_a_request_counts_in_the_same_place():
    tally = Tally(0.0)
    copy.deepcopy({"a": [tally]})["a"][0].add(1.0)
    assert told(tally).requests == 1
