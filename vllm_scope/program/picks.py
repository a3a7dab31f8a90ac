"""Determines to which tokens of a request an action applies.

Owns:  Pick.
Runs:  in every process of an engine. numpy, no torch.
From:  request.selectors.   To: compiled (programs), block_keys (keys of KV blocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vllm_scope.request.selectors import Selector, Tokens


@dataclass(frozen=True)
class Pick:
    """A selector and its use. For a replacement, also the positions of the new rows.

    Attributes:
        use: if "edit", the action applies to the tokens that the selector certainly selects. If
            "deliver", the action also applies to tokens that the selector may select. (The code
            that reads the rows later drops the extra rows by their labels.)
        positions: the positions of a replacement's rows. Empty for other actions. A negative
            position counts from the prompt's end.
        after: the name of the probe for whose verdict the action waits. None if the action waits
            for no verdict.
    """

    selector: Selector
    use: Literal["edit", "deliver"]
    positions: tuple[int, ...] = ()
    after: str | None = None

    @property
    def uniform(self) -> bool:
        return self.selector.uniform

    def values(self, tokens: Tokens) -> NDArray[np.int32]:
        """The value of the pick for each token, int32 [num_tokens]. The value is 0 if the token is
        not picked, else 1. For a replacement, the value of a picked token is the number of its new
        row, counted from 1.
        """
        if self.positions:
            p, n = tokens.positions, tokens.num_prompt
            rows = self._rows_at(p)
            if self._rows[0][0] < 0:
                rows = np.where((rows == 0) & (p < n), self._rows_at(p - n), rows)
            return rows
        masks = self.selector.select(tokens)
        return (masks.certain if self.use == "edit" else masks.possible).astype(np.int32)

    def value_in(self, generated: bool) -> int:
        """The pick's value for all tokens of a phase (prompt or generated), if the pick is
        uniform."""
        return int(self.selector.picks_phase(generated))

    @cached_property
    def _rows(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The positions of a replacement in ascending order, and for each position the number of
        its row, counted from 1."""
        given = np.asarray(self.positions, np.int64)
        order = np.argsort(given)
        return given[order], (order + 1).astype(np.int32)

    def _rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        ascending, rows = self._rows
        at = np.minimum(np.searchsorted(ascending, positions), len(ascending) - 1)
        return np.where(ascending[at] == positions, rows[at], np.int32(0))
