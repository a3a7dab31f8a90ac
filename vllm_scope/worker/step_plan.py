"""The programs and slots of one step's rows, computed from the tokens of its requests.

Owns:  StepPlan, PlannedTokens (some tokens of a step with their programs), `plan_of`.
Runs:  in every worker, before the forward, on the CPU. No function waits for the device.
From:  plan (which tokens get which program).
To:    tap.tables (the program and slot of each row), drain (the labels of the rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_scope.batch.by_position import Ints, indices_within
from vllm_scope.batch.labels import Labels
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import Layout
from vllm_scope.program.operations import NO_PROGRAM
from vllm_scope.worker.planned import Requests


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """The programs of one step's rows, and the rows' slots, relative to the step's first slot.

    Attributes:
        rows: int64 [num_rows], the batch rows that have a program, ascending.
        program_ids: int32 [num_rows].
        owners: int32 [num_rows], the owner number of each row. A tap reports a fault of the row
            under this number. 0 for a row without an owner number.
        offsets: int64 [num_rows], the first slot of each row's token, counted from the first slot
            of the step.
        num_slots: the number of slots that all rows need in the arena.
        num_delivered: the number of slots that all rows need in the ring, after heads were applied.
        delivers: bool [num_rows], True for the rows that `labels` describe.
        walks: the rows whose gates have states, and the walks of these rows; None if there are no
            such rows. A plan that reuses the last plan (worker.plan) has the same object `walks`.
    """

    rows: Ints
    program_ids: NDArray[np.int32]
    owners: NDArray[np.int32]
    offsets: Ints
    num_slots: int
    num_delivered: int
    delivers: NDArray[np.bool_]
    labels: Labels
    optimistic: bool
    walks: tuple[Ints, NDArray[np.int32]] | None = None


class PlannedTokens(NamedTuple):
    """Some tokens of a step. Each attribute is [n]: the tokens' rows, their positions, the indices
    of their requests, and their program ids."""

    rows: Ints
    positions: Ints
    requests: Ints
    ids: NDArray[np.int32]

    @staticmethod
    def of_requests(
        index: Ints, ids: NDArray[np.int32], row: Ints, position: Ints, count: Ints
    ) -> PlannedTokens:
        """All tokens of some requests, if each request has one program for all its tokens.

        Args:
            row, position: The row and the position of each request's first token.
            count: How many tokens each request has in the step.
        """
        if index.size and int(count.max()) > 1:
            within = indices_within(count)
            index, ids = np.repeat(index, count), np.repeat(ids, count)
            row, position = np.repeat(row, count) + within, np.repeat(position, count) + within
        return PlannedTokens(row, position, index, ids)

    @staticmethod
    def of_tokens(
        index: Ints, ids: Sequence[NDArray[np.int32]], row: Ints, position: Ints
    ) -> PlannedTokens:
        """The tokens of some requests, without the tokens that have no program. A request's tokens
        have consecutive rows and positions.

        Args:
            ids: For each request, the program ids of its tokens (at least one token).
            row, position: The row and the position of each request's first token.
        """
        count = np.fromiter(map(len, ids), np.int64, len(ids))
        every = np.concatenate(ids)
        within = indices_within(count)
        found = PlannedTokens(
            np.repeat(row, count) + within, np.repeat(position, count) + within,
            np.repeat(index, count), every,
        )  # fmt: skip
        has = every != NO_PROGRAM
        return found if has.all() else PlannedTokens(*(one[has] for one in found))


def plan_of(
    parts: Sequence[PlannedTokens], requests: Requests, tables: Tables, optimistic: bool
) -> StepPlan | None:
    """The plan of these tokens, in the order of rows; None if there are no tokens."""
    given = [part for part in parts if part.rows.size]
    if not given:
        return None
    rows, positions, index, ids = given[0]
    if len(given) > 1:
        rows, positions, index, ids = map(np.concatenate, zip(*given, strict=True))
        order = np.argsort(rows, kind="stable")
        rows, positions, index, ids = rows[order], positions[order], index[order], ids[order]
    owners, slots = requests.owner[index], tables.num_slots[ids]
    ends = np.cumsum(slots)
    delivers = slots > 0
    rows_of, ids_of = rows, ids
    if not delivers.all():
        rows_of, ids_of = rows[delivers], ids[delivers]
        positions, index = positions[delivers], index[delivers]
    layout_of, layouts = _layouts(ids_of, tables)
    labels = Labels(requests.key[index], positions, layout_of, layouts, rows_of)
    size = int(ends[-1])
    delivered = int(tables.num_delivered[ids].sum()) if labels.encodes else size
    return StepPlan(rows, ids, owners, ends - slots, size, delivered, delivers, labels, optimistic)


def _layouts(
    ids: NDArray[np.int32], tables: Tables
) -> tuple[NDArray[np.int32], tuple[Layout, ...]]:
    """The index of each program's layout, int32 [n], and the distinct layouts."""
    if len(ids) and (ids == ids[0]).all():  # the usual case
        return np.zeros(len(ids), np.int32), (tables.layout_of(int(ids[0])),)
    distinct, program_of = np.unique(ids, return_inverse=True)
    places: dict[Layout, int] = {}
    layout_of = [places.setdefault(tables.layout_of(int(i)), len(places)) for i in distinct]
    return np.array(layout_of, np.int32)[program_of], tuple(places)
