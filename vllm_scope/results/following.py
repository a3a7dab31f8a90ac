"""How far a stream or a probe of a streaming request was followed, by position.

Owns:  State, and `follow`, which finds the values of a later snapshot that can be returned.
To:    cursor.

Promise: a value that arrives out of order waits for the earlier positions; a position is returned
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_scope.batch.by_position import Ints, last_of_each
from vllm_scope.request.selectors import Selector
from vllm_scope.results.result import ScopeResult

NONE: Ints = np.zeros(0, np.int64)
#: Where values are, int64 [n] each: the index of a value's part, and the value's index in the part.
Places = tuple[Ints, Ints]


@dataclass(frozen=True)
class State:
    """How far one stream or probe was followed. Streams whose rows arrive together share one State.

    Attributes:
        seen: each position below `seen` was returned, is due, or is not wanted.
        due: wanted positions that were not returned yet, ascending.
        taken: for each part, the number of values that were looked at.
        early: positions that arrived while an earlier position was missing, and where their values
            are.
    """

    seen: int
    due: Ints
    taken: tuple[int, ...]
    early: tuple[Ints, Places]

    @property
    def settled(self) -> int:
        """The position below which each position was returned, or is not wanted."""
        return int(self.due[0]) if len(self.due) else self.seen


START = State(0, NONE, (), (NONE, (NONE, NONE)))


def follow(
    state: State, selectors: Sequence[Selector], result: ScopeResult, arrived: Sequence[Ints]
) -> tuple[State, Ints, Places]:
    """(The state after a later snapshot, the positions that can be returned, their places).

    Args:
        arrived: for each part, the positions that arrived.
    """
    new = result.wanted(selectors, state.seen)
    due = new if not len(state.due) else np.concatenate([state.due, new])
    taken = (*state.taken, *(0 for _ in arrived[len(state.taken) :]))
    fresh = [i for i, positions in enumerate(arrived) if len(positions) > taken[i]]
    after = replace(
        state, seen=max(state.seen, result.num_processed), due=due,
        taken=tuple(map(len, arrived)) or taken,
    )  # fmt: skip
    if len(fresh) == 1 and not len(state.early[0]):
        # The usual case: the positions that arrived are the next ones that are due, in order.
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
    # The value that was computed last stays; positions that are known to be unwanted are dropped.
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
