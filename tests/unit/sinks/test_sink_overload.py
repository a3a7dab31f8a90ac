"""A sink in trouble: what each policy promises, by count; and nobody else notices."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future

import numpy as np
import psutil
import pytest

from tests.unit.recording import PATIENCE_S, POINTS, SITES, TOKEN_BYTES, Live, Other, Whole, side
from tests.unit.waiting import until
from vllm_scope import Read
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.heads import Bank, Encoding, Scored, Told
from vllm_scope.request.sites import Sites, point_of
from vllm_scope.request.spec import Spec
from vllm_scope.sinks import Manifest, Report, RequestInfo
from vllm_scope.sinks.options import SinkOptions
from vllm_scope.sinks.quota import REQUEST_BYTES
from vllm_scope.sinks.request import Arrival, Delivery, Ended
from vllm_scope.sinks.sink_queue import QueuedRows
from vllm_scope.sinks.sink_thread import SinkThread
from vllm_scope.sinks.spill import SpillFile

READ = Read("resid_post", to="mine")


# Sinks in trouble


@pytest.mark.parametrize("where", ["write", "finish"])
@pytest.mark.parametrize("kind", [Live, Whole])
def test_a_sink_that_raises_fails_its_requests_with_the_reason_and_no_others(
    monkeypatch, where, kind
):
    sinks = {"mine": {"fail": where}, "other": {}}
    with side(monkeypatch, sinks, mine=kind, other=Other) as here:
        for key in range(5):
            here.add(key, READ, Read("embed", to="other"))
            here.write(key, [0, 1, 2])
            here.end(key)
        for key in range(5):
            manifest = here.manifest(key)
            assert (manifest.status, manifest.delivered) == ("error", 0)
            assert manifest.reason == "sink 'mine' failed: OSError: disk full"
            assert here.manifest(key, "other").status == "ok"
        assert here.router.counters()["mine"]["errors"] >= 5


def test_a_sink_whose_flush_s_is_longer_than_any_wait_answers_all_its_requests(monkeypatch):
    with side(monkeypatch, {"mine": {"flush_s": 1e12}}, mine=Whole) as here:
        for key in range(3):
            here.add(key, READ)
            here.write(key, [0, 1, 2])
            here.end(key)
            assert here.manifest(key).status == "ok"
        assert here.router.flush() == {"mine": None}


def test_a_sink_that_hangs_is_waited_for_as_long_as_its_patience_and_then_not(monkeypatch):
    sinks = {"mine": {"patience_s": 0.3, "queue_mib": 0.001}, "other": {}}
    with side(monkeypatch, sinks, mine=Live, other=Other) as here:
        stuck = Live.made[0]
        stuck.go_on.clear()
        started = time.monotonic()
        for key in range(50):
            here.add(key, READ, Read("embed", to="other"))
            here.write(key, list(range(20)))
            here.end(key, output=tuple(range(19)))
        # One wait for all: once it counts as stalled, nothing waits.
        assert 0.2 < time.monotonic() - started < 1.5
        for key in range(50):
            manifest = here.manifest(key)
            assert (manifest.status, manifest.delivered) == ("error", 0)
            assert "did not return from a call within 0.3 s" in manifest.reason
            assert here.manifest(key, "other").status == "ok"
        assert here.router.counters()["mine"]["queue_bytes"] <= 1200
        stuck.go_on.set()
        time.sleep(0.2)
        here.add(99, READ)
        here.write(99, [0, 1, 2])
        here.end(99)
        assert here.manifest(99).status == "ok"


@pytest.mark.parametrize(
    "returned",
    [
        pytest.param({"files": ["x"]}, id="a-dict"),
        pytest.param(Report(streams=None), id="no-streams"),
        pytest.param(Report(files=[3]), id="a-number-as-a-file"),
        pytest.param(Report(details={"x": object()}), id="an-object"),
        pytest.param(Report(details={"x": np.float32(1)}), id="a-numpy-number"),
        pytest.param(Report(details={"x": {(1, 2): 3}}), id="a-key-that-json-cannot-have"),
        pytest.param(Report(status="fine"), id="no-status"),
        pytest.param(Report(published=True), id="no-future"),
        pytest.param(SystemExit(), id="it-exits"),
    ],
)
def test_a_wrong_return_value_ends_its_request_and_not_the_next(monkeypatch, returned):
    def finish(self, ending):
        if ending.request.key == 1:
            if isinstance(returned, BaseException):
                raise returned
            return returned
        return None

    monkeypatch.setattr(Live, "finish", finish)
    with side(monkeypatch, {"mine": {}}, mine=Live) as here:
        for key in (1, 2):
            here.add(key, READ)
            here.write(key, [0, 1, 2])
            here.end(key)
        manifest = here.manifest(1)
        assert (manifest.status, manifest.files) == ("error", [])
        assert manifest.reason.startswith("sink 'mine' failed: ")
        assert here.manifest(2).status == "ok"


@pytest.mark.parametrize(
    ("becomes", "status", "says"),
    [
        pytest.param("done", "ok", None, id="done"),
        pytest.param("failed", "error", "failed: OSError: bucket gone", id="failed"),
        pytest.param("cancelled", "error", "CancelledError", id="cancelled"),
        pytest.param("forgotten", "error", "was flushed, but published nothing", id="forgotten"),
        pytest.param("running", "error", "was flushed, but published nothing", id="running"),
    ],
)
def test_a_plugin_that_publishes_later_says_when(monkeypatch, becomes, status, says):
    """Two requests share one upload."""
    upload: Future[None] = Future()

    def flush(self):
        if becomes == "done":
            upload.set_result(None)
        elif becomes == "failed":
            upload.set_exception(OSError("bucket gone"))
        elif becomes == "cancelled":
            upload.cancel()
        elif becomes == "running" and not upload.running():
            upload.set_running_or_notify_cancel()

    monkeypatch.setattr(Live, "finish", lambda self, ending: Report(["x"], published=upload))
    with side(monkeypatch, {"mine": {}}, mine=Live) as here:
        monkeypatch.setattr(Live, "flush", flush)
        for key in (1, 2):
            here.add(key, READ)
            here.write(key, [0, 1, 2])
        for key in (1, 2):
            here.end(key)
        for key in (1, 2):
            manifest = here.manifest(key)
            assert manifest.status == status
            assert manifest.files == (["x"] if status == "ok" else [])
            assert says is None or says in manifest.reason
        monkeypatch.undo()


def test_requests_that_wait_for_a_flush_that_hangs_are_ended(monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr(Live, "finish", lambda self, ending: Report(published=Future()))
    monkeypatch.setattr(Live, "flush", lambda self: stuck.wait(PATIENCE_S))
    with side(monkeypatch, {"mine": {"patience_s": 0.3}, "other": {}}, mine=Live,
              other=Other) as here:  # fmt: skip
        here.add(1, READ, Read("embed", to="other"))
        here.write(1, [0, 1, 2])
        here.end(1)
        manifest = here.manifest(1)
        assert (manifest.status, manifest.delivered) == ("error", 0)
        assert "did not return from a call within 0.3 s" in manifest.reason
        assert here.manifest(1, "other").status == "ok"
        stuck.set()


def test_requests_leave_nothing_behind_at_a_sink_that_hangs(monkeypatch):
    """However many come while it does: each holds its prompt, its ids, its spec."""
    with side(monkeypatch, {"mine": {"patience_s": 0.2, "queue_mib": 0.001}}, mine=Live) as here:
        stuck = Live.made[0]
        stuck.go_on.clear()
        for key in range(50):
            here.add(key, READ)
            here.write(key, list(range(20)))
            here.end(key)
        (thread,) = here.router._threads["mine"]
        while not thread.stalled:
            time.sleep(0.01)
        for key in range(50, 2000):
            here.add(key, READ)
            here.write(key, [0])
            here.end(key)
            assert here.manifest(key).status == "error"
        # The queue's 32 rows, with the ends of their requests.
        assert len(thread._queue) < 80
        stuck.go_on.set()
        here.add(2000, READ)
        while thread.stalled:
            time.sleep(0.01)
        here.write(2000, [0, 1])
        here.end(2000, output=(7,))
        assert here.manifest(2000).status == "ok"
    assert len(stuck.endings) < 100
    assert thread._num_running == 0


def test_requests_of_a_sink_that_hangs_end_even_if_counters_cannot_be_sent(monkeypatch):
    with side(monkeypatch, {"mine": {"patience_s": 1.5}}, mine=Live) as here:
        here.memory.send_counters = lambda sinks: 1 / 0
        Live.made[0].go_on.clear()
        here.add(1, READ)
        here.write(1, [0])
        here.end(1)
        assert "did not return" in here.manifest(1).reason
        del here.memory.send_counters
        Live.made[0].go_on.set()


@pytest.mark.parametrize("step", ["whole_blocks", "forget", "ending"])
def test_rows_that_cannot_be_joined_fail_only_their_request(monkeypatch, step):
    def no_memory(self, *_):
        raise MemoryError

    with side(monkeypatch, {"mine": {}}, mine=Whole) as here:
        for key in (1, 2):
            here.add(key, READ)
            here.write(key, [0, 1, 2])
            with monkeypatch.context() as patch:
                if key == 1:
                    patch.setattr(Delivery, step, no_memory)
                here.end(key)
                assert here.manifest(key).status == ("error" if key == 1 else "ok")
        assert "MemoryError" in here.manifest(1).reason


def test_closing_does_not_wait_for_a_sink_that_hangs(monkeypatch):
    started = time.monotonic()
    with side(monkeypatch, {"mine": {"patience_s": 0.3}}, mine=Live) as here:
        Live.made[0].go_on.clear()
        here.add(1, READ)
        here.write(1, [0])
    assert time.monotonic() - started < 3
    Live.made[0].go_on.set()


# Policies, of a sink at a tenth of the speed that rows come at

STEP_S, NUM_STEPS = 0.001, 120


def _overloaded(monkeypatch, options, **more):
    """Rows of one request at ten times the sink's speed; (manifest, counters, seconds)."""
    body = {"delay_s": 5 * STEP_S, "queue_mib": 20 * TOKEN_BYTES / 2**20} | options
    with side(monkeypatch, {"mine": body}, mine=Live, **more) as here:
        here.add(1, READ)
        started = time.monotonic()
        queued = 0
        for position in range(NUM_STEPS):
            here.write(1, [position])
            queued = max(queued, here.router.counters()["mine"]["queue_bytes"])
            time.sleep(STEP_S)
        fed_s = time.monotonic() - started
        here.end(1, output=tuple(range(NUM_STEPS - 1)))
        manifest = here.manifest(1)
        counters = here.router.counters()["mine"]
    assert queued <= 20 * TOKEN_BYTES
    return manifest, counters, fed_s


#: Each step is a block at two layers.
SINK_S = 2 * 5 * STEP_S * NUM_STEPS


def test_block_loses_nothing_and_makes_the_engine_as_slow_as_the_sink(monkeypatch):
    manifest, counters, fed_s = _overloaded(monkeypatch, {"on_overload": "block"})
    assert (manifest.status, manifest.delivered) == ("ok", 2 * NUM_STEPS)
    assert counters["drops"] == 0
    assert counters["waits"] > 0
    assert fed_s > 0.7 * SINK_S
    assert [p for p, _ in Live.made[0].rows[1, "resid_post", 0]] == list(range(NUM_STEPS))


def test_drop_never_waits_and_counts_what_it_drops(monkeypatch):
    manifest, counters, fed_s = _overloaded(monkeypatch, {"on_overload": "drop"})
    assert counters["waits"] == 0
    assert fed_s < 0.6 * SINK_S
    assert counters["drops"] == manifest.dropped > NUM_STEPS
    assert manifest.delivered + manifest.dropped == manifest.expected == 2 * NUM_STEPS
    assert (manifest.status, manifest.reason) == ("partial", "the queue of sink 'mine' was full")
    positions = [p for p, _ in Live.made[0].rows[1, "resid_post", 0]]
    assert positions == sorted(set(positions))
    assert len(positions) == manifest.delivered // 2


def test_spill_loses_nothing_keeps_the_order_and_does_not_wait(monkeypatch, tmp_path):
    options = {"on_overload": "spill", "spill_folder": str(tmp_path), "spill_mib": 1}
    manifest, counters, fed_s = _overloaded(monkeypatch, options)
    assert (manifest.status, manifest.delivered) == ("ok", 2 * NUM_STEPS)
    assert counters["waits"] == counters["drops"] == 0
    assert counters["spilled_bytes"] > NUM_STEPS * TOKEN_BYTES // 2
    assert fed_s < 0.6 * SINK_S
    expected = [(p, 10 * p + 1) for p in range(NUM_STEPS)]
    assert Live.made[0].rows[1, "resid_post", 0] == expected
    assert list(tmp_path.iterdir()) == []  # it has no name


def test_spill_waits_when_the_disk_is_full_too(monkeypatch):
    options = {"on_overload": "spill", "spill_mib": 10 * TOKEN_BYTES / 2**20}
    manifest, counters, _ = _overloaded(monkeypatch, options)
    assert (manifest.status, manifest.delivered) == ("ok", 2 * NUM_STEPS)
    assert counters["waits"] > 0
    assert counters["drops"] == 0


def test_closing_waits_once_for_all_sinks_that_hang(monkeypatch):
    plugins = {f"s{i}": type(f"S{i}", (Live,), {"made": []}) for i in range(4)}
    sinks = {name: {"patience_s": 0.5} for name in plugins}
    with side(monkeypatch, sinks, **plugins) as here:
        here.add(0, *(Read("resid_post", to=name) for name in plugins))
        for plugin in plugins.values():
            plugin.made[0].go_on.clear()
        here.write(0, [0, 1])
        time.sleep(0.1)
        started = time.monotonic()
        here.router.close()
        assert time.monotonic() - started < 1.5
        for plugin in plugins.values():
            plugin.made[0].go_on.set()


def test_a_row_that_a_dropped_one_should_replace_is_not_delivered(monkeypatch):
    """As a rejected draft's, whose position is computed anew."""
    sinks = {"mine": {"held_mib": 100 / 2**20}}
    with side(monkeypatch, sinks, mine=Whole) as here:
        here.add(0, READ)
        here.write(0, [0, 1, 2])
        here.write(0, [2], base=1000.0)
        here.end(0)
        manifest = here.manifest(0)
        rows = Whole.made[0].rows
    assert (manifest.status, manifest.delivered, manifest.expected) == ("partial", 4, 6)
    assert "held_mib" in manifest.reason
    assert [at for at, _ in rows[0, "resid_post", 1]] == [0, 1]


@pytest.mark.parametrize("waits", ["held", "queued"])
def test_a_key_that_takes_all_it_can_leaves_another_its_room(monkeypatch, waits):
    most = 16 * 2 * TOKEN_BYTES / 2**20
    options = {"held_mib": most} if waits == "held" else {"queue_mib": most, "on_overload": "drop"}
    with side(monkeypatch, {"mine": options}, mine=Whole if waits == "held" else Live) as here:
        if waits == "queued":
            here.add(0, READ)
            Live.made[0].go_on.clear()
            here.write(0, [0])  # the sink is at it, and what follows waits
            until(lambda: here.router.counters()["mine"]["queue_bytes"] == 0, 5)
        counter = f"{'queue' if waits == 'queued' else waits}_bytes"
        here.info = {"owner": "one"}
        for key in range(1, 30):
            here.add(key, READ)
            here.write(key, [0])
        until(lambda: here.router.counters()["mine"]["drops"], 5)
        held = here.router.counters()["mine"][counter]
        assert 0.7 * most * 2**20 <= held <= 0.75 * most * 2**20
        here.info = {"owner": "two"}
        here.add(30, READ)
        here.write(30, [0, 1, 2])
        if waits == "queued":
            Live.made[0].go_on.set()
        for key in range(1, 31):
            here.end(key)
        assert here.manifest(30).status == "ok"
        assert {here.manifest(key).delivered for key in range(1, 30)} == {0, 2}
        until(lambda: here.router.counters()["mine"][counter] == 0, 5)


def test_a_request_whose_rows_are_all_dropped_counts_as_one_for_its_key(monkeypatch):
    options = {"on_overload": "drop", "queue_mib": 0.0001, "key_mib": 1}
    with side(monkeypatch, {"mine": options}, mine=Live) as here:
        Live.made[0].go_on.clear()
        for key in (1, 2):  # one is in a call of the sink, one fills the queue
            here.add(key, READ)
            here.write(key, [0, 1, 2])
            until(lambda: Live.made[0].threads, 20)
        here.info = {"owner": "one"}
        here.add(3, READ)
        for position in range(5):
            here.write(3, [position])
        here.end(3)
        (given,) = here.router._quotas["mine"]._given.values()
        assert given == {"one": REQUEST_BYTES + 5 * TOKEN_BYTES}
        Live.made[0].go_on.set()
        manifest = here.manifest(3)
        assert (manifest.status, manifest.delivered) == ("partial", 0)
        assert "the queue of sink 'mine' was full" in manifest.reason


def test_the_end_of_a_request_of_many_drops_is_quick():
    """It is told on the drain's thread, where a sink has seen nothing of it."""
    layout = Layout(tuple(point_of(2 * i, 1) for i in range(65)))
    sites = Sites(64, 4, "float32", tuple(2 * i for i in range(65)))
    asked = Spec((Read("resid_post", to="mine"),)).resolve(sites)
    delivery = Delivery(RequestInfo(0, "r", "u", (5, 6)), asked, "mine", sites, sites.boundaries)
    widths, nothing = Widths((16,)), np.zeros((1, 0), np.uint8)
    for i in range(1000):
        delivery.lose(Arrival(layout, np.array([i]), nothing, widths, i + 1), "full")
    for stream in delivery._streams:
        for i in range(1000):
            delivery._arrived.setdefault(stream, []).append((np.array([i]), np.array([i])))
    started = time.perf_counter()
    ending = delivery.ending(Ended(tuple(range(1000)), "length"))
    assert time.perf_counter() - started < 0.3
    assert (ending.delivered, ending.status) == (0, "partial")


def test_a_row_that_comes_after_a_dropped_one_is_delivered(monkeypatch):
    sinks = {"mine": {"on_overload": "drop", "queue_mib": 40 / 2**20}}
    with side(monkeypatch, sinks, mine=Live) as here:
        sink = Live.made[0]

        def wait():
            until(lambda: here.router.counters()["mine"]["queue_bytes"] == 0, 5)

        for key in range(2):
            here.add(key, READ)
            sink.go_on.clear()
            here.write(key, [0, 1])
            wait()
            here.write(key, [2])
            here.write(key, [2], base=1000.0)  # dropped
            sink.go_on.set()
            until(lambda key=key: 2 in dict(sink.rows.get((key, "resid_post", 1), ())), 5)
        here.write(1, [2], base=2000.0)
        here.end(0)
        here.end(1)
        manifests = [here.manifest(key) for key in range(2)]
        assert here.router.counters()["mine"]["drops"] == 4
    assert [(m.status, m.delivered) for m in manifests] == [("partial", 4), ("ok", 6)]


@pytest.mark.parametrize("kind", [Bank, Told, Scored])
def test_each_number_of_a_bank_counts_as_a_value(kind):
    layout = Layout(POINTS[:1], ((kind.of([b"a"], 3), POINTS[1:]), (Encoding("e", 20), POINTS[:1])))
    widths = Widths((16,))
    data = np.zeros((5, 16 * layout.slots(widths)), np.uint8)
    rows = QueuedRows(None, Arrival(layout, np.arange(5), data, widths))
    assert rows.num_values == 5 * (1 + 2 * 3 + 1)


def test_another_sink_does_not_notice_one_that_drops_or_spills(monkeypatch):
    for policy in ("drop", "spill"):
        sinks = {"mine": {"on_overload": policy, "queue_mib": 0.0001, "delay_s": 0.02}, "other": {}}
        with side(monkeypatch, sinks, mine=Live, other=Other) as here:
            here.add(1, READ)
            started = time.monotonic()
            for key in range(2, 30):
                here.write(1, [key])
                here.add(key, Read("embed", to="other"))
                here.write(key, [0, 1, 2])
                here.end(key)
                assert here.manifest(key, "other").status == "ok"
            assert time.monotonic() - started < 1


def test_memory_stays_bounded_behind_a_sink_that_hangs(monkeypatch):
    """512 MiB of rows at a queue of 8 MiB, and 64 MiB held of requests that never end."""
    row = np.zeros((16, 64 << 10), np.uint8)
    info = RequestInfo(1, "r", "u", (1,))
    asked = Spec((Read("embed", to="mine"),)).resolve(SITES)
    made: list[Manifest] = []
    Whole.made = []
    for kind, most in ((Live, 8), (Whole, 8 + 64)):
        kind.made = []
        options = SinkOptions(queue_mib=8, held_mib=64, patience_s=0.2)
        sink = kind()
        sink.go_on.clear()
        thread = SinkThread("mine", sink, options, lambda delivery, manifest: made.append(manifest))
        delivery = Delivery(info, asked, "mine", SITES, SITES.boundaries)
        before = psutil.Process(os.getpid()).memory_info().rss
        for i in range(512):
            layout = Layout((POINTS[0],))
            thread.put(
                delivery, Arrival(layout, np.arange(16 * i, 16 * i + 16), row.copy(), 1 << 16)
            )
        grown = psutil.Process(os.getpid()).memory_info().rss - before
        assert grown < (most + 24) << 20, grown >> 20
        assert thread.snapshot().drops > 0
        sink.go_on.set()
        while thread.stalled:
            time.sleep(0.01)
        delivery.error = "given up"
        thread.end(delivery, Ended((), "abort"))
        thread.close()
        assert thread.snapshot().held_bytes == 0
    assert [manifest.status for manifest in made] == ["error", "error"]


# Spill file


def test_a_spill_file_is_a_queue_of_bounded_size():
    spill = SpillFile(None, 1000)
    rng = np.random.default_rng(0)
    waiting: list[np.ndarray] = []
    for _ in range(2000):
        if rng.random() < 0.5:
            data = rng.integers(0, 256, int(rng.integers(1, 400)), np.uint8)
            if spill.put(data):
                waiting.append(data)
            else:
                assert waiting
        elif waiting:
            assert (spill.take() == waiting.pop(0)).all()
        assert spill.num_bytes == sum(map(len, waiting)) <= 1000
        assert os.fstat(spill._file.fileno()).st_size <= 1000
    assert not spill.put(np.zeros(1001, np.uint8)) or not waiting
    spill.close()
