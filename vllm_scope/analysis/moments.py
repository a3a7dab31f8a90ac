"""Computes probes, steering vectors and principal components from sums of rows, without the rows.

Owns:  `difference_of_means`, `ridge_probe`, `lda_probe`, `principal_components`, `whitening`.
From:  `vllm_scope.moments` (maps (site, layer, label) to batch.sums.Sums).
To:    LinearProbe, SteeringModule; principal components and whitening, for the caller.

Promise: scikit-learn's Ridge, LinearDiscriminantAnalysis (solver "lsqr") and PCA compute the same
results from the rows in float64, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_scope.analysis.contrast import made_by
from vllm_scope.analysis.probes import LinearProbe, checked_pooling
from vllm_scope.analysis.rows import stream_of
from vllm_scope.batch.sums import Sums
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import SiteLayer
from vllm_scope.vectors import Provenance, SteeringModule
from vllm_scope.vectors.module import as_stream, name_of
from vllm_scope.vectors.probe_files import finite

Floats = NDArray[np.float64]
#: Maps (site, layer, label) to the sums that `vllm_scope.moments` returns.
Found = Mapping[tuple[str, int, str], Sums]


def sums_at(found: Found, stream: SiteLayer, labels: Iterable[str] | None = None) -> Sums:
    """Add the sums of some labels at a stream.

    Args:
        labels: the names of the labels, or None for all labels that have sums at the stream. A
            label that is named several times is added one time.

    Raises:
        SpecError: a label has no sums, no rows, or rows that are missing or not finite, or the
            sums of the labels were made with different options.
    """
    stream = stream_of(stream)
    known = {label: sums for (*place, label), sums in found.items() if tuple(place) == stream}
    wanted = list(dict.fromkeys(known if labels is None else labels))
    if not wanted:
        raise SpecError(f"there are no sums at {name_of(stream)}; {_there(found)}.")
    for label in wanted:
        if label not in known or not (known[label].count or known[label].missing):
            raise SpecError(
                f"there are no rows with label {shown(label)} at {name_of(stream)}; "
                f"{_there(found)}."
            )
        one = known[label]
        if one.missing:
            raise SpecError(
                f"{one.missing} rows with label {shown(label)} at {name_of(stream)} are missing: "
                "the device had no room, an error occurred, or the sums of this name have other "
                "options than the request; drop the sums and run the requests again."
            )
        if not all(np.isfinite(some).all() for some in _numbers(one)):
            raise SpecError(
                f"the sums with label {shown(label)} at {name_of(stream)} have NaN or Inf, because "
                "a row or a target is too large or not finite; drop the sums and leave out the "
                "request that has it."
            )
    try:
        return Sums.total([known[label] for label in wanted])
    except ValueError as error:
        raise SpecError(
            f"the labels {shown(wanted)} at {name_of(stream)} do not fit together: {error} Name "
            "labels whose requests had the same options of Moments."
        ) from None


def _numbers(one: Sums) -> list[Floats]:
    some = (one.x, one.xx, one.xy, np.float64(one.y), np.float64(one.yy))
    return [np.asarray(each) for each in some if each is not None]


def _there(found: Found) -> str:
    keys = [f"{name_of((site, layer))} {shown(label)}" for site, layer, label in found]
    return f"there are {', '.join(keys[:8])}" if keys else "there are none at all"


def difference_of_means(
    found: Found,
    positive: str,
    negative: str,
    *,
    normalise: bool = True,
    provenance: Provenance | None = None,
) -> SteeringModule:
    """The mean of one label's rows minus the mean of another label's rows, at each stream.

    The result equals that of `contrast.mean_difference`, but this function needs only sums.

    Args:
        positive, negative: two labels with sums at the same streams.
        normalise: whether each vector is scaled to length 1.
        provenance: the fields model, revision and dataset. This function sets the other fields.

    Raises:
        SpecError: `sums_at` refuses a label, or the two means are equal.
    """
    streams = dict.fromkeys((s, k) for s, k, label in found if label in (positive, negative))
    if not streams:
        raise SpecError(
            f"there are no sums with label {shown(positive)} or {shown(negative)}; {_there(found)}."
        )
    vectors = {}
    for stream in streams:
        up, down = (sums_at(found, stream, [label]).mean for label in (positive, negative))
        vector = up - down
        length = float(np.linalg.norm(vector))
        if length <= 1e-12 * max(np.abs(up).max(), np.abs(down).max()):
            raise SpecError(f"{name_of(stream)}: the two means do not differ.")
        vectors[stream] = torch.from_numpy(vector / length if normalise else vector)
    return SteeringModule(vectors, made_by("mean_difference", normalise, provenance))


def ridge_probe(
    found: Found,
    stream: SiteLayer,
    *,
    alpha: float = 1.0,
    targets: Mapping[str, float] | None = None,
    pooling: str | None = None,
    model: str | None = None,
    template: str | None = None,
) -> LinearProbe:
    """Fit a probe by ridge regression of a number y on rows x.

    The weight w and the bias b minimise the sum of (x . w + b - y)^2 over the rows, plus
    alpha * |w|^2.

    Args:
        alpha: the strength of the L2 penalty, 0 or above.
        targets: maps a label to the number y of the label's rows. Rows with other labels are not
            used. At least two of the numbers must differ. If None, all rows are used, and y is the
            number that the row's request gave as `target`.
        pooling, model, template: fields of the probe, as in `train_probe`.

    Raises:
        SpecError: `sums_at` refuses a label, the sums have no covariance or no targets, all
            `targets` are the same, or alpha is too small for so few rows.
    """
    stream = as_stream(stream_of(stream))
    checked_pooling(pooling)
    if not (math.isfinite(alpha) and alpha >= 0):
        raise SpecError(f"alpha is {alpha!r}; it must be a finite number, 0 or above.")
    if targets is None:
        one = sums_at(found, stream)
        if one.xy is None:
            raise SpecError(
                f"the sums at {name_of(stream)} have no targets; give targets, a number for each "
                "label, or send the requests with Moments(target=...)."
            )
        xy, y = one.xy, one.y
    else:
        numbers = _targets(targets, found, stream)
        each = {label: sums_at(found, stream, [label]) for label in numbers}
        one = sums_at(found, stream, numbers)
        xy = np.sum([numbers[label] * sums.x for label, sums in each.items()], axis=0)
        y = sum(numbers[label] * sums.count for label, sums in each.items())
    mean_y = y / one.count
    matrix = _scatter(one) + alpha * np.eye(len(one.x))
    weight = _solve(matrix, xy - mean_y * one.x, len(matrix) if alpha else one.count - 1)
    bias = mean_y - float(one.mean @ weight)
    return LinearProbe(
        weight.astype(np.float32), bias, *stream, pooling=pooling, model=model, template=template
    )


def _targets(targets: object, found: Found, stream: SiteLayer) -> dict[str, float]:
    """The targets as floats, by label.

    Raises:
        SpecError: a target is not a finite number, or all targets are the same.
    """
    if not isinstance(targets, Mapping):
        raise SpecError(
            f"targets is {shown(targets)}; it must be a dict from a label to its number, such as "
            "{'good': 1.0, 'bad': -1.0}."
        )
    numbers = {
        label: finite(float(y) if isinstance(y, bool) else y, f"targets[{label!r}]")
        for label, y in targets.items()
    }
    if len(set(numbers.values())) < 2:
        known = [label for *place, label in found if tuple(place) == stream]
        raise SpecError(
            f"targets is {shown(dict(targets))}, so that every row has the same number; give "
            f"different numbers to two or more of the labels at {name_of(stream)}, which are "
            f"{shown(known)}."
        )
    return numbers


def lda_probe(
    found: Found,
    stream: SiteLayer,
    positive: str | Sequence[str],
    negative: str | Sequence[str],
    *,
    shrinkage: float = 0.0,
    pooling: str | None = None,
    model: str | None = None,
    template: str | None = None,
) -> LinearProbe:
    """Fit a probe by linear discriminant analysis of two classes. A class has one or more labels.

    The probe's score is the log odds of the positive class. The prior probability of a class is the
    class's share of the rows.

    Args:
        positive, negative: the label or the labels of each class.
        shrinkage: a number from 0 to 1. The analysis uses a weighted sum of two matrices. The
            identity times the mean variance has the weight `shrinkage`, and the covariance within
            the classes has the weight 1 - shrinkage.
        pooling, model, template: fields of the probe, as in `train_probe`.

    Raises:
        SpecError: `sums_at` refuses a label, a label is in both classes, the sums have no
            covariance, or the covariance is singular. If there are fewer rows than a row has
            numbers, shrinkage must be above 0.
    """
    if not 0 <= shrinkage <= 1:
        raise SpecError(f"shrinkage is {shrinkage!r}; it must be a number from 0 to 1.")
    stream = as_stream(stream_of(stream))
    checked_pooling(pooling)
    classes = [[some] if isinstance(some, str) else list(some) for some in (positive, negative)]
    both = [label for label in classes[0] if label in classes[1]]
    if both:
        raise SpecError(
            f"the labels {shown(both)} are in both classes, positive and negative; name each label "
            "in one class."
        )
    up, down = (sums_at(found, stream, labels) for labels in classes)
    within = (_scatter(up) + _scatter(down)) / (up.count + down.count)
    width = len(within)
    shrunk = (1 - shrinkage) * within + shrinkage * np.trace(within) / width * np.eye(width)
    rank = width if shrinkage else up.count + down.count - 2
    weight = _solve(shrunk, up.mean - down.mean, rank)
    bias = math.log(up.count / down.count) - float((up.mean + down.mean) @ weight) / 2
    return LinearProbe(
        weight.astype(np.float32), bias, *stream, pooling=pooling, model=model, template=template
    )


@dataclass(frozen=True, eq=False)
class Components:
    """The directions in which rows vary most. scikit-learn's PCA has the same directions.

    Attributes:
        mean: the mean of the rows, [width].
        directions: k directions of length 1 by descending variance, [k, width]. In each direction,
            the number with the largest absolute value is positive.
        variances: the variance of the rows along each direction, [k]. The divisor of a variance is
            the number of rows minus 1.
        total: the sum of the variances along all `width` directions.
    """

    mean: Floats
    directions: Floats
    variances: Floats
    total: float

    def transform(self, rows: Floats) -> Floats:
        """The components of rows [n, width] along the directions, [n, k]."""
        found: Floats = (rows - self.mean) @ self.directions.T
        return found


def principal_components(sums: Sums, k: int) -> Components:
    """The first k principal components of the rows of `sums`, which `sums_at` returns.

    Raises:
        SpecError: k is not from 1 to the width of a row, there are fewer than 2 rows, or the sums
            have no covariance.
    """
    if not 1 <= k <= len(sums.x):
        raise SpecError(f"k is {k}; rows have 1 to {len(sums.x)} components.")
    if sums.count < 2:
        raise SpecError(f"there are {sums.count} rows; components need 2 or more.")
    scatter = _scatter(sums)
    values, vectors = np.linalg.eigh(scatter)
    directions = vectors[:, ::-1][:, :k].T
    largest = np.take_along_axis(directions, np.abs(directions).argmax(1)[:, None], 1)
    variances = values[::-1][:k].clip(0) / (sums.count - 1)
    total = float(np.trace(scatter)) / (sums.count - 1)
    return Components(sums.mean, directions * np.sign(largest), variances, total)


@dataclass(frozen=True, eq=False)
class Whitening:
    """The map z = (x - mean) @ matrix, after which the covariance of the rows is the identity.

    The matrix is symmetric. Of all maps with this property, this map changes rows least (ZCA).

    Attributes:
        mean: the mean of the rows, [width].
        matrix: the symmetric matrix, [width, width].
    """

    mean: Floats
    matrix: Floats

    def __call__(self, rows: Floats) -> Floats:
        """Apply the map to rows [n, width]."""
        found: Floats = (rows - self.mean) @ self.matrix
        return found


def whitening(sums: Sums, floor: float = 1e-6) -> Whitening:
    """The Whitening for the rows of `sums`, which `sums_at` returns.

    Args:
        floor: a number above 0 and at most 1. The smallest variance that the map uses is `floor`
            times the largest variance. The map uses this value in place of smaller variances. In
            the directions of those variances, the mapped rows have a variance below 1.

    Raises:
        SpecError: `floor` is out of range, all rows are the same, or the sums have no covariance.
    """
    if not 0 < floor <= 1:
        raise SpecError(f"floor is {floor!r}; it must be a number above 0, at most 1.")
    scatter = _scatter(sums)
    # If all rows are the same, the exact scatter is 0. The computed scatter has rounding errors.
    if np.trace(scatter) <= 1e-12 * (sums.x @ sums.mean):
        raise SpecError("the rows are all the same; they cannot be whitened.")
    values, vectors = np.linalg.eigh(scatter / sums.count)
    matrix = (vectors / np.sqrt(values.clip(floor * values[-1]))) @ vectors.T
    return Whitening(sums.mean, matrix)


def _scatter(sums: Sums) -> Floats:
    try:
        return sums.scatter
    except ValueError as error:
        raise SpecError(str(error)) from None


def _solve(matrix: Floats, vector: Floats, rank: int) -> Floats:
    """Solve a linear system whose matrix is symmetric and positive semi-definite.

    Args:
        rank: the largest rank that the exact matrix can have with this number of rows. The pivots
            alone do not always show that a matrix is singular. If the rows have a large mean,
            rounding errors make the pivots of a singular matrix too large.

    Raises:
        SpecError: the matrix is singular.
    """
    factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(matrix))
    pivots = factor.diagonal() ** 2
    # Rounding errors alone can make a pivot as large as `least`. The exact pivot can then be 0.
    least = len(matrix) * np.finfo(np.float64).eps * pivots.max()
    if rank >= len(matrix) and not failed and pivots.min() > least:
        found = torch.cholesky_solve(torch.from_numpy(vector)[:, None], factor)
        return np.asarray(found[:, 0], np.float64)
    raise SpecError(
        "the covariance of the rows is singular; take more rows than a row has numbers, or a "
        "larger alpha or shrinkage."
    )
