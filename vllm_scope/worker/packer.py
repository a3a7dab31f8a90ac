"""Gathers the rows of a region of the arena, and applies heads to the rows.

Owns:  Packer. The packer decides which slots of the batch each row of a region gets, and holds the
       weights of heads.
Runs:  `hold` and `num_slots` on the worker's thread, `release_all` on the drain thread, `pack` on
       the threads on which worker.filler fills leases. Work on a GPU is enqueued on the drain's
       stream.
From:  filler.   To: codecs.packed, probe_bank, held_saes, lens.

Promise: the host never waits for the device. The number of kernel launches grows with the number of
pairs (layout, head) and with the number of chunks. In one chunk, a head gets at most CHUNK_BYTES of
raw rows. This limits the extra memory.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vllm_scope.batch.by_position import Ints
from vllm_scope.batch.labels import Labels
from vllm_scope.codecs.packed import packing_of
from vllm_scope.errors import CapacityError
from vllm_scope.program.layout import SLOT_BYTES, Layout, Widths, slots_of_row
from vllm_scope.request.heads import Bank, Encoding, Head, Strongest, Summed, Told
from vllm_scope.request.nets import Net
from vllm_scope.request.sites import kind_of_point
from vllm_scope.worker.device_sums import on_device
from vllm_scope.worker.held_saes import NONE, PairMakers
from vllm_scope.worker.probe_bank import Banks
from vllm_scope.worker.side_stream import Entering
from vllm_scope.worker.slot_views import WORDS, Grid, gathered

logger = logging.getLogger("vllm.vllm_scope")

#: One call of a head gets at most this many bytes of raw rows. The encoding of these rows needs
#: about ten times as much memory.
CHUNK_BYTES = 16 << 20
#: The largest number of distinct projections of rp8 for all running requests.
MOST_PROJECTIONS = 8
#: The first three fields of a _Move.
_Kind = tuple[Head | tuple[Bank, ...] | None, int, int]
#: Maps a `_Kind` to pairs of arrays, with one number for each row. The first array has the row's
#: first slot in the region. The second array has its first slot in the _Chunk, which is the part of
#: the batch for some consecutive tokens. In `_uniform_chunks`, slots are counted from the first
#: slot of a token.
_Found = dict[_Kind, list[tuple[Ints, Ints]]]


@dataclass(frozen=True)
class _Move:
    """Moves rows with the same head and the same size from a region to a batch.

    Attributes:
        head: the head that is applied to the rows; None for raw rows. If `head` is a tuple of
            banks, the rows are divided into equal parts, one part for each bank.
        num_slots: slots of one row in the region.
        row_bytes: the number of bytes of a row that the head gets, without padding.
        sources: the rows' first slots in the region. A Grid if these slots are at regular
            distances, else int64 [n].
        targets: the first slots of the rows, or of the head's results, in the chunk. A Grid if
            these slots are at regular distances, else int64 [n].
    """

    head: Head | tuple[Bank, ...] | None
    num_slots: int
    row_bytes: int
    sources: Tensor | Grid
    targets: Tensor | Grid

    def rows(self, words: Tensor) -> Tensor:
        """The rows, int64 [n, words of a row]. The result is a view of the region, or a copy."""
        if isinstance(self.sources, Grid):
            return self.sources.rows(words, self.num_slots)
        return gathered(words, self.sources, self.num_slots)

    def put(self, found: Tensor, batch: Tensor) -> None:
        """Write raw rows or a head's results, [n, words of one row or result], to the batch."""
        count = found.shape[1] // WORDS
        if isinstance(self.targets, Grid):
            into = self.targets.view(batch, count)
            into.copy_(found.reshape(into.shape))
            return
        batch.index_copy_(0, self._slots_of(self.targets, count), found.reshape(-1, WORDS))

    def _slots_of(self, targets: Tensor, count: int) -> Tensor:
        """int64 [n * count], all slots to write, `count` slots for each row. The tensor is cached,
        because several steps use the same move."""
        known: Tensor | None = self.__dict__.get("_slots")
        if known is None:
            within = torch.arange(count, device=targets.device)
            known = self.__dict__["_slots"] = (targets[:, None] + within).view(-1)
        return known


@dataclass(frozen=True)
class _Chunk:
    """Consecutive tokens, which have the slots from `start` to `stop` - 1 of the batch.

    Attributes:
        in_order: True if the chunk has only one move, and the move's targets are ascending.
    """

    start: int
    stop: int
    moves: list[_Move]
    in_order: bool


@dataclass(frozen=True)
class _Sized:
    """The size of one step's batch. Usually the next step's batch has the same size."""

    labels: Labels
    boundary: int | None
    num_slots: int

    def is_for(self, labels: Labels, boundary: int | None) -> bool:
        # In steady decoding, a step has the same array object `layout_of` as the previous step
        # (plan._Steady).
        return labels.layout_of is self.labels.layout_of and boundary == self.boundary


@dataclass(frozen=True)
class _Plan(_Sized):
    """The moves for a step. Later steps for which `is_for` is True use the same moves."""

    chunks: list[_Chunk]


@dataclass
class Packer:
    """Makes batches from regions of one worker's arena.

    Args:
        dtype, device: the arena's dtype and device.
        widths: bytes of a raw row, by kind.
        saes: The SAEs that the worker holds, by name, and the lenses, by heads.LensKey.
        entered: A function that returns the context in which weights are loaded to the device.
        stacks: True if similar banks (`Banks.like`) are computed together. The computation then
            needs fewer launches, but the last bit of a score can depend on other requests. If None,
            `stacks` is True on a GPU and False on a CPU.
    """

    dtype: torch.dtype
    device: torch.device
    widths: Widths
    saes: PairMakers = field(default_factory=lambda: NONE)
    entered: Entering = nullcontext
    stacks: bool | None = None
    _plan: _Plan | None = None
    _sized: _Sized | None = None
    #: Maps the key of a request to the projections that the request can need.
    _held: dict[int, frozenset[Encoding]] = field(default_factory=dict)
    #: Maps the key of a request to the nets of the request's probes, by bank.
    _probing: dict[int, Mapping[Bank, Sequence[Net]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._banks = Banks(self.device, self.entered)
        self._packing = threading.Lock()
        if self.stacks is None:
            self.stacks = self.device.type == "cuda"

    def hold(
        self, key: int, encodings: Sequence[Encoding], banks: Mapping[Bank, Sequence[Net]]
    ) -> None:
        """Prepare the projections of a request's codecs and the weights of its probes. Call this
        method before the request's first step.

        Raises:
            CapacityError: there are too many distinct projections, or no device memory is left.
        """
        self._hold_projections(key, encodings)
        if not banks:
            return
        try:
            self._banks.hold(banks)
        except torch.OutOfMemoryError:
            raise CapacityError(
                "the device has no room for the probes' weights; send fewer probes, or send the "
                "request again when other requests have finished."
            ) from None
        self._probing[key] = banks

    def _hold_projections(self, key: int, encodings: Sequence[Encoding]) -> None:
        large = frozenset(e for e in encodings if e.metadata["codec"] == "rp8")
        if not large:
            return
        running = frozenset[Encoding]().union(*self._held.values())
        if len(running | large) > MOST_PROJECTIONS:
            raise CapacityError(
                f"running requests use {len(running)} projections of rp8, and this request needs "
                f"{len(large - running)} more; at most {MOST_PROJECTIONS} are possible at a time. "
                "Use the k and seed of a running request, or send the request again later."
            )
        try:
            with self.entered():
                for encoding in large:
                    packing_of(encoding).codec.prepare(self.device)
        except torch.OutOfMemoryError:
            raise CapacityError(
                "the device has no room for rp8's projection; use a smaller k, or send the request "
                "again later."
            ) from None
        self._held[key] = large

    def release_all(self, keys: Iterable[int]) -> None:
        """Release the weights and projections of ended requests. Call this method after the last
        rows of these requests were packed."""
        every: list[Bank] = []
        for key in keys:
            self._held.pop(key, None)
            every += self._probing.pop(key, ())
        if every:
            self._banks.release(every)

    def num_slots(self, labels: Labels, boundary: int | None) -> int:
        """The number of slots of the batch that `pack` makes. Any thread can call this method."""
        sized = self._sized
        if sized is None or not sized.is_for(labels, boundary):
            num_slots = _num_slots(labels, boundary, self.widths)
            sized = self._sized = _Sized(labels, boundary, num_slots)
        return sized.num_slots

    def pack(
        self, region: Tensor, labels: Labels, boundary: int | None, into: Tensor
    ) -> Collection[int]:
        """Make a batch from a region. On a GPU, the work is enqueued on the current stream.

        Args:
            region: [num_slots, elements of a slot], a view of the arena.
            labels, boundary: The same as in sinks.RowBatch.
            into: uint8 [num_slots(...), SLOT_BYTES], host memory, pinned if there is a GPU.

        Returns:
            The keys of requests for which a head failed, for example because no memory is left.
            The values of a failed head are NaN, and its indices are -1. All other parts of the
            batch are correct.
        """
        with self._packing:
            return self._pack(region, labels, boundary, into)

    def _pack(
        self, region: Tensor, labels: Labels, boundary: int | None, into: Tensor
    ) -> Collection[int]:
        plan = self._plan
        if plan is None or not plan.is_for(labels, boundary):
            chunks = list(self._chunks(labels, boundary))
            plan = self._plan = _Plan(labels, boundary, chunks[-1].stop, chunks)
        words = region.view(torch.int64)
        failed: set[Head] = set()
        for chunk in plan.chunks:
            batch = self._batch(chunk, words, failed).view(torch.uint8)
            into[chunk.start : chunk.stop].copy_(batch, non_blocking=True)
        if not failed:
            return ()
        layouts = _local(labels, boundary)
        having = [i for i, one in enumerate(layouts) if failed & {head for head, _ in one.encoded}]
        return set(labels.keys[np.isin(labels.layout_of, having)].tolist())

    def _batch(self, chunk: _Chunk, words: Tensor, failed: set[Head]) -> Tensor:
        """A chunk of the batch, int64 [num_slots, WORDS]. Failed heads are added to `failed`."""
        size = (chunk.stop - chunk.start) * WORDS
        made = [self._made(move, words, failed) for move in chunk.moves]
        whole = sum(found.numel() for found in made) == size
        # The results of a single move with ascending targets are already the whole chunk.
        if len(made) == 1 and chunk.in_order and whole:
            return made[0].reshape(-1, WORDS)
        empty = torch.empty if whole else torch.zeros
        batch = empty((size // WORDS, WORDS), dtype=torch.int64, device=self.device)
        for move, found in zip(chunk.moves, made, strict=True):
            move.put(found, batch)
        return batch

    def _made(self, move: _Move, words: Tensor, failed: set[Head]) -> Tensor:
        """Raw rows, or the head's results: int64 [n, words of one row or result]."""
        rows = move.rows(words)
        if move.head is None:
            return rows
        row_size = move.row_bytes // self.dtype.itemsize
        return self._packed(move.head, rows.view(self.dtype)[:, :row_size], failed)

    def _packed(self, head: Head | tuple[Bank, ...], rows: Tensor, failed: set[Head]) -> Tensor:
        """A head's results for rows [n, width], as int64 [n, words of one result]. Failed heads are
        added to `failed`."""
        try:
            return self._pack_of(head)(rows).view(torch.int64)
        except Exception:
            if isinstance(head, tuple):  # one bank at a time needs less memory, and can fail alone
                parts = rows.split(len(rows) // len(head))
                alone = zip(head, parts, strict=True)
                return torch.cat([self._packed(one, part, failed) for one, part in alone])
            logger.exception("vllm-scope: the head %r failed", head.text)
            failed.add(head)
            return self._nothing_of(head, rows)

    def _nothing_of(self, head: Head, rows: Tensor) -> Tensor:
        """The results that replace the results of a failed head. Values are NaN, and indices are
        -1. If the head is a codec, each result is the encoding of a row of NaN."""
        if isinstance(head, Encoding):
            none = torch.full((1, rows.shape[1]), torch.nan, dtype=self.dtype)
            words = packing_of(head).pack(none).view(torch.int64).to(self.device)
            return words.expand(len(rows), -1).contiguous()
        # If all bits are set, a float32 is NaN, and an int32 is -1.
        num_words = slots_of_row(head.row_bytes) * WORDS
        return torch.full((len(rows), num_words), -1, device=self.device)

    def _pack_of(self, head: Head | tuple[Bank, ...]) -> Callable[[Tensor], Tensor]:
        if isinstance(head, tuple):
            return self._banks.stack(head).pack
        if isinstance(head, Strongest):
            return partial(self.saes[head.maker].pack, count=head.count)
        return self._banks[head].pack if isinstance(head, Bank) else packing_of(head).pack

    def _chunks(self, labels: Labels, boundary: int | None) -> Iterator[_Chunk]:
        if len(labels.layouts) == 1:
            return self._uniform_chunks(_local(labels, boundary)[0], len(labels.keys))
        return self._mixed_chunks(labels, boundary)

    def _uniform_chunks(self, layout: Layout, num_tokens: int) -> Iterator[_Chunk]:
        """The chunks of a batch whose tokens have the same layout."""
        widths = self.widths
        before, after = layout.arena.slots(widths), layout.slots(widths)
        at_once = max(1, CHUNK_BYTES // SLOT_BYTES // _weight(layout, widths))
        found: _Found = {}
        for kind, source, target in _places(layout, widths):
            found.setdefault(kind, []).append((source, target))
        found = self._stacked(found) if self.stacks else found
        for first in range(0, num_tokens, at_once):
            count = min(at_once, num_tokens - first)
            moves = [
                _Move(
                    *kind,
                    self._at(first * before, count, before, [source for source, _ in some]),
                    self._at(0, count, after, [target for _, target in some]),
                )
                for kind, some in found.items()
            ]
            yield _Chunk(first * after, (first + count) * after, moves, _in_order(moves))

    def _at(self, first: int, num_tokens: int, step: int, parts: list[Ints]) -> Tensor | Grid:
        """The first slots of the rows of some tokens, ordered by part. All tokens have one layout.

        Args:
            first, step: The first token's first slot, and the number of slots of a token.
            parts: For each part, the first slots of its rows, counted from the token's first slot.
                A part is the raw rows of one size, or the rows of one head, or the results of one
                head.
        """
        if len({len(part) for part in parts}) == 1:
            grid = Grid.of(first, num_tokens, step, np.array(parts))
            if grid is not None:
                return grid
        tokens = first + step * np.arange(num_tokens)[:, None]
        places = np.concatenate([(tokens + part).ravel() for part in parts])
        return on_device(self.device, places)

    def _mixed_chunks(self, labels: Labels, boundary: int | None) -> Iterator[_Chunk]:
        before, after = _sizes(labels, boundary, self.widths)
        sources, targets = np.cumsum(before) - before, np.cumsum(after) - after
        local = _local(labels, boundary)
        weights = np.array([_weight(layout, self.widths) for layout in local], np.int64)
        ends = np.cumsum(weights[labels.layout_of])
        first, num_tokens = 0, len(before)
        while first < num_tokens:
            room = (int(ends[first - 1]) if first else 0) + CHUNK_BYTES // SLOT_BYTES
            last = max(int(np.searchsorted(ends, room, "right")), first + 1)
            start = int(targets[first])
            stop = int(targets[last - 1] + after[last - 1])
            found: _Found = {}
            for i, layout in enumerate(local):
                some = first + np.flatnonzero(labels.layout_of[first:last] == i)
                for kind, source, target in _places(layout, self.widths) if len(some) else ():
                    found.setdefault(kind, []).append((
                        (sources[some][:, None] + source).ravel(),
                        (targets[some][:, None] + target).ravel() - start,
                    ))  # fmt: skip
            pairs = [pair for some in found.values() for pair in some]
            in_order = len(pairs) == 1 and bool((np.diff(pairs[0][1]) > 0).all())
            yield _Chunk(start, stop, self._moves(found), in_order)
            first = last

    def _moves(self, found: _Found) -> list[_Move]:
        """The moves of a chunk. All indices are copied to the device in one copy."""
        if not found:  # the tokens deliver no rows at this tap
            return []
        found = self._stacked(found) if self.stacks else found
        sources = [np.concatenate([source for source, _ in some]) for some in found.values()]
        targets = [np.concatenate([target for _, target in some]) for some in found.values()]
        both = on_device(self.device, np.concatenate([*sources, *targets]))
        counts = [len(source) for source in sources]
        parts = both.split([*counts, *counts])
        return [
            _Move(*kind, source, target)
            for kind, source, target in zip(
                found, parts[: len(counts)], parts[len(counts) :], strict=True
            )
        ]

    def _stacked(self, found: _Found) -> _Found:
        """Join the moves of banks with equal shapes and equal numbers of rows in this chunk."""
        alike: dict[tuple[object, ...], list[_Kind]] = {}
        for kind, some in found.items():
            like: tuple[object, ...] = (kind,)
            if isinstance(kind[0], Bank) and not isinstance(kind[0], Told):
                like = (*kind[1:], self._banks.like(kind[0]), sum(len(s) for s, _ in some))
            alike.setdefault(like, []).append(kind)
        stacked: _Found = {}
        for kinds in alike.values():
            kind = kinds[0]
            if len(kinds) > 1:
                kind = tuple(k[0] for k in kinds if isinstance(k[0], Bank)), *kind[1:]
            stacked[kind] = [pair for one in kinds for pair in found[one]]
        return stacked


def _in_order(moves: Sequence[_Move]) -> bool:
    """True only if there is one move, and its targets are ascending and at regular distances."""
    targets = moves[0].targets if len(moves) == 1 else None
    return isinstance(targets, Grid) and targets.shape[0] == 1


def _num_slots(labels: Labels, boundary: int | None, widths: Widths) -> int:
    """The number of slots of all tokens in the batch."""
    if len(labels.layouts) == 1:
        return len(labels.keys) * _local(labels, boundary)[0].slots(widths)
    return int(_sizes(labels, boundary, widths)[1].sum())


def _local(labels: Labels, boundary: int | None) -> list[Layout]:
    return [layout.at(boundary) for layout in labels.layouts]


def _sizes(labels: Labels, boundary: int | None, widths: Widths) -> tuple[Ints, Ints]:
    """The number of slots of each token in the region, and in the batch."""
    layouts = _local(labels, boundary)
    before = np.array([layout.arena.slots(widths) for layout in layouts], np.int64)
    after = np.array([layout.slots(widths) for layout in layouts], np.int64)
    if boundary is not None:  # in the region of one tap, all tokens have the same number of slots
        before[:], after[:] = before.max(), after.max()
    return before[labels.layout_of], after[labels.layout_of]


def _weight(layout: Layout, widths: Widths) -> int:
    """The number of slots that one token needs in a chunk. This is the larger of two numbers of
    slots. One is for the token's raw rows in one call of a head. The other is for the values that
    the token delivers."""
    counts: Counter[object] = Counter()
    for (head, num_slots, _), sources, _ in _places(layout, widths):
        # Several banks can be computed in one call. Each SAE has its own call.
        together = isinstance(head, Bank) and not isinstance(head, Strongest)
        counts[Bank if together else head] += num_slots * len(sources)
    return max(layout.slots(widths), *counts.values(), 1)


def first_slots(labels: Labels, boundary: int | None, widths: Widths) -> Ints:
    """int64 [num_tokens]: each token's first slot in a region. The arguments are the same as for
    `Packer.pack`."""
    sizes = _sizes(labels, boundary, widths)[0]
    found: Ints = np.cumsum(sizes) - sizes
    return found


def _places(layout: Layout, widths: Widths) -> Iterator[tuple[_Kind, Ints, Ints]]:
    """Yield (kind of move, first slots in the region, first slots in the batch) for the rows of a
    token. The slots are counted from the token's first slot in the region or in the batch."""
    arena = layout.arena
    at = arena.row_slots(widths)

    def sources(points: Sequence[int]) -> Ints:
        return np.array([at[point] for point in points], np.int64)

    for _, points, first, num_slots in layout.rows_at(widths):
        targets = first + np.arange(len(points)) * num_slots
        yield (None, num_slots, 0), sources(points), targets
    for head, points, first, num_slots in layout.encoded_at(widths):
        if isinstance(head, Summed):  # worker.summing adds these rows to sums
            continue
        targets = first + np.arange(len(points)) * num_slots
        if isinstance(head, Told):
            told = [arena.made_at(head, point, widths) for point in points]
            yield (None, num_slots, 0), np.array(told, np.int64), targets
            continue
        kind = kind_of_point(points[0])  # all rows of a head have one width
        raw = widths.row_slots[kind], widths.row_bytes[kind]
        yield (head, *raw), sources(points), targets
