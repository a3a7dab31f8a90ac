"""The rows of requests with Moments, before the rows are added to sums.

Owns:  SummedRequest, Owners (the requests of some rows), StepRows (rows of a region), WaitingRows.
Runs:  on the threads of worker.summing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.batch.by_position import Ints
from vllm_scope.program.layout import slots_of_row
from vllm_scope.request.resolved import ResolvedMoments
from vllm_scope.request.sites import Place
from vllm_scope.worker.device_sums import on_device
from vllm_scope.worker.slot_views import Grid, gathered

#: (name, place, label)
Key = tuple[str, Place, str]


@dataclass
class SummedRequest:
    """A request with Moments.

    Attributes:
        places: for each action, a dict that maps each point to its place.
        added: maps (index of an action, point) to the position after the last added row. Later rows
            of this action and point at smaller positions are ignored.
        accepted: the number of prompt and generated tokens that were accepted so far.
        over: True if the request has ended.
    """

    num_prompt: int
    actions: list[ResolvedMoments | None]
    places: list[dict[int, Place]]
    added: dict[tuple[int, int], int] = field(default_factory=dict)
    accepted: int = 0
    over: bool = False

    @property
    def sure(self) -> int:
        """A position. The rows at smaller positions can be added to sums: they belong to the
        prompt, or to generated tokens whose next token is also accepted."""
        return max(self.num_prompt, self.accepted - 1)


@dataclass(eq=False)
class Owners:
    """The requests to which some rows belong.

    Attributes:
        requests: the distinct requests. An entry is None for an unknown request, and for a request
            whose sums were dropped.
        of: int64 [n], the index of each row's request in `requests`.
    """

    requests: list[SummedRequest | None]
    of: Ints

    @property
    def is_known(self) -> NDArray[np.bool_]:
        """bool [n], True for rows whose request is known."""
        return np.array([one is not None for one in self.requests], bool)[self.of]

    @property
    def known(self) -> Ints:
        return np.flatnonzero(self.is_known)

    def numbers(self, number_of: Callable[[SummedRequest], int]) -> Ints:
        """int64 [n], the result of `number_of` for each row's request; 0 for unknown requests."""
        found = [0 if one is None else number_of(one) for one in self.requests]
        return np.array(found, np.int64)[self.of]

    def added(self, number: int, point: int) -> Ints:
        """int64 [n]: SummedRequest.added of each row's request, for an action at a point."""
        return self.numbers(lambda one: one.added.get((number, point), 0))

    def at(self, some: Ints) -> Owners:
        return Owners(self.requests, self.of[some])

    def action(self, index: int, number: int) -> ResolvedMoments:
        request = self.requests[index]
        found = None if request is None else request.actions[number]
        assert found is not None
        return found

    def key(self, index: int, number: int, point: int) -> Key:
        """The key of the sums to which an action's rows at a point are added."""
        request, action = self.requests[index], self.action(index, number)
        assert request is not None
        return action.name, request.places[number][point], action.by

    def reach(self, number: int, point: int, positions: Ints) -> None:
        """Record that the rows at these positions were added to sums."""
        stops = np.zeros(len(self.requests), np.int64)
        np.maximum.at(stops, self.of, positions + 1)
        for one, stop in zip(self.requests, stops.tolist(), strict=True):
            if one is not None and stop:
                one.added[number, point] = max(stop, one.added.get((number, point), 0))


@dataclass(eq=False)
class StepRows:
    """Rows of some tokens of a region.

    Attributes:
        firsts: int64 [n], the first slot of each token.
        claimed: int64 [n], the position that the labels state for each token.
        rows: int64 [n], the batch row of each token.
        true, ready: the same as for Summing.add.
    """

    words: Tensor
    firsts: Ints
    keys: Ints
    claimed: Ints
    rows: Ints
    true: Tensor | None
    ready: Callable[[], bool]

    def at(self, some: Ints) -> StepRows:
        return StepRows(
            self.words, self.firsts[some], self.keys[some], self.claimed[some], self.rows[some],
            self.true, self.ready,
        )  # fmt: skip

    def positions(self) -> Ints:
        """The actual positions of the tokens, int64 [n]. Call this method only after `ready` has
        returned True."""
        if self.true is None:
            return self.claimed
        found: Ints = self.true.numpy().astype(np.int64)[self.rows]
        return found

    def rows_at(self, some: Ints, slot: int, row_bytes: int, dtype: torch.dtype) -> Tensor:
        """The rows of some tokens, [n, width]: a view of the region, or a copy. The row of a token
        starts at the token's slot `slot`."""
        at = self.firsts[some] + slot
        grid = Grid.of_tokens(at) if len(at) else None
        if grid is None:
            return self._gathered(at, row_bytes, dtype)
        rows = grid.rows(self.words, slots_of_row(row_bytes))
        return rows.view(dtype)[:, : row_bytes // dtype.itemsize]

    def rows_of(self, slots: Sequence[int], row_bytes: int, dtype: torch.dtype) -> Tensor:
        """A copy of the rows that start at `slots` of each token, [len(slots), n, width]."""
        at = (np.array(slots, np.int64)[:, None] + self.firsts).ravel()
        return self._gathered(at, row_bytes, dtype).view(len(slots), len(self.firsts), -1)

    def _gathered(self, at: Ints, row_bytes: int, dtype: torch.dtype) -> Tensor:
        found = gathered(self.words, on_device(self.words.device, at), slots_of_row(row_bytes))
        return found.view(dtype)[:, : row_bytes // dtype.itemsize]


@dataclass(eq=False)
class WaitingRows:
    """Rows of one action in one step. The rows wait until their tokens are accepted.

    Attributes:
        number: the index of the action in each request of these rows.
        positions: a function that returns the actual positions of the rows, int64 [n]. On a GPU,
            call this function only after `ready` has returned True.
        rows: [points, n, width].
    """

    number: int
    points: tuple[int, ...]
    keys: Ints
    positions: Callable[[], Ints]
    ready: Callable[[], bool]
    rows: Tensor

    @property
    def num_bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()

    def rest(self, owners: Owners) -> WaitingRows | None:
        """The rows that must wait longer; None if there are no such rows. Rows of ended requests do
        not wait. `owners` has the requests of `keys`."""
        positions = self.positions()
        runs = owners.numbers(lambda one: not one.over) & owners.is_known
        left = np.flatnonzero((positions >= owners.numbers(lambda one: one.sure)) & (runs > 0))
        if len(left) in (0, len(positions)):
            return self if len(left) else None
        try:
            kept, rows = positions[left], picked(self.rows, left, 1)
        except torch.OutOfMemoryError:
            return self  # `SummedRequest.added` excludes the rows that were already added
        return WaitingRows(
            self.number, self.points, self.keys[left], lambda: kept, lambda: True, rows
        )


def picked(rows: Tensor, at: NDArray[np.int64], dim: int = 0) -> Tensor:
    return rows.index_select(dim, on_device(rows.device, at))
