"""The ring of slots in device memory. Taps write rows to the ring, and the drain copies the rows.

Owns:  the arena tensor, and the allocation of regions to steps.
Runs:  in the worker that delivers the rows of its pipeline stage.
From:  plan (how many slots a step needs).   To: graph.tap (writes), drain (copies the rows).

Promise: a region is reused only after the fence of its last copy. Therefore no row is overwritten
before it is copied. If the ring is full, on a GPU the stream waits, and on a CPU the thread waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.transport.spans import SpanRing


class HostFence(threading.Event):
    """The drain thread sets this event after the copy. The worker's thread waits for the event."""


class StreamFence:
    """A CUDA event that follows the copy. The current stream waits for the event. The host waits
    only until the copy is enqueued."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._enqueued: threading.Event | None = None
        self._hurry: Callable[[], None] = _nothing

    def put_off(self, hurry: Callable[[], None]) -> None:
        """Note that another thread will enqueue the copy later. `wait` calls `hurry` if needed."""
        self._enqueued, self._hurry = threading.Event(), hurry

    def set(self) -> None:
        """Record the event on the current stream, on which the copy is enqueued."""
        self._event.record()
        if self._enqueued is not None:
            self._enqueued.set()

    def wait(self) -> None:
        if self._enqueued is not None and not self._enqueued.is_set():
            self._hurry()
            self._enqueued.wait()
        # Usually the copy is done. A query takes a fifth of the time of an enqueued wait.
        if not self._event.query():
            self._event.wait()


def _nothing() -> None:
    pass


@dataclass
class Region:
    """Slots `start` to `start + num_slots - 1`, for one step or for one tap of a step."""

    start: int
    num_slots: int
    fence: HostFence | StreamFence

    @property
    def stop(self) -> int:
        return self.start + self.num_slots


class Arena(SpanRing[Region]):
    """A ring of slots in device memory.

    Attributes:
        slots: [num_slots, elements of a slot], model dtype. The address of this tensor never
            changes, because CUDA graphs contain the address.
        num_slots: how many slots the ring has.
    """

    name = "an arena"

    def __init__(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(num_slots)
        shape = (num_slots, SLOT_BYTES // dtype.itemsize)
        # Filled now. If the first use of host pages came later, the growth would look like a leak.
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
