"""The items that wait for the drain thread, and which steps are copied or delivered together.

Owns:  the items (Rows, Finish, Stored, Collect, Keep, Forget), and `may_join`, `adjacent`,
       `joined`.
Runs:  on the drain thread; `true_labels` also on the threads of the watch.
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

#: Steps are joined into one batch up to this many bytes.
MOST_BYTES = 64 << 20


class Rows(msgspec.Struct, frozen=True, eq=False):
    """Rows of one step, or of one tap of a step, on their way to the sink.

    Attributes:
        boundary: as in RowBatch.
        region: the region of the arena; None if the rows are in the ring already, or if taps write
            them to the ring.
        copied: on a GPU, the event after which the rows are in the ring; None if the drain thread
            copies them.
        positions: int64 [num_rows], the true positions of the batch's rows; None if the
            labels' positions are true.
        tapped: the event after which the rows are in the region; None on a CPU, or if the drain
            thread does not copy the rows.
        watched: True if the watch waits for `copied`, so that no later step may use that event.
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
        """True if the device has written these rows to the ring, or to the region if the step is
        put off. True on a CPU. False also after an error of the device: whoever waits for it learns
        of that."""
        event = self.copied or self.tapped
        try:
            return event is None or event.query()
        except RuntimeError:
            return False

    @property
    def waits(self) -> Region | None:
        """The region, if the drain thread copies it."""
        return self.region if self.copied is None else None


@dataclass(frozen=True)
class Finish:
    """The end of a request. Its rows are in earlier items."""

    key: int
    error: str | None


@dataclass(eq=False)
class Stored:
    """Scores of cached tokens.

    Attributes:
        write: writes the scores to the lease; returns False if some are missing.
        written: set when the thread has finished this item, even if scores are missing. None if no
            other thread waits for that.
        whole: True if the scores are in the lease.
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
    """A request whose scores the store should collect. The scores are of steps after this item."""

    key: int
    layout: Layout
    block_size: int


@dataclass(frozen=True)
class Keep:
    """Blocks whose scores the store should keep. The scores are of steps before this item."""

    filled: Sequence[Filled]


@dataclass(frozen=True)
class Forget:
    """Blocks whose scores the store should forget, if it has kept them before this item."""

    keys: Sequence[ScoreKey]


#: An item of work for the drain thread. A function is called.
Item = Rows | Finish | Stored | Collect | Keep | Forget | Callable[[], None]


def may_join(steps: Sequence[Rows], item: Rows) -> bool:
    """True if `item` may join the batch of `steps`: none is of one tap alone, the layouts are
    equal, and all lie side by side in the ring, in at most MOST_BYTES."""
    return item.boundary is None and steps[-1].boundary is None and _lie_as_one(steps, item)


def stored_may_join(run: Sequence[Stored], item: Stored) -> bool:
    """True if `item` may join the batch of `run`: the layouts are equal, and all scores lie side by
    side in the ring, in at most MOST_BYTES."""
    return _lie_as_one(run, item)


def _lie_as_one(run: Sequence[Rows] | Sequence[Stored], item: Rows | Stored) -> bool:
    first, last = run[0], run[-1]
    return (
        item.lease.start == last.lease.stop
        and item.labels.layouts == last.labels.layouts
        and (item.lease.stop - first.lease.start) * SLOT_BYTES <= MOST_BYTES
    )


def adjacent(steps: Sequence[Rows], joins: bool) -> Iterator[list[Rows]]:
    """Divide steps that may be joined (`may_join`) into runs. Heads can work on the rows of one run
    at once: these rows lie side by side in the arena and in the ring, and none of them are summed.
    """
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
    """The labels of the rows and scores that leave the device, with true positions."""
    labels = step.labels
    layouts = tuple(layout.sent for layout in labels.layouts) if labels.encodes else labels.layouts
    if layouts != labels.layouts:
        labels = replace(labels, layouts=layouts)
    if step.positions is None:
        return labels
    true = step.positions.numpy().astype(np.int64)
    return replace(labels, positions=true[labels.rows])
