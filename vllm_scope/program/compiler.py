"""A request's actions, compiled: which program each of its tokens gets.

Owns:  RequestProgram.
Runs:  in workers, when a request arrives and when its tokens are planned; in EngineCore and the
       front-end, to count what a request needs. numpy, no torch.
From:  request.resolve.   To: compiled (builds and keeps the programs), plan, admission.

Promise: the program depends on the token's absolute position, never on the step, so chunked
prefill and recompute read and edit the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vllm_scope.program.compiled import Column, Compiled
from vllm_scope.program.operations import OP_DOT, Cost, Op, Program, edit_op
from vllm_scope.program.picks import Pick
from vllm_scope.request.resolve import Resolved, ResolvedRead
from vllm_scope.request.selectors import Ids, Selector, Tokens
from vllm_scope.request.sites import LEVELS, Sites

#: Positions whose columns are made at once.
_POSITIONS_AT_ONCE = 4096


def rows_of(asked: Resolved, reads: Iterable[ResolvedRead]) -> dict[int, int]:
    """Each point that some reads name -> the first of them with the same row.

    Two points of a boundary have the same row if no edit of the request is between them.
    """
    edited = {(e.stream.boundary, e.stream.group) for e in asked.edits}
    named = {stream.point(read.when) for read in reads for stream in read.streams}
    firsts: dict[tuple[int, int], int] = {}
    found = {}
    for point in sorted(named):
        boundary, level = divmod(point, LEVELS)
        while level and (boundary, level - 1) not in edited:
            level -= 1
        found[point] = firsts.setdefault((boundary, level), point)
    return found


def _compile(asked: Resolved, sites: Sites, here: frozenset[int], drains: bool) -> Compiled:
    picks: dict[Pick, int] = {}

    def pick(
        selector: Selector, use: Literal["edit", "deliver"], positions: tuple[int, ...] = ()
    ) -> int:
        return picks.setdefault(Pick(selector, use, positions), len(picks))

    rows = rows_of(asked, asked.reads)
    reads, scores, edits = [], [], []
    made: dict[Any, Op] = {}
    for read in asked.reads if drains else ():
        points = tuple(
            stream.point(read.when) for stream in read.streams if stream.boundary in here
        )
        if points:
            reads.append((pick(read.tokens, "deliver"), points, read.encoding))
    for probe in asked.probes if drains else ():
        if probe.stream.boundary in here:
            op = Op(OP_DOT, 0, probe.weight, probe.bias)
            point = probe.stream.point()
            scores.append((pick(probe.tokens, "deliver"), point, probe.number, op))
    for edit in asked.edits:
        place = (edit.stream.boundary, edit.stream.group)
        if place[0] in here:
            at = pick(edit.tokens, "edit", edit.positions)
            edits.append((at, place, edit_op(edit, made)))
    check = sites.last_of_stream if asked.edits else None
    return Compiled(
        tuple(picks), tuple(reads), tuple(scores), tuple(edits), check if check in here else None,
        rows,
    )  # fmt: skip


@dataclass(frozen=True)
class RequestProgram:
    """Which program each token of one request gets.

    Attributes:
        prompt_ids: empty if no selector looks at them.
    """

    num_prompt: int
    prompt_ids: NDArray[np.int64]
    _compiled: Compiled

    @staticmethod
    def compile(
        asked: Resolved,
        sites: Sites,
        here: frozenset[int],
        num_prompt: int,
        prompt_ids: Ids,
        drains: bool = True,
    ) -> RequestProgram:
        """Compile the actions at the boundaries of a worker's stage.

        Args:
            asked: reads, probes and edits, the server's edits first. The Compiled is kept on it,
                for other requests of the same spec.
            here: the boundaries.
            drains: False on a rank that edits like the others and delivers nothing.
        """
        known: dict[Any, Compiled] = asked.__dict__.setdefault("_compiled", {})
        key = (sites, here, drains)
        if key not in known:
            known[key] = _compile(asked, sites, here, drains)
        compiled = known[key]
        ids = () if compiled.uniform else prompt_ids
        return RequestProgram(num_prompt, np.asarray(ids, np.int64), compiled)

    @property
    def has_vectors(self) -> bool:
        """It has scores or edits."""
        return self._compiled.has_vectors

    @property
    def checks(self) -> bool:
        """Its tokens may be reported as faulty, because something edits them."""
        return bool(self._compiled.edits) or self._compiled.check is not None

    @property
    def empty(self) -> bool:
        return not self._compiled.picks and self._compiled.check is None

    @property
    def generated_is_uniform(self) -> bool:
        """All generated tokens get one program, and all prompt tokens get one."""
        return self._compiled.uniform

    def _columns(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """[num_picks, num_positions]."""
        tokens = Tokens.running(positions, self.num_prompt, self.prompt_ids)
        columns = np.zeros((len(self._compiled.picks), len(positions)), np.int32)
        for i, pick in enumerate(self._compiled.picks):
            columns[i] = pick.values(tokens)
        return columns

    def runs(self, first: int, count: int) -> list[tuple[int, int, Program]]:
        """Runs of tokens with the same program among positions first .. first+count-1.

        Returns:
            (offset from `first`, length, program); tokens without a program are left out.
        """
        if self.generated_is_uniform:
            prompt, generated = self._of_phase(False), self._of_phase(True)
            split = 0 if prompt is generated else min(max(self.num_prompt - first, 0), count)
            phases = (0, split, prompt), (split, count - split, generated)
            return [(at, length, one) for at, length, one in phases if length and one is not None]
        columns = self._columns(np.arange(first, first + count, dtype=np.int64))
        edges = np.flatnonzero((columns[:, 1:] != columns[:, :-1]).any(axis=0)) + 1
        found = []
        for start, stop in zip([0, *edges], [*edges, count], strict=True):
            program = self._compiled.program(columns[:, start])
            if program is not None:
                found.append((int(start), int(stop - start), program))
        return found

    def generated_superset(self) -> Program | None:
        """One program that delivers whatever any generated token may need.

        Used if the host does not know a token's position when the step is planned (draft
        tokens under async scheduling): the extra rows are dropped by their labels. Edits of
        generated tokens then do not depend on the position; the front-end checked that.
        """
        if self.generated_is_uniform:
            return self._of_phase(True)
        column = self._columns(np.array([self.num_prompt], np.int64))[:, 0]
        for i, pick in enumerate(self._compiled.picks):
            if pick.use == "deliver" and not pick.uniform:
                column[i] = 1
        return self._compiled.program(column)

    def all_programs(self, num_positions: int) -> list[Program]:
        """Every program that some position of the request may get.

        Raises:
            SpecError: more of them than one request may have.
        """
        if self.generated_is_uniform:
            return _distinct(
                self._of_phase(generated) for generated, some in
                ((False, self.num_prompt > 0), (True, num_positions > self.num_prompt)) if some
            )  # fmt: skip
        found: dict[bytes, Column] = {}
        for first in range(0, num_positions, _POSITIONS_AT_ONCE):
            last = min(first + _POSITIONS_AT_ONCE, num_positions)
            columns = self._columns(np.arange(first, last, dtype=np.int64))
            found |= self._compiled.distinct(columns)
            self._compiled.check_size(found.values())
        return _distinct(self._compiled.program(column) for column in found.values())

    def with_drafts(self, num_positions: int) -> list[Program]:
        """`all_programs` and `generated_superset`: what a request with vectors holds."""
        return _distinct([*self.all_programs(num_positions), self.generated_superset()])

    def _of_phase(self, generated: bool) -> Program | None:
        """The program of all tokens of a phase, if the picks are uniform."""
        known = self._compiled.of_phase
        if generated not in known:
            column = [pick.value_in(generated) for pick in self._compiled.picks]
            known[generated] = self._compiled.program(np.array(column, np.int32))
        return known[generated]

    def cost(self, num_positions: int) -> Cost:
        """What the request takes of the device tables, with what drafts may need."""
        return self.cost_of(self.all_programs(num_positions))

    def cost_of(self, programs: list[Program]) -> Cost:
        """`cost`, from the result of `all_programs`."""
        return Cost.of(_distinct([*programs, self.generated_superset()]))


def _distinct(programs: Iterable[Program | None]) -> list[Program]:
    return list(dict.fromkeys(program for program in programs if program is not None))
