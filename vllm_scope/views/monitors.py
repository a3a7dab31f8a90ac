"""The operator's page, which shows the findings of each monitor and the plugin's state.

Owns:  `monitor_page`.
From:  control.activity. To: server.pages, cli.monitor, a notebook.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from urllib.parse import quote

from vllm_scope.control.activity import OUTCOMES, SLICE_S, Activity, Found, Ring, State
from vllm_scope.views.checks import expect, words_of
from vllm_scope.views.document import Picture
from vllm_scope.views.parts import Part, bar, bars, cell, grid, heading, section, text

#: The number of monitors whose sections are open at the start.
_MOST_OPEN = 4
#: The number of seconds of one bar in the histogram of requests, and the number of bars.
_BAR_S, _NUM_BARS = 2 * SLICE_S, 60
_COUNTERS = {
    "rows": "rows", "bytes": "bytes", "drops": "rows dropped", "errors": "errors",
    "waits": "waits", "wait_ms": "ms waited", "queue_bytes": "bytes in the queue",
    "held_bytes": "bytes of running requests",
}  # fmt: skip


def monitor_page(activity: Activity, title: str = "Monitors") -> Picture:
    """A page of a server's monitors.

    Args:
        activity: the findings of the monitors, as `ScopeClient.activity()` returns them.
        title: the title of the page, as plain text.

    Raises:
        SpecError: `activity` is not an Activity, or the title is not a text.
    """
    is_activity = isinstance(activity, Activity)
    expect(is_activity, "activity", activity, "an Activity, such as from ScopeClient.activity()")
    words_of(title, "title")
    found, state = activity.monitors, activity.state
    facts = "A monitor's counts begin when the monitor is set, and begin again when it is changed."
    if not found:
        facts = "There are no monitors now."
    content = [text(f"{_date(activity.at_s)}. {facts}"), *([_overview(activity)] if found else [])]
    content += [
        _monitor(name, one, activity.at_s, i) for i, (name, one) in enumerate(found.items())
    ]
    return Picture(title, [*content, heading("The plugin"), _state(state), *_sinks(state)])


def _date(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def time_of(time_s: float) -> str:
    """The time of day in UTC, as text."""
    return f"{datetime.fromtimestamp(time_s, UTC):%H:%M:%S}"


def _overview(activity: Activity) -> Part:
    columns = [
        "action", "above", "requests", "verdicts", "flagged", "requests/s", "verdicts/s",
        *OUTCOMES,
    ]  # fmt: skip
    cells = []
    for one in activity.monitors.values():
        requests_s, verdicts_s = one.rates(activity.at_s)
        told = [f"{one.escalations.get(outcome, 0):,}" for outcome in OUTCOMES]
        if one.action != "escalate":
            told = [""] * len(OUTCOMES)
        cells.append([
            one.action, f"{one.threshold:g}", f"{one.requests:,}", f"{one.verdicts:,}",
            share(one), f"{requests_s:.3g}", f"{verdicts_s:.3g}", *told,
        ])  # fmt: skip
    caption = (
        "Rates are of the last minute. On the right are the outcomes of verdicts for a webhook"
    )
    return _table(activity.monitors, ("monitor", ""), columns, cells, caption)


def share(one: Found) -> str:
    """The share of a monitor's requests with a verdict, as text."""
    return f"{one.verdicts / one.requests:.1%}" if one.requests else "-"


def place(one: Found) -> str:
    """The site and the layers of a monitor, and the monitor that the field `after` names, as
    text."""
    told = " ".join([one.site, ", ".join(map(str, one.layers))]).strip()
    return told if one.after is None else f"{told}, after {one.after}"


def _table(
    names: Iterable[str], titles: tuple[str, str], columns: Sequence[str],
    rows: Sequence[Sequence[str]], caption: str, style: str = "",
) -> Part:  # fmt: skip
    cells = [[cell(told) if told else None for told in row] for row in rows]
    return grid(names, columns, cells, titles, caption, style)


def _monitor(name: str, one: Found, now_s: float, index: int) -> Part:
    since = _date(one.since_s) if one.since_s else "the start"
    facts = f"{one.requests:,} requests, {one.verdicts:,} verdicts since {since}"
    shown = [text(f"{place(one)}, above {one.threshold:g}: {one.action}."), _scores(one)]
    shown += [_requests(one, now_s), _recent(one)]
    # The id has the monitor's name, not the monitor's index. Therefore a section that the reader
    # has opened stays open, even if other monitors are added or removed.
    id = f"monitor-{quote(name, safe='', errors='replace')}"
    return section(name, one.action, facts, shown, id, index < _MOST_OPEN)


def _scores(one: Found) -> Part:
    """A histogram of scores, with at least one bar on each side of the threshold."""
    histogram = one.histogram
    if not histogram.counts:
        return text("No score yet.")
    first = min(histogram.first, -1)
    last = max(histogram.first + len(histogram.counts) - 1, 0)
    counts = dict(enumerate(histogram.counts, histogram.first))
    most, each = max(histogram.counts), []
    for i in range(first, last + 1):
        low, high = (one.threshold + (i + j) * histogram.width for j in (0, 1))
        told = f"{low:.6g} to {high:.6g}: {counts.get(i, 0):,} requests"
        each.append(bar(counts.get(i, 0) / most, told, float(i >= 0)))
    above = sum(count for i, count in counts.items() if i >= 0)
    said = (
        f"Largest value of {sum(histogram.counts):,} requests: {above:,} above the threshold "
        f"{one.threshold:g}"
    )
    low, high = (one.threshold + i * histogram.width for i in (first, last + 1))
    caption = f"{said}, which the line marks. The bars go from {low:.6g} to {high:.6g}."
    if one.not_finite:
        caption += f" The value of {one.not_finite:,} more requests is not finite."
    return bars(each, said, caption, (-first, f"threshold {one.threshold:g}"))


def _requests(one: Found, now_s: float) -> Part:
    """A histogram of requests, with one bar for each _BAR_S seconds of the last ten minutes."""
    end = (int(now_s) // _BAR_S + 1) * _BAR_S
    start = end - _NUM_BARS * _BAR_S
    counts = [[0, 0] for _ in range(_NUM_BARS)]
    for piece in one.slices:
        if start <= piece.begin_s < end:
            counts[(piece.begin_s - start) // _BAR_S][0] += piece.requests
            counts[(piece.begin_s - start) // _BAR_S][1] += piece.verdicts
    most, each = max(requests for requests, _ in counts), []
    if not most:
        return text("No request has ended in the last ten minutes.")
    for i, (requests, verdicts) in enumerate(counts):
        begin = start + i * _BAR_S
        told = (
            f"{time_of(begin)} to {time_of(begin + _BAR_S)}: {requests:,} requests, {verdicts:,} "
            "verdicts"
        )
        each.append(bar(requests / most, told, verdicts / requests if requests else 0.0))
    said = f"Requests that ended in the last ten minutes, {_BAR_S} s a bar"
    caption = f"{said}; the lower part shows requests with a verdict. The highest bar has {most:,}."
    return bars(each, said, caption)


def _recent(one: Found) -> Part:
    if not one.recent:
        return text("No verdict yet.")
    columns = ["request", "completion", "position", "score", "action"]
    cells = [
        [verdict.request_id, f"{verdict.completion}", f"{verdict.position:,}",
         "not finite" if verdict.value is None else f"{verdict.value:.4g}", one.action]
        for verdict in one.recent
    ]  # fmt: skip
    names = [time_of(verdict.time_s) for verdict in one.recent]
    caption = f"The last {len(cells)} of {one.verdicts:,} verdicts, the newest first"
    return _table(names, ("time (UTC)", ""), columns, cells, caption, "words")


def mib(num_bytes: float, most: float | None = None) -> str:
    """A number of bytes in MiB as text, and the limit `most` if `most` is given."""
    told = f"{num_bytes / 2**20:,.1f}"
    return f"{told} MiB" if most is None else f"{told} of {most / 2**20:,.1f} MiB"


def fill(ring: Ring) -> str:
    """The used share of a ring in percent, as text."""
    return f"{ring.used_bytes / ring.num_bytes:.1%}" if ring.num_bytes else "-"


def _state(state: State) -> Part:
    rows = {
        "running requests that read, probe or edit": f"{state.requests:,}",
        "requests whose rows are awaited": f"{state.pending:,}",
        "rows and scores held": mib(state.rows_bytes, state.rows_most_bytes),
        "files that wait": f"{state.results:,}, "
        + mib(state.results_bytes, state.results_most_bytes),
    }
    for i, ring in enumerate(state.rings):
        told = f"{fill(ring)}, {mib(ring.used_bytes, ring.num_bytes)}, "
        rows[f"ring of worker {i}"] = told + f"waited {ring.wait_ms:,.0f} ms"
    caption = "Waiting requests and held bytes are of the API server process that answered"
    return _table(rows, ("", ""), ["now"], [[told] for told in rows.values()], caption, "words")


def _sinks(state: State) -> list[Part]:
    if not state.sinks:
        return []
    cells = [
        [f"{counters[name]:,.0f}" if name in counters else "" for name in _COUNTERS]
        for counters in state.sinks.values()
    ]
    caption = "Sinks since the start; rows beyond an API key's quota count as dropped"
    return [_table(state.sinks, ("sink", ""), list(_COUNTERS.values()), cells, caption)]
