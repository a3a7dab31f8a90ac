"""The ring of rows that taps write and the drain empties.

Owns:  the arena tensor, and which part of it a step may write.
Runs:  in the worker that drains its stage, in device memory.
From:  plan (how many slots a step needs).   To: graph.tap (writes), drain (copies out).

Promise: a region is reused only after the fence of its last copy, so a row is never overwritten
before it is copied. If the ring is full, the stream waits (GPU), or the thread (CPU).
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from vllm_scope.program.layout import SLOT_BYTES


class HostFence(threading.Event):
    """The drain thread sets it; the worker's thread waits for it."""


class StreamFence:
    """A CUDA event after the copy; the current stream waits for it, the host does not."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def wait(self) -> None:
        self.event.wait()


@dataclass
class Region:
    """Slots `start` to `start + num_slots - 1`, of one step or one tap of a step."""

    start: int
    num_slots: int
    fence: HostFence | StreamFence

    @property
    def stop(self) -> int:
        return self.start + self.num_slots

    def overlaps(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop


class Arena:
    """A ring of slots.

    Attributes:
        slots: [num_slots, elements of a slot], model dtype. Its address never changes:
            CUDA graphs hold it.
        num_slots: its length.
    """

    def __init__(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (num_slots, SLOT_BYTES // dtype.itemsize)
        # Written now: host pages that are first touched later look like a leak.
        self.slots = torch.empty(shape, dtype=dtype, device=device).fill_(0)
        self.num_slots = num_slots
        self._new_fence = StreamFence if device.type == "cuda" else HostFence
        self._head = 0
        self._outstanding: deque[Region] = deque()

    @property
    def num_bytes(self) -> int:
        return self.slots.numel() * self.slots.element_size()

    def acquire(self, num_slots: int) -> Region:
        """The next region of the ring, after the fences of the regions that it overlaps.

        Raises:
            ValueError: more than the whole arena.
        """
        if num_slots > self.num_slots:
            raise ValueError(f"{num_slots} slots asked of an arena of {self.num_slots}")
        if num_slots == 0:
            # Not queued: an empty region overlaps nothing, and would end the loops below.
            region = Region(self._head, 0, self._new_fence())
            self.give_back(region)
            return region
        start = self._head
        if start + num_slots > self.num_slots:
            # Wrap. Regions at the ring's end are older than those at its beginning, so
            # the queue keeps its order.
            while self._outstanding and self._outstanding[0].start >= start:
                self._outstanding.popleft().fence.wait()
            start = 0
        stop = start + num_slots
        while self._outstanding and self._outstanding[0].overlaps(start, stop):
            self._outstanding.popleft().fence.wait()
        region = Region(start, num_slots, self._new_fence())
        self._outstanding.append(region)
        self._head = stop
        return region

    def give_back(self, region: Region) -> None:
        """Free a region that nothing will copy."""
        if isinstance(region.fence, HostFence):
            region.fence.set()

    def view(self, region: Region) -> torch.Tensor:
        return self.slots[region.start : region.stop]
