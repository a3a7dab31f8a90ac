"""The values of a spec's picks in a range of positions, shared by specs with equal picks.

Owns:  ColumnRange, and this process's caches of ColumnRanges and of columns.
Runs:  in workers, in EngineCore and in the front-end. numpy, no torch.
From:  compiled (the picks).   To: compiler.

A pick is a selector with its use (program.picks). A column is the values of all picks for one
position. Requests that differ only in their vectors and layers, such as the cells of a sweep, have
equal picks, and therefore equal columns. This module computes these columns one time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_scope.program.picks import Pick
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.selectors import ITEM_BYTES, items_of, num_bytes_of

#: If the picks together name more than MOST_ITEMS positions, their columns are not cached. For such
#: picks, the hash takes longer than the computation of the columns. Positions of a Replace count
#: two times: in `Pick.positions`, and in the pick's selector.
MOST_ITEMS: Final = 64
#: The largest number of bytes in each of the two caches.
REMEMBERED_BYTES: Final = 16 << 20
_KEY_BYTES = 1024
#: The measured bytes of a pick, without its selector and its positions.
_PICK_BYTES = 256


class ColumnRange(NamedTuple):
    """The columns of a range of positions. All arrays are read-only.

    Attributes:
        columns: int32 [num_picks, num_positions].
        which: int64 [num_positions], the index of each position's column in `distinct`.
        distinct: the distinct columns by their bytes, in the order of positions.
    """

    columns: NDArray[np.int32]
    which: NDArray[np.int64]
    distinct: dict[bytes, NDArray[np.int32]]


class PicksKey:
    """A key that is equal for equal picks. The hash takes long, and is therefore computed only when
    the key is made.

    Attributes:
        num_bytes: the estimated memory of the picks. A cache that has this key also keeps the picks
            in memory.
    """

    __slots__ = ("_hash", "num_bytes", "picks", "used")

    def __init__(self, picks: tuple[Pick, ...], used: tuple[int, ...]) -> None:
        self.picks, self.used = picks, used
        self.num_bytes = sum(
            _PICK_BYTES + ITEM_BYTES * len(pick.positions) + num_bytes_of(pick.selector)
            for pick in picks
        )
        self._hash = hash((picks, used))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, PicksKey) or self._hash != other._hash:
            return False
        return (self.picks, self.used) == (other.picks, other.used)


class RangeKey(NamedTuple):
    """The key of a ColumnRange in the cache. The key can be used only if the picks use no token
    ids."""

    picks: PicksKey
    num_prompt: int
    first: int
    num_positions: int


class ColumnsKey(NamedTuple):
    """The key of a result of RequestProgram.columns in the cache. The key has all inputs of that
    method.

    Attributes:
        size: the inputs of Compiled.check_size except the columns.
    """

    picks: PicksKey
    size: tuple[bool, bytes]
    num_prompt: int
    num_positions: int
    drafts: bool


_known: Remembered[RangeKey, ColumnRange] = Remembered(REMEMBERED_BYTES)
_columns: Remembered[ColumnsKey, tuple[bytes, ...]] = Remembered(REMEMBERED_BYTES)


def remembered(key: RangeKey, make: Callable[[], ColumnRange]) -> ColumnRange:
    """The ColumnRange with this key, from the cache or from `make`. Call this function only if
    `can_remember` is True for the picks."""
    found = _known.get(key)
    if found is None:
        found = make()
        size = _KEY_BYTES + key.picks.num_bytes + 2 * found.columns.nbytes + found.which.nbytes
        _known.put(key, found, size)
    return found


def remembered_columns(key: ColumnsKey, make: Callable[[], tuple[bytes, ...]]) -> tuple[bytes, ...]:
    """The distinct columns of a request, from the cache or from `make`."""
    found = _columns.get(key)
    if found is None:
        found = make()
        size = _KEY_BYTES + key.picks.num_bytes + sum(map(len, found))
        _columns.put(key, found, size)
    return found


def can_remember(picks: tuple[Pick, ...]) -> bool:
    """True if the columns of these picks can be cached: the picks use no token ids and name few
    positions."""
    num_items = sum(len(pick.positions) + items_of(pick.selector) for pick in picks)
    return num_items <= MOST_ITEMS and not any(pick.selector.sees_ids for pick in picks)
