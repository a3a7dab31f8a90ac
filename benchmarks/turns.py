"""Modes that take turns, and the ratios of their figures.

The speed of a shared machine changes over time. So a ratio compares the figures of two modes in the
same turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

Mode = TypeVar("Mode")


class Ratio(NamedTuple):
    """The median of the turns' ratios, and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:6.3f} ({self.low:.3f} to {self.high:.3f})"


def order(modes: Iterable[Mode], turn: int) -> list[Mode]:
    """The modes, in reverse order in every second turn, so that effects of the order cancel."""
    found = list(modes)
    return found[:: 1 if turn % 2 else -1]


def ratio_of(values: Sequence[float], others: Sequence[float]) -> Ratio:
    """values / others, turn by turn. The interval is a bootstrap interval of the median."""
    ratios = np.array([a / b for a, b in zip(values, others, strict=True)])
    picks = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.percentile(np.median(picks, axis=1), (2.5, 97.5))
    return Ratio(statistics.median(ratios.tolist()), float(low), float(high))
