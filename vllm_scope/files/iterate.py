"""Yields each row one time for a training, as fast as the disk can read rows.

Owns:  `iter_rows`, which also decides the order of shuffled rows.

Disks are slow at many small reads. To shuffle rows, `iter_rows` therefore does not permute single
rows of the whole data set. Instead, `iter_rows` permutes runs of neighbouring rows, and reads
POOL_RUNS runs as one pool. Batches take the rows of a pool in random order. If the rows have no
codec, the kernel reads the runs of a pool into the page cache before the runs are used. Each row is
then copied one time, from the page cache into its batch.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vllm_scope.errors import FileError
from vllm_scope.files.buffers import Buffers
from vllm_scope.files.streams import StoredStream

#: Number of rows of a run. If a row has 4096 bf16 values, a run has 1 MB.
RUN_ROWS = 128
POOL_RUNS = 256
#: After the caller has dropped batches, the memory of at most this many batches is kept for reuse.
_KEPT_BATCHES = 4
#: Largest number of stored streams that stay mapped from pool to pool. The kernel's page tables
#: take 1/512 of the mapped bytes that were read.
_MOST_MAPPED = 512
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

#: (index of a span, start, stop), for the rows `start` to `stop` - 1 of this span. A span is a
#: StoredStream (see `_joined`).
_Run = tuple[int, int, int]


def iter_rows(
    stored: Sequence[StoredStream],
    batch_size: int,
    shuffle: bool,
    seed: int,
    part: tuple[int, int] = (0, 1),
    skip: int = 0,
) -> Iterator[Tensor]:
    """Yields the rows of stored streams in batches. See Capture.iter_rows.

    Args:
        part: (index, number of parts). Only the rows of this part are yielded. Each row is in one
            part.
        skip: number of batches to leave out at the beginning. Most rows of these batches are not
            read.

    Raises:
        ValueError: `batch_size`, `part` or `skip` is wrong.
        FileError: the streams have different widths or dtypes, or a file has fewer rows than its
            index says.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if skip < 0:
        raise ValueError(f"skip is {skip}; it must be at least 0")
    if not 0 <= part[0] < part[1]:
        raise ValueError(
            f"part is {part}; it must be (index, number of parts), and the index must be at least "
            "0 and less than the number of parts"
        )
    shapes = {(one.codec.hidden_size, one.codec.dtype) for one in stored}
    if len(shapes) > 1:
        raise FileError(f"the rows are not of one shape and dtype: {sorted(shapes)}")
    spans = _joined(stored)
    for span in spans:
        # An index can name more rows than its file has. A list of the runs of so many rows could
        # fill the memory. A short span has few runs, and is checked later, when its rows are read.
        if span.num_rows > POOL_RUNS * RUN_ROWS:
            span.check()
    runs = _runs(spans, RUN_ROWS if shuffle or part[1] > 1 else batch_size)
    at = skip * batch_size
    if shuffle:
        return _shuffled(spans, runs, part, batch_size, seed, at)
    return _batches(_in_order(spans, runs[part[0] :: part[1]], at), batch_size)


def _joined(stored: Sequence[StoredStream]) -> list[StoredStream]:
    """The streams that have rows, here called spans. If the rows of several streams follow each
    other in a shard, these streams are joined to one span."""
    spans: list[StoredStream] = []
    for stream in stored:
        together = spans[-1].joined(stream) if spans else None
        if together is not None:
            spans[-1] = together
        elif stream.num_rows:
            spans.append(stream)
    return spans


def _runs(spans: Sequence[StoredStream], num_rows: int) -> list[_Run]:
    """The spans, cut into runs of at most `num_rows` rows. If the codec of a span is not rowwise,
    the whole span is a run."""
    found: list[_Run] = []
    for number, span in enumerate(spans):
        step, last = num_rows if span.codec.rowwise else span.num_rows, span.num_rows
        found += [(number, at, min(at + step, last)) for at in range(0, last, step)]
    return found


def _in_order(
    spans: Sequence[StoredStream], runs: Sequence[_Run], skipped: int
) -> Iterator[Tensor]:
    for number, start, stop in runs:
        first = start + min(skipped, stop - start)
        skipped -= first - start
        if first < stop:
            yield spans[number].rows(first, stop)


def _shuffled(
    spans: Sequence[StoredStream],
    runs: Sequence[_Run],
    part: tuple[int, int],
    batch_size: int,
    seed: int,
    skipped: int,
) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(runs), generator=generator).tolist()[part[0] :: part[1]]
    mapped = lru_cache(_MOST_MAPPED)(lambda number: spans[number].rows(0, spans[number].num_rows))
    batches: Buffers | None = None
    batch: Tensor | None = None
    filled = 0
    for pool_of in _pools(order, runs):
        num_rows = sum(runs[i][2] - runs[i][1] for i in pool_of)
        mixed = torch.randperm(num_rows, generator=generator)[skipped:]
        skipped = max(skipped - num_rows, 0)
        if not len(mixed):
            continue
        # Read the rows in the order of the file, which is fast. The rows are mixed later.
        pool = _Pool(spans, [runs[i] for i in sorted(pool_of)], mapped)
        mixed = pool.starts[mixed]
        batches = batches or Buffers(_KEPT_BATCHES * batch_size * pool.memory.shape[1])
        while len(mixed):
            if batch is None:
                batch = batches.empty((batch_size, *pool.kept[0].shape[1:]), pool.kept[0].dtype)
            some, mixed = mixed[: batch_size - filled], mixed[batch_size - filled :]
            into = batch.flatten(1).view(torch.uint8)[filled : filled + len(some)]
            torch.index_select(pool.memory, 0, some, out=into)
            filled += len(some)
            if filled == batch_size:
                yield batch
                batch, filled = None, 0
    if batch is not None:
        yield batch[:filled].clone()


class _Pool:
    """The rows of some runs. Encoded rows are decoded. Rows without a codec stay in mapped files.

    Because all rows are entries of the one tensor `memory`, one call of torch copies rows of many
    files into a batch.

    Args:
        mapped: a function that returns all rows of the span with this index. The function is called
            only for spans without a codec.

    Attributes:
        memory: a view of all memory between the lowest and the highest address of the rows, uint8
            [num_starts, bytes of a row]. Entry i begins at byte i of this memory, and is as long as
            a row. Therefore entries overlap. Only the entries in `starts` are rows.
        starts: the index of each row's first byte in `memory`, int64 [rows].
        kept: the tensors that own the bytes of `memory`. The pool keeps these tensors alive.
    """

    def __init__(
        self, spans: Sequence[StoredStream], runs: Sequence[_Run], mapped: Callable[[int], Tensor]
    ) -> None:
        self.kept: list[Tensor] = []
        begins = np.empty(len(runs), np.int64)
        counts = np.array([stop - start for _, start, stop in runs])
        for i, (number, start, stop) in enumerate(runs):
            if spans[number].encoded:
                rows, first = spans[number].rows(start, stop).contiguous(), 0
            else:
                rows, first = mapped(number), start
            self.kept.append(rows)
            size = rows.stride(0) * rows.itemsize
            begins[i] = rows.data_ptr() + first * size
            if not spans[number].encoded:
                _read_ahead(int(begins[i]), (stop - start) * size)
        low, high = int(begins.min()), int((begins + counts * size).max())
        raw = torch.frombuffer((ctypes.c_char * (high - low)).from_address(low), dtype=torch.uint8)
        self.memory = raw.as_strided((high - low - size + 1, size), (1, 1))
        before = np.cumsum(counts) - counts
        starts = np.repeat(begins - low - before * size, counts) + size * np.arange(counts.sum())
        self.starts = torch.from_numpy(starts)


def _read_ahead(address: int, num_bytes: int) -> None:
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(first, address + num_bytes - first, mmap.MADV_WILLNEED)


def _pools(order: list[int], runs: Sequence[_Run]) -> Iterator[list[int]]:
    """The runs in their order, divided into pools of POOL_RUNS runs. If runs are longer than
    RUN_ROWS, a pool has fewer runs, but about the same number of rows."""
    pool: list[int] = []
    num_rows = 0
    for i in order:
        size = runs[i][2] - runs[i][1]
        if pool and (len(pool) == POOL_RUNS or num_rows + size > POOL_RUNS * RUN_ROWS):
            yield pool
            pool, num_rows = [], 0
        pool.append(i)
        num_rows += size
    if pool:
        yield pool


def _batches(pieces: Iterator[Tensor], batch_size: int) -> Iterator[Tensor]:
    """Cuts the pieces and joins them to batches. A piece of the size of a batch is not copied."""
    waiting: list[Tensor] = []
    num_waiting = 0
    for piece in pieces:
        while len(piece):
            taken = piece[: batch_size - num_waiting]
            piece = piece[len(taken) :]
            waiting.append(taken)
            num_waiting += len(taken)
            if num_waiting == batch_size:
                yield waiting[0] if len(waiting) == 1 else torch.cat(waiting)
                waiting, num_waiting = [], 0
    if waiting:
        yield waiting[0] if len(waiting) == 1 else torch.cat(waiting)
