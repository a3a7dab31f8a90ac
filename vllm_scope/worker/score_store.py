"""Stores the scores of KV blocks, for later requests that use the blocks from the prefix cache.

Owns:  ScoreStore, Filled.
Runs:  on the drain thread, in the order of steps.
From:  drain (each step's rows), core.score_index (says which blocks are kept and forgotten).
To:    drain (the scores of cached tokens).

The store keeps the delivered bytes of each token, which contain only scores. All tokens of a
request have one layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_scope.batch.by_position import Ints
from vllm_scope.batch.by_request import by_key, by_layout
from vllm_scope.batch.labels import Labels
from vllm_scope.core.score_index import TURNS, ScoreKey
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths
from vllm_scope.transport.ring import Lease

logger = logging.getLogger("vllm.vllm_scope")

Bytes = NDArray[np.uint8]
#: A ring of single tokens (_Singles) has room for _BLOCKS_BACK blocks and for the tokens of TURNS +
#: MOST_STEPS_KEPT + 2 steps. EngineCore can report a full block up to TURNS + 1 steps after the
#: block's last token was computed. The drain can collect MOST_STEPS_KEPT more steps before the
#: store keeps the block.
_BLOCKS_BACK, MOST_STEPS_KEPT = 4, 16


class Filled(NamedTuple):
    """KV blocks that a request has filled.

    Attributes:
        key: the request's key.
        first: the index of the first of these blocks among all blocks of the request.
        hashes: the blocks' hashes.
        probes: the digest of the request's probes.
    """

    key: int
    first: int
    hashes: Sequence[bytes]
    probes: bytes


@dataclass(frozen=True)
class _Run:
    """Several tokens of one request, from one step or from one tap of a step.

    Attributes:
        step: the number of the step. If a position was computed twice, the values of the later step
            are correct.
        slots: which bytes of each token `data` contains, as indices; None if `data` contains all
            bytes.
    """

    step: int
    positions: Ints
    data: Bytes
    slots: Ints | None

    def of(self, wanted: Ints) -> Bytes | None:
        """The bytes of the tokens at the consecutive positions `wanted`. None if these tokens are
        not consecutive in `data`, or if `data` has only some bytes of each token."""
        first = int(wanted[0] - self.positions[0])
        here = slice(first, first + len(wanted))
        if self.slots is not None or first < 0 or not np.array_equal(self.positions[here], wanted):
            return None
        return self.data[here]


class _Singles:
    """For each request, a ring with the scores of the request's last positions. The ring gets a
    token's scores if the step computes only this one token of the request."""

    def __init__(self, span: int, token_bytes: int) -> None:
        self._span = span
        #: [num_rows, span]. Position p of a request is at column p % span of the request's row.
        self.positions = np.full((0, span), -1, np.int64)
        self.steps = np.zeros((0, span), np.int64)
        self.values = np.zeros((0, span, token_bytes), np.uint8)
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        #: The keys of `_row_of`, ascending, and their rows; None after each change of `_row_of`.
        self._sorted: tuple[Ints, Ints] | None = None

    def __bool__(self) -> bool:
        return bool(self._row_of)

    def take(self, key: int) -> int:
        """Allocate a row for a request."""
        if not self._free:
            old = len(self.positions)
            new = max(16, 2 * old)
            positions = np.full((new, self._span), -1, np.int64)
            self.steps = np.resize(self.steps, positions.shape)
            values = np.zeros((new, *self.values.shape[1:]), np.uint8)
            positions[:old], values[:old] = self.positions, self.values
            self.positions, self.values = positions, values
            self._free = list(range(new - 1, old - 1, -1))
        row = self._row_of[key] = self._free.pop()
        self.positions[row] = -1
        self._sorted = None
        return row

    def give_back(self, key: int) -> None:
        self._free.append(self._row_of.pop(key))
        self._sorted = None

    def rows_of(self, keys: NDArray[np.int64]) -> Ints:
        """The row of each key's request, [n]; -1 for a request without a row."""
        if self._sorted is None:
            known = np.fromiter(self._row_of, np.int64, len(self._row_of))
            order = np.argsort(known)
            rows = np.fromiter(self._row_of.values(), np.int64, len(known))
            self._sorted = known[order], rows[order]
        known, rows = self._sorted
        at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        found: Ints = np.where(known[at] == keys, rows[at], -1)
        return found

    def put(self, steps: Ints, rows: Ints, positions: Ints, data: Bytes) -> None:
        """Store tokens in the ring. If several tokens have the same entry of the ring, the token of
        the last step is kept.

        Args:
            steps, rows, positions, data: [n], the step, row, position and bytes of each token. A
                request has at most one token in a step.
        """
        at = positions % self._span
        self._put(steps, rows, positions, at, data)
        if (self.steps[rows, at] != steps).any():
            # Several tokens have the same entry of the ring. numpy does not define which of these
            # tokens it keeps. Therefore the tokens are stored again, one step after another.
            for _, some in by_key(steps):
                self._put(steps[some], rows[some], positions[some], at[some], data[some])

    def _put(self, steps: Ints, rows: Ints, positions: Ints, at: Ints, data: Bytes) -> None:
        self.positions[rows, at], self.steps[rows, at] = positions, steps
        self.values[rows, at] = data


@dataclass
class _Collected:
    """The tokens of one request that are not in a kept block yet.

    Attributes:
        singles, row: the ring of single tokens for the request's layout, and the request's row in
            the ring.
    """

    layout: Layout
    singles: _Singles
    row: int
    runs: list[_Run] = field(default_factory=list)


class ScoreStore:
    """The scores of KV blocks, by block hash and digest of the probes.

    Args:
        widths: bytes of a raw row, by kind.
        step_tokens: the same as in Sites.
    """

    def __init__(self, widths: Widths, step_tokens: int = 1) -> None:
        self._widths, self._step_tokens = widths, step_tokens
        #: The number of tokens of a block, which is the same for all requests.
        self._block_size = 0
        self._blocks: dict[ScoreKey, Bytes] = {}
        self._requests: dict[int, _Collected] = {}
        self._singles: dict[Layout, _Singles] = {}
        self._step = 0
        self._missing: list[ScoreKey] = []

    def __bool__(self) -> bool:
        """True if the store collects the scores of a request."""
        return bool(self._requests)

    def begin(self, key: int, layout: Layout, block_size: int) -> None:
        """Start to collect the scores of a request. `layout` is the layout of all tokens of the
        request."""
        self._block_size = block_size
        singles = self._singles.get(layout)
        if singles is None:
            size = layout.slots(self._widths) * SLOT_BYTES
            steps = TURNS + MOST_STEPS_KEPT + 2
            span = _BLOCKS_BACK * block_size + steps * self._step_tokens
            singles = self._singles[layout] = _Singles(span, size)
        self._requests[key] = _Collected(layout, singles, singles.take(key))

    def end(self, key: int) -> None:
        collected = self._requests.pop(key, None)
        if collected is None:
            return
        collected.singles.give_back(key)
        if not collected.singles:
            del self._singles[collected.layout]

    def collect(
        self, labels: Labels, lease: Lease, boundary: int | None, sizes: Sequence[int]
    ) -> None:
        """Collect the scores of several steps, of one step, or of one tap of a step.

        Args:
            boundary: The boundary of the tap; None for whole steps.
            sizes: The number of tokens of each step.
        """
        numbers = self._step + 1 + np.repeat(np.arange(len(sizes)), sizes)
        self._step += len(sizes)
        for layout, tokens, data in by_layout(
            labels.layouts, labels.layout_of, boundary, self._widths, lease.slots
        ):
            singles = self._singles.get(layout)
            if not singles:
                continue
            keys, positions, steps = labels.keys[tokens], labels.positions[tokens], numbers[tokens]
            rows = singles.rows_of(keys)
            in_runs = rows >= 0
            slots = None
            # Two tokens have the same number in `groups` if they belong to the same request and the
            # same step. All unknown requests count as one request.
            groups = (steps - steps[0]) * (rows.max() + 2) + rows + 1
            if boundary is None:
                alone = in_runs & (np.bincount(groups)[groups] == 1)
                if alone.all():
                    singles.put(steps, rows, positions, data)
                    continue
                if alone.any():
                    singles.put(steps[alone], rows[alone], positions[alone], data[alone])
                in_runs &= ~alone
            else:
                slots = self._slots_at(layout, boundary)
                data = data[:, : len(slots)]
            several = np.flatnonzero(in_runs)
            for _, some in by_key(groups[several]) if len(several) else ():
                at = several[some]
                run = _Run(int(steps[at[0]]), positions[at], data[at], slots)
                self._requests[int(keys[at[0]])].runs.append(run)

    def _slots_at(self, layout: Layout, boundary: int) -> Ints:
        """The indices of the bytes that one tap delivers, among all bytes of a token."""
        found = []
        for head, points, _, num_slots in layout.at(boundary).encoded_at(self._widths):
            for point in points:
                slot = layout.made_at(head, point, self._widths)
                assert slot is not None
                found.append(slot * SLOT_BYTES + np.arange(num_slots * SLOT_BYTES))
        return np.concatenate([np.zeros(0, np.int64), *found])

    def keep(self, filled: Iterable[Filled]) -> None:
        """Make blocks from the collected tokens of some requests. The store does not keep
        incomplete blocks. EngineCore at first assumes that the store keeps all of these blocks.
        Later EngineCore gets the keys of the incomplete blocks from `take_missing`."""
        #: Requests that have filled exactly one block each, by the `id` of their ring. This is the
        #: usual case in decoding.
        decoding: dict[int, list[tuple[_Collected, Filled]]] = {}
        for one in filled:
            collected = self._requests.get(one.key)
            if collected is not None and len(one.hashes) == 1 and not collected.runs:
                decoding.setdefault(id(collected.singles), []).append((collected, one))
            else:
                self._guard(partial(self._keep_one, collected, one), [one])
        for some in decoding.values():
            call = partial(self._keep_singles, some[0][0].singles, some)
            self._guard(call, [one for _, one in some])

    def _guard(self, call: Callable[[], None], filled: Iterable[Filled]) -> None:
        """Call a function that keeps these blocks. If the call fails, for example because no memory
        is left, none of these blocks is kept."""
        try:
            call()
        except Exception:
            logger.exception("vllm-scope: scores of some blocks could not be kept")
            for one in filled:
                for block_hash in one.hashes:
                    self._put(block_hash, one.probes, None)

    def _keep_singles(self, singles: _Singles, some: Sequence[tuple[_Collected, Filled]]) -> None:
        """Keep one block of each request in `some`, from the tokens in the ring `singles`."""
        rows = np.array([collected.row for collected, _ in some])[:, None]
        first = np.array([one.first for _, one in some])[:, None] * self._block_size
        wanted = first + np.arange(self._block_size)
        at = wanted % singles.positions.shape[1]
        whole: list[bool] = (singles.positions[rows, at] == wanted).all(axis=1).tolist()
        for (_, one), all_there, block in zip(some, whole, singles.values[rows, at], strict=True):
            # Each block is a copy, because the store can forget each block separately.
            self._put(one.hashes[0], one.probes, block.copy() if all_there else None)

    def _keep_one(self, collected: _Collected | None, one: Filled) -> None:
        blocks: list[Bytes | None] = [None] * len(one.hashes)
        if collected is not None and one.hashes:
            blocks = self._made(collected, one.first * self._block_size, len(one.hashes))
        for block_hash, block in zip(one.hashes, blocks, strict=True):
            self._put(block_hash, one.probes, block)
        if collected is not None:
            stop = (one.first + len(one.hashes)) * self._block_size
            collected.runs = [run for run in collected.runs if run.positions.max() >= stop]

    def _put(self, block_hash: bytes, probes: bytes, block: Bytes | None) -> None:
        """Keep a block. If `block` is None (a token is missing), record the block as missing."""
        if block is not None:
            self._blocks[block_hash, probes] = block
            return
        # The store can have an older block with this key. Its scores can come from earlier weights
        # of the model, and must not stay.
        self._blocks.pop((block_hash, probes), None)
        self._missing.append((block_hash, probes))

    def _made(self, collected: _Collected, start: int, count: int) -> list[Bytes | None]:
        """The scores of `count` consecutive blocks from position `start` on; None for an incomplete
        block."""
        size, singles = count * self._block_size, collected.singles
        wanted = np.arange(start, start + size)
        at = wanted % singles.positions.shape[1]
        there = singles.positions[collected.row, at] == wanted
        if len(collected.runs) == 1 and not there.any():
            whole = collected.runs[0].of(wanted)
            if whole is not None:  # the usual case for prompts
                return [some.copy() for some in whole.reshape(count, self._block_size, -1)]
        block = np.zeros((size, singles.values.shape[2]), np.uint8)
        #: `filled`: True for bytes that exist. `steps`: the step of each single token.
        filled, steps = np.zeros(block.shape, bool), np.zeros(size, np.int64)
        block[there] = singles.values[collected.row, at[there]]
        filled[there] = True
        steps[there] = singles.steps[collected.row, at[there]]
        for run in collected.runs:
            tokens = run.positions - start
            some = np.flatnonzero((tokens >= 0) & (tokens < size))
            some = some[steps[tokens[some]] < run.step]
            tokens = tokens[some]
            where = (tokens,) if run.slots is None else (tokens[:, None], run.slots)
            block[where], filled[where] = run.data[some], True
        are_whole: list[bool] = np.all(filled.reshape(count, -1), axis=1).tolist()
        return [
            # Each block is a copy, because the store can forget each block separately.
            some.copy() if all_there else None
            for some, all_there in zip(np.split(block, count), are_whole, strict=True)
        ]

    def fill(self, hashes: Sequence[bytes], probes: bytes, lease: Lease) -> bool:
        """Write the scores of consecutive blocks to a lease. If a block is missing, write nothing,
        and return False."""
        keys = [(block_hash, probes) for block_hash in hashes]
        found = [self._blocks.get(key) for key in keys]
        missing = [key for key, block in zip(keys, found, strict=True) if block is None]
        if missing:
            self._missing += missing
            return False
        blocks = [block for block in found if block is not None]
        into = lease.slots.numpy().reshape(-1, blocks[0].shape[1])
        np.concatenate(blocks, out=into)
        return True

    @property
    def has_missing(self) -> bool:
        """True if `take_missing` would return a block. Any thread can call this method."""
        return bool(self._missing)

    def take_missing(self) -> list[ScoreKey]:
        """The keys of the blocks that the store could not keep or find since the last call. Any
        thread can call this method."""
        # The list is not replaced by a new list, because the drain thread can add a key at the same
        # time.
        found = self._missing[:]
        del self._missing[: len(found)]
        return found

    def forget(self, keys: Iterable[ScoreKey]) -> None:
        for key in keys:
            self._blocks.pop(key, None)
