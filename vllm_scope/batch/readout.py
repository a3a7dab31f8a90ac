"""Computes a probe's scores and aggregates from the numbers of the probe's nets.

Owns:  Readout (for a request's positions, in order), `scores_of` (for single tokens).
Runs:  in the front-end (results), and in the worker (sinks.request), with numpy on the CPU.
From:  request.resolve (the probe).

Promise: the scores and aggregates do not depend on how the positions are divided into calls. Pools
and aggregates add numbers in float64.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.batch.by_position import Ints
from vllm_scope.request.nets import Aggregate, Ema, RollingMean
from vllm_scope.request.resolved import ResolvedProbe

Floats = NDArray[np.float64]
#: A pool (_Pool) subtracts a reference number from its logits, so that exp does not overflow. The
#: reference is a multiple of _STEP, and therefore seldom changes. exp(-2 * _STEP) is far above the
#: smallest float64.
_STEP = 256.0


class Read(NamedTuple):
    """The scores and aggregates at some positions, ascending.

    Attributes:
        scores: float32 [n].
        aggregates: float32 [n]. Each number is the aggregate of the scores up to its position.
            None if the probe has no aggregate.
    """

    scores: Tensor
    aggregates: Tensor | None


class Verdict(NamedTuple):
    """The first position at which a probe's value is above its threshold.

    Attributes:
        value: the aggregate at this position, or the score if the probe has no aggregate.
    """

    position: int
    value: float


class Readout:
    """Computes the scores, aggregates and verdict of one probe for one request.

    Attributes:
        verdict: None until a value is above the threshold.
    """

    def __init__(self, probe: ResolvedProbe) -> None:
        self._probe = probe
        self._pool = _Pool(probe.num_values // 2) if probe.pools else None
        self._aggregate = None if probe.aggregate is None else _running(probe.aggregate)
        self.verdict: Verdict | None = None

    def read(self, numbers: Tensor, positions: Ints) -> Read:
        """The scores and aggregates at some positions.

        Args:
            numbers: float32 [n, num_values], the sums over the probe's cells. A cell is the probe
                at one layer.
            positions: int64 [n], ascending, larger than all positions of earlier calls.
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
        with np.errstate(over="ignore", invalid="ignore"):
            if self._pool is None:
                scores = _scores(self._probe, numbers.numpy())
            else:
                pooled = self._pool.add(numbers.double().numpy()) + self._probe.bias
                scores = _activated(self._probe, pooled)
            found = torch.from_numpy(scores)
            if self._aggregate is None or not len(scores):
                return Read(found, None if self._aggregate is None else found[:0])
            aggregates = self._aggregate.add(scores.astype(np.float64))
            return Read(found, torch.from_numpy(aggregates.astype(np.float32)))


def scores_of(probe: ResolvedProbe, numbers: Tensor) -> Tensor:
    """The scores, float32 [n], of a probe that scores each token separately. `numbers` has the
    shape [n, 1 or more]."""
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(_scores(probe, numbers.numpy()))


def _scores(probe: ResolvedProbe, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    # numpy takes a third of torch's time for so few numbers.
    return _activated(probe, numbers[:, 0] + np.float32(probe.bias))


def _activated(probe: ResolvedProbe, scores: NDArray[Any]) -> NDArray[np.float32]:
    """The scores after the probe's activation function, as float32. `scores` can be float64."""
    if probe.activation == "sigmoid":
        # torch.sigmoid is not used, because it rounds the last few elements of a tensor differently
        # than the other elements.
        scores = 1 / (1 + np.exp(-scores.astype(np.float64)))
    return scores.astype(np.float32, copy=False)


class _Pool:
    """Computes the value of an AttentionPool (request.nets) at each position. This value is a sum
    over the pool's heads. Each head averages its values up to the position, with softmax
    weights."""

    def __init__(self, num_heads: int) -> None:
        #: For each head, the largest logit so far, and the reference: the first multiple of _STEP
        #: at or above this logit.
        self._top = np.full((2, num_heads), -np.inf)
        #: For each head, the sum of weights and the sum of weighted values. A weight is exp(logit -
        #: reference).
        self._sums = np.zeros((2, num_heads))

    def add(self, numbers: Floats) -> Floats:
        """The sum over heads at each of the next positions, [n].

        Args:
            numbers: [n, 2 * num_heads], the logits, then the values.
        """
        logits, values = np.split(numbers, 2, axis=1)
        with np.errstate(invalid="ignore"):
            tops = np.maximum.accumulate(np.vstack([self._top[:1], logits]))
            bases = np.vstack([self._top[1:], np.ceil(tops[1:] / _STEP) * _STEP])
            # A logit of minus infinity has weight 0, even if it is the first logit.
            weights = np.exp(np.where(np.isneginf(logits), -np.inf, logits - bases[1:]))
            terms = np.stack([weights, weights * values], axis=1)
            found = np.empty(terms.shape)
            changed = (bases[1:] != bases[:-1]) & ~np.isnan(bases[:-1])
            starts = np.flatnonzero(changed.any(axis=1)).tolist()
            for start, stop in pairwise(sorted({0, *starts, len(logits)})):
                if start in starts:
                    kept = np.exp(bases[start] - bases[start + 1])
                    self._sums = self._sums * np.where(changed[start], kept, 1.0)
                sums = np.cumsum(np.concatenate([self._sums[None], terms[start:stop]]), axis=0)
                found[start:stop], self._sums = sums[1:], sums[-1]
            self._top = np.stack([tops[-1], bases[-1]])
            total: Floats = (found[:, 1] / found[:, 0]).sum(axis=1)
        return total


class _Running(Protocol):
    def add(self, scores: Floats) -> Floats:
        """The aggregates at the next n >= 1 positions, from the scores at these positions."""


class _Max:
    def __init__(self) -> None:
        self._last = -np.inf

    def add(self, scores: Floats) -> Floats:
        if self._last == -np.inf:  # -inf changes no maximum
            found: Floats = np.maximum.accumulate(scores)
        else:
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
    """The mean of all scores."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, scores: Floats) -> Floats:
        counts = self._count + 1 + np.arange(len(scores))
        sums = _running_sums(self._sum, scores)
        self._sum, self._count = sums[-1], int(counts[-1])
        found: Floats = sums / counts
        return found


class _RollingMean:
    """The mean of the last `window` scores.

    The positions are divided into blocks of `window` positions. A window consists of the end of one
    block and the beginning of the next block. Each of these two parts has its own running sum. One
    running sum over all positions would be wrong. After a NaN or a large score has left the window,
    the NaN, or the rounding error of the score, would stay in the sum.

    Args:
        largest: If True, `add` returns, at each position with a full window, the largest mean of
            all full windows so far.
    """

    def __init__(self, window: int, largest: bool) -> None:
        self._window, self._count = window, 0
        #: `_block`: the scores of the last block, which is not full. `_begun`: the number of these
        #: scores. `_sum`: the sum of these scores. The operating system allocates no memory for a
        #: part of `_block` that was never written.
        self._block, self._begun, self._sum = np.zeros(window), 0, 0.0
        #: [window + 1]. The entry i is the sum of the previous block's scores from index i to the
        #: block's end.
        self._ends = np.zeros(window + 1)
        self._max = _Max() if largest else None

    def add(self, scores: Floats) -> Floats:
        lengths = np.minimum(self._count + 1 + np.arange(len(scores)), self._window)
        self._count += len(scores)
        found: Floats = self._sums(scores) / lengths
        full = np.flatnonzero(lengths == self._window)
        if self._max is not None and len(full):
            found[full] = self._max.add(found[full])
        return found

    def _sums(self, scores: Floats) -> Floats:
        begun, self._begun = self._begun, self._begun + len(scores)
        if self._begun < self._window:
            self._block[begun : self._begun] = scores
            sums = _running_sums(self._sum, scores)
            self._sum = sums[-1]
            with np.errstate(invalid="ignore"):
                return sums + self._ends[begun + 1 : self._begun + 1]
        num_full, self._begun = divmod(self._begun, self._window)
        blocks = np.zeros((num_full + 1, self._window))
        blocks.ravel()[begun : begun + len(scores)] = scores
        blocks[0, :begun] = self._block[:begun]
        with np.errstate(invalid="ignore"):
            ends = np.zeros((num_full + 1, self._window + 1))
            ends[0] = self._ends
            ends[1:, :-1] = np.cumsum(blocks[:-1, ::-1], axis=1)[:, ::-1]
            sums = np.cumsum(blocks, axis=1)
            found: Floats = (sums + ends[:, 1:]).ravel()[begun : begun + len(scores)]
        self._ends, self._block = ends[-1].copy(), blocks[-1].copy()
        self._sum = sums[-1, self._begun - 1] if self._begun else 0.0
        return found


def _running_sums(first: float, scores: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        found: Floats = np.cumsum(np.append(first, scores))[1:]
    return found


def _running(aggregate: Aggregate) -> _Running:
    if isinstance(aggregate, Ema):
        return _Ema(aggregate.decay)
    if isinstance(aggregate, RollingMean):
        return _RollingMean(aggregate.window, aggregate.then == "max")
    return _Max() if aggregate == "max" else _Mean()
