"""What sinks do, for Prometheus: beside vLLM's own metrics, on its /metrics.

Owns:  the metrics `vllm_scope_sink_*`, and the arithmetic from totals to increments.
Runs:  in front-ends, on the inbox's thread. Workers have no /metrics; once a second they
       send their totals, when they have changed, to one front-end.

Where vLLM runs several API servers, prometheus_client keeps the values in files that
all of them sum up; each worker reports to one of them, so nothing counts twice.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm_scope.transport.messages import CountersHeader

_COUNTERS = {
    "rows": "Rows and scores that a sink was given",
    "bytes": "Bytes that a sink was given",
    "waits": "Times that the engine's rows waited for room in a sink's queue",
    "wait_ms": "Milliseconds of these waits",
    "drops": "Rows that were dropped",
    "spilled_bytes": "Bytes that waited on disk in between",
    "errors": "Calls to a sink that failed or hung",
}
_GAUGES = {
    "queue_bytes": "Bytes in a sink's queue",
    "held_bytes": "Bytes of requests that have not ended",
    "spill_bytes": "Bytes that wait on disk",
}
#: (worker, sink) -> what it said last, of workers that live.
_last: dict[tuple[int, str], dict[str, float]] = {}


@cache
def _metrics() -> dict[str, Any]:
    try:
        from prometheus_client import Counter, Gauge
    except ImportError:
        return {}
    labels = ["sink"]
    found: dict[str, Any] = {
        name: Counter(f"vllm_scope_sink_{name}", text, labels) for name, text in _COUNTERS.items()
    }
    for name, text in _GAUGES.items():
        found[name] = Gauge(f"vllm_scope_sink_{name}", text, labels, multiprocess_mode="livesum")
    return found


def count_sinks(header: CountersHeader) -> None:
    """Add what a worker's sinks have done since it was last heard of."""
    metrics = _metrics()
    for sink, totals in header.sinks.items():
        last = _last.get((header.worker, sink), {})
        for name, value in totals.items():
            if name not in metrics:
                continue
            metric = metrics[name].labels(sink=sink)
            change = value - last.get(name, 0)
            # Gauges too: several workers add up to one sink.
            metric.inc(change) if change > 0 or name in _GAUGES else None
        _last[header.worker, sink] = totals


def forget_worker(worker: int) -> None:
    """A worker is gone: what waited there waits no more, and nothing is kept of it."""
    metrics = _metrics()
    for key in [key for key in _last if key[0] == worker]:
        totals = _last.pop(key)
        for name in metrics.keys() & _GAUGES.keys() & totals.keys():
            metrics[name].labels(sink=key[1]).dec(totals[name])
