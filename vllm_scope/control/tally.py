"""Counts the findings of one monitor, in bounded memory.

Owns:  Tally, and `joined`, which adds the counts of several API server processes.
Runs:  in the front-end, on any thread.
From:  engine.judge (calls `add`), engine.monitors (has a Tally for each monitor).
To:    activity.

Promise: a Tally has at most MOST_RANGES ranges of scores, MOST_SLICES slices of time and
MOST_VERDICTS verdicts. The number of requests does not change these limits. A Tally does not
contain text of a request.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from vllm_scope.control.activity import SLICE_S, Flagged, Found, Histogram, Slice
from vllm_scope.control.background import Uncopied

#: Largest number of ranges of scores: on each side of the threshold, and on both sides together.
_SIDE = 32
MOST_RANGES = 2 * _SIDE
#: Number of stored slices of time: 120 * 5 s = ten minutes.
MOST_SLICES = 120
MOST_VERDICTS = 50
#: Number of stored characters of a request's id. A client can choose a long id.
MOST_ID = 128


class Tally(Uncopied):
    """Counts the findings of one monitor. If the monitor is set again, it gets a new Tally.

    Args:
        threshold: the monitor's threshold, a float64.
        since_s: as in Found.
    """

    def __init__(
        self, threshold: float, since_s: float = 0.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._threshold, self.since_s, self._clock = threshold, since_s, clock
        self._lock = threading.Lock()
        self._requests = self._verdicts = self._not_finite = 0
        #: The width of a range is 2 ** _exponent. `_ranges` maps the index of a range (`first + i`
        #: in Histogram) to the number of completions.
        self._exponent = -math.inf
        self._ranges: dict[int, int] = {}
        self._slices: deque[list[int]] = deque(maxlen=MOST_SLICES)
        self._recent: deque[Flagged] = deque(maxlen=MOST_VERDICTS)

    def add(
        self, value: float | None, request_id: str = "", completion: int = 0,
        verdict: tuple[int, float] | None = None, ended_s: float | None = None,
    ) -> None:  # fmt: skip
        """Count a completion that has ended.

        Args:
            value: the completion's largest value, or None if no token was scored.
            verdict: (position, value) of the completion's verdict, or None if there is no verdict.
            ended_s: the time at which the completion ended, by `clock`. If `ended_s` is None, the
                completion ended now.
        """
        now = self._clock() if ended_s is None else ended_s
        with self._lock:
            if value is not None:
                self._requests += 1
                self._add_value(value, verdict is not None)
            current = self._slice(int(now // SLICE_S) * SLICE_S)
            current[1] += value is not None
            if verdict is not None:
                self._verdicts += 1
                current[2] += 1
                position, at = verdict
                told = at if math.isfinite(at) else None
                # A lone surrogate cannot be encoded in UTF-8.
                named = request_id[:MOST_ID].encode("utf-8", "replace").decode()
                self._recent.appendleft(Flagged(now, named, completion, position, told))

    def _slice(self, begin_s: int) -> list[int]:
        # If the clock was set back, the completion counts in the last slice.
        if not self._slices or self._slices[-1][0] < begin_s:
            self._slices.append([begin_s, 0, 0])
        return self._slices[-1]

    def _add_value(self, value: float, above: bool) -> None:
        distance = value - self._threshold
        if not math.isfinite(distance):
            self._not_finite += 1
            return
        # If ranges have the width 2 ** needed, the value is in one of the _SIDE ranges next to the
        # threshold: |distance| is less than _SIDE * 2 ** needed.
        needed = math.frexp(distance)[1] - _SIDE.bit_length() + 1 if distance else -1000
        if needed > self._exponent:
            self._ranges = _merged([(self._ranges, self._exponent)], needed)
            self._exponent = needed
        index = math.ceil(math.ldexp(distance, -int(self._exponent))) - 1
        # The worker compared float32 numbers, and this code compares float64 numbers. If the two
        # results differ, the value counts on the side of the threshold that the worker's verdict
        # says.
        index = max(index, 0) if above else min(index, -1)
        self._ranges[index] = self._ranges.get(index, 0) + 1

    def found(
        self, site: str, action: str, layers: Sequence[int], after: str | None,
        escalations: Mapping[str, int],
    ) -> Found:  # fmt: skip
        """The counts so far, with the monitor's settings."""
        begin_s = _first_slice(self._clock())
        with self._lock:
            slices = [Slice(*one) for one in self._slices if one[0] >= begin_s]
            return Found(
                site, self._threshold, action, list(layers), after, self.since_s, self._requests,
                self._verdicts, self._not_finite, _histogram(self._ranges, self._exponent),
                slices, list(self._recent), dict(escalations),
            )  # fmt: skip


def _first_slice(now_s: float) -> int:
    """The beginning of the oldest of the last MOST_SLICES slices, in seconds."""
    return (int(now_s // SLICE_S) - MOST_SLICES + 1) * SLICE_S


def _merged(some: Sequence[tuple[Mapping[int, int], float]], exponent: int) -> dict[int, int]:
    """Add the counts of several mappings, range by range. In the result, a range has the width 2 **
    exponent.

    Args:
        some: pairs of a mapping and an exponent. A mapping has the count of each range, by the
            index of the range. The exponents are at most `exponent`.
    """
    found: dict[int, int] = {}
    for ranges, own in some:
        for index, count in ranges.items():
            wider = index >> (exponent - int(own))
            found[wider] = found.get(wider, 0) + count
    return found


def _histogram(ranges: Mapping[int, int], exponent: float) -> Histogram:
    if not ranges:
        return Histogram()
    first, last = min(ranges), max(ranges)
    counts = [ranges.get(i, 0) for i in range(first, last + 1)]
    return Histogram(math.ldexp(1.0, int(exponent)), first, counts)


def joined(found: Sequence[Found], now_s: float) -> Found:
    """The sum of one monitor's findings in several API server processes.

    Args:
        found: one Found for each process, at least one Found. All Founds must be from the same
            setting of the same monitor. A Found can be from an earlier time if its process has had
            no completion since then.
        now_s: the current time, in seconds of `time.time()`.
    """
    begin_s = _first_slice(now_s)
    one, slices = found[0], dict[int, list[int]]()
    for each in found:
        for piece in each.slices:
            if piece.begin_s < begin_s:
                continue
            total = slices.setdefault(piece.begin_s, [0, 0])
            total[0] += piece.requests
            total[1] += piece.verdicts
    last = sorted(slices.items())[-MOST_SLICES:]
    recent = sorted((v for each in found for v in each.recent), key=lambda v: -v.time_s)
    escalations: dict[str, int] = {}
    for each in found:
        for outcome, count in each.escalations.items():
            escalations[outcome] = escalations.get(outcome, 0) + count
    return Found(
        one.site, one.threshold, one.action, one.layers, one.after, one.since_s,
        sum(each.requests for each in found), sum(each.verdicts for each in found),
        sum(each.not_finite for each in found), _sum_of([each.histogram for each in found]),
        [Slice(begin, *counts) for begin, counts in last], recent[:MOST_VERDICTS], escalations,
    )  # fmt: skip


def _sum_of(histograms: Sequence[Histogram]) -> Histogram:
    some = [
        (dict(enumerate(each.counts, each.first)), math.frexp(each.width)[1] - 1)
        for each in histograms
        if each.counts
    ]
    if not some:
        return Histogram()
    exponent = max(own for _, own in some)
    return _histogram(_merged(some, exponent), exponent)
