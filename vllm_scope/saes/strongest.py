"""Arrays of active features, of a table's entries, and of a table's histograms.

Owns:  Found, Entries, the order of entries, and the widening of histograms.
Runs:  as max_activating.   To: max_activating.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

#: Bars of a histogram, from 0 to a power of two above the largest value.
NUM_BARS: Final = 64
#: Bytes of a label in UTF-8; a longer one is cut.
LABEL_BYTES: Final = 64

#: Some entries: name -> an array with the entries on its first axes.
Entries = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Found:
    """Active features, sorted by feature and then by position: the index, position and value of
    each feature."""

    feature: Ints
    position: Ints
    value: Floats


def empty(shape: tuple[int, ...], context: int) -> Entries:
    """Empty entries: their value is 0.

    Args:
        context: number of tokens of each entry's context.
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
    """The index of each item in its run of equal items."""
    found: Ints = np.arange(len(ascending)) - np.repeat(*runs(ascending))
    return found


def entries_at(entries: Entries, feature: Ints, place: Ints, some: Ints) -> Entries:
    """The entries at (feature[some], place[some])."""
    return {name: array[feature[some], place[some]] for name, array in entries.items()}


def order_of(every: Entries, owner: Ints) -> Ints:
    """Indices that sort entries by owner, then as in a table: by value (greatest first), label,
    position and tokens."""
    tokens = np.ascontiguousarray(every["tokens"])
    as_text = tokens.view(f"S{tokens.shape[1] * tokens.itemsize}")[:, 0]
    keys = (as_text, every["position"], every["label"], -every["value"], owner)
    found: Ints = np.lexsort(keys)
    return found


def widened(bars: Ints, doublings: NDArray[np.integer]) -> Ints:
    """Histograms [n, NUM_BARS], each with its range doubled `doublings` times if it has counts."""
    bars = bars.copy()
    left = np.where(bars.any(1), np.minimum(doublings, NUM_BARS.bit_length()), 0)
    while (grow := left > 0).any():
        pairs = bars[grow].reshape(-1, NUM_BARS // 2, 2).sum(2)
        bars[grow] = np.pad(pairs, ((0, 0), (0, NUM_BARS // 2)))
        left = left - grow
    return bars
