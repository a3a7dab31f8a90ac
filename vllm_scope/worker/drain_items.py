"""The items of work for the drain thread, and the rules by which steps are joined.

Owns:  the items (Rows, Finish, Stored, Collect, Keep, Forget), and `may_join`, `adjacent`,
       `joined`.
Runs:  on the drain thread. `true_labels` also runs on the threads of the watch, and `adjacent` on
       the threads of Filler.fill_waiting.
To:    drain, filler, deliverer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from vllm_scope.batch.labels import Labels
from vllm_scope.core.score_index import ScoreKey
from vllm_scope.program.layout import SLOT_BYTES, Layout
from vllm_scope.transport.ring import Lease
from vllm_scope.worker.arena import Region
from vllm_scope.worker.score_store import Filled

#: A batch that is joined from several steps has at most this many bytes.
MOST_BYTES = 64 << 20


class Rows(msgspec.Struct, frozen=True, eq=False):
    """Rows of one step, or of one tap of a step, for the sink.

    Attributes:
        boundary: the same as in sinks.RowBatch.
        region: the region of the arena that has the rows. None if the rows are already in the ring,
            or if taps write the rows to the ring.
        copied: the event after which the rows are in the ring. None on a CPU, or if the drain
            thread copies the rows.
        positions: int64 [num_rows] in host memory, the actual positions of the batch's rows. None
            if the positions in `labels` are correct.
        tapped: the event after which the rows are in the region. None on a CPU, or if the drain
            thread does not copy the rows.
        watched: True if the watch waits for `copied`. In this case, no later step may reuse the
            event `copied`.
    """

    labels: Labels
    boundary: int | None
    region: Region | None
    lease: Lease
    copied: torch.cuda.Event | None
    positions: Tensor | None
    tapped: torch.cuda.Event | None = None
    watched: bool = False

    @property
    def is_done(self) -> bool:
        """True if the device has written these rows to the ring. If the step is deferred
        (worker.filler), True if the device has written the rows to the region. On a CPU, always
        True. False after an error of the device, because a wait for the event would raise this
        error."""
        event = self.copied or self.tapped
        try:
            return event is None or event.query()
        except RuntimeError:
            return False

    @property
    def waits(self) -> Region | None:
        """The region that the drain thread must copy; None if there is no such region."""
        return self.region if self.copied is None else None


@dataclass(frozen=True)
class Finish:
    """The end of a request. All rows of the request are in earlier items."""

    key: int
    error: str | None


@dataclass(eq=False)
class Stored:
    """Scores of cached tokens.

    Attributes:
        write: a function that writes the scores to the lease. The function returns False if some
            scores are missing.
        written: the drain thread sets this event after it has processed the item, even if scores
            are missing. None if no other thread waits for the item.
        whole: True if all scores are in the lease.
    """

    labels: Labels
    lease: Lease
    write: Callable[[Lease], bool]
    written: threading.Event | None = None
    whole: bool = False

    def labels_if_whole(self) -> Labels | None:
        return self.labels if self.whole else None


@dataclass(frozen=True)
class Collect:
    """Tells the store to collect the scores of a request, from the steps after this item."""

    key: int
    layout: Layout
    block_size: int


@dataclass(frozen=True)
class Keep:
    """Tells the store to keep the scores of some KV blocks, from the steps before this item."""

    filled: Sequence[Filled]


@dataclass(frozen=True)
class Forget:
    """Tells the store to forget the scores of some KV blocks that were kept before this item."""

    keys: Sequence[ScoreKey]


#: An item of work for the drain thread. If the item is a function, the thread calls the function.
Item = Rows | Finish | Stored | Collect | Keep | Forget | Callable[[], None]


def may_join(steps: Sequence[Rows], item: Rows) -> bool:
    """True if the rows of `item` and of `steps` can be one batch. There are three conditions. Each
    of these steps has the rows of all taps. The steps have equal layouts. The rows are adjacent in
    the ring, and have at most MOST_BYTES together."""
    return item.boundary is None and steps[-1].boundary is None and lie_together(steps, item)


def lie_together(run: Sequence[Rows] | Sequence[Stored], item: Rows | Stored) -> bool:
    """True if `item` follows `run` in the ring and has the same layouts, and if both together have
    at most MOST_BYTES. If True, Stored items can be one batch."""
    first, last = run[0], run[-1]
    return (
        item.lease.start == last.lease.stop
        and item.labels.layouts == last.labels.layouts
        and (item.lease.stop - first.lease.start) * SLOT_BYTES <= MOST_BYTES
    )


def adjacent(steps: Sequence[Rows], joins: bool) -> Iterator[list[Rows]]:
    """Divide a list of steps into runs of adjacent steps. If `joins` is False, each run has one
    step. Before the call, `may_join` must have accepted each step after the first. In a run of
    several steps, no row is added to sums, and the rows are adjacent in the arena and in the ring.
    Therefore heads can be applied to all rows of a run together."""
    run: list[Rows] = []
    for step in steps:
        if run and not (joins and _follows(run[-1], step)):
            yield run
            run = []
        run.append(step)
    if run:
        yield run


def _follows(last: Rows, step: Rows) -> bool:
    assert last.region is not None
    assert step.region is not None
    return (
        step.labels.encodes
        and not step.labels.sums
        and step.region.start == last.region.stop
        and step.lease.start == last.lease.stop
    )


def joined(labels: Sequence[Labels]) -> Labels:
    """The labels of one batch, from the labels of several steps with the same layouts."""
    return Labels(
        np.concatenate([one.keys for one in labels]),
        np.concatenate([one.positions for one in labels]),
        np.concatenate([one.layout_of for one in labels]),
        labels[0].layouts,
        np.concatenate([one.rows for one in labels]),
    )


def true_labels(step: Rows) -> Labels:
    """The labels of a step, without the rows that are only added to sums on the device. If the
    positions in `step.labels` are not correct, the actual positions replace them."""
    labels = step.labels
    layouts = tuple(layout.sent for layout in labels.layouts) if labels.encodes else labels.layouts
    if layouts != labels.layouts:
        labels = replace(labels, layouts=layouts)
    if step.positions is None:
        return labels
    true = step.positions.numpy().astype(np.int64)
    return replace(labels, positions=true[labels.rows])
