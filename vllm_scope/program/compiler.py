"""A request's actions, compiled: which program each of its tokens gets.

Owns:  RequestProgram, and BlockKeys (what its edits mean for blocks of KV).
Runs:  in workers, when a request arrives and when its tokens are planned; in
       EngineCore, to count what a request needs. numpy, no torch.
From:  resolve.   To: program, plan.

Promise: the program depends on the token's absolute position, never on the step it
happens to be in, so chunked prefill and recompute read and edit the same rows.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError
from vllm_scope.program.operations import (
    OP_ABLATE,
    OP_ADD,
    OP_ADD_NORM,
    OP_CLAMP,
    OP_DOT,
    OP_SET,
    Cost,
    Op,
    Program,
    assemble,
)  # fmt: skip
from vllm_scope.request.arrays import Array
from vllm_scope.request.encoding import Encoding
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.resolve import Resolved, ResolvedEdit
from vllm_scope.request.selectors import Ids, Selector, Tokens
from vllm_scope.request.sites import LEVELS, Sites, point_of

#: What one request may have: distinct programs, and operations of all of them together. To build
#: a program takes each process 15 us, and 1.3 us for each operation. Those of a request that
#: scores or edits are written to the device's tables before its first step, by the thread that
#: runs the model: 15 us for each program more, and 3 us for each operation; 45 ms at the most.
MOST_PROGRAMS, MOST_OPS = 1024, 1 << 14
MOST_PROGRAMS_WITH_VECTORS, MOST_OPS_WITH_VECTORS = 512, 1 << 13
#: What the programs of all specs that are remembered may take in this process.
REMEMBERED_BYTES = 64 << 20
_PROGRAM_BYTES, _OP_BYTES = 2048, 256
#: Positions whose programs are told apart at once.
_POSITIONS_AT_ONCE = 4096


class _Programs:
    """Which programs were built last, of all specs; bounded in bytes.

    The programs themselves stand with what they were compiled from, and go with it. A request
    that runs keeps its own: those that go from here are built again when they are next needed.
    """

    def __init__(self) -> None:
        self._known: Remembered[tuple[weakref.ref[_Compiled], bytes], None]
        self._known = Remembered(REMEMBERED_BYTES)

    def use(self, of: _Compiled, column: bytes) -> None:
        """A program was asked for again."""
        self._known.get((of.ref, column))

    def put(self, of: _Compiled, column: bytes, program: Program | None) -> None:
        of.built[column] = program
        size = _PROGRAM_BYTES + len(column) + (0 if program is None else _size_of(program))
        for ref, gone in self._known.put((of.ref, column), None, size):
            owner = ref()
            if owner is not None:
                owner.built.pop(gone, None)

    @property
    def num_bytes(self) -> int:
        return self._known.num_bytes


def _size_of(program: Program) -> int:
    """Of its operations, in bytes, with the rows of replacements, which are made for them."""
    ops = [op for _, ops in program.taps for op in ops]
    rows = (len(op.vector.data) for op in ops if op.code == OP_SET and op.vector is not None)
    return _OP_BYTES * len(ops) + sum(rows)


programs = _Programs()


@dataclass(frozen=True, eq=False)
class _Compiled:
    """What a spec does at some boundaries, whatever the prompt; requests share it.

    A token's program follows from its column: for each distinct way of picking
    tokens, whether it picks this one (for a replacement: which of its rows, from 1).
    """

    ways: tuple[_Way, ...]
    reads: tuple[tuple[int, tuple[int, ...], Encoding | None], ...]
    scores: tuple[tuple[int, int, int, Op], ...]
    edits: tuple[tuple[int, tuple[int, int], Callable[[int], Op]], ...]
    #: Where every token is checked, of a request with edits; None where it is elsewhere.
    check: int | None
    #: Where all tokens of a phase get the same: what generated ones get, and a prompt's.
    of_phase: dict[bool, Program | None] = field(default_factory=dict)
    #: By column; `programs` says how long they stay.
    built: dict[bytes, Program | None] = field(default_factory=dict)

    @cached_property
    def ref(self) -> weakref.ref[_Compiled]:
        """What stands for it in keys: another one that gets its id has another."""
        return weakref.ref(self)

    @property
    def has_vectors(self) -> bool:
        return bool(self.scores or self.edits)

    @cached_property
    def uniform(self) -> bool:
        """Tokens of a phase (prompt or generated) get the same."""
        return all(way.uniform for way in self.ways)

    def program(self, column: NDArray[np.int32]) -> Program | None:
        key = column.tobytes()
        known = self.built.get(key, self)  # itself for none: another thread may drop it
        if not isinstance(known, _Compiled):
            programs.use(self, key)
            return known
        found = self._build(column)
        programs.put(self, key, found)
        return found

    @cached_property
    def _ops_of_ways(self) -> NDArray[np.int64]:
        """How many operations a token has for being picked in each way."""
        found = np.zeros(len(self.ways), np.int64)
        for way, points, _ in self.reads:
            found[way] += len(points)
        for way in [score[0] for score in self.scores] + [edit[0] for edit in self.edits]:
            found[way] += 1
        return found

    @cached_property
    def _marks(self) -> NDArray[np.int64]:
        """A random number for each way: sums of them tell columns apart."""
        return np.frombuffer(secrets.token_bytes(8 * len(self.ways)), np.int64)

    def distinct(self, columns: NDArray[np.int32]) -> dict[bytes, NDArray[np.int32]]:
        """The distinct ones of some columns, int32 [num_ways, n]."""
        with np.errstate(over="ignore"):
            sums = self._marks @ columns.astype(np.int64)
        _, firsts = np.unique(sums, return_index=True)
        return {columns[:, i].tobytes(): columns[:, i] for i in firsts.tolist()}

    def check_size(self, columns: Collection[NDArray[np.int32]]) -> None:
        """Raises SpecError for more than one request may have; nothing is built for it."""
        most, most_ops = MOST_PROGRAMS, MOST_OPS
        if self.has_vectors:
            most, most_ops = MOST_PROGRAMS_WITH_VECTORS, MOST_OPS_WITH_VECTORS
        if len(columns) > most:
            raise SpecError(
                f"the request's tokens are treated in more than {most:,} different ways; "
                "let fewer of its selectors pick single tokens, or send several requests."
            )
        num_ops = sum(int((column > 0) @ self._ops_of_ways) for column in columns)
        if num_ops > most_ops:
            raise SpecError(
                f"the request's tokens are treated in {len(columns):,} different ways, of "
                f"{num_ops:,} reads, scores and edits together; at most {most_ops:,}. Send several "
                "requests."
            )

    def _build(self, column: NDArray[np.int32]) -> Program | None:
        points: dict[Encoding | None, set[int]] = {}
        for way, some, encoding in self.reads:
            if column[way]:
                points.setdefault(encoding, set()).update(some)
        scores: dict[int, list[tuple[int, Op]]] = {}
        for way, point, number, op in self.scores:
            if column[way]:
                scores.setdefault(point, []).append((number, op))
        edits: dict[tuple[int, int], list[Op]] = {}
        for way, place, op_of in self.edits:
            if column[way]:
                edits.setdefault(place, []).append(op_of(int(column[way])))
        if not (points or scores or edits) and self.check is None:
            return None
        plain = tuple(sorted(points.pop(None, ())))
        encoded = [(e, tuple(sorted(some))) for e, some in points.items() if e is not None]
        listed = tuple(sorted(encoded, key=lambda x: x[0].text))
        return assemble(plain, scores, edits, listed, self.check)


def _compile(asked: Resolved, sites: Sites, here: frozenset[int], drains: bool) -> _Compiled:
    ways: dict[_Way, int] = {}

    def way(selector: Selector, use: str, positions: tuple[int, ...] = ()) -> int:
        return ways.setdefault(_Way(selector, use, positions), len(ways))

    edited = edited_places(asked, sites)
    reads, scores, edits = [], [], []
    made: dict[Any, Op] = {}
    for read in asked.reads if drains else ():
        points = {
            canonical_point(sites.point_of(stream, read.when), edited)
            for stream in read.streams
            if sites.boundary_of(stream) in here
        }
        if points:
            reads.append((way(read.tokens, "deliver"), tuple(sorted(points)), read.encoding))
    for probe in asked.probes if drains else ():
        if sites.boundary_of(probe.stream) in here:
            op = Op(OP_DOT, 0, probe.weight, probe.bias)
            point = canonical_point(sites.point_of(probe.stream), edited)
            scores.append((way(probe.tokens, "deliver"), point, probe.number, op))
    for edit in asked.edits:
        place = (sites.boundary_of(edit.stream), sites.group_of(edit.stream))
        if place[0] in here:
            column = way(edit.tokens, "edit", edit.positions)
            edits.append((column, place, _op_of(edit, made)))
    check = sites.last_of_stream if asked.edits else None
    return _Compiled(
        tuple(ways), tuple(reads), tuple(scores), tuple(edits), check if check in here else None
    )


@dataclass(frozen=True)
class RequestProgram:
    """Which program each token of one request gets."""

    num_prompt: int
    #: Empty where nobody looks at them.
    prompt_ids: NDArray[np.int64]
    _compiled: _Compiled

    @staticmethod
    def compile(
        asked: Resolved,
        sites: Sites,
        here: frozenset[int],
        num_prompt: int,
        prompt_ids: Ids,
        drains: bool = True,
    ) -> RequestProgram:
        """Keep what concerns the boundaries that this worker's stage holds.

        Args:
            asked: reads, probes and edits, the server's edits first. Remembers what was
                made of it: many requests may ask for the same.
            here: the boundaries.
            num_prompt, prompt_ids: of the request.
            drains: False on a rank that edits like the others and delivers nothing.
        """
        known: dict[Any, _Compiled] = asked.__dict__.setdefault("_compiled", {})
        key = (sites, here, drains)
        if key not in known:
            known[key] = _compile(asked, sites, here, drains)
        compiled = known[key]
        ids = () if compiled.uniform else prompt_ids
        return RequestProgram(num_prompt, np.asarray(ids, np.int64), compiled)

    @property
    def has_vectors(self) -> bool:
        """It scores or edits."""
        return self._compiled.has_vectors

    @property
    def checks(self) -> bool:
        """Its tokens may be reported: something edits them."""
        return bool(self._compiled.edits) or self._compiled.check is not None

    @property
    def empty(self) -> bool:
        return not self._compiled.ways and self._compiled.check is None

    @property
    def generated_is_uniform(self) -> bool:
        """Every generated token gets the same program, as every prompt token does."""
        return self._compiled.uniform

    def _columns(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32 [num_ways, num_positions]."""
        tokens = Tokens.running(positions, self.num_prompt, self.prompt_ids)
        columns = np.zeros((len(self._compiled.ways), len(positions)), np.int32)
        for i, way in enumerate(self._compiled.ways):
            columns[i] = way.pick(tokens)
        return columns

    def runs(self, first: int, count: int) -> list[tuple[int, int, Program]]:
        """Runs of tokens with the same program among positions first .. first+count-1.

        Returns:
            (offset from `first`, length, program); tokens without one are left out.
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

        Used where a token's position is not known on the host when the step is
        planned (draft tokens under async scheduling): read more, sort by label.
        Edits must not depend on the position there, which the front-end checked.
        """
        if self.generated_is_uniform:
            return self._of_phase(True)
        column = self._columns(np.array([self.num_prompt], np.int64))[:, 0]
        for i, way in enumerate(self._compiled.ways):
            if way.use == "deliver" and not way.uniform:
                column[i] = 1
        return self._compiled.program(column)

    def all_programs(self, num_positions: int) -> list[Program]:
        """Every program that some position of the request may get.

        Raises:
            SpecError: more of them than one request may have.
        """
        if self.generated_is_uniform:
            return self._distinct(
                self._of_phase(generated) for generated, some in
                ((False, self.num_prompt > 0), (True, num_positions > self.num_prompt)) if some
            )  # fmt: skip
        found: dict[bytes, NDArray[np.int32]] = {}
        for first in range(0, num_positions, _POSITIONS_AT_ONCE):
            last = min(first + _POSITIONS_AT_ONCE, num_positions)
            columns = self._columns(np.arange(first, last, dtype=np.int64))
            found |= self._compiled.distinct(columns)
            self._compiled.check_size(found.values())
        return self._distinct(self._compiled.program(column) for column in found.values())

    def with_drafts(self, num_positions: int) -> list[Program]:
        """`all_programs`, and the one that drafts may need: what a request with vectors holds."""
        return self._distinct([*self.all_programs(num_positions), self.generated_superset()])

    @staticmethod
    def _distinct(programs: Iterable[Program | None]) -> list[Program]:
        return list(dict.fromkeys(program for program in programs if program is not None))

    def _of_phase(self, generated: bool) -> Program | None:
        """Of all tokens of a phase, where these get the same."""
        known = self._compiled.of_phase
        if generated not in known:
            columns = [way.of_phase(generated) for way in self._compiled.ways]
            known[generated] = self._compiled.program(np.array(columns, np.int32))
        return known[generated]

    def cost(self, num_positions: int) -> Cost:
        """What the request takes of the device tables, what drafts may need included."""
        return self.cost_of(self.all_programs(num_positions))

    def cost_of(self, programs: list[Program]) -> Cost:
        """`cost`, from what `all_programs` has returned."""
        return Cost.of(self._distinct([*programs, self.generated_superset()]))


@dataclass(frozen=True)
class _Way:
    """A way of picking tokens, for what, and with which row of a replacement."""

    selector: Selector
    use: str
    positions: tuple[int, ...] = ()

    @property
    def uniform(self) -> bool:
        return self.selector.uniform

    @cached_property
    def _rows(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The positions in ascending order, and the row of each, from 1."""
        given = np.asarray(self.positions, np.int64)
        order = np.argsort(given)
        return given[order], (order + 1).astype(np.int32)

    def _rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        ascending, rows = self._rows
        at = np.minimum(np.searchsorted(ascending, positions), len(ascending) - 1)
        return np.where(ascending[at] == positions, rows[at], np.int32(0))

    def of_phase(self, generated: bool) -> int:
        """What `pick` says of every token of a phase, where it is uniform."""
        one = np.zeros(1, np.int64)
        return int(self.pick(Tokens(one, 0 if generated else 1, one, None))[0])

    def pick(self, tokens: Tokens) -> NDArray[np.int32]:
        """int32 by token: 0 for no, else 1, or the row of the replacement from 1."""
        if self.positions:
            p, n = tokens.positions, tokens.num_prompt
            rows = self._rows_at(p)
            if self._rows[0][0] < 0:  # they count from the end of the prompt
                rows = np.where((rows == 0) & (p < n), self._rows_at(p - n), rows)
            return rows
        masks = self.selector.select(tokens)
        return (masks.certain if self.use == "edit" else masks.possible).astype(np.int32)


def edited_places(asked: Resolved, sites: Sites) -> set[tuple[int, int]]:
    """(boundary, group) of every edit."""
    return {(sites.boundary_of(e.stream), sites.group_of(e.stream)) for e in asked.edits}


def canonical_point(point: int, edited: set[tuple[int, int]]) -> int:
    """The first point of the boundary that sees the same row."""
    boundary, level = divmod(point, LEVELS)
    while level and (boundary, level - 1) not in edited:
        level -= 1
    return point_of(boundary, level)


def _unit(values: Array) -> Array:
    """A vector of length 1."""
    numbers = values.numpy.astype(np.float64)
    return Array(values.shape, (numbers / np.linalg.norm(numbers)).astype("<f4").tobytes())


def _op_of(edit: ResolvedEdit, made: dict[Any, Op]) -> Callable[[int], Op]:
    """What an edit does to a token, by the row of a replacement, from 1.

    Args:
        made: what was made of edits; those that differ in their streams alone share it.
    """
    if edit.kind == "replace":
        return partial(_replacing, edit.values.numpy)
    op: Op | None = edit.__dict__.get("_op")
    if op is None:
        content = edit.kind, edit.values, edit.numbers, edit.norm_match
        op = made.get(content) or made.setdefault(content, _op_for_all(edit))
        # Server-wide edits are compiled with those of every request.
        edit.__dict__["_op"] = op
    return lambda row: op


def _replacing(rows: NDArray[np.float32], row: int) -> Op:
    values = rows[row - 1]
    return Op(OP_SET, 0, Array(values.shape, values.tobytes()))


def _op_for_all(edit: ResolvedEdit) -> Op:
    if edit.kind == "add" and not edit.norm_match:
        return Op(OP_ADD, 0, edit.values, edit.numbers[0])
    direction = _unit(edit.values)
    if edit.kind == "add":
        return Op(OP_ADD_NORM, 0, direction, edit.numbers[0])
    if edit.kind == "ablate":
        return Op(OP_ABLATE, 0, direction)
    lo, hi, strength = edit.numbers
    # With k d for d the operation does (clip(k p, k lo, k hi) - k p) k d, which is k * k
    # times what it does with d.
    k = math.sqrt(strength)
    if k == 0:
        lo, hi, k = -math.inf, math.inf, 1  # and not 0 times infinity
    if k != 1:
        direction = Array(direction.shape, (direction.numpy * np.float32(k)).tobytes())
    return Op(OP_CLAMP, 0, direction, k * lo, k * hi)


class BlockKeys:
    """What edits mean for the KV of a block of tokens, as bytes.

    Two requests may share a block's KV where the same edits fall on the same tokens
    of it and of all blocks before it (vLLM chains the keys).
    """

    def __init__(self, edits: tuple[ResolvedEdit, ...], num_prompt: int, prompt_ids: Ids) -> None:
        ways: dict[_Way, int] = {}
        given = [_Way(edit.tokens, "edit", edit.positions) for edit in edits]
        self._way_of = np.array([ways.setdefault(way, len(ways)) for way in given], np.int64)
        self._ways = tuple(ways)
        digests = b"".join(edit.digest for edit in edits)
        self._digests = np.frombuffer(digests, np.uint8).reshape(len(edits), -1)
        self._num_prompt, self._ids = num_prompt, np.asarray(prompt_ids, np.int64)

    def key(self, start: int, stop: int) -> bytes | None:
        """Of the tokens at positions start .. stop-1; None where none is edited."""
        positions = np.arange(start, stop, dtype=np.int64)
        tokens = Tokens.running(positions, self._num_prompt, self._ids)
        #: By what a way picks here, its number among all that is picked, from 1.
        numbers: dict[bytes, int] = {}
        of_ways = np.zeros(len(self._ways), "<u4")
        for i, way in enumerate(self._ways):
            column = way.pick(tokens)
            if column.any():
                of_ways[i] = numbers.setdefault(column.tobytes(), len(numbers) + 1)
        if not numbers:
            return None
        of_edits = of_ways[self._way_of]
        here = of_edits > 0
        digest = hashlib.blake2b(repr((len(numbers), int(here.sum()))).encode(), digest_size=16)
        digest.update(b"".join(numbers))
        digest.update(of_edits[here].tobytes())
        digest.update(self._digests[here].tobytes())
        return digest.digest()
