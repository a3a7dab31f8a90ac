"""The findings of monitors and the plugin's state, in the form in which callers receive them.

Owns:  Found (the findings of one monitor) and its parts Histogram, Slice and Flagged; State and its
       part Ring; Activity (contains the Found of each monitor, and the State).
From:  tally, engine.http.calls.
To:    server.pages, server.access, client, cli.monitor, views.monitors.

Promise: an Activity does not contain text of a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Length of a slice of time, in seconds.
SLICE_S = 5
#: Number of slices from which a rate is computed: 12 * 5 s = one minute.
_RATE_SLICES = 12
#: Outcomes of sending a verdict to a webhook. "waiting" means that the verdict was not sent yet.
OUTCOMES = ("sent", "failed", "dropped", "waiting")


@dataclass(frozen=True)
class Histogram:
    """For each range of values, the number of completions whose largest value is in the range.

    Range i begins above `threshold + (first + i) * width`, and ends at
    `threshold + (first + i + 1) * width`, inclusive. Therefore the threshold is the end of a range.

    Attributes:
        width: the width of a range, a power of 2. If there are no ranges, `width` is 0.
        first: `first` in the formula above, negative if the first range is below the threshold.
        counts: the number of completions in each range.
    """

    width: float = 0.0
    first: int = 0
    counts: list[int] = field(default_factory=list)

    def ranges(self, threshold: float) -> list[tuple[float, float, int]]:
        """The lower end, the upper end and the count of each range, in ascending order."""
        ends = [threshold + (self.first + i) * self.width for i in range(len(self.counts) + 1)]
        return list(zip(ends, ends[1:], self.counts, strict=False))


@dataclass(frozen=True)
class Slice:
    """Counts of the completions that ended in the SLICE_S seconds after the time `begin_s`."""

    begin_s: int
    requests: int
    verdicts: int


@dataclass(frozen=True)
class Flagged:
    """A verdict of a monitor.

    Attributes:
        time_s: the time at which the completion ended, in seconds of `time.time()`.
        request_id: the first MOST_ID characters of the request's id.
        position: the first position at which the value was above the threshold.
        value: the value at this position, or None if the value is not finite.
    """

    time_s: float
    request_id: str
    completion: int
    position: int
    value: float | None


@dataclass(frozen=True)
class Found:
    """A monitor's settings, and its findings in completions since the monitor was set.

    Attributes:
        since_s: the time at which the monitor was set, in seconds of `time.time()`. 0.0 if the
            monitor was set at the server's start.
        requests: number of completions that the monitor has scored.
        verdicts: number of completions with a value above the threshold.
        not_finite: number of completions that are not in the histogram, because their largest value
            is not finite.
        slices: the slices of the last ten minutes in the order of time, without empty slices.
        recent: the last verdicts. The newest verdict is first.
        escalations: the number of verdicts for the monitor's webhook. The key is the outcome of the
            sending (OUTCOMES).
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
        """The completions per second and the verdicts per second, over about the last minute."""
        begin = (now_s // SLICE_S - _RATE_SLICES + 1) * SLICE_S
        recent = [one for one in self.slices if begin <= one.begin_s <= now_s]
        counts = sum(one.requests for one in recent), sum(one.verdicts for one in recent)
        return counts[0] / (now_s - begin), counts[1] / (now_s - begin)


@dataclass(frozen=True)
class Ring:
    """The shared memory through which one worker delivers rows.

    Attributes:
        used_bytes: bytes of rows that no front-end has read yet.
        wait_ms: the total time for which the worker has waited for room in the ring.
    """

    num_bytes: int
    used_bytes: int
    wait_ms: float


@dataclass(frozen=True)
class State:
    """The plugin's running requests and its use of memory, files and rings. The fields from
    `pending` to `results_most_bytes` are for the API server process that made the answer. The other
    fields are for the whole engine.

    Attributes:
        requests: number of running requests that read, probe or edit.
        pending: number of requests that wait for rows, or are not answered yet.
        rows_bytes, rows_most_bytes: bytes of rows and scores of running requests, and their limit.
        results, results_bytes, results_most_bytes: number of result files that are not deleted yet,
            the bytes of these files, and the limit of these bytes.
        rings: the ring of each worker that delivers rows.
        sinks: the counters of each sink (sinks.counters), as sums over all workers. The keys are
            the name of the sink, then the name of the counter.
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
    """The findings of a server's monitors, and the plugin's state. `at_s` is the time of this
    answer, in seconds of `time.time()`."""

    at_s: float
    monitors: dict[str, Found]
    state: State
