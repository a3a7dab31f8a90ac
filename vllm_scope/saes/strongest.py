"""Arrays of active features, of table entries and of histograms, for tables of strongest tokens.

Owns:  Found, Entries, the order of entries, and the widening of histograms.
Runs:  anywhere with numpy. To: max_activating.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

#: Number of bars of a histogram. The bars go from 0 to a power of two above the largest value.
NUM_BARS: Final = 64
#: The largest number of bytes of a label in UTF-8. A longer label is cut.
LABEL_BYTES: Final = 64

#: Entries of tables, as arrays by name. The first axes of all arrays are the same, and index the
#: entries.
Entries = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Found:
    """Active features of tokens, sorted by feature and then by position. `feature` is the index of
    the feature, `position` the position of the token."""

    feature: Ints
    position: Ints
    value: Floats


def empty(shape: tuple[int, ...], context: int) -> Entries:
    """Make empty entries, which have the value 0.

    Args:
        context: the number of token ids in each entry, for the strong token and its context.
    """
    return {
        "value": np.zeros(shape, np.float32), "position": np.zeros(shape, np.int32),
        "label": np.zeros(shape, f"S{LABEL_BYTES}"),
        "tokens": np.zeros((*shape, context), np.int32),
        "values": np.zeros((*shape, context), np.float32),
    }  # fmt: skip


def runs(ascending: Ints) -> tuple[Ints, Ints]:
    """The start and the length of each run of equal items."""
    starts = np.flatnonzero(np.diff(ascending, prepend=-1))
    return starts, np.diff(starts, append=len(ascending))


def ranks(ascending: Ints) -> Ints:
    """For each item, its index among the items that are equal to it."""
    found: Ints = np.arange(len(ascending)) - np.repeat(*runs(ascending))
    return found


def entries_at(entries: Entries, feature: Ints, place: Ints, some: Ints) -> Entries:
    """The entries with the indices (feature[some], place[some])."""
    return {name: array[feature[some], place[some]] for name, array in entries.items()}


def order_of(every: Entries, owner: Ints) -> Ints:
    """Indices that sort entries by owner (the feature of an entry), then by value (greatest first),
    label, position, and the bytes of the token ids."""
    tokens = np.ascontiguousarray(every["tokens"])
    as_text = tokens.view(f"S{tokens.shape[1] * tokens.itemsize}")[:, 0]
    keys = (as_text, every["position"], every["label"], -every["value"], owner)
    found: Ints = np.lexsort(keys)
    return found


def widened(bars: Ints, doublings: NDArray[np.integer]) -> Ints:
    """Double the range of each of n histograms, [n, NUM_BARS], `doublings` times. Empty histograms
    do not change."""
    bars = bars.copy()
    left = np.where(bars.any(1), np.minimum(doublings, NUM_BARS.bit_length()), 0)
    while (grow := left > 0).any():
        pairs = bars[grow].reshape(-1, NUM_BARS // 2, 2).sum(2)
        bars[grow] = np.pad(pairs, ((0, 0), (0, NUM_BARS // 2)))
        left = left - grow
    return bars
