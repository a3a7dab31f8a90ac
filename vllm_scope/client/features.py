"""Features in the server's answers, as numpy.

Owns:  SparseFeatures, NamedFeatures (all features of a choice), Named (a dict by name).
To:    answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import ScopeError
from vllm_scope.request.read_features import check_feature

V = TypeVar("V")


@dataclass(frozen=True)
class SparseFeatures:
    """The features of one SAE, as a sparse matrix.

    Attributes:
        positions, indices, values: three arrays [num_values]: the position of a token (int64), a
            feature's number (int64), and the feature's value at this token (float32). A value that
            is not finite is NaN. The arrays are sorted by position. At one position, the strongest
            feature comes first.
        tokens: the positions whose features arrived, int64 [num_tokens], ascending. Positions
            without an active feature are also in `tokens`.
        num_features: the SAE's number of features, or None if the read has `indices` and the SAE is
            not a TopK SAE.
        asked: the features that the read named (`indices`), or None if the read has `top_k`.

    `num_features` and `asked` are both None if an earlier version of vllm-scope runs on the server.
    """

    positions: NDArray[np.int64]
    indices: NDArray[np.int64]
    values: NDArray[np.float32]
    tokens: NDArray[np.int64]
    num_features: int | None = None
    asked: tuple[int, ...] | None = None

    def dense(self, index: int) -> NDArray[np.float32]:
        """The values of one feature, float32 [num_tokens]; 0 at tokens without a delivered value.

        A value is not delivered if the feature is not active at the token, or if the value is below
        the read's `threshold`. If the read has `top_k`, only the values of the token's `top_k`
        strongest features are delivered.

        Raises:
            KeyError: the read did not name this feature, or the SAE has no feature with this index.
        """
        check_feature(index, self.num_features, self.asked)
        found = np.zeros(len(self.tokens), np.float32)
        here = self.indices == index
        found[np.searchsorted(self.tokens, self.positions[here])] = self.values[here]
        return found

    def top(self, position: int) -> list[tuple[int, float]]:
        """The index and the value of each feature at a position, the strongest feature first.

        Raises:
            KeyError: `tokens` does not have this position.
        """
        if position not in self.tokens:
            raise KeyError(f"position {position} has no features; see tokens.")
        first, last = np.searchsorted(self.positions, [position, position + 1])
        some = slice(int(first), int(last))
        return list(zip(self.indices[some].tolist(), self.values[some].tolist(), strict=True))

    def at(self, tokens: NDArray[np.int64]) -> SparseFeatures:
        """The features at the given positions."""
        here = np.isin(self.positions, tokens)
        return replace(
            self, positions=self.positions[here], indices=self.indices[here],
            values=self.values[here], tokens=self.tokens[np.isin(self.tokens, tokens)],
        )  # fmt: skip


class Named(dict[str, V]):
    """A dict whose error for a missing name lists the names that exist."""

    #: The word that the error's text uses for the values.
    what: ClassVar[str]

    def __missing__(self, name: str) -> NoReturn:
        names = ", ".join(map(repr, self)) or "none"
        raise KeyError(f"{name!r} has no {self.what} here; this choice has those of {names}.")


class NamedFeatures(Named[SparseFeatures]):
    """Maps the name of a `Features` to its SparseFeatures."""

    what = "features"


def sparse_features(
    tokens: NDArray[np.int64], indices: list[list[int]], values: list[list[float | None]]
) -> SparseFeatures:
    """Make SparseFeatures from an answer's lists. Each list has one item for each position in
    `tokens`.

    Raises:
        ScopeError: the lists' lengths differ.
    """
    counts = [len(some) for some in indices]
    if len(counts) != len(tokens) or counts != [len(some) for some in values]:
        raise ScopeError(
            f"the server sent features of {len(counts)} positions where {len(tokens)} are "
            "expected, or indices without values."
        )
    return SparseFeatures(
        np.repeat(tokens, counts),
        np.array([index for some in indices for index in some], np.int64),
        np.array([value for some in values for value in some], np.float32), tokens,
    )  # fmt: skip
