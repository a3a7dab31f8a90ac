"""Computes steering vectors from rows with a concept (positives) and without it (negatives).

From:  rows.pooled_rows, or any tensors.   To: vectors.SteeringModule.

Promise: a vector points from the negatives to the positives. By default, the vector's length is 1.
With normalise=False, the length is the distance between the two means along the vector. If this
vector is added to the negatives' mean, the result has the same projection onto the vector as the
positives' mean.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope import __version__
from vllm_scope.analysis.rows import as_rows
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import SiteLayer
from vllm_scope.vectors import Provenance, SteeringModule
from vllm_scope.vectors.module import name_of

Rows = Mapping[SiteLayer, Tensor] | Mapping[SiteLayer, NDArray[np.floating]]


def mean_difference(
    positives: Rows,
    negatives: Rows,
    *,
    normalise: bool = True,
    provenance: Provenance | None = None,
) -> SteeringModule:
    """The positives' mean minus the negatives' mean, at each stream.

    Args:
        positives, negatives: both map the same streams (site, layer) to rows [n, hidden_size] of
            any float dtype. The numbers of rows can differ.
        normalise: whether each vector is scaled to length 1.
        provenance: the fields model, revision and dataset. This function sets the other fields.

    Raises:
        SpecError: the positives and the negatives do not have the same streams or sizes, there are
            no rows, some rows are not finite, or the two means are equal.
    """

    def direction(up: Tensor, down: Tensor, _name: str) -> Tensor:
        return up.mean(0) - down.mean(0)

    return _module(positives, negatives, direction, "mean_difference", normalise, provenance)


def principal_difference(
    positives: Rows,
    negatives: Rows,
    *,
    normalise: bool = True,
    provenance: Provenance | None = None,
) -> SteeringModule:
    """The direction in which a pair's rows differ most, at each stream (repeng's "pca_center").

    Row i of the positives and row i of the negatives are a pair. The function subtracts each pair's
    midpoint from both rows, and computes the first principal component of all these rows. The
    vector points to the side on which the positives have the larger mean projection.

    Arguments and errors are those of `mean_difference`. In addition, there must be as many
    positives as negatives.
    """

    def direction(up: Tensor, down: Tensor, name: str) -> Tensor:
        if len(up) != len(down):
            raise SpecError(
                f"{name} has {len(up)} positives and {len(down)} negatives; give equal numbers."
            )
        # After the midpoint is subtracted, the rows of a pair are plus and minus half of their
        # difference. Thus all rows have the same principal axis as the differences. The mean of the
        # differences must not be subtracted first.
        axis: Tensor = torch.linalg.svd(up - down, full_matrices=False).Vh[0]
        return axis * ((up - down) @ axis).mean()

    return _module(positives, negatives, direction, "principal_difference", normalise, provenance)


def pairs_digest(pairs: Iterable[tuple[str, str]]) -> str:
    """The value of `Provenance.dataset` for (positive, negative) texts. The value is "sha256:" and
    the SHA-256 of the sorted pairs, written as JSON in UTF-8. The order of the pairs does not
    matter."""
    listed = sorted([list(pair) for pair in pairs])
    content = json.dumps(listed, ensure_ascii=False, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"


def made_by(method: str, normalised: bool, known: Provenance | None) -> Provenance:
    """The provenance of vectors that vllm-scope has made.

    Args:
        known: the fields that the caller knows, which are model, revision and dataset.
    """
    return dataclasses.replace(
        known or Provenance(),
        method=method,
        normalised=normalised,
        created_by=f"vllm-scope {__version__}",
    )


def _module(
    positives: Rows,
    negatives: Rows,
    direction: Callable[[Tensor, Tensor, str], Tensor],
    method: str,
    normalise: bool,
    provenance: Provenance | None,
) -> SteeringModule:
    for side, given in (("positives", positives), ("negatives", negatives)):
        if not isinstance(given, Mapping):
            raise SpecError(
                f"{side} is {shown(given)}; it must be a dict from (site, layer) to rows, such as "
                "pooled_rows(results)."
            )
    if set(positives) != set(negatives):
        only = sorted(set(positives) ^ set(negatives))
        raise SpecError(
            f"{shown(only)} are on one side only; positives and negatives need the same streams."
        )
    vectors = {}
    for stream in positives:
        name = name_of(stream)
        up = _checked(positives[stream], f"positives at {name}")
        down = _checked(negatives[stream], f"negatives at {name}")
        if up.shape[1] != down.shape[1]:
            raise SpecError(
                f"{name}: positives have {up.shape[1]} values in a row, and negatives have "
                f"{down.shape[1]}; give rows of equal sizes."
            )
        vector = direction(up, down, name)
        length = vector.norm()
        # If all rows are the same, the two means can still differ by rounding.
        if length <= 1e-12 * max(up.abs().max(), down.abs().max()):
            raise SpecError(f"{name}: positives and negatives do not differ, in the mean.")
        vectors[stream] = vector / length if normalise else vector
    return SteeringModule(vectors, made_by(method, normalise, provenance))


def _checked(rows: Tensor | NDArray[np.floating], what: str) -> Tensor:
    """Return the rows as float64. Raises SpecError if they have another shape or are not finite."""
    rows = as_rows(rows, what)
    if rows.dim() != 2 or not len(rows):
        raise SpecError(
            f"{what} have shape {list(rows.shape)}; they must be [n, hidden_size], with n above 0."
        )
    rows = rows.detach().cpu().double()
    if not rows.isfinite().all():
        raise SpecError(f"{what} have NaN or Inf; leave those rows out.")
    return rows
