"""What sinks do is counted once, and of workers that are gone nothing stays."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_scope.sinks import metrics
from vllm_scope.transport.messages import CountersHeader

prometheus = pytest.importorskip("prometheus_client")


def value(name, sink):
    return prometheus.REGISTRY.get_sample_value(f"vllm_scope_sink_{name}", {"sink": sink})


def told(worker, sink, **totals):
    metrics.count_sinks(CountersHeader(worker, {sink: totals}))


@pytest.fixture
def known(monkeypatch):
    found = {}
    monkeypatch.setattr(metrics, "_last", found)
    return found


def test_totals_of_several_workers_add_up(known):
    for rows in (3, 5, 5):
        told(1, "sum", rows=rows, queue_bytes=10 * rows)
    told(2, "sum", rows=7, queue_bytes=4)
    assert value("rows_total", "sum") == 12
    assert value("queue_bytes", "sum") == 54
    told(1, "sum", rows=6, queue_bytes=0)
    assert value("rows_total", "sum") == 13
    assert value("queue_bytes", "sum") == 4


def test_gauges_and_totals_of_a_gone_worker_are_removed(known):
    for worker in range(50):
        told(worker, "gone", rows=2, held_bytes=100, queue_bytes=1)
        metrics.forget_worker(worker)
    assert known == {}
    assert value("rows_total", "gone") == 100, "what was done stays done"
    assert value("held_bytes", "gone") == value("queue_bytes", "gone") == 0
    metrics.forget_worker(7)


def test_a_score_that_is_not_finite_leaves_the_sum_of_scores_a_number():
    for score in (0.5, math.nan, math.inf, -math.inf, 0.25):
        metrics.count_verdict("finite", score, False, 0)
    labels = {"monitor": "finite"}
    assert prometheus.REGISTRY.get_sample_value("vllm_scope_monitor_score_count", labels) == 2
    # prometheus_client shows the sum only if there are several API server processes.
    assert metrics._of_monitors().scores.labels(**labels)._sum.get() == 0.75


@pytest.mark.parametrize("made_before", [False, True])
def test_threads_that_count_first_at_once_share_one_metric(made_before):
    name, registry = "vllm_scope_of_threads", prometheus.CollectorRegistry()
    began = threading.Event()

    @metrics._once
    def made():
        began.wait(0.2)  # the others come meanwhile
        return prometheus.Counter(name, "A counter", registry=registry)

    if made_before:
        made()
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(lambda: made().inc()) for _ in range(64)]
        for one in calls:
            one.result()
    assert registry.get_sample_value(f"{name}_total") == 64


def test_every_metric_is_made_once_by_threads_that_come_at_once():
    for get in (metrics._metrics, metrics._of_monitors, metrics._decisions, metrics._of_memory):
        with ThreadPoolExecutor(8) as pool:
            assert len({id(found) for found in pool.map(lambda _, get=get: get(), range(8))}) == 1
