"""Modes that take turns, and what their turns say.

A machine that others share is fast and slow by turns; what two modes did next to each other is
compared, never what one did early and the other late.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

Mode = TypeVar("Mode")


class Ratio(NamedTuple):
    """The median of the turns' ratios, and where it lies with 95 % certainty."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:6.3f} ({self.low:.3f} to {self.high:.3f})"


def order(modes: Iterable[Mode], turn: int) -> list[Mode]:
    """Forwards and backwards by turns: who comes next to whom, and after whom, evens out."""
    found = list(modes)
    return found[:: 1 if turn % 2 else -1]


def ratio_of(values: Sequence[float], others: Sequence[float]) -> Ratio:
    """values / others, turn by turn; the interval is a bootstrap's of the median."""
    ratios = np.array([a / b for a, b in zip(values, others, strict=True)])
    picks = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.percentile(np.median(picks, axis=1), (2.5, 97.5))
    return Ratio(statistics.median(ratios.tolist()), float(low), float(high))
