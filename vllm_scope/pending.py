"""One request's rows while they arrive.

Owns:  Pending, Delivered (what one message has for it).
Runs:  in the front-end; written by the road's thread and its copiers, read anywhere.
From:  inbox.   To: result (snapshots).

Promise: what a snapshot has seen never changes, whatever arrives after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch

from vllm_scope.assemble import Part
from vllm_scope.encoding import Encoding
from vllm_scope.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.resolve import Resolved
from vllm_scope.result import RowKey, ScopeResult, Status, dtype_of
from vllm_scope.sinks import Manifest
from vllm_scope.sites import Sites

#: Positions that a request's rows get room for at first, where more are not certain.
FIRST_ROOM = 64
#: A request's rows get room for all of its positions at once up to this many.
MOST_ROOM = 4096


class Delivered(NamedTuple):
    """A request's part of a message, of one layout.

    Attributes:
        layout: of its tokens.
        local: the part of the layout that is here.
        positions, arrivals: int64 [num_tokens]; arrivals grow with the computation.
        data: uint8 [num_tokens, bytes of a token], not kept.
        widths: of rows as they are.
    """

    layout: Layout
    local: Layout
    positions: np.ndarray
    arrivals: np.ndarray
    data: np.ndarray
    widths: Widths


class _Table:
    """What one request got of some columns, in the order in which it arrived.

    A column is a point (rows) or a probe (scores). Append-only: what a snapshot has
    seen never changes, so snapshots share it.

    Attributes:
        columns: the points, or the numbers of the probes.
        counts: how many values of each column are there.
    """

    def __init__(self, columns: tuple[int, ...], value_bytes: int, dtype: torch.dtype) -> None:
        self.columns = columns
        self.counts = [0] * len(columns)
        self._dtype = dtype
        # As bytes: numpy knows no bf16, and lets go of Python's lock while it copies.
        self._values = np.empty((0, len(columns), value_bytes), np.uint8)
        self._positions = np.empty((len(columns), 0), np.int64)
        #: When each value came, among all of the request's.
        self._arrivals = np.empty((len(columns), 0), np.int64)

    def append(
        self, positions: np.ndarray, values: np.ndarray, arrivals: np.ndarray, room: int
    ) -> None:
        """Add tokens with a value of every column, uint8 [num_tokens, num_columns, bytes]."""
        first = self.counts[0]
        if self.counts.count(first) != len(self.counts):
            # Some column lost a message; keep the others' values at their own places.
            for at, column in enumerate(self.columns):
                self.append_one(column, positions, values[:, at], arrivals, room)
            return
        last = self._make_room(first + len(positions), room)
        self._values[first:last] = values
        self._positions[:, first:last] = positions
        self._arrivals[:, first:last] = arrivals
        self.counts = [last] * len(self.columns)

    def append_one(
        self,
        column: int,
        positions: np.ndarray,
        values: np.ndarray,
        arrivals: np.ndarray,
        room: int,
    ) -> None:
        """Add tokens with a value of one column, uint8 [num_tokens, bytes]."""
        at = self.columns.index(column)
        first = self.counts[at]
        last = self._make_room(first + len(positions), room)
        self._values[first:last, at] = values
        self._positions[at, first:last] = positions
        self._arrivals[at, first:last] = arrivals
        self.counts[at] = last

    def _make_room(self, last: int, room: int) -> int:
        size = self._values.shape[0]
        if last > size:
            size = max(last, room, 2 * size)
            values = np.empty((size, *self._values.shape[1:]), np.uint8)
            positions = np.empty((len(self.columns), size), np.int64)
            arrivals = np.empty((len(self.columns), size), np.int64)
            used = max(self.counts)
            arrivals[:, :used] = self._arrivals[:, :used]
            values[:used] = self._values[:used]
            positions[:, :used] = self._positions[:, :used]
            self._values, self._positions, self._arrivals = values, positions, arrivals
        return last

    def snapshot(self) -> dict[int, Part]:
        """column -> its values so far, views."""
        # First: another thread may append meanwhile, and what it makes is never smaller.
        counts = list(self.counts)
        if not len(self._values):
            return {}
        values = torch.from_numpy(self._values).view(self._dtype)
        return {
            column: Part(
                self._positions[at, :count], self._arrivals[at, :count], values[:count, at]
            )
            for at, (column, count) in enumerate(zip(self.columns, counts, strict=True))
        }


class Pending:
    """What one request asked for, while it arrives.

    Attributes:
        key: the request's key, unique among all front-ends.
        manifests: what became of the request at other sinks.
        done: resolved once every stage has sent its last row, or said why not.
        num_came: how often something was added.
    """

    def __init__(
        self,
        key: int,
        asked: Resolved,
        sites: Sites,
        prompt_ids: list[int],
        max_tokens: int,
        num_stages: int,
    ) -> None:
        self.key = key
        self.done: Future[None] = Future()
        self.num_came = 0
        self.error: str | None = None
        self.manifests: dict[str, Manifest] = {}
        self._reading = bool(asked.reads or asked.probes)
        self.asked, self.sites = asked, sites
        self.prompt_ids = prompt_ids
        self._stages_left = set(range(num_stages))
        #: By what their tokens deliver: tables of rows and of scores.
        self._rows: dict[tuple[Encoding | None, tuple[int, ...]], _Table] = {}
        self._encodings = {read.encoding for read in asked.reads}
        self._scores: dict[tuple[int, ...], _Table] = {}
        everything = all(selector.uniform for selector in asked.selectors)
        expected = len(prompt_ids) + max_tokens - 1
        self._room = min(expected, MOST_ROOM if everything else FIRST_ROOM)

    def add(self, some: Delivered) -> None:
        """Copy in what some tokens of one layout delivered."""
        if not self._reading:
            return  # its rows go to other sinks, and came along with a neighbour's
        for kind, points, first, num_slots in some.local.rows_at(some.widths):
            whole = points if some.local is some.layout else some.layout.points_of(kind)
            size, start = num_slots * SLOT_BYTES, first * SLOT_BYTES
            rows = some.data[:, start : start + len(points) * size]
            rows = rows.reshape(len(rows), len(points), size)
            row_bytes = some.widths.row_bytes[kind]
            table = self._rows.get((None, whole))
            if table is None:
                table = _Table(whole, row_bytes, dtype_of(self.sites))
                self._rows[None, whole] = table
            self._append(table, points, some, rows[:, :, :row_bytes])
        if some.local.encoded:
            self._add_encoded(some)
        if some.local.scores:
            first = some.local.score_slot(some.widths) * SLOT_BYTES
            probes = tuple(number for _, number in some.layout.scores)
            values = some.data[:, first : first + 4 * len(some.local.scores)]
            table = self._scores.get(probes)
            if table is None:
                table = self._scores[probes] = _Table(probes, 4, torch.float32)
            local = tuple(number for _, number in some.local.scores)
            self._append(table, local, some, values.reshape(len(values), len(local), 4))
        self.num_came += 1  # behind the values: who sees it finds them

    def _add_encoded(self, some: Delivered) -> None:
        points_of = dict(some.layout.encoded)
        for encoding, points, first, num_slots in some.local.encoded_at(some.widths):
            if encoding not in self._encodings:
                continue  # they go to other sinks, and came along
            key = encoding, points_of[encoding]
            size = num_slots * SLOT_BYTES
            table = self._rows.get(key)
            if table is None:
                table = self._rows[key] = _Table(key[1], size, torch.uint8)
            rows = some.data[:, first * SLOT_BYTES :][:, : len(points) * size]
            self._append(table, points, some, rows.reshape(len(rows), len(points), size))

    def _append(
        self, table: _Table, columns: tuple[int, ...], some: Delivered, values: np.ndarray
    ) -> None:
        if columns == table.columns:
            table.append(some.positions, values, some.arrivals, self._room)
            return
        for at, column in enumerate(columns):
            table.append_one(column, some.positions, values[:, at], some.arrivals, self._room)

    def finish(
        self, stage: int, error: str | None, manifests: Mapping[str, Manifest] | None = None
    ) -> None:
        if stage in self._stages_left:
            for sink, manifest in (manifests or {}).items():
                known = self.manifests.get(sink)
                self.manifests[sink] = manifest if known is None else known.joined(manifest)
        self._stages_left.discard(stage)
        self.error = self.error or error
        if not self._stages_left and not self.done.done():
            self.done.set_result(None)

    def clear(self) -> None:
        """Drop what arrived; snapshots that were taken keep theirs."""
        self._rows, self._scores = {}, {}

    def snapshot(self, output_ids: list[int], finish_reason: str | None) -> ScopeResult:
        """What has arrived so far.

        Args:
            output_ids: all generated tokens so far.
            finish_reason: vLLM's word, or None while the request runs.
        """
        return ScopeResult(
            self.asked,
            self.sites,
            [*self.prompt_ids, *output_ids],
            len(self.prompt_ids),
            _row_parts(self._rows),
            _parts(self._scores),
            self._status(finish_reason),
            self._why(),
            dict(self.manifests),
        )

    def _why(self) -> str | None:
        worst = max(self.manifests.values(), key=lambda m: m.status == "error", default=None)
        failed = worst is not None and worst.status == "error"
        return self.error or (worst.reason if failed and worst is not None else None)

    def _status(self, finish_reason: str | None) -> Status:
        if self._why() is not None:
            return "failed"
        if finish_reason is None:
            return "streaming"
        if finish_reason in ("abort", "error"):
            return "aborted"
        whole = all(manifest.status == "ok" for manifest in self.manifests.values())
        return "complete" if whole and self.done.done() else "incomplete"


def _row_parts(
    tables: dict[tuple[Encoding | None, tuple[int, ...]], _Table],
) -> dict[RowKey, list[Part]]:
    parts: dict[RowKey, list[Part]] = {}
    for (encoding, _), table in list(tables.items()):
        for point, part in table.snapshot().items():
            parts.setdefault((encoding, point), []).append(part)
    return parts


def _parts(tables: dict[tuple[int, ...], _Table]) -> dict[int, list[Part]]:
    parts: dict[int, list[Part]] = {}
    for table in list(tables.values()):
        for column, part in table.snapshot().items():
            parts.setdefault(column, []).append(part)
    return parts
