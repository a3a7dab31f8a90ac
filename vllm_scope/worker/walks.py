"""Finds, for each row of a step, where the log has the states of the request's gates.

Owns:  Walks.
Runs:  in every worker, before the forward, on the CPU. No method waits for the device.
From:  plan (requests and positions), core.admission (the requests' ranges of the log).
To:    tap.tables (the walks of the rows).

Promise: a gate has only one state at each position. In each step, all tokens of a request before
its first row in this step are accepted. Therefore the states of these tokens are final. When a
preempted request starts again, the log already has the states of all its generated tokens except
the last one. These states are not computed again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_scope.batch.by_position import Ints, indices_within
from vllm_scope.graph.tap.states import INDEX, KNOWN, NUM_WALK_COLUMNS, WIDTH
from vllm_scope.program.operations import LogRange


class Walks:
    """The ranges of the log in which the states of running requests are stored. A request is
    identified by its index in planned.Requests."""

    def __init__(self) -> None:
        #: [requests, NUM_WALK_COLUMNS], the walk of each request's first row in a step.
        self._walks = np.zeros((0, NUM_WALK_COLUMNS), np.int32)
        self._requests: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add_request(self, index: int, num_prompt: int, logged: LogRange) -> None:
        """Record where the log stores the states of a request. `logged` is the request's range of
        the log."""
        missing = index + 1 - len(self._walks)
        if missing > 0:
            more = max(missing, 64, len(self._walks))
            self._walks = np.pad(self._walks, ((0, more), (0, 0)))
        start, num_tokens, num_states = logged
        self._walks[index] = start, num_states, num_tokens, num_prompt, 0, 0, 0, 0
        self._requests.add(index)

    def finish_request(self, index: int) -> None:
        if index in self._requests:
            self._requests.remove(index)
            self._walks[index, WIDTH] = 0

    def resume(self, index: int, num_tokens: int) -> None:
        """Record that a preempted request starts again with `num_tokens` tokens. All generated
        tokens except the last token were computed before, and have states in the log."""
        if index in self._requests:
            self._walks[index, KNOWN] = num_tokens - 1

    def rows(
        self, index: Ints, first_row: Ints, count: Ints
    ) -> tuple[Ints, NDArray[np.int32]] | None:
        """The walks of a step's rows.

        Args:
            index, first_row, count: The index, the first row and the number of rows of each request
                of the step.

        Returns:
            The rows of requests with states, [n], ascending, and the walks of these rows, [n,
            NUM_WALK_COLUMNS]. None if no request of the step has states.
        """
        known = np.flatnonzero(index < len(self._walks))
        has = known[self._walks[index[known], WIDTH] > 0]
        if not len(has):
            return None
        has = has[np.argsort(first_row[has])]
        row, count = first_row[has], count[has]
        within = indices_within(count)
        walks = np.repeat(self._walks[index[has]], count, axis=0)
        walks[:, INDEX] = within
        return np.repeat(row, count) + within, walks
