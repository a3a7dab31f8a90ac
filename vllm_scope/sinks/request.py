"""Selects and counts the rows that one request sends to one sink.

Owns:  Arrival (rows on their way to a sink), Ended (the scheduler's data about the end of a
       request), Delivery (the rows of one request at one sink).
Runs:  the worker's thread makes a Delivery. The drain thread calls `arrival`. Any thread can call
       `lose` and `ending`. The sink's thread calls the other methods.
From:  router.   To: sink_thread.

Promise: a sink that takes whole requests gets, for each stream, one row for every accepted position
that was requested. If a row was computed several times, the sink gets the row that was computed
last. The counts `expected` and `delivered` show how many rows are missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_scope.batch.by_position import Ints, Part, last_values, wanted_positions
from vllm_scope.program.layout import SLOT, Layout, Widths
from vllm_scope.request.heads import Head
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.sinks import Block, Ending, RequestInfo, Status
from vllm_scope.sinks.streams import Stream, streams_of


@dataclass(frozen=True)
class Arrival:
    """The rows and scores from one batch, for the tokens of one request that have the same layout.

    Attributes:
        layout: the part of the tokens' layout for which `data` has values.
        positions: int64 [n].
        data: a copy of the bytes of this part, uint8 [n, bytes of a token].
        widths: number of bytes of a raw row, for each kind of site.
        number: the number of this arrival among the request's arrivals at this sink, from 1 on.
    """

    layout: Layout
    positions: Ints
    data: NDArray[np.uint8]
    widths: Widths
    number: int = 0


@dataclass(frozen=True)
class Ended:
    """The scheduler's data about a request that has ended.

    Attributes:
        output_ids: the accepted tokens, including the token sampled last.
        reason: the finish reason that vLLM reports (stop, length, abort or error).
    """

    output_ids: tuple[int, ...]
    reason: str


class Delivery:
    """Selects and keeps the rows of one request for one sink, and counts missing rows.

    Args:
        asked: all actions of the request.
        to: the destination: the sink's name, with the prefix router.GLOBAL for `global_sinks`.
        here: the boundaries of this pipeline stage.

    Attributes:
        error: the reason why no more rows are delivered. None while rows are delivered.
        loss: the reason why rows were dropped. None if no rows were dropped.
        held_bytes: number of bytes of the rows that wait for the request's end.
        entered: True if at least one row of the request has been in the sink's queue.
        charged: True if the request's API key was charged for the request (quota.REQUEST_BYTES).
        refused: True if the request's API key has reached its limit at this sink (Quota).
    """

    def __init__(
        self, info: RequestInfo, asked: Resolved, to: str, sites: Sites, here: Sequence[int]
    ) -> None:
        self.info, self.to = info, to
        self.error: str | None = None
        self.loss: str | None = None
        self.held_bytes = 0
        self.entered = self.charged = self.refused = False
        self._streams = list(streams_of(asked, to, sites, here))
        self._kept: list[Arrival] = []
        self._parts: dict[Layout, tuple[Layout, Ints | slice] | None] = {}
        #: For each stream, a list of pairs: delivered positions, and for each position the number
        #: of its arrival.
        self._arrived: dict[Stream, list[tuple[Ints, Ints]]] = {}
        self._num_arrivals = 0
        #: Dropped arrivals. If an arrival was dropped, earlier rows of the same positions are
        #: outdated, because they may belong to a rejected draft.
        self._dropped: list[Arrival] = []
        #: The last result of `_last_dropped`, as (the number of dropped arrivals at that time, the
        #: result).
        self._last: tuple[int, dict[Layout, Ints]] = (0, {})

    @property
    def empty(self) -> bool:
        """True if this stage has none of the streams that the request sends to the sink."""
        return not self._streams

    def arrival(
        self, layout: Layout, positions: Ints, data: NDArray[np.uint8], widths: Widths
    ) -> Arrival | None:
        """A copy of the rows that go to this destination. None if there are no such rows.

        Args:
            layout: the layout of `data`, which is uint8 [n, bytes of a token].
        """
        if layout not in self._parts:
            self._parts[layout] = self._part_of(layout, widths)
        part = self._parts[layout]
        if part is None:
            return None
        own, slots = part
        by_slot = data.view(SLOT)
        if isinstance(slots, slice):
            taken = by_slot[:, slots].copy()
        else:
            taken = by_slot.take(slots, axis=1)
        self._num_arrivals += 1
        return Arrival(own, positions.copy(), taken.view(np.uint8), widths, self._num_arrivals)

    def _part_of(self, layout: Layout, widths: Widths) -> tuple[Layout, Ints | slice] | None:
        """Returns the part of a layout that goes to this destination, and the slots of this part.
        If the slots are consecutive, they are returned as a slice. None if no values go to this
        destination."""
        wanted: dict[Head | None, set[int]] = defaultdict(set)
        for stream in self._streams:
            wanted[stream.head].add(stream.point)
        taken: list[int] = []
        slots: list[Ints] = []
        for _, points, first, num_slots in layout.rows_at(widths):
            own = _wanted_of(points, wanted[None], layout)
            slots += [first + i * num_slots + np.arange(num_slots) for i in own]
            taken += [points[i] for i in own]
        encoded = []
        for head, points, first, num_slots in layout.encoded_at(widths):
            own = _wanted_of(points, wanted[head], layout)
            slots += [first + i * num_slots + np.arange(num_slots) for i in own]
            if own:
                encoded.append((head, tuple(points[i] for i in own)))
        if not slots:
            return None
        own_layout = Layout(tuple(taken), tuple(encoded), layout.also)
        listed = np.concatenate(slots)
        together = bool((np.diff(listed) == 1).all())
        return own_layout, slice(int(listed[0]), int(listed[-1]) + 1) if together else listed

    def lose(self, arrival: Arrival, reason: str) -> None:
        """Count rows as dropped. `loss` keeps the first reason. Any thread may call this."""
        self.loss = self.loss or reason
        self._dropped.append(replace(arrival, data=np.empty((0, 0), np.uint8)))

    def _outdated(self, stream: Stream, positions: Ints, numbers: Ints) -> NDArray[np.bool_]:
        """For each row, True if a later row of the same position was dropped. bool [n]."""
        found = np.zeros(len(positions), bool)
        if not self._dropped or not len(positions):
            return found
        widths = self._dropped[0].widths
        for layout, last in self._last_dropped().items():
            if stream.bytes_in(layout, widths) is not None:
                known = positions < len(last)
                found[known] |= numbers[known] < last[positions[known]]
        return found

    def _last_dropped(self) -> dict[Layout, Ints]:
        """For each layout, an array int64 [positions]. The value at a position is the number of the
        last dropped arrival that has this position. The value is 0 if no dropped arrival has the
        position."""
        dropped = list(self._dropped)
        if self._last[0] != len(dropped):
            by_layout: dict[Layout, list[Arrival]] = {}
            for one in dropped:
                by_layout.setdefault(one.layout, []).append(one)
            found = {}
            for layout, some in by_layout.items():
                positions = np.concatenate([one.positions for one in some])
                numbers = np.repeat([one.number for one in some], [len(x.positions) for x in some])
                found[layout] = np.zeros(int(positions.max(initial=0)) + 1, np.int64)
                np.maximum.at(found[layout], positions, numbers)
            self._last = (len(dropped), found)
        return self._last[1]

    def keep(self, arrival: Arrival) -> None:
        self._kept.append(arrival)
        self.held_bytes += arrival.data.nbytes

    def forget(self) -> int:
        """Free the rows that were kept for the end of the request. Returns the number of freed
        bytes."""
        freed, self.held_bytes = self.held_bytes, 0
        self._kept.clear()
        return freed

    def live_blocks(self, arrival: Arrival) -> Iterator[Block]:
        """The blocks with the rows of an arrival, one block per stream."""
        for stream in self._streams:
            rows = stream.values(arrival.layout, arrival.data, arrival.widths)
            if rows is not None:
                yield stream.block(self.info, arrival.positions, rows)
                numbers = np.full(len(arrival.positions), arrival.number)
                self._arrived.setdefault(stream, []).append((arrival.positions, numbers))

    def whole_blocks(self, ended: Ended) -> Iterator[Block]:
        """The blocks of the whole request, one block per stream, with exactly the requested
        values."""
        firsts = np.cumsum([0, *(len(some.positions) for some in self._kept)])
        by_layout: dict[Layout, list[int]] = {}
        for i, some in enumerate(self._kept):
            by_layout.setdefault(some.layout, []).append(i)
        joined = []
        for layout, members in by_layout.items():
            kept = [self._kept[i] for i in members]
            arrivals = [firsts[i] + np.arange(len(self._kept[i].positions)) for i in members]
            numbers = [np.full(len(x.positions), x.number) for x in kept]
            joined.append((
                layout, np.concatenate([x.positions for x in kept]), np.concatenate(arrivals),
                np.concatenate(numbers), np.concatenate([x.data for x in kept]), kept[0].widths,
            ))  # fmt: skip
        for stream in self._streams:
            parts = []
            for layout, positions, arrivals, number, data, widths in joined:
                rows = stream.values(layout, data, widths)
                if rows is None:
                    continue
                if self._dropped:
                    true = ~self._outdated(stream, positions, number)
                    positions, arrivals, rows = positions[true], arrivals[true], rows[true]
                parts.append(Part(positions, arrivals, rows))
            if parts:
                rows, positions = last_values(parts, self._wanted(stream, ended), parts[0].rows[:0])
                if len(positions):
                    yield stream.block(self.info, positions, rows)
                    last = np.full(len(positions), self._num_arrivals)
                    self._arrived.setdefault(stream, []).append((positions, last))

    def ending(self, ended: Ended) -> Ending:
        """The Ending of the request, with the number of values that were delivered so far."""
        expected = delivered = 0
        for stream in self._streams:
            wanted = self._wanted(stream, ended)
            pairs = list(self._arrived.get(stream, []))  # a copy, because another thread may add
            arrived = np.concatenate([np.zeros(0, np.int64), *(x for x, _ in pairs)])
            numbers = np.concatenate([np.zeros(0, np.int64), *(x for _, x in pairs)])
            arrived = arrived[~self._outdated(stream, arrived, numbers)]
            expected += len(wanted)
            delivered += int(np.isin(wanted, arrived).sum())
        status: Status = "ok"
        reason = None
        if self.error is not None:
            status, reason = "error", self.error
        elif ended.reason in ("abort", "error"):
            status = "partial"
            reason = f"the request ended by {ended.reason} after {len(ended.output_ids)} tokens"
        elif delivered < expected:
            status = "partial"
            reason = self.loss or f"{expected - delivered} of {expected} rows did not arrive"
        return Ending(
            self.info, ended.output_ids, ended.reason, expected, delivered, status, reason
        )

    def _wanted(self, stream: Stream, ended: Ended) -> Ints:
        ids = [*self.info.prompt_ids, *ended.output_ids]
        return wanted_positions(stream.selectors, ids, len(self.info.prompt_ids), True)


def _wanted_of(points: Sequence[int], wanted: Set[int], layout: Layout) -> list[int]:
    """The indices of the points whose row is also the row of a wanted point. (Two points can have
    the same row, see Layout.also.)"""
    return [i for i, row in enumerate(points) if not wanted.isdisjoint(layout.names_of(row))]
