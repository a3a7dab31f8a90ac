"""Finds the new values of a streaming request, at a cost that does not grow with earlier values.

Owns:  Cursor.
Runs:  in the front-end, for one completion, on its event loop.
From:  result (snapshots, from the first to the last).   To: server.

Promise: each value of a stream or probe is returned one time, in position order, as soon as the
values of all earlier selected positions have arrived. After a preemption the engine computes
positions again. If the value of such a position was already returned, the new value is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from vllm_scope.batch.by_position import Ints, Part, joined_rows
from vllm_scope.batch.readout import Readout, Verdict
from vllm_scope.batch.sparse import sparse_rows
from vllm_scope.codecs.packed import EncodedRows, packing_of
from vllm_scope.request.actions.probing import is_monitor
from vllm_scope.request.heads import Encoding
from vllm_scope.request.resolved import ResolvedFeatures, ResolvedProbe
from vllm_scope.request.selectors import Selector
from vllm_scope.results.column import Column
from vllm_scope.results.following import START, Places, State, follow
from vllm_scope.results.result import ScopeResult
from vllm_scope.results.scores import cells_of, summed
from vllm_scope.results.snapshot import Source, What


@dataclass
class _Track:
    """One stream, or one bank at one point, with the values that `take` has not used yet.

    Attributes:
        state: None while the bank's probes wait for the verdict of the probe that `after` names.
        new: the values that `look` has found since the last call of `take`.
        sent: for a stream, the positions that `take` has returned.
    """

    source: Source
    state: State | None = START
    new: list[Column] = field(default_factory=list)
    sent: list[Ints] = field(default_factory=list)


@dataclass
class _ProbeTrack:
    """A probe or a `Features`, with one track for the numbers of each cell.

    Attributes:
        readout: the probe's Readout. None for features.
        waiting: for each cell, the numbers at positions where another cell still has no numbers.
    """

    probe: ResolvedProbe | ResolvedFeatures
    cells: list[_Track]
    readout: Readout | None
    waiting: list[Column | None]
    sent: list[Ints] = field(default_factory=list)

    def take(self, came: dict[int, Column]) -> Column | None:
        """The new values, or None. `came` has the new values of each track, by the `id` of the
        track."""
        parts: list[Column] = []
        for i, track in enumerate(self.cells):
            some = [column for column in (self.waiting[i], came.get(id(track))) if column]
            if some:
                parts.append(_joined(some))
                self.waiting[i] = parts[-1]
        if len(parts) < len(self.cells):
            return None
        count = min(len(part.positions) for part in parts)
        self.waiting = [
            part.at(np.arange(count, len(part.positions))) if len(part.positions) > count else None
            for part in parts
        ]
        if not count:
            return None
        self.sent.append(parts[0].positions[:count])
        numbers = summed(self.probe, [part.values[:count] for part in parts])
        if isinstance(self.probe, ResolvedFeatures):
            return Column(self.probe.name, sparse_rows(self.probe, numbers), self.sent[-1])
        assert self.readout is not None
        read = self.readout.read(numbers, self.sent[-1])
        return Column(self.probe.name, read.scores, self.sent[-1], aggregates=read.aggregates)


class Cursor:
    """Follows the streams, probes and features of one completion from snapshot to snapshot.

    Args:
        rows: if True, follow streams too. If False, follow only probes and features.
    """

    def __init__(self, rows: bool) -> None:
        self._rows, self._num_prompt = rows, 0
        self._tracks: list[_Track] | None = None
        self._probes: list[_ProbeTrack] = []
        #: The tracks of the caller's own probes and features.
        self._own: list[_Track] = []

    def look(self, result: ScopeResult) -> None:
        """Add the new values of a later snapshot."""
        self._num_prompt = result.num_prompt
        #: Streams of one table usually share their position arrays. Then one call of `follow` is
        #: enough for all these streams.
        known: dict[tuple[int, ...], tuple[State, Ints, Places]] = {}
        #: The objects whose ids are in the keys of `known`. If such an object were freed, Python
        #: could give its id to a new object.
        kept: list[tuple[State, list[Ints]]] = []
        for track in self._of(result):
            if track.state is None:
                first = self._begins(track.source.after)
                if first is None:
                    continue
                track.state = replace(START, seen=first)
            parts = result.parts_of(track.source)
            arrived = [part.positions for part in parts]
            key = (id(track.state), id(track.source.selectors), *map(id, arrived))
            if key not in known:
                kept.append((track.state, arrived))
                known[key] = follow(track.state, track.source.selectors, result, arrived)
            track.state, positions, places = known[key]
            if len(positions):
                track.new.append(_column(track.source, parts, positions, places))

    def late(self, last: int) -> bool:
        """True if the value of a wanted position up to `last` is missing."""
        return any(
            track.state is not None and len(track.state.due) and track.state.due[0] <= last
            for track in self._tracks or ()
        )

    @property
    def settled(self) -> int:
        """The first position whose scores may still arrive. All wanted scores below this position
        have arrived. The scores of an operator's monitors are not considered."""
        found = []
        for track in self._own:
            state = track.state
            first = self._begins(track.source.after) if state is None else state.settled
            # A probe that waits for the verdict of another probe begins after all positions that
            # the other probe has scored so far. Therefore a waiting probe does not make the result
            # smaller.
            found += [] if first is None else [first]
        return min(found, default=0)

    def take(self) -> list[Column]:
        """The values that are new since the last call, as one column for each stream, probe or
        `Features`. Columns without new values are left out."""
        found, came = [], {}
        for track in self._tracks or ():
            if track.new:
                column = _joined(track.new)
                if track.source.label is None:
                    came[id(track)] = column
                else:
                    found.append(column)
                    track.sent.append(column.positions)
                track.new = []
        scores = (probe.take(came) for probe in self._probes) if came else ()
        return [*found, *(column for column in scores if column is not None)]

    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of each probe that has a verdict, by name. The verdicts come from the values
        that `take` has returned."""
        found = ((t.probe.name, t.readout.verdict) for t in self._probes if t.readout)
        return {name: verdict for name, verdict in found if verdict is not None}

    def begun(self) -> dict[str, int]:
        """Like ScopeResult.begun, but only with the values that `take` has returned so far."""
        later = [track.probe for track in self._probes if track.probe.after is not None]
        known = {probe.name: self._begins(probe.after) for probe in later}
        return {name: first for name, first in known.items() if first is not None}

    def _begins(self, after: str | None) -> int | None:
        """The first position that is scored by probes with this `after`. None if the probe named
        `after` has no verdict in the values taken so far."""
        first = next((track for track in self._probes if track.probe.name == after), None)
        if first is None or first.readout is None or first.readout.verdict is None:
            return None
        assert isinstance(first.probe, ResolvedProbe)
        return first.probe.begins(first.readout.verdict.position, self._num_prompt)

    def rest(self, result: ScopeResult) -> list[Column]:
        """The values of the request's last snapshot that `take` did not return. Some selectors
        (`last`) select positions only when the request has ended."""
        sent: dict[tuple[str, int, str] | str, list[Ints]] = {
            t.source.label: t.sent for t in self._of(result) if t.source.label is not None
        }
        sent |= {track.probe.name: track.sent for track in self._probes}
        return [_without(c, sent[c.label]) for c in result.columns() if c.label in sent]

    def _of(self, result: ScopeResult) -> list[_Track]:
        if self._tracks is None:
            alike: dict[tuple[Selector, ...], tuple[Selector, ...]] = {}
            self._tracks = []
            for source in result.sources(self._rows):
                selectors = alike.setdefault(source.selectors, source.selectors)
                state = START if source.after is None else None
                self._tracks.append(_Track(replace(source, selectors=selectors), state))
            numbers = {(t.source.what, t.source.place, t.source.selectors): t for t in self._tracks}
            banked: tuple[ResolvedProbe | ResolvedFeatures, ...]
            banked = (*result.probes, *result.asked_features)
            for one in banked:
                cells = [numbers[bank, point, (tokens,)] for bank, point, tokens in cells_of(one)]
                readout = Readout(one) if isinstance(one, ResolvedProbe) else None
                self._probes.append(_ProbeTrack(one, cells, readout, [None] * len(cells)))
                if not is_monitor(one.name):
                    self._own += cells
        return self._tracks


def _column(source: Source, parts: Sequence[Part], positions: Ints, places: Places) -> Column:
    which, at = places
    first = int(which[0])
    if (which == first).all():
        start, stop = int(at[0]), int(at[-1]) + 1
        rows = parts[first].rows
        in_order = stop - start == len(at) and bool((np.diff(at) == 1).all())
        values = rows[start:stop] if in_order else rows[torch.from_numpy(at)]
    else:
        # Join the runs. A run is a range of neighbouring values of one part.
        breaks = np.flatnonzero((np.diff(which) != 0) | (np.diff(at) != 1)) + 1
        starts, stops = [0, *breaks.tolist()], [*breaks.tolist(), len(at)]
        runs = ((which[a], at[a], at[b - 1] + 1) for a, b in zip(starts, stops, strict=True))
        values = joined_rows([parts[i].rows[first:last] for i, first, last in runs])
    shape = source.row_shape if source.label is not None else tuple(values.shape[1:])
    return Column(source.label or "", _as(source.what, values), positions, shape)


def _as(what: What, values: torch.Tensor) -> torch.Tensor | EncodedRows:
    return EncodedRows(packing_of(what).codec, values) if isinstance(what, Encoding) else values


def _joined(columns: Sequence[Column]) -> Column:
    if len(columns) == 1:
        return columns[0]
    sources = [column.source for column in columns]
    # `s` is never SparseRows here, because `take` converts features later.
    data = joined_rows([s.data if isinstance(s, EncodedRows) else s for s in sources])  # type: ignore
    first = sources[0]
    source = EncodedRows(first.codec, data) if isinstance(first, EncodedRows) else data
    positions = np.concatenate([column.positions for column in columns])
    return replace(columns[0], source=source, positions=positions)


def _without(column: Column, sent: Sequence[Ints]) -> Column:
    if not sent:
        return column
    left = np.flatnonzero(~np.isin(column.positions, np.concatenate(sent)))
    return column.at(left)
