"""Plans each step. The plan says which programs and which arena slots the rows of the batch get.

Owns:  Planner.
Runs:  in every worker, before the forward, on the CPU. No method waits for the device.
From:  program.compiler (for each request), engine.worker.runners (StepBatch).
To:    step_plan (puts the rows in order).

Promise: a plan depends only on the requests and the batch. If no request has taps, a step needs
only one test of a dict. If a request has the same program for all its tokens from now on, numpy
plans the request together with all others of this kind. Python code plans the other requests one by
one. Usually these requests still compute prompt tokens, or have selectors that pick single
generated tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from vllm_scope.batch.by_position import Ints
from vllm_scope.batch.labels import StepBatch
from vllm_scope.errors import ScopeError
from vllm_scope.graph.tap.tables import MOST_OWNERS, Tables
from vllm_scope.program.compiled import Column
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.held import Held
from vllm_scope.program.operations import NO_LOG, NO_PROGRAM, LogRange
from vllm_scope.worker.planned import Holding, Requests, find_ids
from vllm_scope.worker.step_plan import PlannedTokens, StepPlan, plan_of
from vllm_scope.worker.walks import Walks


@dataclass
class _Steady:
    """The last step. The next step usually has the same requests, one position later."""

    version: int
    req_ids: list[str]
    query_start: bytes
    next_computed: Ints
    plan: StepPlan

    def matches(self, batch: StepBatch, version: int) -> bool:
        # Bytes can be compared because the dtypes are equal. This comparison is faster than a
        # comparison of arrays.
        return (
            self.version == version
            and self.req_ids == batch.req_ids
            and self.query_start == batch.query_start.tobytes()
            and self.next_computed.tobytes() == batch.num_computed.tobytes()
        )

    def advance(self) -> StepPlan:
        """The plan of the next step. `matches` must have returned True for this step. After the
        call, this object describes the next step."""
        labels = self.plan.labels
        self.plan = replace(self.plan, labels=replace(labels, positions=labels.positions + 1))
        self.next_computed = self.next_computed + 1
        return self.plan


class Planner:
    """Holds the requests with taps, and plans steps."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._requests = Requests()
        self._walks = Walks()
        #: `_version` increases if a request is added, ends, changes, starts again, or begins a
        #: stage.
        self._version = 0
        self._steady: _Steady | None = None
        #: Maps an owner number (StepPlan.owners) to the id of a request with edits. Any thread can
        #: read this dict.
        self.owners: dict[int, str] = {}
        self._last_owner = 0
        #: The number of planned requests, added up over all steps.
        self.num_requests_planned = 0

    def __len__(self) -> int:
        return len(self._requests.index_of)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests.index_of

    @property
    def is_steady(self) -> bool:
        """True if the next step can reuse the last plan. The next step reuses the plan if it has
        the same requests without changes, each one token later. A reused plan keeps the array
        object `program_ids`. If `is_steady` is False, the next plan has a new array."""
        return self._steady is not None

    def key_of(self, req_id: str) -> int | None:
        """A request's key; None if the request is not known."""
        index = self._requests.index_of.get(req_id)
        return None if index is None else int(self._requests.key[index])

    def add_request(
        self, req_id: str, key: int, program: RequestProgram, held: Held | None,
        logged: LogRange = NO_LOG,
    ) -> None:  # fmt: skip
        """Plan a request's tokens from now on.

        Args:
            held: Every program that the request's tokens can get, if these programs have vectors;
                else None. This call reserves room in the tables for all of these programs.
            logged: The range of the log in which the states of the request's gates are stored.

        Raises:
            CapacityError: the tables have no room for the programs.
        """
        new, generated = self._hold(0, program, held)
        requests = self._requests
        self._version += 1
        index = requests.take()
        requests.index_of[req_id] = index
        requests.programs[index] = program
        requests.held[index] = new
        requests.key[index] = key
        requests.first_fixed[index] = program.first_fixed
        requests.owner[index] = self._new_owner(req_id) if program.checks else 0
        requests.generated[index] = generated
        requests.generated_fixed[index] = program.generated_is_uniform
        if logged.num_states:
            self._walks.add_request(index, program.num_prompt, logged)

    def change_request(
        self, req_id: str, first: int, program: RequestProgram, held: Held | None
    ) -> None:
        """Give a request's tokens another program, from the position `first` on. Earlier tokens
        keep their program, even if they are computed again.

        Args:
            first: A position at or after the first generated token.
            held: The same as for `add_request`, but for the new program. If all generated tokens
                get one program, `held` can also be None.

        Raises:
            CapacityError: the tables have no room for the programs.
        """
        requests = self._requests
        index = requests.index_of[req_id]
        whole = requests.programs[index].then(first, program)
        new, generated = self._hold(first, whole.last, held)
        self._version += 1
        requests.programs[index] = whole
        known = requests.held[index]
        # No token will get the programs of older changes at or after `first`.
        self._release(one for one in known if one.since >= first)
        requests.held[index] = (*(one for one in known if one.since < first), *new)
        requests.first_fixed[index], requests.generated[index] = first, generated

    def _hold(
        self, since: int, program: RequestProgram, held: Held | None,
        known: Sequence[Holding] = (),
    ) -> tuple[tuple[Holding, ...], int]:  # fmt: skip
        """Let the tables hold the programs `held` while a request runs. If all generated tokens get
        the same program, also hold this program, except if `held` or `known` already has it.
        Returns the new holdings, and the id of this program (NO_PROGRAM if the generated tokens get
        different programs)."""
        # `begin_step` first frees the programs that only the last step used.
        self._tables.begin_step()
        new = () if held is None else (Holding(since, held, self._tables.hold(held)),)
        if not program.generated_is_uniform:
            return new, NO_PROGRAM
        columns = [program.superset_column()]
        found = find_ids(program, columns, (*known, *new))
        if found is None:
            held = program.held([columns[0].tobytes()])
            try:
                found = self._tables.hold(held)
            except Exception:
                self._release(new)
                raise
            new = (*new, Holding(since, held, found))
        return new, int(found[0])

    def _release(self, holdings: Iterable[Holding]) -> None:
        for one in holdings:
            self._tables.release_set(one.held)

    def resume_request(self, req_id: str, num_tokens: int) -> None:
        """Record that a preempted request starts again.

        Args:
            num_tokens: The number of the request's prompt tokens and accepted generated tokens.
        """
        index = self._requests.index_of.get(req_id)
        if index is not None:
            self._version += 1
            self._walks.resume(index, num_tokens)

    def begin_stages(self, req_id: str, firsts: Sequence[str]) -> None:
        """From now on, plan a request's tokens with the probes that waited for the verdicts of
        `firsts`. Such a probe then also scores tokens before the first position of its stage. The
        code that reads scores drops these extra scores. The code finds these scores by the
        positions in the labels.

        Raises:
            CapacityError: the tables have no room for the programs. In this case, the request is
                planned as before.
        """
        requests = self._requests
        index = requests.index_of.get(req_id)
        if index is None:
            return
        program, known = requests.programs[index].told(firsts), requests.held[index]
        new: tuple[Holding, ...] = ()
        generated = NO_PROGRAM
        try:
            # Tokens before the last change can be computed again. Therefore the tables need the new
            # programs of every part, not only of the last part.
            for since, one in program.parts:
                more, generated = self._hold(since, one, None, known)
                new = (*new, *more)
        except Exception:
            self._release(new)
            raise
        requests.held[index] = (*known, *new)
        requests.programs[index], requests.generated[index] = program, generated
        requests.first_fixed[index] = program.first_fixed
        self._version += 1

    def finish_request(self, req_id: str) -> int | None:
        """Forget a request, and return its key; None if the request is not known."""
        requests = self._requests
        index = requests.index_of.pop(req_id, None)
        if index is None:
            return None
        self._version += 1
        del requests.programs[index]
        self._release(requests.held.pop(index))
        requests.free.append(index)
        self._walks.finish_request(index)
        self.owners.pop(int(requests.owner[index]), None)
        return int(requests.key[index])

    def _new_owner(self, req_id: str) -> int:
        """The next free owner number. The numbers are given out in cyclic order, because a running
        step can still use a number that was freed shortly before."""
        owner = self._last_owner % (MOST_OWNERS - 1) + 1
        while owner in self.owners:
            owner = owner % (MOST_OWNERS - 1) + 1
        self._tables.faults[owner] = 0  # clears a fault of the last request with this number
        self.owners[owner] = req_id
        self._last_owner = owner
        return owner

    def begin_step(self, batch: StepBatch) -> tuple[StepPlan | None, list[tuple[str, ScopeError]]]:
        """Plan one forward.

        Returns:
            The plan, or None if no row has a program; and (request id, reason) for each request
            that could not be planned.
        """
        if not self._requests.index_of:
            return None, []
        if self._steady is not None and self._steady.matches(batch, self._version):
            plan = self._steady.advance()
            self.num_requests_planned += len(plan.rows)
            self._tables.begin_step()
            return plan, []
        self._steady = None
        requests, num_reqs = self._requests, len(batch.req_ids)
        get = requests.index_of.get
        index = np.fromiter((get(r, -1) for r in batch.req_ids), np.int64, num_reqs)
        counts = np.diff(batch.query_start).astype(np.int64)
        reads = (index >= 0) & (counts > 0)
        # Usually every request has taps. A slice is then faster than indices.
        reading = slice(None) if reads.all() else np.flatnonzero(reads)
        index, count = index[reading], counts[reading]
        if index.size == 0:
            return None, []
        self.num_requests_planned += int(index.size)
        self._tables.begin_step()

        first_row = batch.query_start[:-1][reading].astype(np.int64)
        first_position = batch.num_computed[reading].astype(np.int64)
        in_columns = first_position >= requests.first_fixed[index]
        in_columns &= requests.generated_fixed[index]
        generated = requests.generated[index]

        easy = in_columns & (generated != NO_PROGRAM)
        columns = index, generated, first_row, first_position, count
        of_easy = columns if easy.all() else tuple(column[easy] for column in columns)
        parts = [PlannedTokens.of_requests(*of_easy)]
        failures: list[tuple[str, ScopeError]] = []
        planned, ids = [], []
        for i in np.flatnonzero(~in_columns).tolist():
            try:
                ids.append(self._ids(
                    int(index[i]), int(first_position[i]), int(count[i]), batch.optimistic
                ))  # fmt: skip
                planned.append(i)
            except ScopeError as error:
                in_batch = int(np.flatnonzero(reads)[i])
                failures.append((batch.req_ids[in_batch], error))
        if planned:
            parts.append(PlannedTokens.of_tokens(
                index[planned], ids, first_row[planned], first_position[planned]
            ))  # fmt: skip
        found = plan_of(parts, requests, self._tables, batch.optimistic)
        if found is not None and self._walks:
            found = replace(found, walks=self._walks.rows(index, first_row, count))
        if found is not None and in_columns.all() and not batch.optimistic and count.max() == 1:
            self._steady = _Steady(
                self._version, list(batch.req_ids), batch.query_start.tobytes(),
                batch.num_computed + counts, found,
            )  # fmt: skip
        return found, failures

    def _ids(self, index: int, first: int, count: int, optimistic: bool) -> NDArray[np.int32]:
        """The program ids of a request's tokens, [count]."""
        program, held = self._requests.programs[index], self._requests.held[index]
        superset = optimistic and first >= program.num_prompt
        found = []
        for one, start, length in program.parts_at(first, count):
            if superset:
                columns, of_tokens = [one.superset_column()], np.zeros(length, np.int64)
            else:
                columns, of_tokens = one.distinct_at(start, length)
            ids = find_ids(one, columns, held)
            if ids is None:
                ids = np.array([self._id_of(one, column, held) for column in columns], np.int32)
            found.append(ids[of_tokens])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _id_of(self, program: RequestProgram, column: Column, held: Sequence[Holding]) -> int:
        """The id of one program. If the request does not hold the program, the id is valid only in
        this step."""
        found = find_ids(program, [column], held)
        if found is not None:
            return int(found[0])
        one = program.program(column)
        return NO_PROGRAM if one is None else self._tables.program_id(one)
