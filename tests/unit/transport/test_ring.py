"""Host memory that workers and front-ends share: no span is written while it is read."""

from __future__ import annotations

import subprocess
import sys
import threading

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope import CapacityError
from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.transport.ring import MAX_READERS, HostRing, Lease, RingReader

PATIENCE_S = 10


def _ring(num_slots: int) -> HostRing:
    return HostRing(num_slots, cuda=False)


@given(st.data())
def test_a_span_is_handed_out_again_only_when_every_lease_on_it_is_released(data):
    num_slots = data.draw(st.integers(1, 24), "slots")
    ring = _ring(num_slots)
    waiting: list[tuple[int, Lease, int]] = []  # number, lease, holders

    def release_one() -> None:
        number, lease, holders = waiting.pop(0)
        assert (lease.slots == number).all(), f"{lease.start} to {lease.stop} were overwritten"
        for _ in range(holders):
            assert not lease.free
            lease.release()
        assert lease.free

    # Releases come in order, at the latest when the ring waits for them.
    ring.reclaim = release_one
    for number, size in enumerate(data.draw(st.lists(st.integers(1, num_slots), max_size=40)), 1):
        if waiting and data.draw(st.booleans(), "a reader is done"):
            release_one()
        lease = ring.acquire(size)
        assert 0 <= lease.start <= lease.stop <= num_slots
        assert lease.slots.shape == (size, SLOT_BYTES)
        overlapping = [x for _, x, _ in waiting if x.start < lease.stop and lease.start < x.stop]
        assert not overlapping
        lease.slots.fill_(number)
        holders = data.draw(st.integers(1, 3), "holders")
        for _ in range(holders - 1):
            lease.retain()
        waiting.append((number, lease, holders))
    while waiting:
        release_one()
    ring.close()


def test_used_slots_are_those_that_are_leased():
    ring = _ring(10)
    first, second = ring.acquire(3), ring.acquire(4)
    assert ring.num_used() == 7
    first.release()
    assert ring.num_used() == 4
    second.release()
    ring.acquire(5)  # at the beginning again
    assert ring.num_used() == 5
    ring.close()


def test_an_empty_span_does_not_hide_the_one_behind_it():
    ring, waited = _ring(8), []
    leases = [ring.acquire(size) for size in (4, 0, 4)]

    def release_next() -> None:
        waited.append(len(waited))
        leases[len(waited) - 1].release()

    ring.reclaim = release_next
    ring.acquire(4)
    ring.acquire(4)
    assert leases[2].free
    ring.close()


@pytest.mark.parametrize("size", [4, 6], ids=["the-next-slots", "at-the-beginning-again"])
def test_a_span_whose_wait_was_interrupted_is_waited_for_again(size):
    ring = _ring(8)
    ring.acquire(3).release()
    lease = ring.acquire(5)
    ring.acquire(3).release()

    def interrupt() -> None:
        raise KeyboardInterrupt

    ring.reclaim = interrupt
    with pytest.raises(KeyboardInterrupt):
        ring.acquire(size)
    assert not lease.free
    assert ring.num_used() == 5
    ring.reclaim = lease.release
    ring.acquire(size)
    assert lease.free, "slots in use were allocated again"
    ring.close()


def test_more_than_the_whole_ring_is_refused():
    ring = _ring(4)
    with pytest.raises(ValueError, match="a ring of 4 slots has no room for 5"):
        ring.acquire(5)
    assert ring.acquire(4).start == 0
    ring.close()


def test_waiting_for_a_reader_takes_as_long_as_the_reader_does():
    ring = _ring(4)
    lease = ring.acquire(3)
    threading.Timer(0.05, lease.release).start()
    assert ring.acquire(3).start == 0
    assert 20 < ring.wait_ms < PATIENCE_S * 1e3
    ring.close()


def test_a_reader_sees_what_the_worker_writes_and_the_worker_how_far_it_has_read():
    ring = _ring(10)
    reader = RingReader(ring.ref)
    content = torch.randint(0, 256, (10, SLOT_BYTES), dtype=torch.uint8)
    ring.slots.copy_(content)
    assert torch.equal(reader.slots(2, 7), content[2:7])
    for number in (0, 3, MAX_READERS - 1):
        reader.acknowledge(number, number + 11)
    assert {n: c for n, c in enumerate(ring.counters.tolist()) if c} == {
        0: 11, 3: 14, MAX_READERS - 1: MAX_READERS + 10,
    }  # fmt: skip
    assert torch.equal(ring.slots, content)  # counters and slots do not overlap
    ring.close()


def test_another_process_reads_the_same_slots_and_keeps_them_after_the_ring_is_closed():
    ring = _ring(4)
    ring.slots.copy_(torch.arange(4.0)[:, None].expand(-1, 4).contiguous().view(torch.uint8))
    code = (
        "import sys, msgspec, torch; from vllm_scope.transport.ring import RingReader, RingRef\n"
        "reader = RingReader(msgspec.json.decode(sys.argv[1], type=RingRef))\n"
        "reader.acknowledge(1, 5); print('open', flush=True); input()\n"
        "print(reader.slots(1, 3).view(torch.float32).tolist())"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, msgspec.json.encode(ring.ref).decode()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout.readline() == "open\n"
    assert ring.counters[1] == 5
    ring.close()
    out, _ = child.communicate("go on\n", timeout=PATIENCE_S)
    assert out == "[[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]\n"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        pytest.param({"identity": 7}, "is not the worker's ring", id="another-ring"),
        pytest.param({"num_slots": 1 << 40}, "mmap|memory|size", id="larger-than-it-is"),
        pytest.param({"fd": 1 << 20}, "No such file", id="no-file"),
        pytest.param({"pid": 1 << 30}, "No such file", id="no-process"),
    ],
)
def test_another_file_in_the_rings_place_is_not_read(wrong, error):
    ring = _ring(4)
    with pytest.raises((OSError, ValueError), match=error):
        RingReader(msgspec.structs.replace(ring.ref, **wrong))
    ring.close()


def test_a_counter_starts_at_zero_for_its_next_reader():
    ring = _ring(4)
    first, second = ring.add_reader(), ring.add_reader()
    ring.counters[[first, second]] = 5
    ring.free_reader(first)
    assert ring.add_reader() == first
    assert ring.counters[[first, second]].tolist() == [0, 5]
    for _ in range(MAX_READERS - 2):
        ring.add_reader()
    with pytest.raises(CapacityError, match=f"{MAX_READERS} front-ends read from this worker"):
        ring.add_reader()
    ring.close()


def test_a_ring_in_the_place_of_a_closed_one_is_another_ring():
    # A file descriptor is given again once it is closed. A front-end that took the
    # second ring for the first, whose memory it has mapped, would return its old rows.
    first = _ring(4)
    ref = first.ref
    first.close()
    second = _ring(4)
    assert second.ref != ref
    second.close()
