"""What monitors have found since they were set, and the plugin's state, in the form for callers.

Owns:  Found (of one monitor), with Histogram, Slice and Flagged; State, with Ring; Activity, which
       has all of these.
From:  tally, engine.http.calls.
To:    server.pages and server.access; client, cli.monitor and views.monitors, which show it.

Promise: an Activity has no text of a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Length of a slice of time, in seconds.
SLICE_S = 5
#: Number of slices from which a rate is computed: about a minute.
_RATE_SLICES = 12
#: Outcomes of the verdicts for a webhook. A verdict that is "waiting" has not been sent yet.
OUTCOMES = ("sent", "failed", "dropped", "waiting")


@dataclass(frozen=True)
class Histogram:
    """The number of requests whose largest value is in each range.

    Range i has the values above `threshold + (first + i) * width`, up to this number plus `width`,
    inclusive. So the threshold is the end of a range.

    Attributes:
        width: a power of 2; 0 if there are no ranges.
        first: `first` in the formula above; negative if the first range is below the threshold.
        counts: the number of requests in each range.
    """

    width: float = 0.0
    first: int = 0
    counts: list[int] = field(default_factory=list)

    def ranges(self, threshold: float) -> list[tuple[float, float, int]]:
        """(lower end, upper end, requests) of each range, in order."""
        ends = [threshold + (self.first + i) * self.width for i in range(len(self.counts) + 1)]
        return list(zip(ends, ends[1:], self.counts, strict=False))


@dataclass(frozen=True)
class Slice:
    """The completions that ended within SLICE_S seconds from `begin_s`, a time of `time.time()`."""

    begin_s: int
    requests: int
    verdicts: int


@dataclass(frozen=True)
class Flagged:
    """A verdict of a monitor.

    Attributes:
        time_s: when the completion ended, in seconds of `time.time()`.
        request_id: the first MOST_ID characters of the request's id.
        position: the first position at which the value was above the threshold.
        value: the value at this position; None if it is not finite.
    """

    time_s: float
    request_id: str
    completion: int
    position: int
    value: float | None


@dataclass(frozen=True)
class Found:
    """A monitor's settings, and what it found in completions that have ended since it was set.

    Attributes:
        since_s: when the monitor was set, in seconds of `time.time()`; 0.0 if it was set at the
            server's start.
        requests: completions that the monitor scored.
        verdicts: completions with a value above the threshold.
        not_finite: completions whose largest value is in no range, because it is not finite.
        slices: the last ten minutes, in order; slices in which nothing ended are left out.
        recent: the last verdicts, the newest first.
        escalations: outcome (OUTCOMES) -> verdicts for the monitor's webhook.
    """

    site: str
    threshold: float
    action: str
    layers: list[int] = field(default_factory=list)
    after: str | None = None
    since_s: float = 0.0
    requests: int = 0
    verdicts: int = 0
    not_finite: int = 0
    histogram: Histogram = field(default_factory=Histogram)
    slices: list[Slice] = field(default_factory=list)
    recent: list[Flagged] = field(default_factory=list)
    escalations: dict[str, int] = field(default_factory=dict)

    def rates(self, now_s: float) -> tuple[float, float]:
        """Requests and verdicts per second, over about the last minute."""
        begin = (now_s // SLICE_S - _RATE_SLICES + 1) * SLICE_S
        recent = [one for one in self.slices if begin <= one.begin_s <= now_s]
        counts = sum(one.requests for one in recent), sum(one.verdicts for one in recent)
        return counts[0] / (now_s - begin), counts[1] / (now_s - begin)


@dataclass(frozen=True)
class Ring:
    """The shared memory through which one worker delivers rows.

    Attributes:
        used_bytes: bytes of rows that a front-end has still to read.
        wait_ms: the total time that the worker has waited for room.
    """

    num_bytes: int
    used_bytes: int
    wait_ms: float


@dataclass(frozen=True)
class State:
    """What the plugin holds. `pending` to `results_most_bytes` are of the API server process that
    was asked; the other fields are of the whole engine.

    Attributes:
        requests: running requests that read, probe or edit.
        pending: requests that wait for rows, or that are not yet answered.
        rows_bytes, rows_most_bytes: rows and scores of running requests, and their limit.
        results, results_bytes, results_most_bytes: files that wait to be fetched: their number,
            their bytes, and the limit of these bytes.
        rings: the ring of each worker that delivers rows.
        sinks: sink -> counter (sinks.counters) -> value, over all workers.
    """

    requests: int
    pending: int
    rows_bytes: int
    rows_most_bytes: int
    results: int = 0
    results_bytes: int = 0
    results_most_bytes: int = 0
    rings: list[Ring] = field(default_factory=list)
    sinks: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Activity:
    """What a server's monitors have found, and its plugin's state. `at_s`: the time of this answer,
    in seconds of `time.time()`."""

    at_s: float
    monitors: dict[str, Found]
    state: State
