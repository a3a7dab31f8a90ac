"""The arena, a ring of slots in device memory. Taps write rows to the arena, and the drain copies
the rows out of the arena.

Owns:  the tensor with the slots, and the allocation of regions to steps.
Runs:  in each worker with taps; `acquire` on the worker's thread.
From:  plan (how many slots a step needs).   To: graph.tap (writes rows), drain (copies the rows).

Promise: no row is overwritten before it is copied. Each region has a fence, which is set after the
copy of the region's rows. A later step uses the same slots only after the fence is set. On a CPU,
the worker's thread waits for the fence. On a GPU, the model's stream waits for the fence, and the
worker's thread waits only until the copy is enqueued.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.transport.spans import SpanRing


class HostFence(threading.Event):
    """An event that is set after the copy of a region. Before the worker's thread uses the region's
    slots again, this thread waits for the event."""


class StreamFence:
    """A CUDA event that follows the copy of a region. `wait` makes the current stream wait for this
    event. The thread that calls `wait` waits only until the copy is enqueued."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._enqueued: threading.Event | None = None
        self._hurry: Callable[[], None] = _nothing

    def put_off(self, hurry: Callable[[], None]) -> None:
        """Record that another thread will enqueue the copy later. If a thread calls `wait` earlier
        than that, `wait` calls `hurry`."""
        self._enqueued, self._hurry = threading.Event(), hurry

    def set(self) -> None:
        """Record the CUDA event on the current stream. The copy is enqueued on the same stream."""
        self._event.record()
        if self._enqueued is not None:
            self._enqueued.set()

    def wait(self) -> None:
        if self._enqueued is not None and not self._enqueued.is_set():
            self._hurry()
            self._enqueued.wait()
        # Usually the copy is already done. A query of an event takes a fifth of the time of
        # `self._event.wait()`.
        if not self._event.query():
            self._event.wait()


def _nothing() -> None:
    pass


@dataclass
class Region:
    """The slots from `start` to `start + num_slots - 1`, for one step or one tap of a step."""

    start: int
    num_slots: int
    fence: HostFence | StreamFence

    @property
    def stop(self) -> int:
        return self.start + self.num_slots


class Arena(SpanRing[Region]):
    """A ring of slots in device memory.

    Attributes:
        slots: a tensor [num_slots, elements of a slot] with the model's dtype. The address of this
            tensor never changes, because CUDA graphs contain the address.
        num_slots: how many slots the ring has.
    """

    name = "an arena"

    def __init__(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(num_slots)
        shape = (num_slots, SLOT_BYTES // dtype.itemsize)
        # The tensor is filled now, so that on a CPU the process gets all pages of the tensor at
        # once. Otherwise the memory of the process would grow later, which would look like a memory
        # leak.
        self.slots = torch.empty(shape, dtype=dtype, device=device).fill_(0)
        self._new_fence = StreamFence if device.type == "cuda" else HostFence

    @property
    def num_bytes(self) -> int:
        return self.slots.numel() * self.slots.element_size()

    def _new_span(self, start: int, stop: int) -> Region:
        region = Region(start, stop - start, self._new_fence())
        if start == stop:
            self.give_back(region)
        return region

    def _wait_for(self, span: Region) -> None:
        span.fence.wait()

    def give_back(self, region: Region) -> None:
        """Free a region that will not be copied."""
        if isinstance(region.fence, HostFence):
            region.fence.set()

    def view(self, region: Region) -> torch.Tensor:
        return self.slots[region.start : region.stop]
