"""The sinks' counters as Prometheus metrics, in addition to vLLM's metrics on /metrics.

Owns:  the metrics `vllm_scope_sink_*` and other metrics of this package.
Runs:  in front-ends; `count_sinks` and `forget_worker` on the receiver's thread. Workers have no
       endpoint /metrics. Each second, a worker sends its totals to one front-end if they changed.

With several API servers, prometheus_client keeps the values in files, and each server shows the
sum. Each worker reports to one server. Therefore values are not counted twice.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from vllm_scope.control.policy import Decided
from vllm_scope.transport.messages import CountersHeader

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

_COUNTERS = {
    "rows": "Rows and scores that a sink got",
    "bytes": "Bytes that a sink got",
    "waits": "Times that the engine's rows waited for room in a sink's queue",
    "wait_ms": "Milliseconds that rows waited for room in a sink's queue",
    "drops": "Rows that were dropped",
    "spilled_bytes": "Bytes that have waited on disk",
    "errors": "Failed calls to a sink, and requests that failed because a call hung",
}
_GAUGES = {
    "queue_bytes": "Bytes in a sink's queue",
    "held_bytes": "Bytes of requests that have not ended",
    "spill_bytes": "Bytes that wait on disk now",
}
#: The last totals that arrived, by (worker, sink). The totals of ended workers are removed.
_last: dict[tuple[int, str], dict[str, float]] = {}

T = TypeVar("T")


def _once(make: Callable[[], T]) -> Callable[[], T]:
    """A function that returns the result of `make`. In one process, `make` is called only one time.
    Thread-safe. Prometheus refuses a second metric of the same name."""
    lock, made = threading.Lock(), list[T]()

    def get() -> T:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0]

    return get


@_once
def _metrics() -> dict[str, Counter | Gauge]:
    try:
        from prometheus_client import Counter, Gauge
    except ImportError:
        return {}
    labels = ["sink"]
    found: dict[str, Counter | Gauge] = {
        name: Counter(f"vllm_scope_sink_{name}", text, labels) for name, text in _COUNTERS.items()
    }
    for name, text in _GAUGES.items():
        found[name] = Gauge(f"vllm_scope_sink_{name}", text, labels, multiprocess_mode="livesum")
    return found


class _OfMonitors(NamedTuple):
    scores: Histogram
    verdicts: Counter
    lost: Counter
    escalations: Counter


@_once
def _of_monitors() -> _OfMonitors | None:
    try:
        from prometheus_client import Counter, Histogram
    except ImportError:
        return None
    return _OfMonitors(
        Histogram(
            "vllm_scope_monitor_score", "The largest value of a request that has ended",
            ["monitor"], buckets=[i / 10 for i in range(-10, 21)],
        ),
        Counter(
            "vllm_scope_monitor_verdicts", "Requests with a value above the threshold", ["monitor"]
        ),
        Counter("vllm_scope_monitor_lost_scores", "Scores that did not arrive", ["monitor"]),
        Counter("vllm_scope_monitor_escalations", "Verdicts for webhooks", ["outcome"]),
    )  # fmt: skip


def count_verdict(monitor: str, value: float | None, above: bool, num_lost: int) -> None:
    """Count the finding of a monitor in a request that has ended.

    Args:
        value: the monitor's largest value in the request. None if no token was scored. A value that
            is not finite is left out, because the sum of all values would never be finite again.
        above: True if the monitor has a verdict.
        num_lost: number of scores that did not arrive. Only this metric counts lost scores of
            monitors.
    """
    metrics = _of_monitors()
    if metrics and value is not None and math.isfinite(value):
        metrics.scores.labels(monitor=monitor).observe(value)
    if metrics and above:
        metrics.verdicts.labels(monitor=monitor).inc()
    if metrics and num_lost:
        metrics.lost.labels(monitor=monitor).inc(num_lost)


def count_escalation(outcome: str) -> None:
    """Count a verdict for a webhook. `outcome` is "sent", "failed" or "dropped"."""
    if metrics := _of_monitors():
        metrics.escalations.labels(outcome=outcome).inc()


def _counter(name: str, text: str, *labels: str) -> Counter | None:
    """A new counter. None if prometheus_client is not installed."""
    try:
        from prometheus_client import Counter
    except ImportError:
        return None
    return Counter(name, text, labels)


@_once
def _decisions() -> Counter | None:
    return _counter(
        "vllm_scope_policy_decisions", "Decisions of policies: scale, stop, flag, or failed",
        "policy", "what",
    )  # fmt: skip


def count_decision(policy: str, decided: Decided) -> None:
    """Count one decision of a policy about a request, or one failure of the policy."""
    metric = _decisions()
    if metric is None:
        return
    given = {"scale": decided.scale, "stop": decided.stop, "flag": decided.flag}
    for what, one in (given | {"failed": decided.error}).items():
        if one:
            metric.labels(policy=policy, what=what).inc()


@_once
def _of_memory() -> Counter | None:
    return _counter(
        "vllm_scope_result_bytes", "Bytes of memory for rows of results, reused or new",
        "memory",
    )  # fmt: skip


def count_memory(memory: str, num_bytes: int) -> None:
    """Count the bytes of memory that the rows of a result use. `memory` is "reused" or "new"."""
    if metric := _of_memory():
        metric.labels(memory=memory).inc(num_bytes)


def count_sinks(header: CountersHeader) -> None:
    """Add the differences between a worker's totals and the previous totals of this worker."""
    metrics = _metrics()
    for sink, totals in header.sinks.items():
        last = _last.get((header.worker, sink), {})
        for name, value in totals.items():
            if name not in metrics:
                continue
            metric = metrics[name].labels(sink=sink)
            change = value - last.get(name, 0)
            # Gauges also get only the change, because the gauge of a sink is the sum over all
            # workers.
            metric.inc(change) if change > 0 or name in _GAUGES else None
        _last[header.worker, sink] = totals


def forget_worker(worker: int) -> None:
    """Subtract an ended worker's totals from the gauges, and forget the totals of this worker."""
    metrics = _metrics()
    for key in [key for key in _last if key[0] == worker]:
        totals = _last.pop(key)
        for name in metrics.keys() & _GAUGES.keys() & totals.keys():
            metrics[name].labels(sink=key[1]).inc(-totals[name])
