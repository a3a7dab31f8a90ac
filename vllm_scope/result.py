"""What the caller holds: rows put together by label.

Owns:  Pending (one request's rows while they arrive), Inbox (all of them in this
       process), ScopeResult (a snapshot that the caller reads).
Runs:  in the front-end. `Inbox` callbacks on the road's thread, the rest anywhere.
From:  road (RowsMessage, FinishHeader).

Promise: one row per (site, layer, position), the last that was computed, of the
positions that were asked for and truly processed; and the counts that tell
whether any is missing. Stages and steps may arrive in any interleaving.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_scope.assemble import Part, assemble, num_processed, wanted_positions
from vllm_scope.codecs.packed import EncodedRows, decoded, packing_of
from vllm_scope.encoding import Encoding
from vllm_scope.layout import SLOT_BYTES, Layout, slots_of_row
from vllm_scope.receiver import Receiver
from vllm_scope.road import Address, CountersHeader, FinishHeader, RowsMessage
from vllm_scope.selectors import Selector
from vllm_scope.sinks import Manifest
from vllm_scope.sites import ALIASES, LEVELS, SiteLayer, Sites
from vllm_scope.spec import Resolved
from vllm_scope.split import by_key, by_layout

if TYPE_CHECKING:
    from vllm_scope.analysis.cache import ActivationCache

#: A stream on one side of the edits of its site: site, layer, "before" or "after".
_Stream = tuple[str, int, str]
#: Rows [n, hidden_size] or scores [n], and their positions, int64 [n].
_Values = tuple[Tensor, np.ndarray]
#: The same of a stream, whose rows may be as their codec left them.
_Rows = tuple[Tensor | EncodedRows, np.ndarray]
#: What a worker tells rows by: how they are encoded, and the point.
_Column = tuple[Encoding | None, int]
Status = Literal["streaming", "complete", "incomplete", "aborted", "failed"]


#: Messages from this size on are copied by several threads.
PARALLEL_BYTES = 4 << 20
MOST_COPIERS = 6
#: Positions that a request's rows get room for at first, where more are not certain.
FIRST_ROOM = 64
#: A request's rows get room for all of its positions at once up to this many.
MOST_ROOM = 4096


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
        if not len(self._values):
            return {}
        values = torch.from_numpy(self._values).view(self._dtype)
        return {
            column: Part(
                self._positions[at, :count], self._arrivals[at, :count], values[:count, at]
            )
            for at, (column, count) in enumerate(zip(self.columns, self.counts, strict=True))
        }


class Pending:
    """What one request asked for, while it arrives.

    Attributes:
        key: the request's key, unique among all front-ends.
        manifests: what became of the request at other sinks.
        done: resolved once every stage has sent its last row, or said why not.
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

    def add(self, some: _Delivered) -> None:
        """Copy in what some tokens of one layout delivered."""
        if not self._reading:
            return  # its rows go to other sinks, and came along with a neighbour's
        points, layout = some.local.points, some.layout
        if points:
            row_slots = slots_of_row(some.row_bytes)
            size = len(points) * row_slots * SLOT_BYTES
            rows = some.data[:, :size].reshape(len(some.data), len(points), -1)
            table = self._rows.get((None, layout.points))
            if table is None:
                table = _Table(layout.points, some.row_bytes, _dtype(self.sites))
                self._rows[None, layout.points] = table
            self._append(table, points, some, rows[:, :, : some.row_bytes])
        if some.local.encoded:
            self._add_encoded(some)
        if some.local.scores:
            first = len(points) * slots_of_row(some.row_bytes) * SLOT_BYTES
            probes = tuple(number for _, number in layout.scores)
            values = some.data[:, first : first + 4 * len(some.local.scores)]
            table = self._scores.get(probes)
            if table is None:
                table = self._scores[probes] = _Table(probes, 4, torch.float32)
            local = tuple(number for _, number in some.local.scores)
            self._append(table, local, some, values.reshape(len(values), len(local), 4))

    def _add_encoded(self, some: _Delivered) -> None:
        points_of = dict(some.layout.encoded)
        for encoding, points, first, num_slots in some.local.encoded_at(
            slots_of_row(some.row_bytes)
        ):
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
        self, table: _Table, columns: tuple[int, ...], some: _Delivered, values: np.ndarray
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
) -> dict[_Column, list[Part]]:
    parts: dict[_Column, list[Part]] = {}
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


@dataclass(frozen=True)
class Column:
    """One stream or probe of a result, for those who pass it on.

    Attributes:
        label: site, layer and "before" or "after" of a stream; a probe's name.
        source: the values, or rows as their read's codec left them.
        positions: int64 [n], ascending.
        wanted: int64, ascending: the positions that were asked for, of the tokens
            processed so far; those that are not among `positions` are on their way,
            or lost.
    """

    label: tuple[str, int, str] | str
    source: Tensor | EncodedRows
    positions: np.ndarray
    wanted: np.ndarray

    @property
    def values(self) -> Tensor:
        """[n, hidden_size] rows, or float32 [n] scores, CPU. Decoded each time."""
        return decoded(self.source)

    @property
    def nbytes(self) -> int:
        """Of `values`."""
        return math.prod(self.source.shape) * self.source.dtype.itemsize

    def part(self, first: int, last: int) -> Column:
        """Its values `first` to `last - 1`."""
        some = slice(first, last)
        return replace(self, source=self.source[some], positions=self.positions[some])

    @property
    def num_settled(self) -> int:
        """How many values come before the first that is still missing."""
        n = min(len(self.positions), len(self.wanted))
        differ = np.flatnonzero(self.positions[:n] != self.wanted[:n])
        return int(differ[0]) if len(differ) else n


class Scores(Mapping[str, Tensor]):
    """Scores of the probes by name: float32 [num_positions], CPU, in position order."""

    def __init__(self, result: ScopeResult, names: list[str]) -> None:
        self._result, self._names = result, names

    def __getitem__(self, name: str) -> Tensor:
        return self._result._score(self._number(name))[0]

    def positions(self, name: str) -> Tensor:
        """int64 [num_positions], ascending: the absolute positions of the scores."""
        return torch.from_numpy(self._result._score(self._number(name))[1])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _number(self, name: str) -> int:
        if name not in self._names:
            asked = ", ".join(self._names) or "none"
            raise KeyError(f"no probe of this request is called {name!r}; its probes: {asked}.")
        return self._names.index(name)


class ScopeResult:
    """The rows and scores of one completion.

    `result["resid_post", 5]` is a tensor [num_positions, hidden_size], model dtype,
    CPU, in position order; `result.positions("resid_post", 5)` the absolute
    positions (index into prompt + generated). Row p is the state while token p is
    processed, so the token sampled last has none. Where a stream was read before and
    after the edits of its site, the key takes a third word:
    `result["resid_post", 5, "before"]`. Rows of a read with a codec are decoded here;
    `result.encoded("resid_post", 5)` has them as they came.

    Attributes:
        scores: by the probes' names, float32 [num_positions]; `scores.positions(name)`.
        status: "streaming" while the request runs, "complete" when everything that
            was asked for is here, "incomplete" when some is not, "aborted" when
            the request was, "failed" when its reads or edits were (see `error`).
        error: the reason, where status is "failed".
        manifests: by sink, what became of the reads that went elsewhere than to memory;
            complete once the request has ended. One that failed makes the status
            "failed", one that is partial "incomplete"; rows in memory are here
            all the same.
        expected: rows and scores that were asked for, of the tokens processed so far.
        delivered: of those, how many are here.
        dropped: expected - delivered, once the request has ended; 0 before.
    """

    def __init__(
        self,
        asked: Resolved,
        sites: Sites,
        token_ids: list[int],
        num_prompt: int,
        rows: dict[_Column, list[Part]],
        scores: dict[int, list[Part]],
        status: Status,
        error: str | None,
        manifests: Mapping[str, Manifest] | None = None,
    ) -> None:
        self.manifests = dict(manifests or {})
        self._asked, self._sites = asked, sites
        self._token_ids, self._num_prompt = token_ids, num_prompt
        self._row_parts, self._score_parts = rows, scores
        self._status, self.error = status, error
        self._wanted_by: dict[tuple[Selector, ...], np.ndarray] = {}
        self._streams: dict[_Stream, _Rows] = {}
        self._decoded: dict[_Stream, Tensor] = {}
        self._scores: dict[int, _Values] = {}

    @property
    def num_processed(self) -> int:
        """Positions processed so far: all tokens but the one sampled last."""
        return num_processed(len(self._token_ids), self._num_prompt)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated, so far; `token_ids[p]` is the token at position p."""
        return list(self._token_ids)

    @property
    def num_prompt(self) -> int:
        return self._num_prompt

    @property
    def scores(self) -> Scores:
        return Scores(self, [probe.name for probe in self._asked.probes])

    def keys(self) -> list[SiteLayer]:
        """The streams that were asked for."""
        return list(dict.fromkeys((site, layer) for site, layer, _ in self._read_streams()))

    def __contains__(self, stream: object) -> bool:
        try:
            return bool(self._find(stream))  # type: ignore[arg-type]
        except (KeyError, TypeError):
            return False

    def __getitem__(self, stream: SiteLayer | _Stream | str) -> Tensor:
        rows = self._stream(stream)[0]
        if not isinstance(rows, EncodedRows):
            return rows
        key = self._find(stream)
        if key not in self._decoded:
            self._decoded[key] = rows.decode()
        return self._decoded[key]

    def encoded(self, site: str, layer: int = 0, when: str | None = None) -> EncodedRows | None:
        """The rows as they came, with their `codec` and its `parts`; None where the read
        has no codec."""
        rows = self._stream(_key(site, layer, when))[0]
        return rows if isinstance(rows, EncodedRows) else None

    def positions(self, site: str, layer: int = 0, when: str | None = None) -> Tensor:
        """int64 [num_positions], ascending: the absolute positions of the rows."""
        return torch.from_numpy(self._stream(_key(site, layer, when))[1])

    @property
    def expected(self) -> int:
        return sum(len(wanted) for wanted, _ in self._accounts())

    @property
    def delivered(self) -> int:
        return sum(_num_in(wanted, arrived) for wanted, arrived in self._accounts())

    @property
    def dropped(self) -> int:
        return 0 if self._status == "streaming" else self.expected - self.delivered

    @property
    def status(self) -> Status:
        if self._status == "complete" and self.dropped:
            return "incomplete"
        return self._status

    def num_late(self, behind: int) -> int:
        """Values still missing, of tokens that come `behind` or more before the last one."""
        last = len(self._token_ids) - 1 - behind
        late = 0
        for wanted, arrived in self._accounts():
            due = wanted[: np.searchsorted(wanted, last, side="right")]
            late += len(due) - _num_in(due, arrived)
        return late

    def columns(self) -> list[Column]:
        """Every stream and then every probe, in the order in which they were asked for."""
        streams = [Column(s, *self._stream(s), self._wanted_of(s)) for s in self._read_streams()]
        probes = [
            Column(probe.name, *self._score(number), self._wanted([probe.tokens]))
            for number, probe in enumerate(self._asked.probes)
        ]
        return [*streams, *probes]

    def as_cache(self) -> ActivationCache:
        """The rows under TransformerLens's names, [1, num_positions, hidden_size] each.

        Raises:
            SpecError: not every position from 0 on was read, or rows are missing.
        """
        from vllm_scope.analysis.cache import ActivationCache

        return ActivationCache(self, num_layers=self._sites.num_layers)

    def __repr__(self) -> str:
        return (
            f"ScopeResult({self.status}, {len(self.keys())} streams, {len(self.scores)} probes, "
            f"{self.delivered} of {self.expected} values)"
        )

    def __getstate__(self) -> dict[str, Any]:
        # The values alone, not the room that they were given.
        for stream in self._read_streams():
            rows, positions = self._stream(stream)
            own = rows.kept() if isinstance(rows, EncodedRows) else rows.contiguous().clone()
            self._streams[stream] = (own, positions)
        for number in range(len(self._asked.probes)):
            values, positions = self._score(number)
            self._scores[number] = (values.clone(), positions)
        return {**self.__dict__, "_row_parts": {}, "_score_parts": {}, "_decoded": {}}

    def _read_streams(self) -> list[_Stream]:
        found = ((*s, read.when) for read in self._asked.reads for s in read.streams)
        return list(dict.fromkeys(found))

    def _accounts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each stream and probe: the positions that are wanted, and that have arrived."""
        for stream in self._read_streams():
            known = self._streams.get(stream)
            yield self._wanted_of(stream), _arrived(known, self._parts_of(stream))
        for number, probe in enumerate(self._asked.probes):
            known = self._scores.get(number)
            parts = self._score_parts.get(number, [])
            yield self._wanted([probe.tokens]), _arrived(known, parts)

    def _wanted(self, selectors: list[Selector]) -> np.ndarray:
        """The positions processed so far that any of these selects."""
        key = tuple(selectors)
        if key not in self._wanted_by:
            self._wanted_by[key] = self._select(selectors)
        return self._wanted_by[key]

    def _select(self, selectors: list[Selector]) -> np.ndarray:
        return wanted_positions(
            selectors, self._token_ids, self._num_prompt, self._status != "streaming"
        )

    def _wanted_of(self, stream: _Stream) -> np.ndarray:
        site_layer, when = stream[:2], stream[2]
        return self._wanted([
            read.tokens for read in self._asked.reads
            if site_layer in read.streams and read.when == when
        ])  # fmt: skip

    def _parts_of(self, stream: _Stream) -> list[Part]:
        """A worker reads each row once: at the first point that sees it so."""
        point = self._sites.point_of(stream[:2], stream[2])
        first = point - point % LEVELS
        encoding = self._encoding_of(stream)
        for known in range(point, first - 1, -1):
            if (encoding, known) in self._row_parts:
                return self._row_parts[encoding, known]
        return []

    def _encoding_of(self, stream: _Stream) -> Encoding | None:
        return next(
            read.encoding for read in self._asked.reads
            if stream[:2] in read.streams and read.when == stream[2]
        )  # fmt: skip

    def _stream(self, key: SiteLayer | _Stream | str) -> _Rows:
        stream = self._find(key)
        if stream not in self._streams:
            encoding, wanted = self._encoding_of(stream), self._wanted_of(stream)
            if encoding is None:
                empty = torch.empty((0, self._sites.hidden_size), dtype=_dtype(self._sites))
                self._streams[stream] = assemble(self._parts_of(stream), wanted, empty)
            else:
                packing = packing_of(encoding)
                empty = torch.empty((0, packing.num_slots * SLOT_BYTES), dtype=torch.uint8)
                data, positions = assemble(self._parts_of(stream), wanted, empty)
                self._streams[stream] = (EncodedRows(packing.codec, data), positions)
        return self._streams[stream]

    def _find(self, key: SiteLayer | _Stream | str) -> _Stream:
        """The stream that was asked for, by its key; aliases are understood."""
        words = (key, 0) if isinstance(key, str) else tuple(key)
        site = ALIASES.get(str(words[0]), words[0])
        asked = self._read_streams()
        for stream in asked:
            # Of a stream that was read on both sides, the plain key is the one after.
            if stream == (site, *words[1:]) or (
                len(words) == 2
                and stream[:2] == (site, words[1])
                and (stream[2] == "after" or (*stream[:2], "after") not in asked)
            ):
                return stream
        names = ", ".join(f"{site!r} {layer}" for site, layer in self.keys()) or "nothing"
        raise KeyError(f"{key} was not asked for; this request read {names}.")

    def _score(self, number: int) -> _Values:
        if number not in self._scores:
            self._scores[number] = assemble(
                [
                    Part(part.positions, part.arrivals, part.rows[:, 0])
                    for part in self._score_parts.get(number, [])
                ],
                self._wanted([self._asked.probes[number].tokens]),
                torch.empty(0),
            )
        return self._scores[number]


def _key(site: str, layer: int, when: str | None) -> SiteLayer | _Stream:
    return (site, layer) if when is None else (site, layer, when)


def _num_in(wanted: np.ndarray, arrived: np.ndarray) -> int:
    if np.array_equal(wanted, arrived[: len(wanted)]):  # the usual case
        return len(wanted)
    return int(np.isin(wanted, arrived).sum())


def _arrived(known: _Rows | None, parts: list[Part]) -> np.ndarray:
    if known is not None:
        return known[1]
    return np.concatenate([p.positions for p in parts]) if parts else np.zeros(0, np.int64)


def _dtype(sites: Sites) -> torch.dtype:
    dtype = getattr(torch, sites.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Inbox:
    """All pending requests of this process, and the road that fills them."""

    def __init__(self) -> None:
        # Weak: a request that nobody holds any more (aborted, client gone) takes
        # its rows with it, and what still arrives for it is ignored.
        self._pending: weakref.WeakValueDictionary[int, Pending] = weakref.WeakValueDictionary()
        # Unique over all front-ends of an engine: their keys meet in its workers.
        self._keys = itertools.count(secrets.randbits(30) << 32)
        #: Tokens that came so far, of all messages: tells which row is the last.
        self._num_arrived = 0
        self._num_copiers = min(MOST_COPIERS, (os.cpu_count() or 1) // 2)
        self._copiers = None
        if self._num_copiers > 1:
            self._copiers = ThreadPoolExecutor(self._num_copiers, "vllm-scope-copy")
        #: Told what workers' sinks have counted.
        self.on_counters: Callable[[CountersHeader], None] = lambda _: None
        self._receiver = Receiver(
            self._on_rows, self._on_finish, lambda header: self.on_counters(header)
        )

    @property
    def address(self) -> Address:
        return self._receiver.address

    def __len__(self) -> int:
        return len(self._pending)

    def open(
        self,
        asked: Resolved,
        sites: Sites,
        prompt_ids: list[int],
        max_tokens: int,
        num_stages: int,
    ) -> Pending:
        pending = Pending(next(self._keys), asked, sites, prompt_ids, max_tokens, num_stages)
        self._pending[pending.key] = pending
        return pending

    def forget(self, pending: Pending) -> None:
        """Let go of a request's rows now; what still arrives for it is ignored."""
        self._pending.pop(pending.key, None)
        pending.clear()

    def listen(self, host: str) -> None:
        """Let workers reach this process over TCP too; see Receiver.listen."""
        self._receiver.listen(host)

    def close(self) -> None:
        self._receiver.close()

    def _on_rows(self, message: RowsMessage) -> None:
        jobs: list[tuple[Pending, _Delivered]] = []
        for layout, tokens, data in by_layout(
            message.layouts, message.layout_of, message.boundary, message.row_bytes, message.slots
        ):
            local = layout if message.boundary is None else layout.at(message.boundary)
            for some in by_key(message.keys[tokens]):
                of = tokens[some]
                pending = self._pending.get(int(message.keys[of[0]]))
                if pending is not None:
                    jobs.append((pending, _Delivered(
                        layout, local, message.positions[of], self._num_arrived + of,
                        data[some], message.row_bytes,
                    )))  # fmt: skip
        self._num_arrived += len(message.keys)
        if self._copiers is None or message.slots.numel() < PARALLEL_BYTES or len(jobs) == 1:
            _copy(jobs)
            return
        # Each job fills another table, and the first touch of fresh memory is what
        # takes long: a thread gets 3 GB/s where warm memory gives 15.
        shares = [jobs[i :: self._num_copiers] for i in range(self._num_copiers)]
        list(self._copiers.map(_copy, shares))

    def _on_finish(self, header: FinishHeader) -> None:
        pending = self._pending.get(header.key)
        if pending is not None:
            pending.finish(header.stage, header.error, header.manifests)


class _Delivered(NamedTuple):
    """A request's part of a message, of one layout.

    Attributes:
        layout: of its tokens.
        local: the part of the layout that is here.
        positions, arrivals: int64 [num_tokens]; arrivals grow with the computation.
        data: uint8 [num_tokens, bytes of a token], not kept.
        row_bytes: of one row.
    """

    layout: Layout
    local: Layout
    positions: np.ndarray
    arrivals: np.ndarray
    data: np.ndarray
    row_bytes: int


def _copy(jobs: list[tuple[Pending, _Delivered]]) -> None:
    for pending, some in jobs:
        pending.add(some)


_inbox: Inbox | None = None
_inbox_lock = threading.Lock()


def num_pending() -> int:
    """Requests whose rows this process holds or waits for."""
    return 0 if _inbox is None else len(_inbox)


def inbox() -> Inbox:
    """This process's inbox, opened at its first use."""
    global _inbox
    with _inbox_lock:
        if _inbox is None:
            _inbox = Inbox()
        return _inbox
