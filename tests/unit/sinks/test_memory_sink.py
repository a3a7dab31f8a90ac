"""Rows find the front-end that asked for them, and none holds up the worker."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from tests.unit.delivered import ROW_BYTES, labels_of, reads_at, rows_in, slots_per_token
from vllm_scope import CapacityError, CompatError
from vllm_scope.program.layout import Widths
from vllm_scope.sinks import RowBatch
from vllm_scope.sinks.memory import UNSENT, MemorySink
from vllm_scope.transport.messages import Address, FinishHeader
from vllm_scope.transport.receiver import Receiver
from vllm_scope.transport.ring import MAX_READERS, HostRing
from vllm_scope.transport.senders import tcp

PATIENCE_S = 10
LAYOUTS = (reads_at(0, 2), reads_at(1), reads_at(0, 1, 2))


class FrontEnd:
    """Keeps (key, position, boundary, value) of each row, and what has finished.

    Attributes:
        gate: rows are read once it is set.
        lost: keys whose rows were read too late.
    """

    def __init__(self, sink: MemorySink) -> None:
        self.rows: list[tuple] = []
        self.finished: list[FinishHeader] = []
        self.gate = threading.Event()
        self.gate.set()
        self.lost: set[int] = set()
        self.receiver = Receiver(
            self._on_rows, self.finished.append, on_lost=lambda keys: self.lost.update(keys)
        )
        if sink.connect(self.receiver.address) is None:
            self.receiver.listen("127.0.0.1")
            assert sink.connect(self.receiver.address) == "tcp"

    @property
    def name(self) -> str:
        return self.receiver.address.frontend

    def _on_rows(self, message) -> None:
        assert self.gate.wait(PATIENCE_S)
        self.rows += rows_in(message, message.slots, message.boundary)

    def rows_of(self, *keys: int) -> list[tuple]:
        return [row for row in self.rows if row[0] in keys]

    def wait_for(self, num_finished: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.finished) < num_finished and time.monotonic() < deadline:
            time.sleep(0.002)
        assert len(self.finished) == num_finished


@pytest.fixture
def ring() -> Iterator[HostRing]:
    ring = HostRing(40, cuda=False)
    yield ring
    ring.close()


@pytest.fixture(params=["shared", "tcp"])
def sink(ring: HostRing, request: pytest.FixtureRequest) -> Iterator[MemorySink]:
    sink = MemorySink(2, ring, request.param)
    yield sink
    sink.close()


@pytest.fixture
def two(sink: MemorySink) -> Iterator[list[FrontEnd]]:
    front_ends = [FrontEnd(sink), FrontEnd(sink)]
    yield front_ends
    for front_end in front_ends:
        front_end.gate.set()
        front_end.receiver.close()


def _write(
    sink: MemorySink, ring: HostRing, keys: list[int], layout_of: list[int], tap: int | None = None
) -> None:
    """What the drain does. Row values count up from 0: each row's own place in the batch."""
    labels = labels_of(keys, range(50, 50 + len(keys)), layout_of, LAYOUTS)
    num_slots = sum(slots_per_token(labels, tap))
    lease = ring.acquire(num_slots)
    values = torch.arange(float(num_slots))[:, None].expand(-1, 4).contiguous()
    lease.slots.copy_(values.view(torch.uint8))
    try:
        sink.write(RowBatch(labels, lease, Widths((ROW_BYTES,)), tap))
    finally:
        lease.release()


def test_a_batch_of_two_front_ends_reaches_both(sink, ring, two):
    for key, front_end in ((1, two[0]), (2, two[1]), (3, two[0])):
        sink.add_request(key, front_end.name)
    # Key 9 belongs to nobody: its request has finished.
    _write(sink, ring, [1, 2, 9, 3, 1], [0, 2, 0, 1, 2])
    _write(sink, ring, [3, 2, 1], [2, 2, 2], tap=1)
    for key in (1, 2, 3):
        sink.finish(key, None)
    two[0].wait_for(2)
    two[1].wait_for(1)
    assert two[0].rows_of(1, 3) == [
        (1, 50, 0, 0), (1, 50, 2, 1), (3, 53, 1, 7), (1, 54, 0, 8), (1, 54, 1, 9), (1, 54, 2, 10),
        (3, 50, 1, 0), (1, 52, 1, 2),
    ]  # fmt: skip
    assert two[1].rows_of(2) == [(2, 51, 0, 2), (2, 51, 1, 3), (2, 51, 2, 4), (2, 51, 1, 1)]
    assert two[0].finished == [FinishHeader(1, 2, None), FinishHeader(3, 2, None)]
    assert two[1].finished == [FinishHeader(2, 2, None)]


def test_a_front_end_without_a_row_in_the_batch_gets_none(sink, ring, two):
    sink.add_request(1, two[0].name)
    sink.add_request(2, two[1].name)
    _write(sink, ring, [1, 1], [1, 0])
    sink.finish(1, "a reason")
    sink.finish(2, None)
    two[0].wait_for(1)
    two[1].wait_for(1)
    assert two[0].rows == [(1, 50, 1, 0), (1, 51, 0, 1), (1, 51, 2, 2)]
    assert two[0].finished == [FinishHeader(1, 2, "a reason")]
    assert two[1].rows == []


def test_a_request_finishes_once_and_has_no_rows_after(sink, ring, two):
    for key in (1, 2):
        sink.add_request(key, two[0].name)
    sink.finish(1, None)
    sink.finish(1, None)
    _write(sink, ring, [1], [1])
    sink.finish(2, None)
    two[0].wait_for(2)
    assert two[0].rows == []
    assert [header.key for header in two[0].finished] == [1, 2]


def test_the_reason_of_a_failure_reaches_its_front_end_whatever_its_text(sink, two):
    """A message that could not be made would leave its caller waiting."""
    for key, error in ((1, "half \ud800 of a pair"), (2, "x" * 1_000_000)):
        sink.add_request(key, two[0].name)
        sink.finish(key, error)
    two[0].wait_for(2)
    assert two[0].finished[0].error == "half ? of a pair"
    assert two[0].finished[1].error == "x" * 497 + "..."


def test_ends_that_come_together_reach_each_front_end_after_the_rows(sink, ring, two):
    for key, front_end in ((1, two[0]), (2, two[1]), (3, two[0])):
        sink.add_request(key, front_end.name)
    _write(sink, ring, [1, 2, 3], [1, 1, 1])
    # Nobody asked for key 9.
    sink.finish_all([(1, None), (2, "half \ud800 of a pair"), (9, None), (3, "a reason")])
    two[0].wait_for(2)
    two[1].wait_for(1)
    assert [row[0] for row in two[0].rows_of(1, 3)] == [1, 3]
    assert two[0].finished == [FinishHeader(1, 2, None), FinishHeader(3, 2, "a reason")]
    assert two[1].finished == [FinishHeader(2, 2, "half ? of a pair")]
    assert sink.num_requests == 0


def test_ends_that_cannot_be_sent_to_a_front_end_take_none_of_the_others(
    sink, two, monkeypatch, caplog
):
    def send(*_):
        raise OSError("no such road")

    for key, front_end in enumerate(two):
        sink.add_request(key, front_end.name)
    monkeypatch.setattr(sink._senders[two[0].name], "send_ends", send)
    sink.finish_all([(0, None), (1, None)])
    two[1].wait_for(1)
    assert two[0].finished == []
    assert f"ends of 1 requests could not be sent to front-end {two[0].name}" in caplog.text
    assert sink.num_requests == 0


def test_rows_that_cannot_be_sent_to_a_front_end_take_none_of_the_others(
    sink, ring, two, monkeypatch, caplog
):
    def send(*_):
        raise OSError("no such road")

    for key, front_end in enumerate(two):
        sink.add_request(key, front_end.name)
    monkeypatch.setattr(sink._senders[two[0].name], "send_rows", send)
    _write(sink, ring, [0, 1], [1, 1])
    sink.finish_all([(0, None), (1, None)])
    two[0].wait_for(1)
    two[1].wait_for(1)
    assert two[0].rows_of(0) == []
    assert [row[0] for row in two[1].rows_of(1)] == [1]
    assert [end.error for front_end in two for end in front_end.finished] == [UNSENT, None]
    assert f"rows of a step could not be sent to front-end {two[0].name}" in caplog.text


def test_a_request_whose_rows_could_not_be_sent_fails_and_its_neighbours_do_not(
    sink, ring, two, monkeypatch
):
    """The row of a rejected draft could otherwise stand for a lost row of its position."""

    def send(*_):
        raise MemoryError

    for key in range(3):
        sink.add_request(key, two[0].name)
    sink.leave_out_rows(2)
    _write(sink, ring, [0, 1], [1, 1])
    with monkeypatch.context() as broken:
        broken.setattr(sink._senders[two[0].name], "send_rows", send)
        _write(sink, ring, [0, 2], [1, 1])
    _write(sink, ring, [0, 1], [1, 1])
    for key in range(3):
        sink.finish(key, "its own reason" if key == 2 else None)
    two[0].wait_for(3)
    assert [end.error for end in two[0].finished] == [UNSENT, None, "its own reason"]
    sink.add_request(0, two[0].name)
    sink.finish(0, None)
    two[0].wait_for(4)
    assert two[0].finished[-1].error is None


def test_rows_wait_in_the_ring_for_the_slowest_front_end(sink, ring, two):
    sink.add_request(1, two[0].name)
    sink.add_request(2, two[1].name)
    two[1].gate.clear()
    written = 0

    def work() -> None:
        nonlocal written
        for _ in range(30):  # ten rows each: the ring holds four
            _write(sink, ring, [1, 2] * 5, [1] * 10)
            written += 1
        for key in (1, 2):
            sink.finish(key, None)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(0.2)
    assert worker.is_alive()
    assert written <= 4
    two[1].gate.set()
    two[0].wait_for(1)
    two[1].wait_for(1)
    for key, front_end in ((1, two[0]), (2, two[1])):
        expected = [(key, 50 + i, 1, float(i)) for i in range(key - 1, 10, 2)]
        assert front_end.rows_of(key) == expected * 30


def _all_free(ring: HostRing, sink: MemorySink) -> bool:
    """Whether the whole ring can be had, soon."""
    found: list = []
    taker = threading.Thread(target=lambda: found.append(ring.acquire(ring.num_slots)), daemon=True)
    taker.start()
    taker.join(PATIENCE_S / 3)
    return bool(found)


def test_rows_of_requests_that_nobody_asked_for_do_not_stay_in_the_ring(sink, ring, two):
    _write(sink, ring, [7, 8], [1, 1])
    assert _all_free(ring, sink)


FRONT_END = """
import sys, time, msgspec
from vllm_scope.transport.receiver import Receiver
receiver = Receiver(lambda message: time.sleep(60), print)
receiver.listen("127.0.0.1")
print(msgspec.json.encode(receiver.address).decode(), flush=True)
time.sleep(60)
"""


@contextmanager
def _another_process(sink: MemorySink) -> Iterator[tuple[subprocess.Popen, Address]]:
    """A front-end that never reads, connected."""
    child = subprocess.Popen([sys.executable, "-c", FRONT_END], stdout=subprocess.PIPE)
    try:
        address = msgspec.json.decode(child.stdout.readline(), type=Address)
        assert sink.connect(address) is not None
        yield child, address
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("sink", ["shared", "tcp"], indirect=True)
def test_a_front_end_that_died_does_not_hold_a_worker(sink, ring, two, monkeypatch):
    monkeypatch.setattr(tcp, "DIAL_S", 0.2)
    with _another_process(sink) as (child, address):
        sink.add_request(1, address.frontend)
        sink.add_request(2, two[0].name)
        _write(sink, ring, [1, 2], [0, 1])
        child.kill()  # and nobody waits for it: it stays as a zombie
        for _ in range(30):
            _write(sink, ring, [1, 2], [0, 1])
        assert _all_free(ring, sink)
        sink.finish(1, None)
        sink.finish(2, None)
        two[0].wait_for(1)
        assert len(two[0].rows_of(2)) == 31
        FrontEnd(sink).receiver.close()  # whoever connects has the dead cleared away
        with pytest.raises(CapacityError, match="not connected"):
            sink.add_request(3, address.frontend)
        assert sink.num_requests == 0


@pytest.mark.parametrize("sink", ["shared"], indirect=True)
def test_the_counter_of_a_front_end_that_died_is_used_again(sink, ring):
    free = len(ring._free_readers)
    for _ in range(2):
        with _another_process(sink) as (_, address):
            sink.add_request(1, address.frontend)
            _write(sink, ring, [1], [0])
            assert len(ring._free_readers) == free - 1
    front_end = FrontEnd(sink)
    assert len(ring._free_readers) == free - 1
    sink.add_request(2, front_end.name)
    _write(sink, ring, [2], [1])
    sink.finish(2, None)
    front_end.wait_for(1)
    assert front_end.rows == [(2, 50, 1, 0)]
    front_end.receiver.close()


def test_a_front_end_that_left_before_its_first_row_does_not_hold_a_worker(sink, ring, monkeypatch):
    monkeypatch.setattr(tcp, "DIAL_S", 0.2)
    front_end = FrontEnd(sink)
    sink.add_request(1, front_end.name)
    front_end.receiver.close()
    for _ in range(30):
        _write(sink, ring, [1], [0])
    assert _all_free(ring, sink)


def test_a_front_end_that_lives_and_does_not_read_is_given_up_and_may_come_back(
    sink, ring, two, monkeypatch
):
    monkeypatch.setattr(tcp, "DIAL_S", 0.2)
    ring.patience_s = 0.3
    stuck, alive = two
    stuck.gate.clear()
    sink.add_request(1, stuck.name)
    sink.add_request(2, alive.name)
    started = time.monotonic()
    for _ in range(60):
        _write(sink, ring, [1, 2], [0, 1])
    assert 0.3 <= time.monotonic() - started < PATIENCE_S
    sink.finish(1, None)
    sink.finish(2, None)
    alive.wait_for(1)
    assert alive.rows_of(2) == [(2, 51, 1, 2)] * 60
    assert not alive.lost
    stuck.gate.set()
    shared = sink.roads[0] == "shared"
    assert sink.connect(stuck.receiver.address) == sink.roads[0]
    sink.add_request(3, stuck.name)
    _write(sink, ring, [3], [1])
    sink.finish(3, None)
    stuck.wait_for(1)
    assert stuck.rows_of(3) == [(3, 50, 1, 0)]
    assert [header.key for header in stuck.finished] == [3]
    # What was sent over TCP before is right, and what was not is not there.
    assert stuck.lost == ({1, 2} if shared else set())
    if not shared:
        assert set(stuck.rows_of(1)) <= {(1, 50, 0, 0), (1, 50, 2, 1)}


def test_a_front_end_is_not_given_up_early_because_the_worker_waited_for_another_one_before(
    sink, ring, two, caplog
):
    """The ring tells the sink twice of a wait for a lease: after half the time, and at its end."""
    for key, front_end in enumerate(two):
        front_end.gate.clear()
        sink.add_request(key, front_end.name)
        _write(sink, ring, [key], [1])
        ring.give_up(ring._spans[-1])
    assert "has not read its rows" not in caplog.text
    for front_end in two:
        front_end.gate.set()
    for key, front_end in enumerate(two):
        sink.finish(key, None)
        front_end.wait_for(1)
        assert front_end.rows == [(key, 50, 1, 0)]
        assert not front_end.lost


def test_a_front_end_that_never_connected_is_refused(sink, two):
    with pytest.raises(CapacityError, match="front-end nobody is not connected"):
        sink.add_request(1, "nobody")


def test_connecting_again_keeps_the_transport(sink, two):
    roads = sink.roads
    for front_end in two:
        assert sink.connect(front_end.receiver.address) == roads[0]
    assert sink.roads == roads


def test_a_front_end_on_another_host_is_asked_for_tcp(ring, tmp_path):
    sink = MemorySink(0, ring)
    receiver = Receiver(print, print)
    elsewhere = {"path": str(tmp_path / "rows")}
    assert sink.connect(msgspec.structs.replace(receiver.address, **elsewhere)) is None
    assert sink.roads == []
    receiver.listen("127.0.0.1")
    assert sink.connect(msgspec.structs.replace(receiver.address, **elsewhere)) == "tcp"
    # Another worker of the same front-end shares its memory, whoever listens.
    assert MemorySink(0, ring).connect(receiver.address) == "shared"
    sink.close()
    receiver.close()


def test_a_ring_that_cannot_be_mapped_uses_tcp(ring):
    sink = MemorySink(0, ring)
    ring.ref = msgspec.structs.replace(ring.ref, pid=1 << 30)  # as in another pid namespace
    receiver = Receiver(print, print)
    assert sink.connect(receiver.address) is None
    receiver.listen("127.0.0.1")
    assert sink.connect(receiver.address) == "tcp"
    sink.close()
    receiver.close()


def test_where_only_shared_memory_is_allowed_another_host_is_refused(ring, tmp_path):
    sink = MemorySink(0, ring, "shared")
    receiver = Receiver(print, print)
    receiver.listen("127.0.0.1")
    with pytest.raises(CompatError, match=r"on another host.*road is 'shared'; run both"):
        sink.connect(msgspec.structs.replace(receiver.address, path=str(tmp_path / "rows")))
    receiver.close()


def test_as_many_front_ends_share_memory_as_the_ring_has_counters(ring):
    sink = MemorySink(0, ring)
    del ring._free_readers[2:]
    front_ends = [FrontEnd(sink) for _ in range(2)]
    with pytest.raises(CapacityError, match=f"{MAX_READERS} front-ends read from this worker"):
        FrontEnd(sink)
    front_ends[0].receiver.close()
    front_ends.append(FrontEnd(sink))
    sink.close()
    for front_end in front_ends[1:]:
        front_end.receiver.close()
