"""Finds, by position, the values of a streaming request that can be returned.

Owns:  State, `follow` (finds the new values of a later snapshot that can be returned).
To:    cursor.

Promise: each position is returned one time, in ascending order. A value that arrives early waits
until the values of all earlier positions have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_scope.batch.by_position import Ints, last_of_each
from vllm_scope.request.selectors import Selector
from vllm_scope.results.result import ScopeResult

NONE: Ints = np.zeros(0, np.int64)
#: Two int64 [n] arrays. The first array has the index of each value's part, and the second array
#: has the index of the value in this part.
Places = tuple[Ints, Ints]


@dataclass(frozen=True)
class State:
    """The positions of one stream or probe that `follow` has looked at so far. Streams whose rows
    arrive together share a State.

    Attributes:
        seen: `follow` has looked at the positions below `seen`. Each position below `seen` was
            returned, is in `due`, or is not wanted.
        due: wanted positions below `seen` that were not returned yet, ascending.
        taken: for each part, the number of values that `follow` has looked at.
        early: the positions of values that arrived but cannot be returned yet, and the `Places` of
            these values.
    """

    seen: int
    due: Ints
    taken: tuple[int, ...]
    early: tuple[Ints, Places]

    @property
    def settled(self) -> int:
        """The first position that may still be returned."""
        return int(self.due[0]) if len(self.due) else self.seen


START = State(0, NONE, (), (NONE, (NONE, NONE)))


def follow(
    state: State, selectors: Sequence[Selector], result: ScopeResult, arrived: Sequence[Ints]
) -> tuple[State, Ints, Places]:
    """Returns the State after a later snapshot, the positions that can be returned, and the
    `Places` of the values at these positions.

    Args:
        arrived: for each part, all positions that have arrived. Empty if the request's values were
            dropped (Pending.lose). Early values are then dropped too.
    """
    if state.taken and not arrived:
        state = replace(state, taken=START.taken, early=START.early)
    new = result.wanted(selectors, state.seen)
    due = new if not len(state.due) else np.concatenate([state.due, new])
    taken = (*state.taken, *(0 for _ in arrived[len(state.taken) :]))
    fresh = [i for i, positions in enumerate(arrived) if len(positions) > taken[i]]
    after = replace(
        state, seen=max(state.seen, result.num_processed), due=due,
        taken=tuple(map(len, arrived)),
    )  # fmt: skip
    if len(fresh) == 1 and not len(state.early[0]):
        # In the usual case, the new positions are the next due positions, in the same order.
        came = arrived[fresh[0]][taken[fresh[0]] :]
        if np.array_equal(came, due[: len(came)]):
            places = np.arange(taken[fresh[0]], len(arrived[fresh[0]]))
            return (
                replace(after, due=due[len(came) :]), came,
                (np.full(len(came), fresh[0]), places),
            )  # fmt: skip
    if not fresh and not len(state.early[0]):
        return after, NONE, (NONE, NONE)
    return _in_order(after, arrived, taken, fresh)


def _in_order(
    state: State, arrived: Sequence[Ints], taken: Sequence[int], fresh: Sequence[int]
) -> tuple[State, Ints, Places]:
    waiting, (parts, places) = state.early
    came = np.concatenate([waiting, *(arrived[i][taken[i] :] for i in fresh)])
    parts = np.concatenate([parts, *(np.full(len(arrived[i]) - taken[i], i) for i in fresh)])
    places = np.concatenate([places, *(np.arange(taken[i], len(arrived[i])) for i in fresh)])
    # For each position, keep the value that was computed last. Drop positions that are not wanted.
    came, at = last_of_each(came)
    keep = (came >= state.seen) | np.isin(came, state.due)
    came, at = came[keep], at[keep]
    present = np.isin(state.due, came)
    count = int(np.argmin(present)) if not present.all() else len(present)
    found, due = state.due[:count], state.due[count:]
    now = np.searchsorted(came, found)
    rest = ~np.isin(came, found)
    early = (came[rest], (parts[at[rest]], places[at[rest]]))
    after = replace(state, due=due, early=early)
    return after, found, (parts[at[now]], places[at[now]])
