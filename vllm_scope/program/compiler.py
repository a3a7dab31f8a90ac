"""Compiles a request's actions, and determines the program of each token.

Owns:  RequestProgram.
Runs:  in workers, when a request arrives and when its tokens are planned; in EngineCore and the
       front-end, to compute the Cost of a request. numpy, no torch.
From:  request.resolve.   To: compiled (builds and keeps the programs), plan, admission.

The docstring of compiled.py explains the words pick, column, boundary, group and point. A pick is
uniform if it selects all prompt tokens or none, and all generated tokens or none.

Promise: a token's program depends on the token's absolute position, and never on the step.
Therefore a prefill in chunks, or a second computation of tokens, reads and edits the same rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, starmap
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError
from vllm_scope.program.compiled import Column, Compiled, CompiledEdit
from vllm_scope.program.held import Held
from vllm_scope.program.operations import (
    MOST_GATES,
    Cost,
    Op,
    Program,
    edit_ops,
    gate_op,
    score_ops,
    state_op,
)
from vllm_scope.program.picks import Pick
from vllm_scope.program.ranges import (
    ColumnRange,
    ColumnsKey,
    RangeKey,
    remembered,
    remembered_columns,
)
from vllm_scope.request.heads import Head, Scored, Summed
from vllm_scope.request.resolved import Resolved, ResolvedEdit, ResolvedGate
from vllm_scope.request.selectors import Ids, Selector, Tokens
from vllm_scope.request.sites import LEVELS, Place, Sites, boundary_of_point

#: A step can compute at most this many positions after the end of a request. These are positions of
#: draft tokens, or of a step that async scheduling started before the end was known.
OVERSHOOT = 64
#: A loop over all positions of a request handles this many positions at a time.
POSITIONS_AT_ONCE = 4096


class Point(NamedTuple):
    """A point at which an action needs a row.

    Attributes:
        head: the head that is applied to the row. None for the plain row.
        after: the name of the probe for whose verdict the action waits. None if the action waits
            for no verdict.
    """

    tokens: Selector
    point: int
    head: Head | None
    after: str | None = None


def points_of(asked: Resolved) -> tuple[Point, ...]:
    """The Points of the actions that need rows. If several probes of one bank need equal Points,
    the result has only one of these Points."""
    found: tuple[Point, ...] | None = asked.__dict__.get("_points")
    if found is None:
        # Cached, because many requests share a Resolved, which can have 1,000 probes.
        found = asked.__dict__["_points"] = tuple(_points_of(asked))
    return found


def _points_of(asked: Resolved) -> Iterator[Point]:
    for read in asked.reads:
        for stream in read.streams:
            yield Point(read.tokens, stream.point(read.when), read.encoding)
    cells = ((one, cell) for one in asked.banked for cell in one.cells)
    # dict.fromkeys drops equal Points, because many probes can share a bank.
    yield from dict.fromkeys(
        Point(probe.tokens, cell.place.point(), cell.bank, probe.after) for probe, cell in cells
    )
    for i, one in enumerate(asked.moments):
        for stream in one.streams:
            yield Point(one.tokens, stream.point(), Summed.of(i))


def rows_of(asked: Resolved, some: Resolved) -> dict[int, int]:
    """Maps each point of the actions in `some` to the lowest point of these actions that has the
    same row.

    Two points of a boundary have the same row if no edit of `asked` is between them.
    """
    edited = {(e.stream.boundary, e.stream.group) for e in asked.edits}
    named = {each.point for each in points_of(some)}
    firsts: dict[tuple[int, int], int] = {}
    found = {}
    for point in sorted(named):
        boundary, level = divmod(point, LEVELS)
        while level and (boundary, level - 1) not in edited:
            level -= 1
        found[point] = firsts.setdefault((boundary, level), point)
    return found


def _compile(asked: Resolved, sites: Sites, here: frozenset[int], drains: bool) -> Compiled:
    #: The index of each pick, by the pick's attributes.
    picks: dict[tuple[Selector, Literal["edit", "deliver"], tuple[int, ...], str | None], int] = {}

    def pick(
        selector: Selector, use: Literal["edit", "deliver"], positions: tuple[int, ...] = (),
        after: str | None = None,
    ) -> int:  # fmt: skip
        return picks.setdefault((selector, use, positions, after), len(picks))

    rows = rows_of(asked, asked)
    #: The points of each pair of a pick and a head. A dict drops equal points, because many probes
    #: can share one bank.
    reads: dict[tuple[int, Head | None], dict[int, None]] = {}
    #: By (bank, point), the picks of each bank that taps compute. The banks keep this order in all
    #: programs. If the order depended on the column, two programs with the same operations could
    #: differ, and each would take room in the tables.
    scored: dict[tuple[Head | None, int], list[int]] = {}
    scores = _scores(asked)
    edits = []
    made: dict[Hashable, tuple[Op, ...]] = {}
    gates = _gate_ops(asked)
    # Actions at boundaries outside `here` also get picks, so that a column has the same meaning in
    # every process.
    for tokens, point, head, after in points_of(asked):
        at = pick(tokens, "deliver", after=after)
        if boundary_of_point(point) in here and drains:
            reads.setdefault((at, head), {})[point] = None
            if (head, point) in scores:
                scored.setdefault((head, point), []).append(at)
    for _, group in groupby(asked.edits, _action_of):
        some = list(group)
        first = some[0]
        at = pick(first.tokens, "edit", first.positions)
        places = [edit.stream for edit in some if edit.stream.boundary in here]
        edits += _compiled_edits(at, first, places, gates, made)
    check = sites.last_of_stream if asked.edits else None
    return Compiled(
        tuple(starmap(Pick, picks)),
        tuple((at, tuple(points), head) for (at, head), points in reads.items()),
        tuple(edits), check if check in here else None, rows, asked.banks_on_rows(),
        tuple((at, one[1], scores[one]) for one, picks in scored.items() for at in picks),
    )  # fmt: skip


def _scores(asked: Resolved) -> dict[tuple[Head | None, int], tuple[Op, ...]]:
    """The operations that compute the numbers of a bank, in order. The key is (bank, point). Only
    banks that taps compute are in the result."""
    found: dict[tuple[Head | None, int], tuple[Op, ...]] = {}
    for cell in (cell for one in asked.banked for cell in one.cells):
        if isinstance(cell.bank, Scored):
            key = cell.bank, cell.place.point()
            found[key] = (*found.get(key, ()), *score_ops(cell))
    return found


def _compiled_edits(
    pick: int, edit: ResolvedEdit, places: list[Place], gates: Mapping[bytes, _GateOps],
    made: dict[Hashable, tuple[Op, ...]],
) -> list[CompiledEdit]:  # fmt: skip
    """Compile an edit for each of `places`. `made` is passed to `edit_ops`."""
    if not places:
        return []
    gate = None if edit.gate is None else gates[edit.gate.digest]
    ops_of = edit_ops(edit, made, -1 if gate is None else gate.op.register)
    num_ops = 1 if edit.reads is None else 2 * edit.reads.shape[0]
    values = edit.values if edit.positions else None
    found = []
    for place in places:
        before = () if gate is None else gate.before(place)
        at = place.boundary, place.group
        found.append(CompiledEdit(pick, at, ops_of, len(before) + num_ops, before, values))
    return found


def _fitted(first: Compiled, asked: Resolved, here: frozenset[int]) -> Compiled | None:
    """Make the Compiled of `asked` from `first`, whose spec differs from `asked` only in the
    layers, vectors and numbers of the edits. None if `first` reads rows, or if one of the two specs
    edits at a boundary outside `here`."""
    places = [edit.stream for edit in asked.edits]
    if first.reads or len(first.edits) != len(places):
        return None
    if not here.issuperset(place.boundary for place in places):
        return None
    gates, found = _gate_ops(asked), []
    for one, edit, place in zip(first.edits, asked.edits, places, strict=True):
        found += _compiled_edits(one.pick, edit, [place], gates, {})
    return first.with_edits(tuple(found))


def _action_of(edit: ResolvedEdit) -> tuple[object, ...]:
    """A key that is equal for edits that differ only in their streams."""
    return (
        edit.kind, edit.values, edit.tokens, edit.numbers, edit.positions, edit.norm_match,
        edit.limit, edit.gate, edit.dose, edit.reads,
    )  # fmt: skip


class _GateOps(NamedTuple):
    """The operations of a gate. `op` runs at the gate's place. If the gate has a state, `state`
    runs at the edits' places."""

    at: tuple[int, int]
    op: Op
    state: Op | None

    def before(self, edited: Place) -> tuple[tuple[tuple[int, int], Op], ...]:
        """The gate's operations that must run before an edit at `edited`, each as ((boundary,
        group), operation). If edits at several places share the gate, the state is advanced at each
        of these places, always to the same value."""
        if self.state is None:
            return ((self.at, self.op),)
        state = self.state
        if state.told is not None and state.told[0] != edited:
            state = state._replace(told=None)
        return ((self.at, self.op), ((edited.boundary, edited.group), state))


def _gate_ops(asked: Resolved) -> dict[bytes, _GateOps]:
    """The operations of each gate, by the gate's digest. Edits with equal gates share operations.

    A register is a number for one row, with which an operation passes a value to a later operation.
    Gates with a state use the first registers. The register's number is also the index of the
    gate's state in the log.

    Raises:
        SpecError: the gates need more than MOST_GATES registers. A gate with a state needs two
            registers, and any other gate needs one.
    """
    gates: dict[bytes, ResolvedGate] = {}
    for edit in asked.edits:
        gate = edit.gate
        if gate is not None and (gate.digest not in gates or gate.told is not None):
            gates[gate.digest] = gate
    num_states = sum(gate.state is not None for gate in gates.values())
    if len(gates) + num_states > MOST_GATES:
        twice = f", {num_states} of them with a state, which count twice" if num_states else ""
        raise SpecError(
            f"the edits, including server-wide edits, have {len(gates)} different gates"
            f"{twice}; at most {MOST_GATES}."
        )
    found = {}
    for i, gate in enumerate(sorted(gates.values(), key=lambda gate: gate.state is None)):
        score = MOST_GATES - 1 - i if gate.state is not None else -1
        state = None if gate.state is None else state_op(gate, i, score)
        at = gate.place.boundary, gate.place.group
        found[gate.digest] = _GateOps(at, gate_op(gate, i, score), state)
    return found


@dataclass(frozen=True)
class RequestProgram:
    """Determines the program that each token of one request gets.

    Attributes:
        prompt_ids: the prompt's token ids. Empty if all picks are uniform.
        later: pairs (first position, RequestProgram), in ascending order. From its first position
            on, such a RequestProgram replaces the RequestProgram before it.
        begun: the names of the probes that have a verdict. While an action waits for the verdict of
            a probe that is not in `begun`, the value of the action's pick is 0.
    """

    num_prompt: int
    prompt_ids: NDArray[np.int64]
    _compiled: Compiled
    later: tuple[tuple[int, RequestProgram], ...] = ()
    begun: frozenset[str] = frozenset()

    @staticmethod
    def compile(
        asked: Resolved,
        sites: Sites,
        here: frozenset[int],
        num_prompt: int,
        prompt_ids: Ids,
        drains: bool = True,
    ) -> RequestProgram:
        """Compile the actions at the boundaries of a worker's pipeline stage.

        Args:
            asked: the actions of the request. The server's edits come before the request's own
                edits. The Compiled is cached in `asked`, for other requests of the same spec.
            here: the boundaries of the pipeline stage.
            drains: False on a rank that edits rows but leaves the delivery to another rank.
        """
        known: dict[Hashable, Compiled] = asked.__dict__.setdefault("_compiled", {})
        key = (sites, here, drains)
        compiled = known.get(key)
        if compiled is None:
            of_outline: Compiled | None = asked.shared.get(key)
            compiled = None if of_outline is None else _fitted(of_outline, asked, here)
            if compiled is None:
                compiled = asked.shared[key] = _compile(asked, sites, here, drains)
            known[key] = compiled
        ids = () if compiled.uniform else prompt_ids
        return RequestProgram(num_prompt, np.asarray(ids, np.int64), compiled)

    def then(self, first: int, other: RequestProgram) -> RequestProgram:
        """A RequestProgram with the programs of this object before the position `first`, and with
        the programs of `other` from `first` on. The result has the `begun` of this object."""
        earlier = tuple(one for one in self.later if one[0] < first)
        return replace(self, later=(*earlier, (first, other.after(self.begun))))

    @property
    def has_vectors(self) -> bool:
        """The same as Compiled.has_vectors."""
        return self._compiled.has_vectors

    @property
    def checks(self) -> bool:
        """True if the program edits or checks rows on this stage, and can report a fault."""
        return bool(self._compiled.edits) or self._compiled.check is not None

    @property
    def takes_most(self) -> bool:
        """The same as Compiled.takes_most."""
        return self._compiled.takes_most

    @property
    def empty(self) -> bool:
        return not self._compiled.used and self._compiled.check is None

    @property
    def generated_is_uniform(self) -> bool:
        """True if the program of a token depends only on the phase: all prompt tokens get one
        program, and all generated tokens get one program."""
        return self._compiled.uniform

    @property
    def first_fixed(self) -> int:
        """A position. All tokens from this position on get the same program, which is the program
        of `last` for generated tokens. Use this property only if `generated_is_uniform` is True."""
        if self.later:
            return self.later[-1][0]
        if not self.generated_is_uniform:
            return self.num_prompt
        prompt, generated = (self._phase_column(phase).tobytes() for phase in (False, True))
        return 0 if prompt == generated else self.num_prompt

    def after(self, firsts: Iterable[str]) -> RequestProgram:
        """The program of the request after these probes have a verdict."""
        begun = self.begun.union(firsts)
        if begun == self.begun:
            return self
        later = tuple((first, one.after(begun)) for first, one in self.later)
        return replace(self, begun=begun, later=later)

    def told(self, firsts: Iterable[str]) -> RequestProgram:
        """The program that the planner must use after these probes have a verdict. Usually, this is
        the result of `after`. If the device tables do not have the programs of intermediate stages
        (`_later_stages`), it is the program of the last stage. The code that reads the rows then
        drops the scores of stages that have not begun."""
        between = len(self._compiled.firsts) > 1 and not self.generated_is_uniform
        return self.last_stage if between else self.after(firsts)

    @property
    def last(self) -> RequestProgram:
        """The last program of `later`, or this program if `later` is empty."""
        return self.later[-1][1] if self.later else self

    @property
    def last_stage(self) -> RequestProgram:
        """The program after all verdicts for which probes wait. This program delivers all values
        that the program of any other stage delivers."""
        return self.after(self._compiled.firsts)

    def _columns(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """The columns of these positions, [num_picks, num_positions]."""
        tokens = Tokens.running(positions, self.num_prompt, self.prompt_ids)
        columns = np.zeros((len(self._compiled.picks), len(positions)), np.int32)
        for i in self._compiled.used:
            columns[i] = self._compiled.picks[i].values(tokens)
        columns[self._compiled.waiting(self.begun)] = 0
        return columns

    def _range(self, first: int, count: int) -> ColumnRange:
        """The columns of the positions from `first` to `first + count - 1`."""
        compiled = self._compiled

        def made() -> ColumnRange:
            return compiled.ranged(self._columns(np.arange(first, first + count, dtype=np.int64)))

        if not compiled.remembers:
            return made()
        return remembered(RangeKey(compiled.picks_key, self.num_prompt, first, count), made)

    @property
    def parts(self) -> tuple[tuple[int, RequestProgram], ...]:
        """Pairs (first position, RequestProgram): this object, and then `later`."""
        return ((0, self), *self.later)

    def parts_at(self, first: int, count: int) -> list[tuple[RequestProgram, int, int]]:
        """Split the positions from `first` to `first + count - 1` by program. Returns (program,
        first position, count) for each part, in order."""
        if not self.later:
            return [(self, first, count)]
        found, stop = [], first + count
        for start, one in reversed(self.parts):
            if start < stop:
                begin = max(start, first)
                found.append((one, begin, stop - begin))
                stop = begin
        return [part for part in found[::-1] if part[2]]

    def generated_superset(self) -> Program | None:
        """A program that delivers all values that any generated token can deliver.

        With drafts and async scheduling, the planner does not know a token's position when it plans
        the step. In this case the planner uses this program. The code that reads the rows later
        drops the extra rows by their labels. Edits cannot be undone later. Therefore the front-end
        has checked that edits of generated tokens do not depend on the position.
        """
        if self.generated_is_uniform:
            return self._of_phase(True)
        return self._compiled.program(self.superset_column())

    def superset_column(self) -> Column:
        """The column of `generated_superset`."""
        if self.generated_is_uniform:
            return self._phase_column(True)
        column = self._range(self.num_prompt, 1).columns[:, 0].copy()
        for i in self._compiled.used:
            pick = self._compiled.picks[i]
            if pick.use == "deliver" and not pick.uniform:
                column[i] = 1
        return column

    def columns(self, num_positions: int, drafts: bool = True) -> tuple[bytes, ...]:
        """The distinct columns of all positions of the request, and `superset_columns`. From these
        columns, another process can build every program that the request can need.

        Args:
            drafts: if False, the result does not contain `superset_columns`.

        Raises:
            SpecError: the request needs more programs or operations than one request may have.
        """

        def made() -> tuple[bytes, ...]:
            found = dict.fromkeys(self._distinct_columns(num_positions))
            return tuple(found | dict.fromkeys(self.superset_columns() if drafts else ()))

        compiled = self._compiled
        if self.begun or not compiled.remembers:
            return made()
        size = bool(compiled.edits), compiled.ops_of_picks.tobytes()
        key = ColumnsKey(compiled.picks_key, size, self.num_prompt, num_positions, drafts)
        return remembered_columns(key, made)

    def superset_columns(self) -> list[bytes]:
        """The column of the present `generated_superset`. If probes wait for verdicts, also the
        column of `generated_superset` after all these verdicts."""
        stages = (self, *self._later_stages())
        return [stage.superset_column().tobytes() for stage in stages]

    def held(self, columns: Iterable[bytes], key: Hashable = None) -> Held:
        """The programs that the request holds while it runs.

        Args:
            columns: the result of the method `columns`, from this process or another process.
            key: a key that is equal for equal specs. `key` can be None if requests with equal specs
                share one Compiled object.
        """
        return Held(self._compiled, columns, self._compiled.ref if key is None else key)

    def made(self, held: Held) -> bool:
        """True if `held` and this object have the same Compiled. A column then has the same meaning
        for both."""
        return held.is_of(self._compiled)

    def distinct_at(self, first: int, count: int) -> tuple[list[Column], NDArray[np.int64]]:
        """The columns of the positions from `first` to `first + count - 1`. Returns the distinct
        columns, and an array [count] with the index of each position's column."""
        if self.generated_is_uniform:
            split = min(max(self.num_prompt - first, 0), count)
            if 0 < split < count:
                each = [self._phase_column(False), self._phase_column(True)]
                return each, (np.arange(count) >= split).astype(np.int64)
            return [self._phase_column(split == 0)], np.zeros(count, np.int64)
        if count == 1 and not self._compiled.remembers:
            return [self._columns(np.array([first], np.int64))[:, 0]], np.zeros(1, np.int64)
        found = self._range(first, count)
        return list(found.distinct.values()), found.which

    def program(self, column: Column) -> Program | None:
        return self._compiled.program(column)

    def _distinct_columns(self, num_positions: int) -> dict[bytes, Column]:
        found = self._columns_until(num_positions)
        # The limits apply to each stage alone. Otherwise a monitor's cascade could cause the
        # refusal of a request.
        for stage in self._later_stages():
            found |= stage._columns_until(num_positions)
        return found

    def _later_stages(self) -> list[RequestProgram]:
        """The program of the last stage, as a list. The list is empty if no probe waits for a
        verdict. Programs of intermediate stages are not in the list. If programs depend only on the
        phase (prompt or generated), the planner puts them into the tables when a verdict arrives.
        Otherwise the planner uses the last stage's program in their place (`told`)."""
        return [self.last_stage] if self._compiled.firsts - self.begun else []

    def _columns_until(self, num_positions: int) -> dict[bytes, Column]:
        if self.generated_is_uniform:
            phases = (False, self.num_prompt > 0), (True, num_positions > self.num_prompt)
            given = [self._phase_column(generated) for generated, some in phases if some]
            found = {column.tobytes(): column for column in given}
            self._compiled.check_size(found.values())
            return found
        found = {}
        for first in range(0, num_positions, POSITIONS_AT_ONCE):
            found |= self._range(first, min(POSITIONS_AT_ONCE, num_positions - first)).distinct
            self._compiled.check_size(found.values())
        return found

    def _of_phase(self, generated: bool) -> Program | None:
        """If `generated` is True, the program that all generated tokens get; otherwise the program
        that all prompt tokens get. Call this method only if all picks are uniform."""
        known, key = self._compiled.of_phase, (generated, self.begun)
        if key not in known:
            known[key] = self._compiled.program(self._phase_column(generated))
        return known[key]

    def _phase_column(self, generated: bool) -> Column:
        """The column of all prompt tokens, or of all generated tokens, as a read-only array."""
        compiled, key = self._compiled, (generated, self.begun)
        known = compiled.phase_columns.get(key)
        if known is None:
            known = np.zeros(len(compiled.picks), np.int32)
            for i in compiled.used:
                known[i] = compiled.picks[i].value_in(generated)
            known[compiled.waiting(self.begun)] = 0
            known.flags.writeable = False
            compiled.phase_columns[key] = known
        return known

    def cost_of_change(self, columns: Iterable[bytes]) -> Cost:
        """The Cost of the new programs that generated tokens need when a policy changes the scales
        of edits. Vectors are not counted, because the new programs use the vectors of the old
        programs. `columns` is the result of the method `columns`."""
        if self.generated_is_uniform:
            columns = self.superset_columns()
        return self.held(columns).cost.without_vectors()

    def cost(self, num_positions: int) -> Cost:
        """The Cost of the request, including the programs that draft tokens can need."""
        return self.held(self.columns(num_positions)).cost
