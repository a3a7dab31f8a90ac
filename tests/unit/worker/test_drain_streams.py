"""What the drain does where there is a GPU, with streams that do everything at once: which thread
copies, which events are waited for and used again. tests/gpu/test_drain.py has real streams."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tests.unit.delivered import ROW_BYTES, labels_of, reads_at
from tests.unit.waiting import until
from tests.unit.worker.test_drain import (
    CPU,
    PATIENCE_S,
    RecordingSink,
    _drain,
    _rows,
    _submit,
    of_pairs,
    pairs_of,
)
from tests.unit.worker.test_packer import encoding
from tests.unit.worker.test_probe_bank import linear
from vllm_scope.codecs.packed import packing_of
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.heads import Bank, Summed
from vllm_scope.request.resolved import ResolvedMoments
from vllm_scope.request.selectors import Word
from vllm_scope.request.sites import Place
from vllm_scope.transport.ring import HostRing
from vllm_scope.worker import arena as arenas
from vllm_scope.worker import drain as drains
from vllm_scope.worker import filler as fillers
from vllm_scope.worker import pace as paces
from vllm_scope.worker import probe_bank
from vllm_scope.worker.arena import Arena, StreamFence
from vllm_scope.worker.drain import Drain
from vllm_scope.worker.side_stream import SideStream


class Event:
    """A CUDA event of a device that has done everything at once.

    Attributes:
        made: of all events, in order.
    """

    made: ClassVar[list[Event]] = []

    def __init__(self, blocking: bool = False) -> None:
        self.blocking, self.on, self.num_records, self.num_waits = blocking, None, 0, 0
        Event.made.append(self)

    def record(self, stream: Stream | None = None) -> None:
        self.on, self.num_records = stream or torch.cuda.current_stream(), self.num_records + 1

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        self.num_waits += 1


class Stream:
    """A CUDA stream.

    Attributes:
        awaited: the events that it was told to wait for, and the streams that they were recorded
            on.
        num_waits: how often a thread has waited for all that was enqueued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.device_index, self.cuda_stream = device, 0, id(self)
        self.awaited: list[tuple[Event, Stream | None]] = []
        self.num_waits = 0

    def wait_event(self, event: Event) -> None:
        self.awaited.append((event, event.on))

    def wait_stream(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.fixture
def streams(monkeypatch):
    """Streams and events of no device, which every Drain uses. (the taps' stream, events)"""

    class OfCuda(SideStream):
        def __init__(self, device: torch.device) -> None:
            super().__init__(torch.device("cuda", 0))

    here = threading.local()
    taps = Stream(torch.device("cuda", 0))

    def set_stream(stream: Stream) -> None:
        here.stream = stream

    def current(*_: object) -> Stream:
        return getattr(here, "stream", taps)

    Event.made = []
    for name, value in {
        "Event": Event, "Stream": Stream, "current_stream": current, "set_stream": set_stream,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    raw = lambda _: current().cuda_stream  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)
    monkeypatch.setattr(fillers, "SideStream", OfCuda)
    for module in (fillers, drains):
        monkeypatch.setattr(module, "to_host", torch.clone)
    make = Arena.__init__

    def with_stream_fences(self, *args):
        make(self, *args)
        self._new_fence = StreamFence

    monkeypatch.setattr(arenas.Arena, "__init__", with_stream_fences)
    return SimpleNamespace(taps=taps)


def test_rows_without_heads_are_copied_on_the_workers_thread(streams, monkeypatch):
    filled = []
    fill = fillers.Filler._fill

    def filling(self, *args):
        filled.append((threading.current_thread().name, torch.cuda.current_stream()))
        fill(self, *args)

    monkeypatch.setattr(fillers.Filler, "_fill", filling)
    with _drain(8) as (arena, drain, sink):
        for step in range(30):
            _submit(arena, drain, 1, step, 1)
            _submit(arena, drain, 2, 2 * step, 2, boundary=0)
        for key in (1, 2):
            drain.finish_request(key)
        side = drain._stream._stream
    for key, count in ((1, 1), (2, 2)):
        expected = [row for step in range(30) for row in _rows(key, count * step, count)]
        found = [event for event in sink.events if event[0] == key and len(event) == 4]
        assert [event[1] for event in found] == [row[1] for row in expected]
    assert filled == [(threading.current_thread().name, side)] * 60
    assert torch.cuda.current_stream() is streams.taps
    assert [on for _, on in side.awaited] == [streams.taps] * 60, "the taps come first"


def test_small_steps_with_heads_are_copied_on_the_drain_thread_after_their_taps(streams):
    with of_pairs(CPU, 4096) as (submit, drain, sink, found, pairs):
        sink.gate.clear()
        put_off, tapped = drain.filler.put_off, []
        drain.filler.put_off = lambda *args: tapped.append(put_off(*args)) or tapped[-1]
        for step in range(40):
            submit(step % 3, step, 2)
            if step == 5:
                sink.gate.set()
        drain.finish_request(0)
        until(lambda: sink.events, PATIENCE_S)
        side = drain._stream._stream
        assert not drain.filler._num_waiting
    assert found == [one for step in range(40) for one in pairs_of(step % 3, [step], 2)]
    assert sum(pairs.counts) == 80
    last = [num_rows // 2 - 1 for num_rows in accumulate(pairs.counts)]
    assert [event for event, _ in side.awaited] == [tapped[step] for step in last]
    assert {on for _, on in side.awaited} == {streams.taps}
    assert all(event.blocking for event, _ in side.awaited), "the drain thread sleeps meanwhile"


def test_events_are_used_again(streams):
    with _drain(8) as (arena, drain, sink):
        for step in range(50):
            _submit(arena, drain, 1, step, 1)
            until(lambda step=step: len(sink.events) > step, PATIENCE_S)
    of_copies = [event for event in Event.made if event.blocking]
    assert len(of_copies) < 10
    assert sum(event.num_records for event in of_copies) >= 50


def test_true_positions_are_read_before_the_next_step_changes_them(streams):
    arena, sink = Arena(8, torch.float32, CPU), RecordingSink()
    ring = HostRing(64, cuda=False)
    drain = Drain(arena, ring, sink, Widths((ROW_BYTES,)))
    positions = torch.tensor([5])
    try:
        sink.gate.clear()
        for written in (False, True):
            labels = labels_of([1], [0], layouts=(reads_at(0),))
            if written:
                lease = ring.acquire(1)
                lease.slots.view(torch.float32)[:] = 1.0
                drain.submit_written(lease, labels, positions)
            else:
                region = arena.acquire(1)
                arena.view(region)[:] = 1.0
                drain.submit(region, labels, None, positions)
            positions += 1
        sink.gate.set()
    finally:
        drain.close()
    assert [position for _, position, *_ in sink.events] == [5, 6]


def _put_off(count: int):
    """(the drain, the regions) of steps that the drain thread has copied, and what came of them."""
    regions = []
    acquire = Arena.acquire

    def acquiring(self, num_slots):
        regions.append(acquire(self, num_slots))
        return regions[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "acquire", acquiring)
        with of_pairs(CPU, 4096) as (submit, drain, _, found, _):
            for step in range(count):
                submit(1, step, 2)
    assert found == pairs_of(1, range(count), 2)
    return drain, regions


def test_a_region_that_is_put_off_is_free_once_its_copy_is_enqueued_on_the_side_stream(streams):
    drain, regions = _put_off(20)
    side = drain._stream._stream
    for region in regions:
        assert region.fence._enqueued is not None, "who needs the region waits for the thread"
        assert region.fence._enqueued.is_set()
        assert region.fence._event.on is side


def test_the_sink_gets_rows_that_were_put_off_once_they_are_in_the_ring(streams, monkeypatch):
    waits = []
    monkeypatch.setattr(SideStream, "wait_here", lambda self: waits.append(len(seen)))
    seen: list[int] = []
    with of_pairs(CPU, 4096) as (submit, _, sink, _, _):
        write = sink.write
        sink.write = lambda batch: (seen.append(1), write(batch))
        for step in range(10):
            submit(1, step, 2)
    assert len(waits) == len(seen)
    assert waits == list(range(len(seen))), "before each batch"


def test_heads_that_settle_are_done_on_the_device_too(streams):
    with of_pairs(CPU, 4096) as (submit, drain, _, _, _):
        submit(1, 0, 2)
        drain.settle()
        assert drain._stream._stream.num_waits == 1


def test_sums_look_at_an_event_that_no_later_step_records(streams):
    place = Place("resid_post", 0)
    summed = Layout((), ((Summed.of(0), (place.point(),)),))
    with _drain(64) as (arena, drain, _):
        drain.add_moments(1, 30, [ResolvedMoments("m", (place,), Word("all"), "a")])
        for step in range(3):
            region = arena.acquire(1)
            arena.view(region)[:] = 1.0
            drain.submit(region, labels_of([1], [step], layouts=(summed,)))
        side = drain._stream._stream
        awaited = [event for event, _ in side.awaited]
        assert len(set(awaited)) == 3
        assert [event.num_records for event in awaited] == [1, 1, 1]


class Store:
    """A score store that knows which requests it keeps nothing of any more."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def collect(self, labels, lease, boundary, sizes) -> None:
        pass

    def end(self, key: int) -> None:
        self.ended.append(key)


def test_a_copy_that_fails_leaves_nothing_that_writes_to_the_ring(streams, monkeypatch, caplog):
    store = Store()
    with _drain(8, store=store) as (arena, drain, sink):
        fill = fillers.Filler._fill

        def failing(self, region, labels, *more):
            if 9 in labels.keys:
                raise torch.OutOfMemoryError
            fill(self, region, labels, *more)

        monkeypatch.setattr(fillers.Filler, "_fill", failing)
        for step in range(20):
            _submit(arena, drain, 9 if step % 2 else 1, step, 1)
        side = drain._stream._stream
        assert side.num_waits == 10, "the thread waits before the lease is free"
        drain.finish_request(1)
        drain.settle()
    assert [event[1] for event in sink.events if len(event) == 4] == list(range(0, 20, 2))
    assert set(store.ended) == {1, 9}
    assert caplog.text.count("rows could not be encoded") == 10


def test_an_event_that_the_watch_waits_for_is_not_used_again(streams):
    waits = []

    class Watching:
        def __bool__(self) -> bool:
            return True

        def add(self, labels, wait, lease, boundary) -> None:
            waits.append(wait)

    with _drain(8, watch=Watching()) as (arena, drain, sink):
        for step in range(20):
            _submit(arena, drain, 1, step, 1)
            until(lambda step=step: len(sink.events) > step, PATIENCE_S)
    events = [wait.__self__ for wait in waits]
    assert len(set(events)) == 20
    assert [event.num_records for event in events] == [1] * 20


def test_something_that_waits_is_served_though_a_launch_begins_at_once(streams, monkeypatch):
    monkeypatch.setattr(paces, "MOST_LAUNCH_S", PATIENCE_S)
    monkeypatch.setattr(paces, "LINGER_UNSEEN_S", PATIENCE_S)
    with _drain(8) as (arena, drain, sink):
        _submit(arena, drain, 1, 0, 1)
        until(lambda: len(sink.events) == 1, PATIENCE_S)
        time.sleep(0.05)  # the thread rests
        _submit(arena, drain, 1, 1, 1)
        drain.hurry()
        drain.begin_launch()
        until(lambda: sink.events == _rows(1, 0, 2), PATIENCE_S / 2)
        drain.end_launch()


@pytest.mark.parametrize("by", ["the-end", "something-that-waits", "its-length"])
def test_the_thread_begins_no_work_while_the_model_is_launched(streams, monkeypatch, by):
    monkeypatch.setattr(paces, "MOST_LAUNCH_S", 0.1 if by == "its-length" else PATIENCE_S)
    with _drain(8) as (arena, drain, sink):
        drain.begin_launch()
        _submit(arena, drain, 1, 0, 1)
        time.sleep(0.05)
        assert not sink.events
        if by == "the-end":
            drain.end_launch()
        elif by == "something-that-waits":
            drain.hurry()
        until(lambda: sink.events == _rows(1, 0, 1), PATIENCE_S / 2)
        drain.end_launch()


@pytest.mark.parametrize("what", ["bank", "projection"])
def test_weights_are_loaded_on_the_side_stream_and_only_once(streams, monkeypatch, what):
    """When each request entered the stream, adding a request took twice as long."""
    on: list[object] = []
    loaded = partial(probe_bank.DeviceBank, device=torch.device("cpu"))

    def load(nets, device):
        on.append(torch.cuda.current_stream())
        return loaded(nets)

    monkeypatch.setattr(probe_bank, "DeviceBank", load)
    rp8 = encoding("rp8", torch.float32, k=3, seed=1)
    codec = packing_of(rp8).codec
    prepare = lambda self, device: on.append(torch.cuda.current_stream())  # noqa: E731
    monkeypatch.setattr(type(codec), "prepare", prepare)
    banks = {Bank.of([b"one"], 1): [linear(0, 4)]} if what == "bank" else {}
    encodings = [] if what == "bank" else [rp8]
    with _drain(8) as (_, drain, _):
        drain.add_request(1, encodings, banks)
        assert on == [drain.filler.stream._stream]
        entered: list[object] = []
        drain.filler.packer._banks._entered = lambda: entered.append(1) or nullcontext()
        drain.add_request(2, [], banks)
        assert entered == []


def test_on_a_cpu_the_thread_works_while_the_model_runs():
    with _drain(8) as (arena, drain, sink):
        drain.begin_launch()
        _submit(arena, drain, 1, 0, 1)
        until(lambda: sink.events == _rows(1, 0, 1), PATIENCE_S / 2)


def test_a_caller_that_followed_a_request_is_forgotten_with_it(streams):
    with _drain(8) as (_, drain, _):
        drain.follow(1)
        assert drain._pace.is_followed
        drain.finish_request(1)
        assert not drain._pace.is_followed
