"""Plans each forward of a worker before it runs, and delivers the rows of the forward afterwards.

Owns:  the class `Steps`, which has the plan and the room of the current step.
Runs:  in every worker process, on its main thread.
From:  runners (StepBatch), worker.plan.   To: tap.tables, arena, transport.ring, drain.

Promise: if a step's rows fit into the arena, the worker reserves room for the rows before the
forward starts, in the ring or in the arena. If the rows do not fit, the worker reserves room in the
arena for one tap at a time, before this tap writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_scope.batch.labels import StepBatch
from vllm_scope.engine.functions import StepFunctions
from vllm_scope.engine.worker.delivery import WorkerDelivery
from vllm_scope.graph.tap.tables import Repeat, Tables
from vllm_scope.program.layout import SLOT_BYTES, Widths
from vllm_scope.transport.ring import Lease
from vllm_scope.worker.arena import Arena, Region
from vllm_scope.worker.plan import Planner
from vllm_scope.worker.step_plan import StepPlan

logger = logging.getLogger("vllm.vllm_scope")

#: If a step delivers at most this number of bytes, taps on a GPU write the rows directly to host
#: memory. Such taps wait for PCIe (20 us for 1 MiB), but a copy by the host would take longer.
MOST_DIRECT_BYTES = 1 << 20


class Steps:
    """The steps of one worker with taps. Implements tap.op.StepRoute.

    Args:
        boundaries: the boundaries of the whole model's taps, in the order of the taps' numbers.
        delivery: the worker's WorkerDelivery; None on a rank that delivers no rows.
        functions: the Python functions of requests; None if this engine runs no functions.
        fail: called with the id of a request that cannot be planned, and with the reason.

    Attributes:
        active: True while a forward with programs is running.
        num_steps, num_planned: the number of all forwards so far, and of forwards with programs.
    """

    def __init__(
        self,
        planner: Planner,
        tables: Tables,
        arena: Arena,
        boundaries: tuple[int, ...],
        widths: Widths,
        delivery: WorkerDelivery | None,
        functions: StepFunctions | None,
        fail: Callable[[str, str], None],
    ) -> None:
        self._planner, self._tables, self._arena = planner, tables, arena
        self._boundaries, self._widths = boundaries, widths
        self._delivery, self._functions, self._fail = delivery, functions, fail
        self._step: StepPlan | None = None
        self._region: Region | None = None
        self._lease: Lease | None = None
        self._tap_region: Region | None = None
        self._positions: Tensor | None = None
        self.active = False
        self.num_steps = self.num_planned = 0

    def begin(self, batch: StepBatch, positions: Tensor) -> None:
        """Plan the next forward and load the tables.

        Args:
            batch: the requests and tokens of the forward.
            positions: the correct position of each row, as a tensor [num_rows or more] on the
                device.
        """
        try:
            self._begin(batch, positions)
        except Exception as error:
            # Such an error is a bug of this package. All requests with taps in this step fail, but
            # the engine continues.
            logger.exception("vllm-scope: a step could not be planned")
            self.fail()
            self._tables.clear_step()
            reason = f"vllm-scope failed in a step ({type(error).__name__}); the log says why."
            for req_id in batch.req_ids:
                if req_id in self._planner:
                    self._fail(req_id, reason)

    def _begin(self, batch: StepBatch, positions: Tensor) -> None:
        if self._functions:
            self._functions.begin_step(batch)
        plan, failures = self._planner.begin_step(batch)
        for req_id, error in failures:
            self._fail(req_id, str(error))
        if plan is None:
            self._tables.clear_step()
            return
        self.num_planned += 1
        self._step = plan
        self._positions = positions[: int(batch.query_start[-1])] if plan.optimistic else None
        self.active = True
        if plan.walks is not None:
            self._tables.load_walks(*plan.walks, positions)
        if plan.num_slots == 0:
            # The step has only edits. The tables stay valid until the batch changes.
            if not self._tables.has_loaded(plan.program_ids):
                self._tables.load_step(plan.rows, plan.program_ids, plan.owners, plan.offsets)
            return
        first = self._take_room(plan)
        in_ring, repeat = self._lease is not None, None
        if first is None:
            # Each tap is drained alone. A token's slot is its index among the tokens that deliver.
            slots: NDArray[np.int64] = np.cumsum(plan.delivers) - plan.delivers
        else:
            # Usually a step has the rows of the same requests as the step before, each one position
            # later and in the next slots. Then the tables need no upload (`move_on`).
            if self._planner.is_steady and self._tables.point_at(positions):
                if self._tables.move_on(plan.program_ids, first, in_ring):
                    return
                repeat = self._repeat(plan, first)
            slots = first + plan.offsets
        self._tables.load_step(plan.rows, plan.program_ids, plan.owners, slots, in_ring, repeat)

    def _repeat(self, plan: StepPlan, first: int) -> Repeat:
        """The data with which taps can repeat a step whose first slot is `first`. A repeated step
        has the same rows, each one position later, and needs no upload."""
        assert self._delivery is not None
        since = np.zeros(len(plan.rows), np.int64)
        since[plan.delivers] = plan.labels.positions
        ring = self._arena if self._lease is None else self._delivery.ring
        return Repeat(since, plan.num_slots, (ring.num_slots - first) // plan.num_slots - 1)

    def _take_room(self, plan: StepPlan) -> int | None:
        """The step's first slot, in the ring (`_lease`) or the arena (`_region`). None if the step
        must be drained tap by tap."""
        assert self._delivery is not None
        # The ring is at least as large as the arena. Therefore rows that fit into the arena also
        # fit into the ring.
        fits = max(plan.num_slots, plan.num_delivered) <= self._arena.num_slots
        direct = fits and plan.num_slots * SLOT_BYTES <= MOST_DIRECT_BYTES
        if direct and self._arena.slots.is_cuda and not plan.labels.encodes:
            self._lease = self._delivery.ring.acquire(plan.num_slots)
            return self._lease.start
        if fits:
            self._region = self._arena.acquire(plan.num_slots)
            return self._region.start
        return None

    @property
    def acting(self) -> NDArray[np.bool_] | None:
        return self._tables.acting

    def begin_tap(self, tap: int) -> tuple[int, int] | None:
        acting = self._tables.acting
        if acting is None or not acting[tap]:
            return None
        plan = self._step
        self._tap_region = None
        if plan is None or not plan.num_slots or self._region is not None or self._lease:
            return 0, 0
        boundary = self._boundaries[tap]
        most = max(layout.arena.at(boundary).slots(self._widths) for layout in plan.labels.layouts)
        if most == 0:
            return 0, 0
        self._tap_region = self._arena.acquire(most * len(plan.labels.rows))
        return self._tap_region.start, most

    def end_tap(self, tap: int) -> None:
        if self._tap_region is None:
            return
        assert self._step is not None
        assert self._delivery is not None
        self._delivery.drain.submit(
            self._tap_region, self._step.labels, self._boundaries[tap], self._positions
        )
        self._tap_region = None

    def clear(self) -> None:
        """Drop the last plan. Called before a forward without a plan."""
        self._tables.clear_step()

    def fail(self) -> None:
        """Deliver no more rows of this forward. Called if the forward raised an error or cannot be
        planned."""
        self._step = self._positions = None
        if self._lease is not None:
            self._lease.release()
        # If a tap raised an error, the tap's region still belongs to this step.
        for region in (self._region, self._tap_region):
            if region is not None:
                self._arena.give_back(region)
        self._lease = self._region = self._tap_region = None
        self.active = False
        if self._functions:
            self._functions.end_step()

    def end(self) -> None:
        """Deliver the rows of the forward that the worker has just enqueued."""
        self.num_steps += 1
        if self._functions:
            self._functions.end_step()
        if not self.active:
            return
        self.active = False
        plan, self._step = self._step, None
        region, self._region = self._region, None
        lease, self._lease = self._lease, None
        if plan is None or self._delivery is None:
            return
        if lease is not None:
            self._delivery.drain.submit_written(lease, plan.labels, self._positions)
        elif region is not None:
            self._delivery.drain.submit(region, plan.labels, None, self._positions)
