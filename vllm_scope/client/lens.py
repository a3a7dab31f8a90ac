"""Tokens of lenses in the server's answers, as numpy.

Owns:  TopTokens.
To:    answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import ScopeError


@dataclass(frozen=True)
class TopTokens:
    """The likeliest next tokens at each position, which a lens computed from the rows of one layer.

    Attributes:
        positions: int64 [num_positions], ascending, counted from the prompt's first token. The
            tokens at position p are predictions for position p + 1.
        token_ids: int64 [num_positions, k], the likeliest token first.
        log_probs: the natural logarithms of the tokens' probabilities, float32 [num_positions, k].
            A value that is not finite is NaN.
    """

    positions: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if len(shape) != 2 or shape != self.log_probs.shape or len(self.positions) != shape[0]:
            raise ScopeError(
                f"the server sent tokens of shape {shape} and log-probabilities of shape "
                f"{self.log_probs.shape} for {len(self.positions)} positions."
            )

    def top(self, position: int) -> list[tuple[int, float]]:
        """The id and the log-probability of each token at a position, the likeliest token first.

        Raises:
            KeyError: the lens was not applied at the position.
        """
        (found,) = np.nonzero(self.positions == position)
        if not len(found):
            raise KeyError(f"position {position} has no tokens of this lens; see positions.")
        ids, values = self.token_ids[found[0]].tolist(), self.log_probs[found[0]].tolist()
        return list(zip(ids, values, strict=True))

    def at(self, positions: NDArray[np.int64]) -> TopTokens:
        """The tokens at the given positions."""
        here = np.isin(self.positions, positions)
        return TopTokens(self.positions[here], self.token_ids[here], self.log_probs[here])
