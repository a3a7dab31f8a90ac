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
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vllm_scope.road import Address, FinishHeader, Receiver, RowsMessage
from vllm_scope.selectors import Tokens
from vllm_scope.spec import ResolvedRead, SiteLayer, Sites

Status = Literal["streaming", "complete", "incomplete", "aborted", "failed"]


@dataclass(frozen=True)
class _Block:
    """Some consecutive tokens of one request, under one program."""

    boundaries: tuple[int, ...]
    positions: np.ndarray
    rows: Tensor  # [num_tokens, len(boundaries), hidden_size]


class Pending:
    """One request's rows while they arrive.

    Attributes:
        key: the request's key, unique in this process.
        done: resolved once every stage has sent its last row, or said why not.
    """

    def __init__(
        self,
        key: int,
        reads: tuple[ResolvedRead, ...],
        sites: Sites,
        prompt_ids: list[int],
        num_stages: int,
    ) -> None:
        self.key = key
        self.done: Future[None] = Future()
        self.error: str | None = None
        self.reads, self.sites = reads, sites
        self.prompt_ids = prompt_ids
        self._stages_left = set(range(num_stages))
        self._blocks: list[_Block] = []

    def add(self, block: _Block) -> None:
        self._blocks.append(block)

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
        return ScopeResult(
            self.reads,
            self.sites,
            [*self.prompt_ids, *output_ids],
            len(self.prompt_ids),
            tuple(self._blocks),
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
        blocks: tuple[_Block, ...],
        status: Status,
        error: str | None,
    ) -> None:
        self._reads, self._sites = reads, sites
        self._token_ids, self._num_prompt = token_ids, num_prompt
        self._blocks = blocks
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

    def own(self) -> ScopeResult:
        """Copy the rows out of the messages they came in, which other requests share."""
        for stream in self.keys():
            self._stream(stream)
        self._blocks = ()
        return self

    def __getstate__(self) -> dict[str, Any]:
        self.own()
        return dict(self.__dict__)

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

    def _parts(self, stream: SiteLayer) -> list[tuple[np.ndarray, Tensor]]:
        boundary = self._sites.boundary_of(stream)
        return [
            (block.positions, block.rows[:, block.boundaries.index(boundary)])
            for block in self._blocks
            if boundary in block.boundaries
        ]

    def _arrived(self, stream: SiteLayer) -> np.ndarray:
        if stream in self._streams:
            return self._streams[stream][1]
        parts = self._parts(stream)
        return np.concatenate([p for p, _ in parts]) if parts else np.zeros(0, np.int64)

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
        parts = self._parts(stream)
        if not parts:
            empty = torch.empty((0, self._sites.hidden_size), dtype=_dtype(self._sites))
            return empty, np.zeros(0, np.int64)
        positions = np.concatenate([p for p, _ in parts])
        wanted = self._wanted(stream)
        rows = torch.cat([r for _, r in parts])
        if np.array_equal(positions, wanted):
            return rows, wanted
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
        self._keys = itertools.count(1)
        self._receiver = Receiver(self._on_rows, self._on_finish)

    @property
    def address(self) -> Address:
        return self._receiver.address

    def __len__(self) -> int:
        return len(self._pending)

    def open(
        self, reads: tuple[ResolvedRead, ...], sites: Sites, prompt_ids: list[int], num_stages: int
    ) -> Pending:
        pending = Pending(next(self._keys), reads, sites, prompt_ids, num_stages)
        self._pending[pending.key] = pending
        return pending

    def close(self) -> None:
        self._receiver.close()

    def _on_rows(self, message: RowsMessage) -> None:
        reads = np.array([p.num_reads for p in message.programs], np.int64)[message.program_of]
        if message.boundary is not None:
            reads = np.ones_like(reads)
        starts = np.concatenate([[0], np.cumsum(reads)])
        changes = (np.diff(message.keys) != 0) | (np.diff(message.program_of) != 0)
        edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(message.keys)]
        for a, b in itertools.pairwise(edges):
            pending = self._pending.get(int(message.keys[a]))
            if pending is None:
                continue
            boundaries = message.programs[message.program_of[a]].boundaries
            if message.boundary is not None:
                if message.boundary not in boundaries:
                    continue
                boundaries = (message.boundary,)
            rows = message.rows[starts[a] : starts[b]]
            pending.add(
                _Block(
                    boundaries,
                    message.positions[a:b],
                    rows.view(b - a, len(boundaries), rows.shape[1]),
                )
            )

    def _on_finish(self, header: FinishHeader) -> None:
        pending = self._pending.get(header.key)
        if pending is not None:
            pending.finish(header.stage, header.error)


_inbox: Inbox | None = None
_inbox_lock = threading.Lock()


def inbox() -> Inbox:
    """This process's inbox, opened at its first use."""
    global _inbox
    with _inbox_lock:
        if _inbox is None:
            _inbox = Inbox()
        return _inbox


