"""Arena -> host rows -> sink, off the path of the forward.

Owns:  the side stream and the drain thread.
Runs:  `submit` and `finish_request` on the worker's thread, after the forward was
       enqueued; everything else on the drain thread.
From:  arena, plan.Labels.   To: host_ring (copies), a Sink.

Promise: rows reach the sink in the order of their steps, and a request's `finish`
after all of its rows. Where the sink is slow, the worker waits; nothing is lost.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vllm_scope.arena import Arena, HostFence, Region, StreamFence
from vllm_scope.host_ring import HostRing, Lease
from vllm_scope.plan import Labels
from vllm_scope.sinks import RowBatch, Sink

logger = logging.getLogger(__name__)

#: Steps that may wait for the sink before the worker waits too.
MAX_WAITING = 64


@dataclass(frozen=True)
class _Rows:
    """Rows on their way.

    Attributes:
        copied: on a GPU, passed once the rows are in the ring.
        positions: [num_rows] int64, the true positions of the batch's rows, where
            the host's were a guess.
    """

    labels: Labels
    boundary: int | None
    region: Region
    lease: Lease
    copied: torch.cuda.Event | None
    positions: Tensor | None


@dataclass(frozen=True)
class _Finish:
    key: int
    error: str | None


class Drain:
    """Copies regions of the arena to the host ring and hands them to a sink, in order.

    Verbs: `submit` (a written region), `finish_request`, `close`.
    """

    def __init__(self, arena: Arena, ring: HostRing, sink: Sink) -> None:
        self._arena, self._ring, self._sink = arena, ring, sink
        self._queue: queue.Queue[_Rows | _Finish | None] = queue.Queue(MAX_WAITING)
        self._cuda = arena.rows.is_cuda
        if self._cuda:
            self._stream = torch.cuda.Stream(arena.rows.device)
        self._thread = threading.Thread(target=self._run, name="vllm-scope-drain", daemon=True)
        self._thread.start()

    def submit(
        self,
        region: Region,
        labels: Labels,
        boundary: int | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Send a region on its way. Its taps are enqueued on the current stream.

        Args:
            region: what was written.
            labels: whose rows they are.
            boundary: the one tap that the region holds, or None for whole programs.
            positions: [num_rows] int64 on the device: true positions by batch row,
                or None where the labels' positions are true.
        """
        lease = self._ring.acquire(region.num_slots)
        copied = None
        if self._cuda:
            copied, positions = self._copy(region, lease, positions)
        elif positions is not None:
            positions = positions.clone()
        self._queue.put(_Rows(labels, boundary, region, lease, copied, positions))

    def finish_request(self, key: int, error: str | None = None) -> None:
        self._queue.put(_Finish(key, error))

    def close(self) -> None:
        """Deliver what waits, then stop."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout=30)
        self._sink.close()
        self._ring.close()

    def _copy(
        self, region: Region, lease: Lease, positions: Tensor | None
    ) -> tuple[torch.cuda.Event, Tensor | None]:
        if positions is not None:
            # On the main stream: the next step overwrites vLLM's buffer there.
            pinned = torch.empty(positions.shape, dtype=positions.dtype, pin_memory=True)
            positions = pinned.copy_(positions, non_blocking=True)
        written = torch.cuda.Event()
        written.record()
        # Blocking: the drain thread sleeps in `synchronize` instead of spinning.
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(written)
            lease.rows.copy_(self._arena.view(region), non_blocking=True)
            copied.record()
            assert isinstance(region.fence, StreamFence)
            region.fence.event.record()
        return copied, positions

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, _Finish):
                    self._sink.finish(item.key, item.error)
                else:
                    self._write(item)
            except Exception:
                # The rows of this item are lost; their requests report them as
                # dropped. The engine and later steps go on.
                logger.exception("vllm-scope: rows could not be delivered")

    def _write(self, item: _Rows) -> None:
        try:
            if item.copied is not None:
                item.copied.synchronize()
            else:
                try:
                    item.lease.rows.copy_(self._arena.view(item.region))
                finally:
                    assert isinstance(item.region.fence, HostFence)
                    item.region.fence.set()
            labels = item.labels
            if item.positions is not None:
                true = item.positions.numpy().astype(np.int64)
                labels = replace(labels, positions=true[labels.rows])
            self._sink.write(RowBatch(labels, item.lease, item.boundary))
        finally:
            item.lease.release()
