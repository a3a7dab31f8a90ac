"""What waits for the drain thread, and which steps go on their way together.

Owns:  Rows, Finish, Stored, Keep (the items), and `may_join`, `adjacent`, `joined`.
Runs:  on the drain thread; `true_labels` also where the watch looks.
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
from vllm_scope.program.layout import SLOT_BYTES
from vllm_scope.transport.ring import Lease
from vllm_scope.worker.arena import Region
from vllm_scope.worker.score_store import Filled

#: Steps are joined into one batch up to this many bytes.
MOST_BYTES = 64 << 20


class Rows(msgspec.Struct, frozen=True, eq=False):
    """Rows of one step, or of one tap of it, on their way.

    Attributes:
        boundary: as in RowBatch.
        region: of the arena; None if the rows are in the ring already, or are written there.
        copied: on a GPU, the event after which the rows are in the ring; None if the drain thread
            copies them.
        positions: int64 [num_rows], the true positions of the batch's rows; None if the
            labels' positions are true.
        tapped: on a GPU, for rows that the drain thread copies: the event after which they are in
            the region.
        watched: the watch waits for `copied`, so no later step may use that event.
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
    def waits(self) -> Region | None:
        """The region, if the drain thread copies it."""
        return self.region if self.copied is None else None


@dataclass(frozen=True)
class Finish:
    """The end of a request; its rows came before it."""

    key: int
    error: str | None


@dataclass(eq=False)
class Stored:
    """Scores of cached tokens.

    Attributes:
        write: writes them to the lease; False if they are not there.
        written: set after that.
        whole: True if they are in the lease.
    """

    labels: Labels
    lease: Lease
    write: Callable[[Lease], bool]
    written: threading.Event
    whole: bool = False

    def labels_if_whole(self) -> Labels | None:
        return self.labels if self.whole else None


@dataclass(frozen=True)
class Keep:
    """Scores that the store keeps, of steps before this."""

    filled: Sequence[Filled]


#: What the thread does, in order. A call has no rows.
Item = Rows | Finish | Stored | Keep | Callable[[], None]


def may_join(steps: Sequence[Rows], item: Rows) -> bool:
    """True for whole programs of the same layouts, adjacent in the ring, below MOST_BYTES."""
    return item.boundary is None and steps[-1].boundary is None and _lie_as_one(steps, item)


def stored_may_join(run: Sequence[Stored], item: Stored) -> bool:
    """True for scores of the same layout, adjacent in the ring, below MOST_BYTES."""
    return _lie_as_one(run, item)


def _lie_as_one(run: Sequence[Rows] | Sequence[Stored], item: Rows | Stored) -> bool:
    first, last = run[0], run[-1]
    return (
        item.lease.start == last.lease.stop
        and item.labels.layouts == last.labels.layouts
        and (item.lease.stop - first.lease.start) * SLOT_BYTES <= MOST_BYTES
    )


def adjacent(steps: Sequence[Rows], joins: bool) -> Iterator[list[Rows]]:
    """Runs of steps whose rows heads can work on at once: side by side in the arena and in the
    ring, and none of whose rows are summed. `steps`: such as `may_join` allows."""
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
    """Of steps with the same layouts."""
    return Labels(
        np.concatenate([one.keys for one in labels]),
        np.concatenate([one.positions for one in labels]),
        np.concatenate([one.layout_of for one in labels]),
        labels[0].layouts,
        np.concatenate([one.rows for one in labels]),
    )


def true_labels(step: Rows) -> Labels:
    """The labels of what leaves the device, with true positions."""
    labels = step.labels
    layouts = tuple(layout.sent for layout in labels.layouts) if labels.encodes else labels.layouts
    if layouts != labels.layouts:
        labels = replace(labels, layouts=layouts)
    if step.positions is None:
        return labels
    true = step.positions.numpy().astype(np.int64)
    return replace(labels, positions=true[labels.rows])
