"""Scores and aggregates out of the numbers that a probe's nets made.

Owns:  Readout (over a request's positions, in order), `scores_of` (of single tokens).
Runs:  in the front-end (results), and in the worker (sinks.request). numpy, no GPU.
From:  request.resolve (the probe).

Promise: a score and an aggregate are functions of positions. Whether the numbers come at once or
in parts, each is added in float64 in the order of positions, so parts change nothing.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.batch.by_position import Ints
from vllm_scope.request.nets import Aggregate, Ema, RollingMean
from vllm_scope.request.resolve import ResolvedProbe

Floats = NDArray[np.float64]
#: exp of a float64 is above 0 for larger numbers than minus this.
_SPREAD = 600.0


class Read(NamedTuple):
    """Of some positions, ascending.

    Attributes:
        scores: float32 [n].
        aggregates: float32 [n], at each position of all scores up to there; None without.
    """

    scores: Tensor
    aggregates: Tensor | None


class Verdict(NamedTuple):
    """The first position at which a probe's value is above its threshold.

    Attributes:
        value: the aggregate there, or the score if there is no aggregate.
    """

    position: int
    value: float


class Readout:
    """A probe over one request. Each call of `read` takes later positions.

    Attributes:
        verdict: None so far, or without a threshold.
    """

    def __init__(self, probe: ResolvedProbe) -> None:
        self._probe = probe
        self._pool = _Pool(probe.num_values // 2) if probe.pools else None
        self._aggregate = None if probe.aggregate is None else _running(probe.aggregate)
        self.verdict: Verdict | None = None

    def read(self, numbers: Tensor, positions: Ints) -> Read:
        """Of float32 [n, num_values], the sums over the probe's cells.

        Args:
            positions: int64 [n], ascending.
        """
        found = self._read(numbers)
        if self._probe.threshold is not None and self.verdict is None:
            values = (found.scores if found.aggregates is None else found.aggregates).numpy()
            above = np.flatnonzero(values > self._probe.threshold)
            if len(above):
                first = int(above[0])
                self.verdict = Verdict(int(positions[first]), float(values[first]))
        return found

    def _read(self, numbers: Tensor) -> Read:
        if self._pool is None:
            scores = scores_of(self._probe, numbers)
        else:
            pooled = self._pool.add(numbers.double().numpy()) + self._probe.bias
            scores = _activated(self._probe, torch.from_numpy(pooled)).float()
        if self._aggregate is None or not len(scores):
            return Read(scores, None if self._aggregate is None else scores[:0])
        return Read(scores, torch.from_numpy(self._aggregate.add(scores.double().numpy())).float())


def scores_of(probe: ResolvedProbe, numbers: Tensor) -> Tensor:
    """float32 [n]: the scores of a probe whose tokens are scored one by one, of [n, 1 or more]."""
    return _activated(probe, numbers[:, 0] + probe.bias)


def _activated(probe: ResolvedProbe, scores: Tensor) -> Tensor:
    return torch.sigmoid(scores) if probe.activation == "sigmoid" else scores


class _Pool:
    """The softmax-weighted average of values so far, for some heads; their sum."""

    def __init__(self, num_heads: int) -> None:
        #: Per head: the largest logit, and the sums of weights and of weighted values, relative
        #: to the weight of that logit.
        self._top = np.full(num_heads, -np.inf)
        self._weights, self._values = np.zeros(num_heads), np.zeros(num_heads)

    def add(self, numbers: Floats) -> Floats:
        """[n], of [n, 2 * num_heads]: logits, then values."""
        logits, values = np.split(numbers, 2, axis=1)
        if not len(logits):
            return np.zeros(0)
        top = np.maximum(self._top, logits.max(axis=0))
        known, least = self._weights > 0, logits.min(axis=0)
        least = np.where(known, np.minimum(self._top, least), least)
        if not (top - least <= _SPREAD).all() and len(logits) > 1:
            # The smallest weights would be 0 beside the largest.
            half = len(logits) // 2
            return np.concatenate([self.add(numbers[:half]), self.add(numbers[half:])])
        kept = np.exp(np.where(known, self._top - top, -np.inf))
        weights = np.exp(logits - top)
        with np.errstate(invalid="ignore"):
            sums = np.cumsum(np.vstack([self._weights * kept, weights]), axis=0)[1:]
            found = np.cumsum(np.vstack([self._values * kept, weights * values]), axis=0)[1:]
            self._top, self._weights, self._values = top, sums[-1], found[-1]
            averages = found / sums
        total: Floats = averages.sum(axis=1)
        return total


class _Running(Protocol):
    def add(self, scores: Floats) -> Floats:
        """The aggregate at each of some later positions, [n] of [n]; n is 1 or more."""


class _Max:
    def __init__(self) -> None:
        self._last = -np.inf

    def add(self, scores: Floats) -> Floats:
        found = np.maximum.accumulate(np.append(self._last, scores))[1:]
        self._last = found[-1]
        return found


class _Ema:
    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._last: float | None = None

    def add(self, scores: Floats) -> Floats:
        decay = self._decay
        given = scores.tolist() if self._last is None else [self._last, *scores.tolist()]
        found = list(accumulate(given, lambda a, score: decay * a + (1 - decay) * score))
        found = found[len(found) - len(scores) :]
        self._last = found[-1]
        return np.array(found)


class _Mean:
    """The mean of the last `window` scores; of all if `window` is None.

    Args:
        largest: return the largest mean of a full window so far.
    """

    def __init__(self, window: int | None, largest: bool = False) -> None:
        self._window = window
        #: Sums of the scores up to a position, of the last `window` positions and one before.
        self._sums = np.zeros(1)
        self._count = 0
        self._max = _Max() if largest else None

    def add(self, scores: Floats) -> Floats:
        # The sum goes on from the last one, so that parts change no rounding.
        later = np.cumsum(np.append(self._sums[-1], scores))[1:]
        sums = np.concatenate([self._sums, later])
        ends = np.arange(len(self._sums), len(sums))
        lengths = self._count + 1 + np.arange(len(scores))
        self._count += len(scores)
        if self._window is None:
            found: Floats = sums[ends] / lengths
            self._sums = sums[-1:]
            return found
        lengths = np.minimum(lengths, self._window)
        found = (sums[ends] - sums[ends - lengths]) / lengths
        self._sums = sums[-self._window - 1 :]
        full = np.flatnonzero(lengths == self._window)
        if self._max is not None and len(full):
            found[full] = self._max.add(found[full])
        return found


def _running(aggregate: Aggregate) -> _Running:
    if isinstance(aggregate, Ema):
        return _Ema(aggregate.decay)
    if isinstance(aggregate, RollingMean):
        return _Mean(aggregate.window, aggregate.then == "max")
    return _Max() if aggregate == "max" else _Mean(None)
