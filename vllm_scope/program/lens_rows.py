"""Counts the rows to which the lenses of a request are applied.

Owns:  `num_lens_rows`.
Runs:  in the front-end, which refuses a request with too many rows; in EngineCore, where a request
       with lenses waits while the running requests have too many rows.
From:  request.resolved.   To: engine.frontend.checks, engine.core.entry.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from vllm_scope.program.compiler import POSITIONS_AT_ONCE
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.selectors import Ids, Selector, Tokens


def num_lens_rows(asked: Resolved, ids: Ids, max_tokens: int) -> int:
    """The number of rows to which the lenses of a request are applied: for each lens, the number of
    selected tokens times the number of layers.

    Args:
        ids: the token ids of the prompt.
        max_tokens: the largest number of sampled tokens. The last of these tokens does not count,
            because the model never processes it.
    """
    if not asked.features:
        return 0
    counts = Counter(one.tokens for one in asked.features if one.lens is not None)
    num_generated = max(max_tokens - 1, 0)
    return sum(_num_picked(s, ids, num_generated) * count for s, count in counts.items())


def _num_picked(selector: Selector, ids: Ids, num_generated: int) -> int:
    """The number of tokens that the selector can select. Nobody knows yet which generated token
    will be the last token. Therefore, for the selector "last", each token that can be the last
    token counts."""
    num_prompt, found = len(ids), 0
    if selector.uniform:
        in_prompt, generated = map(selector.picks_phase, (False, True))
        return num_prompt * in_prompt + num_generated * generated
    for first in range(0, num_prompt + num_generated, POSITIONS_AT_ONCE):
        stop = min(first + POSITIONS_AT_ONCE, num_prompt + num_generated)
        tokens = Tokens.running(np.arange(first, stop), num_prompt, ids)
        found += int(selector.select(tokens).possible.sum())
    return found
