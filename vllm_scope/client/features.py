"""Features in the server's answers, as numpy.

Owns:  SparseFeatures, and NamedFeatures (all features of a choice).
To:    answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_scope.client.named import Named
from vllm_scope.errors import ScopeError
from vllm_scope.request.read_features import check_feature


@dataclass(frozen=True)
class SparseFeatures:
    """The features of one SAE, as a sparse matrix.

    Attributes:
        positions, indices, values: int64, int64 and float32 [num_values]: the position of a token,
            a feature's number, and the feature's value at the token; NaN for a value that is not
            finite. Sorted by position; at one position the strongest feature comes first.
        tokens: int64 [num_tokens], ascending: the positions that were encoded, also positions
            without an active feature.
        num_features: the SAE's number of features. None for a read with `indices`, except for a
            TopK SAE.
        asked: the features that the read named (`indices`); None for a read with `top_k`.

    `num_features` and `asked` are both None if the server has an earlier version.
    """

    positions: NDArray[np.int64]
    indices: NDArray[np.int64]
    values: NDArray[np.float32]
    tokens: NDArray[np.int64]
    num_features: int | None = None
    asked: tuple[int, ...] | None = None

    def dense(self, index: int) -> NDArray[np.float32]:
        """The values of one feature, float32 [num_tokens]; 0 at tokens without a delivered value.

        A value is not delivered in three cases. The feature is not active at the token; its value
        is below the read's `threshold`; or the read has `top_k`, and the feature is not among the
        token's `top_k` strongest features.

        Raises:
            KeyError: the read named other features, or the SAE has no such feature.
        """
        check_feature(index, self.num_features, self.asked)
        found = np.zeros(len(self.tokens), np.float32)
        here = self.indices == index
        found[np.searchsorted(self.tokens, self.positions[here])] = self.values[here]
        return found

    def top(self, position: int) -> list[tuple[int, float]]:
        """(index, value) of the features at a position, the strongest first.

        Raises:
            KeyError: the position was not encoded.
        """
        if position not in self.tokens:
            raise KeyError(f"position {position} has no features; see tokens.")
        first, last = np.searchsorted(self.positions, [position, position + 1])
        some = slice(int(first), int(last))
        return list(zip(self.indices[some].tolist(), self.values[some].tolist(), strict=True))

    def at(self, tokens: NDArray[np.int64]) -> SparseFeatures:
        """The features of some of the positions."""
        here = np.isin(self.positions, tokens)
        return replace(
            self, positions=self.positions[here], indices=self.indices[here],
            values=self.values[here], tokens=self.tokens[np.isin(self.tokens, tokens)],
        )  # fmt: skip


class NamedFeatures(Named[SparseFeatures]):
    """Name of a `Features` -> its SparseFeatures."""

    what = "features"


def sparse_features(
    tokens: NDArray[np.int64], indices: list[list[int]], values: list[list[float | None]]
) -> SparseFeatures:
    """The features of an answer. Each list has one item for each of `tokens`.

    Raises:
        ScopeError: the lists' lengths differ.
    """
    counts = [len(some) for some in indices]
    if len(counts) != len(tokens) or counts != [len(some) for some in values]:
        raise ScopeError(
            f"the server sent features of {len(counts)} positions for {len(tokens)}, or indices "
            "without values."
        )
    return SparseFeatures(
        np.repeat(tokens, counts),
        np.array([index for some in indices for index in some], np.int64),
        np.array([value for some in values for value in some], np.float32), tokens,
    )  # fmt: skip
