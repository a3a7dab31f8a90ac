"""The generated tokens of a choice, each with its text and the scores of its own row.

Owns:  ScoredTokens; the format of `tokens` in a choice's `scope`.
From:  results (columns).   To: choice.

The model computes a token's row one step after the token was sampled. Therefore a token is sent in
the first chunk after the token's scores have arrived. In most cases, the token is sent one chunk
after the token's text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypedDict

from vllm_scope.batch.sparse import SparseRows
from vllm_scope.results.column import Column
from vllm_scope.results.result import ScopeResult


class TokenJson(TypedDict):
    """An item of `tokens`. A score that is not finite is None."""

    id: int
    text: str
    position: int
    scores: dict[str, float | None]


class ScoredTokens:
    """Returns the generated tokens of one choice in order, each token one time."""

    def __init__(self) -> None:
        self._num_told = 0
        #: The scores of tokens that were not returned yet, by position and by the probe's name.
        self._scores: dict[int, dict[str, float | None]] = {}

    def add(self, result: ScopeResult, columns: Iterable[Column]) -> None:
        """Store the new scores of generated tokens. Scores of the prompt's tokens are left out."""
        first = result.num_prompt + self._num_told
        for column in columns:
            if not isinstance(column.label, str) or isinstance(column.source, SparseRows):
                continue
            start = int(column.positions.searchsorted(first))
            positions, values = column.positions[start:], column.values[start:]
            for position, value in zip(positions.tolist(), values.tolist(), strict=True):
                score = value if math.isfinite(value) else None
                self._scores.setdefault(position, {})[column.label] = score

    def take(
        self, result: ScopeResult, texts: Sequence[str], settled: int | None
    ) -> list[TokenJson]:
        """The tokens that were not returned yet and whose scores have arrived.

        Args:
            texts: the text of each generated token.
            settled: all scores at positions below `settled` have arrived. If `settled` is None, no
                more scores will arrive, and all tokens that are left are returned.
        """
        start = result.num_prompt + self._num_told
        stop = len(result.transcript) if settled is None else max(settled, start)
        found: list[TokenJson] = [
            {
                "id": id,
                "text": texts[i] if i < len(texts) else "",
                "position": start + i - self._num_told,
                "scores": self._scores.pop(start + i - self._num_told, {}),
            }
            for i, id in enumerate(result.transcript[start:stop], self._num_told)
        ]
        self._num_told += len(found)
        return found
