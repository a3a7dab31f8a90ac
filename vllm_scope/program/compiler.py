"""A request's actions, compiled: which program each of its tokens gets.

Owns:  RequestProgram.
Runs:  in workers, when a request arrives and when its tokens are planned; in EngineCore and the
       front-end, to count what a request needs. numpy, no torch.
From:  request.resolve.   To: compiled (builds and keeps the programs), plan, admission.

Promise: the program depends on the token's absolute position, never on the step, so chunked
prefill and recompute read and edit the same rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError
from vllm_scope.program.compiled import Column, Compiled, CompiledEdit
from vllm_scope.program.operations import MOST_GATES, Cost, Op, Program, edit_ops, gate_op
from vllm_scope.program.picks import Pick
from vllm_scope.request.heads import Head
from vllm_scope.request.resolved import Resolved, ResolvedGate
from vllm_scope.request.selectors import Ids, Selector, Tokens
from vllm_scope.request.sites import LEVELS, Sites, boundary_of_point

#: Positions past a request's end that a step may still compute: drafts, and the step that
#: async scheduling has already started.
OVERSHOOT = 64
#: Positions whose columns are made at once.
_POSITIONS_AT_ONCE = 4096


def points_of(asked: Resolved) -> Iterator[tuple[Selector, int, Head | None]]:
    """The distinct points of reads and probes: (tokens, point, what is made of the row there)."""
    for read in asked.reads:
        for stream in read.streams:
            yield read.tokens, stream.point(read.when), read.encoding
    cells = ((probe.tokens, cell) for probe in asked.probes for cell in probe.cells)
    # Many probes share a bank.
    yield from dict.fromkeys((tokens, cell.place.point(), cell.bank) for tokens, cell in cells)


def rows_of(asked: Resolved, some: Resolved) -> dict[int, int]:
    """Each point of some actions -> the first of these points that has the same row.

    Two points of a boundary have the same row if no edit of the request `asked` is between them.
    """
    edited = {(e.stream.boundary, e.stream.group) for e in asked.edits}
    named = {point for _, point, _ in points_of(some)}
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

    rows = rows_of(asked, asked)
    #: (pick, what is made of the row) -> points. Many probes share one bank.
    reads: dict[tuple[int, Head | None], dict[int, None]] = {}
    edits = []
    made: dict[Hashable, tuple[Op, ...]] = {}
    gates = _gate_ops(asked)
    # Every action gets a pick, also an action at boundaries that are not here: a column then means
    # the same in every process.
    for tokens, point, head in points_of(asked):
        at = pick(tokens, "deliver")
        if boundary_of_point(point) in here and drains:
            reads.setdefault((at, head), {})[point] = None
    for edit in asked.edits:
        at, place = pick(edit.tokens, "edit", edit.positions), edit.stream
        if place.boundary in here:
            register, gate = -1, None
            if edit.gate is not None:
                op, seen = gates[edit.gate.digest], edit.gate.place
                register, gate = op.register, ((seen.boundary, seen.group), op)
            ops_of = edit_ops(edit, made, register)
            num_ops = (gate is not None) + (1 if edit.reads is None else 2 * edit.reads.shape[0])
            where = (place.boundary, place.group)
            edits.append(CompiledEdit(at, where, ops_of, num_ops, gate))
    check = sites.last_of_stream if asked.edits else None
    return Compiled(
        tuple(picks), tuple((at, tuple(points), head) for (at, head), points in reads.items()),
        tuple(edits), check if check in here else None, rows, asked.banks,
    )  # fmt: skip


def _gate_ops(asked: Resolved) -> dict[bytes, Op]:
    """Digest of a gate -> its operation; edits with equal gates share one.

    Raises:
        SpecError: more gates than a row has registers.
    """
    gates: dict[bytes, ResolvedGate] = {}
    for edit in asked.edits:
        gate = edit.gate
        if gate is not None and (gate.digest not in gates or gate.told is not None):
            gates[gate.digest] = gate
    if len(gates) > MOST_GATES:
        raise SpecError(
            f"the edits have {len(gates)} different gates, those of server-wide edits included; at "
            f"most {MOST_GATES}."
        )
    return {digest: gate_op(gate, i) for i, (digest, gate) in enumerate(gates.items())}


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
            asked: reads, probes and edits, the server's edits first. The Compiled is cached on
                this object, for other requests of the same spec.
            here: the boundaries of the stage.
            drains: False on a rank that edits like the others and delivers nothing.
        """
        known: dict[Hashable, Compiled] = asked.__dict__.setdefault("_compiled", {})
        key = (sites, here, drains)
        if key not in known:
            known[key] = _compile(asked, sites, here, drains)
        compiled = known[key]
        ids = () if compiled.uniform else prompt_ids
        return RequestProgram(num_prompt, np.asarray(ids, np.int64), compiled)

    @property
    def has_vectors(self) -> bool:
        """True if it edits at its boundaries."""
        return self._compiled.has_vectors

    @property
    def checks(self) -> bool:
        """True if its tokens may be reported as faulty: it edits or checks rows here."""
        return bool(self._compiled.edits) or self._compiled.check is not None

    @property
    def empty(self) -> bool:
        return not self._compiled.used and self._compiled.check is None

    @property
    def generated_is_uniform(self) -> bool:
        """True if all generated tokens get one program, and all prompt tokens get one (the two may
        differ)."""
        return self._compiled.uniform

    def _columns(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """[num_picks, num_positions]."""
        tokens = Tokens.running(positions, self.num_prompt, self.prompt_ids)
        columns = np.zeros((len(self._compiled.picks), len(positions)), np.int32)
        for i in self._compiled.used:
            columns[i] = self._compiled.picks[i].values(tokens)
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
        return self._compiled.program(self._superset_column())

    def _superset_column(self) -> Column:
        if self.generated_is_uniform:
            return self._phase_column(True)
        column = self._columns(np.array([self.num_prompt], np.int64))[:, 0]
        for i in self._compiled.used:
            pick = self._compiled.picks[i]
            if pick.use == "deliver" and not pick.uniform:
                column[i] = 1
        return column

    def columns(self, num_positions: int) -> tuple[bytes, ...]:
        """The distinct columns of all positions of the request, and the column of
        `generated_superset`. With them another process can build every program that the request
        may need.

        Raises:
            SpecError: more programs than one request may have.
        """
        found = self._distinct_columns(num_positions)
        superset = self._superset_column()
        return tuple(found | {superset.tobytes(): superset})

    def programs_of(self, columns: Iterable[bytes]) -> list[Program]:
        """The distinct programs of some columns, which may come from another process."""
        compiled = self._compiled
        rows = (np.frombuffer(column, np.int32) for column in columns)
        return _distinct(compiled.program(np.where(compiled.uses, row, 0)) for row in rows)

    def all_programs(self, num_positions: int) -> list[Program]:
        """Every program that some position of the request may get.

        Raises:
            SpecError: more of them than one request may have.
        """
        return self.programs_of(self._distinct_columns(num_positions))

    def _distinct_columns(self, num_positions: int) -> dict[bytes, Column]:
        if self.generated_is_uniform:
            phases = (False, self.num_prompt > 0), (True, num_positions > self.num_prompt)
            given = [self._phase_column(generated) for generated, some in phases if some]
            found = {column.tobytes(): column for column in given}
            self._compiled.check_size(found.values())
            return found
        found = {}
        for first in range(0, num_positions, _POSITIONS_AT_ONCE):
            last = min(first + _POSITIONS_AT_ONCE, num_positions)
            columns = self._columns(np.arange(first, last, dtype=np.int64))
            found |= self._compiled.distinct(columns)
            self._compiled.check_size(found.values())
        return found

    def _of_phase(self, generated: bool) -> Program | None:
        """The program of all tokens of a phase, if the picks are uniform."""
        known = self._compiled.of_phase
        if generated not in known:
            known[generated] = self._compiled.program(self._phase_column(generated))
        return known[generated]

    def _phase_column(self, generated: bool) -> Column:
        compiled = self._compiled
        column = np.zeros(len(compiled.picks), np.int32)
        for i in compiled.used:
            column[i] = compiled.picks[i].value_in(generated)
        return column

    def cost(self, num_positions: int) -> Cost:
        """What the request takes of the device tables, with what drafts may need."""
        return Cost.of(self.programs_of(self.columns(num_positions)))


def _distinct(programs: Iterable[Program | None]) -> list[Program]:
    return list(dict.fromkeys(program for program in programs if program is not None))
