"""One request's rows while they arrive.

Owns:  Pending, Piece (what one message has, before it is shared out).
Runs:  in the front-end; written by the road's thread and its copiers, read anywhere.
From:  inbox.   To: result (snapshots).

Promise: what a snapshot has seen never changes, whatever arrives after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_scope.batch.by_position import Part, Transcript
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.request.resolve import Resolved
from vllm_scope.request.sites import LEVELS, Sites, boundary_of, point_of
from vllm_scope.results.budget import FULL, Share
from vllm_scope.results.result import ScopeResult, Status, What, dtype_of
from vllm_scope.sinks import Manifest

#: Positions that a request's rows get room for at first, where more are not certain.
FIRST_ROOM = 64
#: A request's rows get room for all of its positions at once up to this many.
MOST_ROOM = 4096

LATE = (
    "this process did not read its rows for deliver_timeout_s, and the worker went on without it; "
    "send the request again, and see what held the process up"
)

#: A table of one request: what it holds, and the points or probe numbers of its columns.
_TableKey = tuple[What, tuple[int, ...]]


class Piece(NamedTuple):
    """Values of one kind that tokens of one layout delivered, one of each column.

    Attributes:
        key: what they are, and the columns of the whole layout.
        columns: those that are here; the same unless a step is drained tap by tap.
        values: uint8 [num_tokens, num_columns, bytes of a value], not kept.
    """

    key: _TableKey
    columns: tuple[int, ...]
    values: np.ndarray


def pieces_of(layout: Layout, local: Layout, data: np.ndarray, widths: Widths) -> list[Piece]:
    """What is in the data of some tokens.

    Args:
        layout: of the tokens.
        local: the part of it that is here.
        data: uint8 [num_tokens, bytes of a token].
        widths: of rows as they are.
    """

    def piece(key: _TableKey, columns: tuple[int, ...], first: int, size: int, used: int) -> Piece:
        values = data[:, first : first + len(columns) * size]
        return Piece(key, columns, values.reshape(len(data), len(columns), size)[:, :, :used])

    found = []
    for kind, points, first, num_slots in local.rows_at(widths):
        key = None, points if local is layout else layout.points_of(kind)
        size, start = num_slots * SLOT_BYTES, first * SLOT_BYTES
        found.append(piece(key, points, start, size, widths.row_bytes[kind]))
    if local.scores:
        start = local.score_slot(widths) * SLOT_BYTES
        found.append(piece(("scores", layout.probes), local.probes, start, 4, 4))
    if local.encoded:
        points_of = dict(layout.encoded)
        for encoding, points, first, num_slots in local.encoded_at(widths):
            size, start = num_slots * SLOT_BYTES, first * SLOT_BYTES
            found.append(piece((encoding, points_of[encoding]), points, start, size, size))
    return found


class _Table:
    """What one request got of some columns, in the order in which it arrived.

    A column is a point (rows) or a probe (scores). Append-only: what a snapshot has
    seen never changes, so snapshots share it.

    Attributes:
        columns: the points, or the numbers of the probes.
    """

    def __init__(self, columns: tuple[int, ...], value_bytes: int, dtype: torch.dtype) -> None:
        self.columns = columns
        self._dtype = dtype
        # As bytes: numpy knows no bf16, and lets go of Python's lock while it copies.
        self._values = np.empty((0, len(columns), value_bytes), np.uint8)
        #: Positions, and when each value came among all of the request's: int64
        #: [2, num_sets, room]. Columns share one set until one of them gets values alone.
        self._labels = np.empty((2, 1, 0), np.int64)
        #: How many values of each column are there, by set.
        self._counts = [0]

    def write(self, labels: np.ndarray, values: np.ndarray, room: int) -> list[int]:
        """Add tokens with a value of every column, which nobody sees before `commit`.

        Args:
            labels: int64 [2, num_tokens], positions and arrivals.
            values: uint8 [num_tokens, num_columns, bytes].
            room: for how many tokens room is made, where it has to be.

        Returns:
            What `commit` is to be told.
        """
        first = self._counts[0]
        if len(self._counts) > 1 and self._counts.count(first) != len(self._counts):
            # Some column lost a message; keep the others' values at their own places.
            counts = self._counts
            for at, column in enumerate(self.columns):
                counts = self.write_one(column, labels, values[:, at], room, counts)
            return counts
        last = first + len(values)
        if last > len(self._values):
            self._make_room(last, room, first)
        self._values[first:last] = values
        self._labels[:, :, first:last] = labels[:, None]
        return [last] * len(self._counts)

    def write_one(
        self,
        column: int,
        labels: np.ndarray,
        values: np.ndarray,
        room: int,
        counts: list[int] | None = None,
    ) -> list[int]:
        """Add tokens with a value of one column, uint8 [num_tokens, bytes].

        Args:
            counts: what was returned for columns that are written and not committed.
        """
        if len(self._counts) < len(self.columns):
            # The counts last: a snapshot that takes place now finds a set for each of them.
            self._labels = self._labels.repeat(len(self.columns), axis=1)
            self._counts = self._counts * len(self.columns)
        at = self.columns.index(column)
        counts = list(self._counts if counts is None else counts)
        first = counts[at]
        last = first + len(values)
        if last > len(self._values):
            self._make_room(last, room, max(counts))
        self._values[first:last, at] = values
        self._labels[:, at, first:last] = labels
        counts[at] = last
        return counts

    def commit(self, counts: list[int]) -> None:
        """From now on snapshots see what was written."""
        self._counts = counts

    def _make_room(self, last: int, room: int, used: int) -> None:
        size = max(last, room, 2 * len(self._values))
        values = np.empty((size, *self._values.shape[1:]), np.uint8)
        labels = np.empty((*self._labels.shape[:2], size), np.int64)
        labels[:, :, :used] = self._labels[:, :, :used]
        values[:used] = self._values[:used]
        self._values, self._labels = values, labels

    def freeze(self) -> _Frozen:
        """Its values so far."""
        # The counts first: another thread may append meanwhile, and what it makes is never
        # smaller.
        counts = tuple(self._counts)
        return _Frozen(self.columns, counts, self._labels, self._values, self._dtype)


@dataclass(frozen=True)
class _Frozen:
    """What a table had at some time."""

    columns: tuple[int, ...]
    counts: tuple[int, ...]
    labels: np.ndarray
    values: np.ndarray
    dtype: torch.dtype

    def parts(self) -> dict[int, Part]:
        """column -> its values, views."""
        if not self.values.size:
            return {}
        labels, counts = self.labels, self.counts
        values = torch.from_numpy(self.values).view(self.dtype)
        if len(counts) == 1:
            # One view of the labels for all columns: who counts them counts once.
            positions, arrivals = labels[:, 0, : counts[0]]
            return {
                column: Part(positions, arrivals, rows)
                for column, rows in zip(self.columns, values[: counts[0]].unbind(1), strict=True)
            }
        return {
            column: Part(labels[0, at, :count], labels[1, at, :count], values[:count, at])
            for at, (column, count) in enumerate(zip(self.columns, counts, strict=True))
        }


class _Arrived(Mapping[What, Mapping[int, list[Part]]]):
    """A result's parts, made when they are asked for: most snapshots of a request that
    streams are asked for little."""

    def __init__(self, tables: Mapping[_TableKey, _Table]) -> None:
        self._tables = [(what, table.freeze()) for (what, _), table in list(tables.items())]
        self._made: dict[What, dict[int, list[Part]]] = {}

    def __getitem__(self, what: What) -> Mapping[int, list[Part]]:
        if what not in self._made:
            found: dict[int, list[Part]] = {}
            for kind, table in self._tables:
                if kind == what:
                    for column, part in table.parts().items():
                        found.setdefault(column, []).append(part)
            self._made[what] = found
        return self._made[what]

    def __iter__(self) -> Iterator[What]:
        return iter(dict.fromkeys(what for what, _ in self._tables))

    def __len__(self) -> int:
        return len(list(iter(self)))


class Pending:
    """What one request asked for, while it arrives.

    Args:
        share: of what may be held; None where nobody counts.

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
        share: Share | None = None,
    ) -> None:
        self.key = key
        self._share = share
        self.done: Future[None] = Future()
        self.num_came = 0
        self.error: str | None = None
        self.manifests: dict[str, Manifest] = {}
        self._reading = bool(asked.reads or asked.probes)
        self.asked, self.sites = asked, sites
        self.prompt_ids = prompt_ids
        self._stages_left = set(range(num_stages))
        #: By what its tokens deliver.
        self._tables: dict[_TableKey, _Table] = {}
        everything = all(selector.uniform for selector in asked.read_selectors)
        expected = len(prompt_ids) + max_tokens - 1
        self._room = min(expected, MOST_ROOM if everything else FIRST_ROOM)

    def add(
        self,
        pieces: Sequence[Piece],
        labels: np.ndarray,
        some: slice | np.ndarray,
        valid: Callable[[], bool] = lambda: True,
    ) -> None:
        """Copy in what some tokens of one layout delivered.

        Args:
            labels: int64 [2, num_tokens]: positions, and arrivals, which grow with the
                computation.
            some: which of the tokens are this request's.
            valid: asked once all is copied: False where others may have written there.
        """
        if not self._reading:
            return  # its rows go to other sinks, and came along with a neighbour's
        own, coming = labels[:, some], 0
        mine: list[tuple[_Table, tuple[int, ...], np.ndarray]] = []
        for key, columns, values in pieces:
            table = self._table(key, values.shape[2])
            here = values[some]
            if len(table.columns) < len(key[1]):
                # The others go to other sinks, and came along.
                at = [i for i, column in enumerate(columns) if column in table.columns]
                if not at:
                    continue
                columns, here = tuple(columns[i] for i in at), here[:, at]
            mine.append((table, columns, here))
            coming += here.nbytes + own.nbytes
        if self._share is not None and not self._share.add(coming):
            self.lose(FULL)
            return
        written: list[tuple[_Table, list[int]]] = []
        for table, columns, here in mine:
            counts: list[int] | None = None
            if columns == table.columns:
                counts = table.write(own, here, self._room)
            else:
                for i, column in enumerate(columns):
                    counts = table.write_one(column, own, here[:, i], self._room, counts)
            assert counts is not None
            written.append((table, counts))
        if not valid():
            return
        for table, counts in written:
            table.commit(counts)
        self.num_came += 1  # behind the values: who sees it finds them

    def _table(self, key: _TableKey, value_bytes: int) -> _Table:
        """Of the columns that were asked for; there may be none."""
        table = self._tables.get(key)
        if table is None:
            what, whole = key
            wanted = _columns_of(self.asked, what)
            columns = tuple(column for column in whole if column in wanted)
            dtype = torch.float32 if what == "scores" else torch.uint8
            dtype = dtype_of(self.sites) if what is None else dtype
            table = self._tables[key] = _Table(columns, value_bytes, dtype)
        return table

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

    def lose(self, why: str, over: bool = False) -> None:
        """Let go of what came and of what comes; the request goes on.

        Args:
            over: no stage will say that it has sent all.
        """
        self.error = self.error or why
        self.clear()
        self.num_came += 1
        if over and not self.done.done():
            self.done.set_result(None)

    def clear(self) -> None:
        """Drop what arrived and what comes; snapshots that were taken keep theirs."""
        self._reading, self._tables = False, {}
        if self._share is not None:
            self._share.give_back()

    def snapshot(self, output_ids: list[int], finish_reason: str | None) -> ScopeResult:
        """What has arrived so far.

        Args:
            output_ids: all generated tokens so far; the list may be extended later.
            finish_reason: vLLM's word, or None while the request runs.
        """
        ids = Transcript(self.prompt_ids, output_ids, len(output_ids))
        return ScopeResult(
            self.asked, self.sites, ids, len(self.prompt_ids), _Arrived(self._tables),
            self._status(finish_reason), self._why(), dict(self.manifests),
        )  # fmt: skip

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


def _columns_of(asked: Resolved, what: What) -> set[int]:
    """The probes' numbers, or the points at which a worker may have read what was asked for
    so: each row at the first point that sees it."""
    known: dict[What, set[int]] = asked.__dict__.setdefault("_columns", {})
    if what not in known:
        if what == "scores":
            known[what] = {probe.number for probe in asked.probes}
        else:
            reads = [read for read in asked.reads if read.encoding == what]
            known[what] = {
                point_of(boundary_of(stream), level)
                for read in reads for stream in read.streams for level in range(LEVELS)
            }  # fmt: skip
    return known[what]
