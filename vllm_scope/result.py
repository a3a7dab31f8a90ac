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
import os
import secrets
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vllm_scope.program import Program
from vllm_scope.receiver import Receiver
from vllm_scope.road import Address, FinishHeader, RowsMessage
from vllm_scope.selectors import Tokens
from vllm_scope.spec import ResolvedRead, SiteLayer, Sites

Status = Literal["streaming", "complete", "incomplete", "aborted", "failed"]


#: Messages from this size on are copied by several threads.
PARALLEL_BYTES = 4 << 20
MOST_COPIERS = 6
#: Positions that a request's rows get room for at first, where more are not certain.
FIRST_ROOM = 64
#: A request's rows get room for all of its positions at once up to this many.
MOST_ROOM = 4096


@dataclass(frozen=True)
class _Part:
    """Some rows of one stream: [n] positions and arrivals, [n, hidden_size] rows."""

    positions: np.ndarray
    arrivals: np.ndarray
    rows: Tensor


class _Rows:
    """Rows of one request under one program, in the order in which they arrive.

    Append-only: what a snapshot has seen never changes, so snapshots share it.

    Attributes:
        boundaries: the streams, [num_boundaries].
        counts: how many rows of each boundary are there.
    """

    def __init__(self, boundaries: tuple[int, ...], row_bytes: int, dtype: torch.dtype) -> None:
        self.boundaries = boundaries
        self.counts = [0] * len(boundaries)
        self._dtype = dtype
        # As bytes: numpy knows no bf16, and lets go of Python's lock while it copies.
        self._rows = np.empty((0, len(boundaries), row_bytes), np.uint8)
        self._positions = np.empty((len(boundaries), 0), np.int64)
        #: When each row came, among all of the request's rows.
        self._arrivals = np.empty((len(boundaries), 0), np.int64)

    def append(
        self, positions: np.ndarray, rows: np.ndarray, arrivals: np.ndarray, room: int
    ) -> None:
        """Add tokens with rows of every boundary, uint8 [num_tokens, num_boundaries, bytes]."""
        first = self.counts[0]
        if any(count != first for count in self.counts):
            # Some stream lost a message; keep the others' rows at their own places.
            for at, boundary in enumerate(self.boundaries):
                self.append_one(boundary, positions, rows[:, at], arrivals, room)
            return
        last = self._make_room(first + len(positions), room)
        self._rows[first:last] = rows
        self._positions[:, first:last] = positions
        self._arrivals[:, first:last] = arrivals
        self.counts = [last] * len(self.boundaries)

    def append_one(
        self,
        boundary: int,
        positions: np.ndarray,
        rows: np.ndarray,
        arrivals: np.ndarray,
        room: int,
    ) -> None:
        """Add tokens with rows of one boundary, uint8 [num_tokens, bytes]."""
        at = self.boundaries.index(boundary)
        first = self.counts[at]
        last = self._make_room(first + len(positions), room)
        self._rows[first:last, at] = rows
        self._positions[at, first:last] = positions
        self._arrivals[at, first:last] = arrivals
        self.counts[at] = last

    def _make_room(self, last: int, room: int) -> int:
        size = self._rows.shape[0]
        if last > size:
            size = max(last, room, 2 * size)
            rows = np.empty((size, *self._rows.shape[1:]), np.uint8)
            positions = np.empty((len(self.boundaries), size), np.int64)
            arrivals = np.empty((len(self.boundaries), size), np.int64)
            used = max(self.counts)
            arrivals[:, :used] = self._arrivals[:, :used]
            rows[:used] = self._rows[:used]
            positions[:, :used] = self._positions[:, :used]
            self._rows, self._positions, self._arrivals = rows, positions, arrivals
        return last

    def snapshot(self) -> dict[int, _Part]:
        """boundary -> its rows so far, views."""
        if not len(self._rows):
            return {}
        rows = torch.from_numpy(self._rows).view(self._dtype)
        return {
            boundary: _Part(
                self._positions[at, :count], self._arrivals[at, :count], rows[:count, at]
            )
            for at, (boundary, count) in enumerate(zip(self.boundaries, self.counts, strict=True))
        }


class Pending:
    """One request's rows while they arrive.

    Attributes:
        key: the request's key, unique among all front-ends.
        done: resolved once every stage has sent its last row, or said why not.
    """

    def __init__(
        self,
        key: int,
        reads: tuple[ResolvedRead, ...],
        sites: Sites,
        prompt_ids: list[int],
        max_tokens: int,
        num_stages: int,
    ) -> None:
        self.key = key
        self.done: Future[None] = Future()
        self.error: str | None = None
        self.reads, self.sites = reads, sites
        self.prompt_ids = prompt_ids
        self._stages_left = set(range(num_stages))
        self._rows: dict[tuple[int, ...], _Rows] = {}
        everything = all(read.tokens.uniform for read in reads)
        expected = len(prompt_ids) + max_tokens - 1
        self._room = min(expected, MOST_ROOM if everything else FIRST_ROOM)

    def add(
        self,
        boundaries: tuple[int, ...],
        boundary: int | None,
        positions: np.ndarray,
        arrivals: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Copy in rows of some tokens under one program.

        Args:
            boundaries: of the program.
            boundary: the one that the rows are of, or None for all of them.
            positions: int64 [num_tokens].
            arrivals: int64 [num_tokens], growing with the order of computation.
            rows: uint8 [num_tokens, 1 or num_boundaries, row bytes], not kept.
        """
        table = self._rows.get(boundaries)
        if table is None:
            table = _Rows(boundaries, rows.shape[-1], _dtype(self.sites))
            self._rows[boundaries] = table
        if boundary is None:
            table.append(positions, rows, arrivals, self._room)
        elif boundary in boundaries:
            table.append_one(boundary, positions, rows[:, 0], arrivals, self._room)

    def finish(self, stage: int, error: str | None) -> None:
        self._stages_left.discard(stage)
        self.error = self.error or error
        if not self._stages_left and not self.done.done():
            self.done.set_result(None)

    def snapshot(self, output_ids: list[int], finish_reason: str | None) -> ScopeResult:
        """What has arrived so far.

        Args:
            output_ids: all generated tokens so far.
            finish_reason: vLLM's word, or None while the request runs.
        """
        parts: dict[int, list[_Part]] = {}
        for table in list(self._rows.values()):
            for boundary, part in table.snapshot().items():
                parts.setdefault(boundary, []).append(part)
        return ScopeResult(
            self.reads,
            self.sites,
            [*self.prompt_ids, *output_ids],
            len(self.prompt_ids),
            parts,
            self._status(finish_reason),
            self.error,
        )

    def _status(self, finish_reason: str | None) -> Status:
        if self.error is not None:
            return "failed"
        if finish_reason is None:
            return "streaming"
        if finish_reason in ("abort", "error"):
            return "aborted"
        return "complete" if self.done.done() else "incomplete"


class ScopeResult:
    """The rows of one completion.

    `result["resid_post", 5]` is a tensor [num_positions, hidden_size], model dtype,
    CPU, in position order; `result.positions("resid_post", 5)` the absolute
    positions (index into prompt + generated). Row p is the state while token p is
    processed, so the token sampled last has none.

    Attributes:
        status: "streaming" while the request runs, "complete" when every row that
            was asked for is here, "incomplete" when some are not, "aborted" when
            the request was, "failed" when its reads were (see `error`).
        error: the reason, where status is "failed".
        expected: rows that were asked for, of the tokens processed so far.
        delivered: of those, rows that are here.
        dropped: expected - delivered, once the request has ended; 0 before.
    """

    def __init__(
        self,
        reads: tuple[ResolvedRead, ...],
        sites: Sites,
        token_ids: list[int],
        num_prompt: int,
        parts: dict[int, list[_Part]],
        status: Status,
        error: str | None,
    ) -> None:
        self._reads, self._sites = reads, sites
        self._token_ids, self._num_prompt = token_ids, num_prompt
        self._parts = parts
        self._status, self.error = status, error
        self._streams: dict[SiteLayer, tuple[Tensor, np.ndarray]] = {}

    @property
    def num_processed(self) -> int:
        """Positions processed so far: all tokens but the one sampled last."""
        sampled = len(self._token_ids) > self._num_prompt
        return len(self._token_ids) - (1 if sampled else 0)

    def keys(self) -> list[SiteLayer]:
        """The streams that were asked for."""
        return list(dict.fromkeys(s for read in self._reads for s in read.streams))

    def __contains__(self, stream: object) -> bool:
        return stream in self.keys() or (stream == "embed" and ("embed", 0) in self.keys())

    def __getitem__(self, stream: SiteLayer | str) -> Tensor:
        return self._stream(stream)[0]

    def positions(self, site: str, layer: int = 0) -> Tensor:
        """int64 [num_positions], ascending: the absolute positions of the rows."""
        return torch.from_numpy(self._stream((site, layer))[1])

    @property
    def expected(self) -> int:
        return sum(len(self._wanted(stream)) for stream in self.keys())

    @property
    def delivered(self) -> int:
        return sum(
            int(np.isin(self._wanted(stream), self._arrived(stream)).sum())
            for stream in self.keys()
        )

    @property
    def dropped(self) -> int:
        return 0 if self._status == "streaming" else self.expected - self.delivered

    @property
    def status(self) -> Status:
        if self._status == "complete" and self.dropped:
            return "incomplete"
        return self._status

    def __repr__(self) -> str:
        return (
            f"ScopeResult({self.status}, {len(self.keys())} streams, "
            f"{self.delivered} of {self.expected} rows)"
        )

    def __getstate__(self) -> dict[str, Any]:
        # The rows alone, not the room that they were given.
        for stream in self.keys():
            rows, positions = self._stream(stream)
            self._streams[stream] = (rows.contiguous().clone(), positions)
        return {**self.__dict__, "_parts": {}}

    def _wanted(self, stream: SiteLayer) -> np.ndarray:
        positions = np.arange(self.num_processed, dtype=np.int64)
        ids = np.asarray(self._token_ids[: self.num_processed], np.int64)
        ended = None if self._status == "streaming" else self.num_processed
        tokens = Tokens(positions, self._num_prompt, ids, ended)
        mask = np.zeros(positions.shape, bool)
        for read in self._reads:
            if stream in read.streams:
                mask |= read.tokens.select(tokens).certain
        return positions[mask]

    def _parts_of(self, stream: SiteLayer) -> list[_Part]:
        return self._parts.get(self._sites.boundary_of(stream), [])

    def _arrived(self, stream: SiteLayer) -> np.ndarray:
        if stream in self._streams:
            return self._streams[stream][1]
        parts = self._parts_of(stream)
        return np.concatenate([p.positions for p in parts]) if parts else np.zeros(0, np.int64)

    def _stream(self, stream: SiteLayer | str) -> tuple[Tensor, np.ndarray]:
        if isinstance(stream, str):
            stream = (stream, 0)
        if stream not in self._streams:
            if stream not in self.keys():
                asked = ", ".join(f"{site!r} {layer}" for site, layer in self.keys())
                raise KeyError(f"{stream} was not asked for; this request read {asked}.")
            self._streams[stream] = self._assemble(stream)
        return self._streams[stream]

    def _assemble(self, stream: SiteLayer) -> tuple[Tensor, np.ndarray]:
        parts = self._parts_of(stream)
        if not parts:
            empty = torch.empty((0, self._sites.hidden_size), dtype=_dtype(self._sites))
            return empty, np.zeros(0, np.int64)
        wanted = self._wanted(stream)
        if len(parts) == 1:
            positions, rows = parts[0].positions, parts[0].rows
            # The usual case costs no copy: computed once, in order, maybe past the end.
            if (
                np.array_equal(positions[: len(wanted)], wanted)
                and not np.isin(positions[len(wanted) :], wanted).any()
            ):
                return rows[: len(wanted)], wanted
        order = np.argsort(np.concatenate([p.arrivals for p in parts]), kind="stable")
        positions = np.concatenate([p.positions for p in parts])[order]
        rows = torch.cat([p.rows for p in parts])[torch.from_numpy(order)]
        # A position that was computed twice (recompute, rejected drafts) keeps its
        # last row; one that was not asked for, or never accepted, goes.
        found, from_end = np.unique(positions[::-1], return_index=True)
        keep = np.isin(found, wanted)
        last = len(positions) - 1 - from_end[keep]
        return rows[torch.from_numpy(last)], found[keep]


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
        self._receiver = Receiver(self._on_rows, self._on_finish)

    @property
    def address(self) -> Address:
        return self._receiver.address

    def __len__(self) -> int:
        return len(self._pending)

    def open(
        self,
        reads: tuple[ResolvedRead, ...],
        sites: Sites,
        prompt_ids: list[int],
        max_tokens: int,
        num_stages: int,
    ) -> Pending:
        pending = Pending(next(self._keys), reads, sites, prompt_ids, max_tokens, num_stages)
        self._pending[pending.key] = pending
        return pending

    def listen(self, host: str) -> None:
        """Let workers reach this process over TCP too; see Receiver.listen."""
        self._receiver.listen(host)

    def close(self) -> None:
        self._receiver.close()

    def _on_rows(self, message: RowsMessage) -> None:
        jobs: list[_Job] = []
        for program, tokens, rows in _by_program(message):
            for some in _by_key(message.keys[tokens]):
                pending = self._pending.get(int(message.keys[tokens[some][0]]))
                if pending is not None:
                    of = tokens[some]
                    positions, arrivals = message.positions[of], self._num_arrived + of
                    jobs.append((pending, program.boundaries, positions, arrivals, rows[some]))
        self._num_arrived += len(message.keys)
        size = message.rows.numel() * message.rows.element_size()
        if self._copiers is None or size < PARALLEL_BYTES or len(jobs) == 1:
            _copy(jobs, message.boundary)
            return
        # Each job fills another table, and the first touch of fresh memory is what
        # takes long: a thread gets 3 GB/s where warm memory gives 15.
        shares = [jobs[i :: self._num_copiers] for i in range(self._num_copiers)]
        list(self._copiers.map(_copy, shares, itertools.repeat(message.boundary)))

    def _on_finish(self, header: FinishHeader) -> None:
        pending = self._pending.get(header.key)
        if pending is not None:
            pending.finish(header.stage, header.error)


#: A request's part of a message under one program: whose, the program's boundaries,
#: positions, arrivals, rows.
_Job = tuple[Pending, tuple[int, ...], np.ndarray, np.ndarray, np.ndarray]


def _copy(jobs: list[_Job], boundary: int | None) -> None:
    for pending, boundaries, positions, arrivals, rows in jobs:
        pending.add(boundaries, boundary, positions, arrivals, rows)


def _by_program(message: RowsMessage) -> Iterator[tuple[Program, np.ndarray, np.ndarray]]:
    """The message's tokens and rows, program by program.

    Yields:
        (program, tokens [n], rows: uint8 [n, rows of a token, row bytes])
    """
    rows = message.rows.view(torch.uint8).numpy()
    everything = np.arange(len(message.keys))
    if message.boundary is not None:
        for i, program in enumerate(message.programs):
            tokens = np.flatnonzero(message.program_of == i)
            yield (
                program,
                tokens,
                rows[tokens][:, None] if len(message.programs) > 1 else rows[:, None],
            )
        return
    if len(message.programs) == 1:
        (program,) = message.programs
        yield program, everything, rows.reshape(len(everything), program.num_reads, -1)
        return
    reads = np.array([program.num_reads for program in message.programs])[message.program_of]
    starts = np.cumsum(reads) - reads
    for i, program in enumerate(message.programs):
        tokens = np.flatnonzero(message.program_of == i)
        at = starts[tokens][:, None] + np.arange(program.num_reads)
        yield program, tokens, rows[at]


def _by_key(keys: np.ndarray) -> Iterator[slice | np.ndarray]:
    """Groups of equal keys, in order; a slice where the places are evenly spaced.

    Several steps of the same requests come as one message, so a request's tokens
    are usually every n-th: a slice copies them without a gather.
    """
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    for some in np.split(order, edges):
        step = int(some[1] - some[0]) if len(some) > 1 else 1
        if step * (len(some) - 1) == some[-1] - some[0] and (np.diff(some) == step).all():
            yield slice(int(some[0]), int(some[-1]) + 1, step)
        else:
            yield some


_inbox: Inbox | None = None
_inbox_lock = threading.Lock()


def inbox() -> Inbox:
    """This process's inbox, opened at its first use."""
    global _inbox
    with _inbox_lock:
        if _inbox is None:
            _inbox = Inbox()
        return _inbox
