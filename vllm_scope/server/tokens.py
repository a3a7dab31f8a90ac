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

    def take(
        self, result: ScopeResult, columns: Iterable[Column], texts: Sequence[str],
        settled: int | None, most: int,
    ) -> list[TokenJson] | None:  # fmt: skip
        """The tokens that were not returned yet and whose scores have arrived. If these tokens have
        more than `most` scores, the result is None, and no later call returns these tokens. A token
        without scores counts as one score.

        Args:
            columns: the new scores. Scores of the prompt's tokens are left out.
            texts: the text of each generated token.
            settled: all scores at positions below `settled` have arrived. If `settled` is None, no
                more scores will arrive, and all tokens that are left are returned.
        """
        start = result.num_prompt + self._num_told
        stop = len(result.transcript)
        if settled is not None:
            stop = min(max(settled, start), stop)
        probes = [
            column for column in columns
            if isinstance(column.label, str) and not isinstance(column.source, SparseRows)
        ]  # fmt: skip
        told = range(self._num_told, self._num_told + stop - start)
        self._num_told = told.stop
        # Count the scores before a Python object is made of each score.
        waiting = sum(len(some) for at, some in self._scores.items() if at < stop)
        ends = (column.positions.searchsorted([start, stop]) for column in probes)
        num_scores = waiting + sum(int(last - first) for first, last in ends)
        if max(num_scores, len(told)) > most:
            self._scores = {at: some for at, some in self._scores.items() if at >= stop}
            self._add(probes, stop)
            return None
        self._add(probes, start)
        found: list[TokenJson] = [
            {
                "id": result.transcript[result.num_prompt + i],
                "text": texts[i] if i < len(texts) else "",
                "position": result.num_prompt + i,
                "scores": self._scores.pop(result.num_prompt + i, {}),
            }
            for i in told
        ]
        return None if sum(max(1, len(token["scores"])) for token in found) > most else found

    def _add(self, probes: Iterable[Column], first: int) -> None:
        """Store the scores at the position `first` and at later positions."""
        for column in probes:
            start = int(column.positions.searchsorted(first))
            positions, values = column.positions[start:], column.values[start:]
            for position, value in zip(positions.tolist(), values.tolist(), strict=True):
                score = value if math.isfinite(value) else None
                self._scores.setdefault(position, {})[str(column.label)] = score
