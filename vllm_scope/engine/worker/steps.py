"""What the taps of a worker do in each forward: planned before it, sent on their way behind it.

Owns:  Steps, the worker's state of the current step.
Runs:  in every worker process, on its main thread.
From:  runners (StepBatch), plan.   To: tap.tables, arena, host_ring, drain.

Promise: a step that delivers has room before its forward starts: whole in the host's ring or in
the arena, or, where it is larger, tap by tap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from vllm_scope.engine.functions import StepFunctions
from vllm_scope.engine.worker.delivery import Delivery
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program.layout import SLOT_BYTES, Widths
from vllm_scope.transport.ring import Lease
from vllm_scope.worker.arena import Arena, Region
from vllm_scope.worker.plan import Planner, StepBatch, StepPlan

logger = logging.getLogger("vllm.vllm_scope")

#: Steps that deliver up to this much write host memory themselves. The taps then wait
#: for PCIe (20 us for 1 MiB), which is less than what a copy costs the host.
MOST_DIRECT_BYTES = 1 << 20
#: And not where there are more scores than this: each is a write of four bytes across PCIe by
#: itself, of 80 to 270 ns (H200: 64 probes on 64 and on 256 rows, above what the arena takes).
MOST_DIRECT_SCORES = 512


class Steps:
    """The steps of one worker with taps, as the taps ask for them (tap.op.StepRoute).

    Verbs: `begin`, `end`, and `clear` before a forward that nobody planned.

    Args:
        boundaries: of the whole model's taps, by their numbers.
        delivery: None on a rank that delivers nothing.
        functions: requests' Python; None where this engine runs none.
        fail: told of a request that cannot be planned, and why.

    Attributes:
        active: a forward with programs is running.
        num_steps, num_planned: forwards so far, and those with programs.
    """

    def __init__(
        self,
        planner: Planner,
        tables: Tables,
        arena: Arena,
        boundaries: tuple[int, ...],
        widths: Widths,
        delivery: Delivery | None,
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
        """Plan the coming forward and load the tables.

        Args:
            batch: what it computes.
            positions: [num_rows or more], device: the true positions.
        """
        try:
            self._begin(batch, positions)
        except Exception as error:
            # A fault of ours: who is in this step fails, the engine and plain neighbours go on.
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
        if plan.num_slots == 0:
            # Edits alone: the same rows get the same programs until the batch changes.
            if not self._tables.has_loaded(plan.program_ids):
                self._tables.load_step(plan.rows, plan.program_ids, plan.owners, plan.offsets)
            return
        first = self._take_room(plan)
        if first is None:
            # Drained tap by tap, a token's slot is its number among those that deliver.
            slots: Any = np.cumsum(plan.delivers) - plan.delivers
        else:
            slots = first + plan.offsets
        in_ring = self._lease is not None
        self._tables.load_step(plan.rows, plan.program_ids, plan.owners, slots, in_ring)

    def _take_room(self, plan: StepPlan) -> int | None:
        """Where the step's slots begin: in the host's ring, in the arena, or in neither."""
        assert self._delivery is not None
        direct = (
            plan.num_slots * SLOT_BYTES <= MOST_DIRECT_BYTES
            and plan.most_scores <= MOST_DIRECT_SCORES
        )
        if direct and self._arena.slots.is_cuda and not plan.labels.encodes:
            self._lease = self._delivery.ring.acquire(plan.num_slots)
            return self._lease.start
        # The ring is as large as the arena, at least.
        if max(plan.num_slots, plan.num_delivered) <= self._arena.num_slots:
            self._region = self._arena.acquire(plan.num_slots)
            return self._region.start
        return None

    def begin_tap(self, tap: int) -> tuple[int, int] | None:
        if not self._tables.acts_at(tap):
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

    def clear(self) -> None:
        """Before a forward that nobody plans: what the last one was told must go."""
        self._tables.clear_step()

    def fail(self) -> None:
        """The forward raised, or cannot be planned: nothing of it is delivered."""
        self._step = self._positions = None
        if self._lease is not None:
            self._lease.release()
        if self._region is not None:
            self._arena.give_back(self._region)
        self._lease = self._region = self._tap_region = None
        self.active = False
        if self._functions:
            self._functions.end_step()

    def end(self) -> None:
        """The forward was enqueued: send what it delivers on its way."""
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
