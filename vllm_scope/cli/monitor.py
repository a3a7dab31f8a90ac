"""`vllm-scope monitor`: a server's monitors and what they have counted, as a live table.

What a monitor is comes from /v1/scope/monitors, the counts from /metrics (sinks.metrics).
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_scope.cli.remote import printable
from vllm_scope.errors import ScopeError

if TYPE_CHECKING:
    from vllm_scope.client import ScopeClient
    from vllm_scope.client.calls import Flow, Response

#: For an answer; the server counts, and computes nothing.
_TIMEOUT_S = 30.0
_BARS = " ▁▂▃▄▅▆▇█"
#: A narrower console gets half as many bars.
_WIDE = 100
_OUTCOMES = ("sent", "failed", "dropped")


class Monitor(msgspec.Struct):
    """A monitor as the server tells it."""

    site: str
    threshold: float
    action: str
    layers: list[int] = []
    after: str | None = None


@dataclass
class Counts:
    """What a server has counted of one monitor since it started.

    Attributes:
        up_to: upper edge of a range of scores -> requests whose score is not above it; inf: all.
        verdicts: requests above the threshold.
    """

    up_to: dict[float, int] = field(default_factory=dict)
    verdicts: int = 0

    @property
    def requests(self) -> int:
        return self.up_to.get(math.inf, 0)

    def bins(self) -> list[tuple[float, int]]:
        """(lower edge, requests) of each range, in order."""
        found, low, below = [], -math.inf, 0
        for edge in sorted(self.up_to):
            found.append((low, self.up_to[edge] - below))
            low, below = edge, self.up_to[edge]
        return found


@dataclass
class Look:
    """One look at a server.

    Attributes:
        counts: name of a monitor -> its counts. Monitors that were replaced are still there.
        escalations: outcome -> how many.
        at: monotonic seconds.
    """

    monitors: Mapping[str, Monitor]
    counts: Mapping[str, Counts]
    escalations: Mapping[str, int]
    at: float


def monitor(
    url: str, api_key: str | None, admin_key: str | None, interval: float, once: bool
) -> None:
    """Show a server's monitors until Ctrl-C; one table if `once`, or if stdout is no terminal.

    Args:
        interval: seconds between two looks.
    """
    console = Console()
    try:
        from vllm_scope.client import ScopeClient

        with ScopeClient(url, api_key, admin_key, timeout=_TIMEOUT_S) as client:
            found = look(client, url)
            if not found.monitors:
                raise ScopeError(
                    f"{url} has no monitors; PUT /v1/scope/monitors sets them, or "
                    "additional_config['scope'].monitors at start."
                )
            if once or not console.is_terminal or console.is_dumb_terminal:
                console.print(view(found, None, console.width))
                return
            with suppress(KeyboardInterrupt):
                _follow(client, url, console, found, interval)
    except (ImportError, ScopeError, OSError) as error:
        console.print(Text(str(error) or type(error).__name__, "red"), soft_wrap=True)
        sys.exit(1)


def _follow(client: ScopeClient, url: str, console: Console, found: Look, interval: float) -> None:
    last = None
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(view(found, last, console.width), refresh=True)
            time.sleep(interval)
            last, found = found, look(client, url)


# What the server says


def look(client: ScopeClient, url: str) -> Look:
    """Ask a server.

    Raises:
        ScopeError: it does not answer, has no scope, or keeps its monitors from this caller.
    """
    from vllm_scope.client import ServerError
    from vllm_scope.client.parsing import converted

    try:
        told = client.monitors()
    except ServerError as error:
        if error.status in (401, 403):
            said = str(error).rstrip(".")
            raise ScopeError(f"{said}; give the keys with --api-key and --admin-key.") from None
        if error.status == 404:
            _explain(client, url)
        raise
    monitors = converted(told, dict[str, Monitor], "list of monitors")
    text = client._run(_get("/metrics")).content.decode("utf-8", "replace")
    return Look(monitors, *counted(text), time.monotonic())


def _get(path: str) -> Flow[Response]:
    from vllm_scope.client.calls import Call

    return (yield Call("GET", path)).checked()


def _explain(client: ScopeClient, url: str) -> None:
    """Raises ScopeError with the reason why a server has no route to its monitors, if known."""
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


def counted(text: str) -> tuple[dict[str, Counts], dict[str, int]]:
    """What /metrics says: counts by monitor, and escalations by outcome.

    Raises:
        ScopeError: it is not the text of Prometheus, or there is no parser for it.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise ScopeError(
            "monitor needs prometheus_client: pip install prometheus_client."
        ) from None
    counts: dict[str, Counts] = defaultdict(Counts)
    escalations: dict[str, int] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                match sample.name.removeprefix("vllm_scope_monitor_"):
                    case "score_bucket":
                        up_to = counts[sample.labels["monitor"]].up_to
                        up_to[float(sample.labels["le"])] = int(sample.value)
                    case "verdicts_total":
                        counts[sample.labels["monitor"]].verdicts = int(sample.value)
                    case "escalations_total":
                        escalations[sample.labels["outcome"]] = int(sample.value)
    except ValueError as error:
        raise ScopeError(f"the server's /metrics is not the text of Prometheus: {error}.") from None
    return dict(counts), escalations


# What is shown


def view(found: Look, last: Look | None, width: int) -> RenderableType:
    """Two lines for each monitor, and a line about escalations.

    Args:
        last: an earlier look; None for no column about the time since then.
        width: of the console, in characters.
    """
    if not found.monitors:
        return Text("There are no monitors now.")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("monitor", overflow="fold")
    table.add_column("action", no_wrap=True)
    since = [] if last is None else [f"last\n{found.at - last.at:.1f} s"]
    for heading in ("requests", "verdicts", "flagged", *since):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(_heading(found.counts), no_wrap=True)
    for name, told in found.monitors.items():
        now = found.counts.get(name, Counts())
        before = None if last is None else last.counts.get(name, Counts())
        step = 1 if width >= _WIDE else 2
        table.add_row(*_cells(name, told, now, before), bars(now.bins(), told.threshold, step))
    counts = (f"{found.escalations.get(outcome, 0)} {outcome}" for outcome in _OUTCOMES)
    return Group(table, Text(f"escalations: {', '.join(counts)}"))


def _heading(counts: Mapping[str, Counts]) -> str:
    edges = sorted({edge for each in counts.values() for edge in each.up_to} - {math.inf})
    return f"scores\n{edges[0]:g} to {edges[-1]:g}" if edges else "scores"


def _cells(name: str, told: Monitor, now: Counts, before: Counts | None) -> list[Text]:
    place = " ".join([told.site, ", ".join(map(str, told.layers))])
    place += "" if told.after is None else f"\n  after {told.after}"
    cells = [
        f"{name}\n  {place}", f"{told.action}\nabove {told.threshold:g}",
        f"{now.requests:,}", f"{now.verdicts:,}",
        f"{now.verdicts / now.requests:.1%}" if now.requests else "-",
    ]  # fmt: skip
    if before is not None:
        new = now.verdicts - before.verdicts, now.requests - before.requests
        # Fewer than before: the server was started again.
        cells.append(f"{new[0]:,} of {new[1]:,}" if min(new) >= 0 else "-")
    return [Text(printable(cell)) for cell in cells]


def bars(bins: Sequence[tuple[float, int]], threshold: float, step: int) -> Text:
    """A bar for each range of scores, red above the threshold.

    Args:
        bins: (lower edge, requests) of each range.
        step: of so many ranges one bar is made. The first and the last range, which have no end,
            stay alone.
    """
    inner = [bins[i : i + step] for i in range(1, len(bins) - 1, step)]
    groups = [group for group in (bins[:1], *inner, bins[1:][-1:]) if group]
    heights = [sum(count for _, count in group) for group in groups]
    most, text = max(heights, default=0) or 1, Text()
    for group, height in zip(groups, heights, strict=True):
        text.append(
            _BARS[math.ceil(height / most * (len(_BARS) - 1))],
            "red" if group[0][0] >= threshold else "",
        )
    return text
