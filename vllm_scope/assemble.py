"""One row per position, out of all that was computed.

Owns:  the rule by which rows that came become a stream: the last computed holds, and
       what was not asked for, or never accepted, goes.
Runs:  where a request's rows come together: in the front-end (result), and in the
       worker for sinks that take whole requests (sinks.request).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.selectors import Selector, Tokens

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Some values of one stream: [n] positions and arrivals, [n, size] rows.

    Attributes:
        arrivals: grow with the computation, over all parts of a request.
    """

    positions: Ints
    arrivals: Ints
    rows: Tensor


def num_processed(num_tokens: int, num_prompt: int) -> int:
    """Positions that have rows: all tokens but the one sampled last."""
    return num_tokens - (1 if num_tokens > num_prompt else 0)


def wanted_positions(
    selectors: Sequence[Selector], token_ids: Sequence[int], num_prompt: int, ended: bool
) -> Ints:
    """The positions, of those processed, that any of these selects.

    Args:
        token_ids: prompt and output so far.
    """
    count = num_processed(len(token_ids), num_prompt)
    positions = np.arange(count, dtype=np.int64)
    if all(selector.uniform for selector in selectors):
        ids = positions  # nobody looks: the phase alone decides
    else:
        ids = np.asarray(token_ids[:count], np.int64)
    tokens = Tokens(positions, num_prompt, ids, count if ended else None)
    mask = np.zeros(positions.shape, bool)
    for selector in selectors:
        mask |= selector.select(tokens).certain
    return positions[mask]


def assemble(parts: list[Part], wanted: Ints, empty: Tensor) -> tuple[Tensor, Ints]:
    """Values and their positions, ascending: of each position the last that came.

    Args:
        wanted: ascending; what else came is left out.
        empty: what there is where nothing came.
    """
    if not parts:
        return empty, np.zeros(0, np.int64)
    if len(parts) == 1:
        positions, rows = parts[0].positions, parts[0].rows
        # The usual cases cost no copy: computed once, in order, so far or past the end.
        n = min(len(positions), len(wanted))
        if np.array_equal(positions[:n], wanted[:n]) and (
            not n or n == len(positions) or positions[n:].min() > wanted[-1]
        ):
            return rows[:n], wanted[:n]
    order = np.argsort(np.concatenate([p.arrivals for p in parts]), kind="stable")
    positions = np.concatenate([p.positions for p in parts])[order]
    rows = torch.cat([p.rows for p in parts])[torch.from_numpy(order)]
    # A position that was computed twice (recompute, rejected drafts) keeps its
    # last row; one that was not asked for, or never accepted, goes.
    found, from_end = np.unique(positions[::-1], return_index=True)
    keep = np.isin(found, wanted)
    last = len(positions) - 1 - from_end[keep]
    return rows[torch.from_numpy(last)], found[keep]
