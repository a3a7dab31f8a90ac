"""What the drain does where there is a GPU, with streams that do everything at once: which thread
copies, which events are waited for and used again. tests/gpu/test_drain.py has real streams."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tests.unit.delivered import ROW_BYTES, labels_of, reads_at
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
from vllm_scope.program.layout import Widths
from vllm_scope.transport.ring import HostRing
from vllm_scope.worker import arena as arenas
from vllm_scope.worker import drain as drains
from vllm_scope.worker import filler as fillers
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
        self.blocking, self.on, self.num_records = blocking, None, 0
        Event.made.append(self)

    def record(self, stream: Stream | None = None) -> None:
        self.on, self.num_records = stream or torch.cuda.current_stream(), self.num_records + 1

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    synchronize = wait


class Stream:
    """A CUDA stream.

    Attributes:
        awaited: the events that it was told to wait for, and the streams that they were recorded
            on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.device_index, self.cuda_stream = device, 0, id(self)
        self.awaited: list[tuple[Event, Stream | None]] = []

    def wait_event(self, event: Event) -> None:
        self.awaited.append((event, event.on))

    def wait_stream(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


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
        for step in range(40):
            submit(step % 3, step, 2)
            if step == 5:
                sink.gate.set()
        drain.finish_request(0)
        until = time.monotonic() + PATIENCE_S
        while not sink.events:
            assert time.monotonic() < until
            time.sleep(0.001)
        side = drain._stream._stream
        assert not drain.filler._num_waiting
    assert found == [one for step in range(40) for one in pairs_of(step % 3, [step], 2)]
    assert sum(pairs.counts) == 80
    assert len(side.awaited) == 40
    assert [on for _, on in side.awaited] == [streams.taps] * 40
    assert all(event.blocking for event, _ in side.awaited), "the drain thread sleeps meanwhile"


def test_events_are_used_again(streams):
    with _drain(8) as (arena, drain, sink):
        for step in range(50):
            _submit(arena, drain, 1, step, 1)
            until = time.monotonic() + PATIENCE_S
            while len(sink.events) <= step:
                assert time.monotonic() < until
                time.sleep(0.001)
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
