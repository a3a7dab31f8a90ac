"""Arena -> host rows -> sink, off the path of the forward.

Owns:  the side stream, the pinned host ring, the drain thread.
Runs:  `submit` and `finish_request` on the worker's thread, after the forward was
       enqueued; everything else on the drain thread.
From:  arena, plan.Labels.   To: a Sink.

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
from vllm_scope.plan import Labels
from vllm_scope.sinks import RowBatch, Sink

logger = logging.getLogger(__name__)

#: Steps that may wait for the sink before the worker waits too.
MAX_WAITING = 64


@dataclass
class _Rows:
    labels: Labels
    boundary: int | None
    region: Region
    host: _HostRows
    #: [num_rows] int64, the true positions of the batch's rows, where the host's
    #: were a guess.
    positions: Tensor | None


@dataclass
class _HostRows:
    """Rows on the host, and how to know that they are there."""

    rows: Tensor
    copied: torch.cuda.Event | None = None
    ring: _PinnedRing | None = None
    span: tuple[int, int] = (0, 0)

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    def release(self) -> None:
        if self.ring is not None:
            self.ring.release(self.span)


@dataclass(frozen=True)
class _Finish:
    key: int
    error: str | None


class Drain:
    """Copies regions of the arena to the host and hands them to a sink, in order.

    Verbs: `submit` (a written region), `finish_request`, `close`.
    """

    def __init__(self, arena: Arena, sink: Sink, host_slots: int | None = None) -> None:
        self._arena = arena
        self._sink = sink
        self._queue: queue.Queue[_Rows | _Finish | None] = queue.Queue(MAX_WAITING)
        self._cuda = arena.rows.is_cuda
        if self._cuda:
            self._stream = torch.cuda.Stream(arena.rows.device)
            self._ring = _PinnedRing(host_slots or arena.num_slots, arena)
        self.error: BaseException | None = None
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
        if self._cuda:
            host, positions = self._copy(region, positions)
        else:
            host = _HostRows(self._arena.view(region))
            positions = None if positions is None else positions.clone()
        self._queue.put(_Rows(labels, boundary, region, host, positions))

    def finish_request(self, key: int, error: str | None = None) -> None:
        self._queue.put(_Finish(key, error))

    def close(self) -> None:
        """Deliver what waits, then stop."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout=30)
        self._sink.close()

    def _copy(self, region: Region, positions: Tensor | None) -> tuple[_HostRows, Tensor | None]:
        span, rows = self._ring.acquire(region.num_slots)
        if positions is not None:
            # On the main stream: the next step overwrites vLLM's buffer there.
            pinned = torch.empty(positions.shape, dtype=positions.dtype, pin_memory=True)
            positions = pinned.copy_(positions, non_blocking=True)
        written = torch.cuda.Event()
        written.record()
        with torch.cuda.stream(self._stream):
            written.wait()
            rows.copy_(self._arena.view(region), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            assert isinstance(region.fence, StreamFence)
            region.fence.event.record()
        return _HostRows(rows, copied, self._ring, span), positions

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, _Finish):
                    self._sink.finish(item.key, item.error)
                else:
                    self._write(item)
            except Exception as error:
                # The rows of this item are lost; their requests report them as
                # dropped. The engine and later steps go on.
                self.error = error
                logger.exception("vllm-scope: rows could not be delivered")

    def _write(self, item: _Rows) -> None:
        try:
            item.host.wait()
            labels = item.labels
            if item.positions is not None:
                true = item.positions.numpy().astype(np.int64)
                labels = replace(labels, positions=true[labels.rows])
            self._sink.write(RowBatch(labels, item.host.rows, item.boundary))
        finally:
            item.host.release()
            if isinstance(item.region.fence, HostFence):
                item.region.fence.set()


class _PinnedRing:
    """Pinned host memory, handed out and given back in order."""

    def __init__(self, num_slots: int, arena: Arena) -> None:
        self._rows = torch.empty(
            (num_slots, arena.rows.shape[1]), dtype=arena.rows.dtype, pin_memory=True
        )
        self._head = 0
        self._used: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    def acquire(self, num_slots: int) -> tuple[tuple[int, int], Tensor]:
        """The next span; the caller waits while the sink still holds it."""
        start = self._head
        if start + num_slots > self._rows.shape[0]:
            start = 0
        span = (start, start + num_slots)
        with self._changed:
            self._changed.wait_for(
                lambda: not any(a < span[1] and span[0] < b for a, b in self._used)
            )
            self._used.append(span)
        self._head = span[1]
        return span, self._rows[span[0] : span[1]]

    def release(self, span: tuple[int, int]) -> None:
        with self._changed:
            self._used.remove(span)
            self._changed.notify_all()
