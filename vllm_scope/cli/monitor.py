"""`vllm-scope monitor`: shows a server's monitors and their findings as a live table or a page.

The figures come from /v1/scope/monitors/activity. The operator's page shows the same figures.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_scope.cli.remote import printable, sentence_of
from vllm_scope.control.activity import OUTCOMES, Activity, Flagged, Found, State
from vllm_scope.errors import ScopeError
from vllm_scope.views.monitors import fill, mib, monitor_page, share, time_of

if TYPE_CHECKING:
    from vllm_scope.client import ScopeClient

#: Seconds to wait for an answer. The time is short, because the server does not run the model for
#: such an answer.
_TIMEOUT_S = 30.0
_BARS = " ▁▂▃▄▅▆▇█"
#: If the console has this width or more, a bar covers two ranges of scores. Otherwise a bar covers
#: four ranges.
_WIDE = 100
#: The largest number of verdicts that are listed, for all monitors together.
_MOST_VERDICTS = 5


def monitor(
    url: str, api_key: str | None, admin_key: str | None, interval: float, once: bool,
    page: Path | None = None,
) -> None:  # fmt: skip
    """Show a server's monitors until Ctrl-C. If `once` is True, or stdout is not a terminal that
    can refresh a table, print only one table.

    Args:
        interval: seconds between two requests to the server.
        page: a .html file that is written instead of the table.
    """
    console = Console()
    try:
        from vllm_scope.client import ScopeClient

        if page is not None and page.suffix not in (".html", ".htm"):
            raise ScopeError(f"--page is {page}; a page's name must end in .html.")
        with ScopeClient(url, api_key, admin_key, timeout=_TIMEOUT_S) as client:
            found = look(client, url)
            if not found.monitors:
                raise ScopeError(
                    f"{url} has no monitors; set them with PUT /v1/scope/monitors, or "
                    "with additional_config['scope'].monitors at start."
                )
            if page is not None:
                monitor_page(found, f"Monitors of {url}").save(page)
            elif once or not console.is_terminal or console.is_dumb_terminal:
                # In a pipe, long lines are not wrapped.
                console.print(view(found, console.width), soft_wrap=not console.is_terminal)
            else:
                with suppress(KeyboardInterrupt):
                    _follow(client, url, console, found, interval)
    except (ImportError, ScopeError, OSError) as error:
        console.print(Text(sentence_of(error), "red"), soft_wrap=True)
        sys.exit(1)


def _follow(
    client: ScopeClient, url: str, console: Console, found: Activity, interval: float
) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(view(found, console.width), refresh=True)
            time.sleep(interval)
            found = look(client, url)


# Requests to the server


def look(client: ScopeClient, url: str) -> Activity:
    """The activity of a server's monitors.

    Raises:
        ScopeError: the server does not answer, has no scope, or does not show its monitors to this
            caller.
    """
    from vllm_scope.client import ServerError
    from vllm_scope.client.messages import KEYS

    try:
        return client.activity()
    except ServerError as error:
        if error.status in (401, 403):
            told = str(error).replace(KEYS, "give the keys with --api-key and --admin-key")
            raise ScopeError(told) from None
        if error.status == 404:
            _explain(client, url)
        raise


def _explain(client: ScopeClient, url: str) -> None:
    """Raises ScopeError with the reason why a server has no route to its monitors, if the reason is
    known."""
    from vllm_scope.client import ServerError

    try:
        info = client.info()
    except ServerError as error:
        raise ScopeError(f"{url} has no scope: {error}") from None
    if not info.get("operator"):
        raise ScopeError(
            f"{url} has no operator's key, and shows its monitors to nobody; start it with "
            "VLLM_SCOPE_ADMIN_KEY."
        )


# The display


def view(found: Activity, width: int) -> RenderableType:
    """A table with two lines for each monitor, then lines with the counts of escalations, the last
    verdicts, and the plugin's state.

    Args:
        width: the console's width, in characters.
    """
    if not found.monitors:
        return Text("There are no monitors now.")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("monitor", overflow="fold")
    table.add_column("action", no_wrap=True)
    for heading in ("requests", "verdicts", "flagged"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("scores", no_wrap=True)
    for name, one in found.monitors.items():
        table.add_row(*_cells(name, one, found.at_s), bars(one, 2 if width >= _WIDE else 4))
    told = [_escalations(found.monitors), *_verdicts(found.monitors), *_state(found.state)]
    return Group(table, *(Text(printable(line)) for line in told))


def _cells(name: str, one: Found, now_s: float) -> list[Text]:
    place = " ".join([one.site, ", ".join(map(str, one.layers))])
    place += "" if one.after is None else f"\n  after {one.after}"
    requests_s, verdicts_s = one.rates(now_s)
    cells = [
        f"{name}\n  {place}", f"{one.action}\nabove {one.threshold:g}",
        f"{one.requests:,}\n{requests_s:.2f}/s", f"{one.verdicts:,}\n{verdicts_s:.2f}/s",
        share(one),
    ]  # fmt: skip
    return [Text(printable(cell)) for cell in cells]


def bars(one: Found, step: int) -> Text:
    """A histogram in two lines. The first line has the bars, and a mark at the threshold. Bars
    above the threshold are red. The second line has the range of scores of all bars.

    Args:
        step: the number of ranges of scores in one bar. No bar is on both sides of the threshold.
    """
    histogram, text = one.histogram, Text()
    if not histogram.counts:
        return Text("-")
    groups: dict[int, int] = {-1: 0, 0: 0}
    for i, count in enumerate(histogram.counts, histogram.first):
        groups[i // step] = groups.get(i // step, 0) + count
    first, last, most = min(groups), max(groups), max(groups.values())
    for i in range(first, last + 1):
        height = math.ceil(groups.get(i, 0) / most * (len(_BARS) - 1))
        text.append("│" if i == 0 else "")
        text.append(_BARS[height], "red" if i >= 0 else "")
    low, high = (one.threshold + i * step * histogram.width for i in (first, last + 1))
    return text.append(f"\n{low:.3g} to {high:.3g}")


def _escalations(monitors: Mapping[str, Found]) -> str:
    counts = (
        f"{sum(one.escalations.get(outcome, 0) for one in monitors.values())} {outcome}"
        for outcome in OUTCOMES
    )
    return f"escalations: {', '.join(counts)}"


def _verdicts(monitors: Mapping[str, Found]) -> list[str]:
    every = [(name, verdict) for name, one in monitors.items() for verdict in one.recent]
    last = sorted(every, key=lambda pair: -pair[1].time_s)[:_MOST_VERDICTS]
    return [
        f"verdict at {time_of(verdict.time_s)} UTC: {name}, {_score(verdict)} at position "
        f"{verdict.position}, {monitors[name].action}, {verdict.request_id}"
        for name, verdict in last
    ]


def _score(verdict: Flagged) -> str:
    return "not finite" if verdict.value is None else f"{verdict.value:.4g}"


def _state(state: State) -> Sequence[str]:
    told = [
        f"plugin: {state.requests:,} requests, {state.pending:,} pending, rows "
        f"{mib(state.rows_bytes, state.rows_most_bytes)}, {state.results:,} files "
        f"{mib(state.results_bytes, state.results_most_bytes)}"
    ]
    if state.rings:
        told.append(f"rings: {', '.join(map(fill, state.rings))} full")
    told += [
        f"sink {name}: {counters.get('drops', 0):,.0f} rows dropped, "
        f"{counters.get('errors', 0):,.0f} errors"
        for name, counters in state.sinks.items()
        if "drops" in counters
    ]
    return told
