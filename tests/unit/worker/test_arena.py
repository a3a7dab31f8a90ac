"""The ring of rows: no region is handed out while its rows still wait for their copy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.worker.arena import Arena, HostFence, Region, StreamFence

CPU = torch.device("cpu")


class LazyCopies:
    """The drain at its laziest: copies end in order, and only when somebody waits.

    Each region is filled with its own number. A copy that finds another number
    there was overtaken by a later step.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.waiting: list[tuple[int, Region]] = []
        self._count = 0

    def take(self, num_slots: int) -> Region:
        region = self.arena.acquire(num_slots)
        overlapping = [
            r for _, r in self.waiting if r.start < region.stop and region.start < r.stop
        ]
        assert not overlapping, f"{region} was handed out over {overlapping}"
        self._count += 1
        self.arena.view(region).fill_(self._count)
        region.fence = _CopyUpTo(self, self._count)
        self.waiting.append((self._count, region))
        return region

    def copy_oldest(self) -> None:
        number, region = self.waiting.pop(0)
        assert (self.arena.view(region) == number).all(), f"{region} was overwritten"

    def copy_up_to(self, number: int) -> None:
        while self.waiting and self.waiting[0][0] <= number:
            self.copy_oldest()


class _CopyUpTo(HostFence):
    def __init__(self, copies: LazyCopies, number: int) -> None:
        super().__init__()
        self._copies, self._number = copies, number

    def wait(self) -> None:
        self._copies.copy_up_to(self._number)


@given(st.data())
def test_outstanding_regions_never_overlap(data):
    num_slots = data.draw(st.integers(1, 24), "slots")
    copies = LazyCopies(Arena(num_slots, torch.float32, CPU))
    for size in data.draw(st.lists(st.integers(1, num_slots), max_size=40), "sizes"):
        if copies.waiting and data.draw(st.booleans(), "a copy ends"):
            copies.copy_oldest()
        region = copies.take(size)
        assert region.start >= 0
        assert region.stop <= num_slots
        assert region.num_slots == size
    copies.copy_up_to(1 << 30)


def test_an_empty_region_does_not_hide_the_one_behind_it():
    copies = LazyCopies(Arena(8, torch.float32, CPU))
    for size in (4, 0, 4, 4, 4):
        copies.take(size)
    copies.copy_up_to(1 << 30)


def test_the_ring_wraps_where_a_region_does_not_fit_before_its_end():
    arena = Arena(10, torch.float32, CPU)
    starts = []
    for size in (4, 4, 4, 6, 10, 1):
        region = arena.acquire(size)
        starts.append(region.start)
        arena.give_back(region)
    assert starts == [0, 4, 0, 4, 0, 0]


def test_a_finished_copy_is_not_waited_for():
    arena = Arena(4, torch.float32, CPU)
    for _ in range(3):
        region = arena.acquire(4)
        arena.give_back(region)
    region.fence.wait()  # set by give_back: returns


def test_more_than_the_whole_arena_is_refused():
    arena = Arena(4, torch.float32, CPU)
    with pytest.raises(ValueError, match="an arena of 4 slots has no room for 5"):
        arena.acquire(5)
    assert arena.acquire(4).start == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_view_is_the_region_itself_and_nothing_else(dtype):
    arena = Arena(6, dtype, CPU)
    assert arena.slots.shape == (6, SLOT_BYTES // dtype.itemsize)
    arena.slots.fill_(torch.nan)
    arena.acquire(2)
    region = arena.acquire(3)
    arena.view(region).fill_(1)
    assert (arena.slots[2:5] == 1).all()
    assert arena.slots[[0, 1, 5]].isnan().all()
    assert arena.num_bytes == 6 * SLOT_BYTES


@pytest.mark.parametrize("done", [True, False])
def test_a_stream_waits_only_for_a_copy_that_is_not_done(monkeypatch, done):
    waits = []
    event = SimpleNamespace(query=lambda: done, wait=lambda: waits.append(1))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    StreamFence().wait()
    assert len(waits) == (not done)
