"""What a tap does to one token's row: operations, and programs of them.

Owns:  Op, Program, and Cost (what a request takes of the device tables).
Runs:  in workers, when a request arrives and when its tokens are planned; in
       EngineCore, to count what a request needs. numpy, no torch.
From:  compiled, layout.   To: plan (per token), tap.tables (on the device).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from vllm_scope.program.layout import Layout
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Head
from vllm_scope.request.resolve import ResolvedEdit
from vllm_scope.request.sites import LEVELS, boundary_of_point, point_of

#: Copy the row out.
OP_READ = 1
#: Edits, in this order: x + a * v; x + a * ||x|| * v; x - (x.v) * v;
#: x + (clip(x.v, a, b) - x.v) * v; v.
OP_ADD, OP_ADD_NORM, OP_ABLATE, OP_CLAMP, OP_SET = 3, 4, 5, 6, 7
#: Report the token's owner if the row is not finite.
OP_CHECK = 8

#: No program: the tap leaves the row alone.
NO_PROGRAM = -1


@dataclass(frozen=True)
class Op:
    """One operation on a row.

    Attributes:
        code: OP_...
        at: index into the arena layout's points (OP_READ).
        vector: float32 [hidden_size], the direction or replacement.
        a, b: the operation's numbers, as in the formulas above.
    """

    code: int
    at: int = 0
    vector: Array | None = None
    a: float = 0.0
    b: float = 0.0


@dataclass(frozen=True)
class Program:
    """What happens to one token.

    Attributes:
        layout: what it delivers.
        taps: (boundary, operations in order), for the boundaries with operations.
        weights: of the layout's probes, [out, in] each. The layout identifies them.
    """

    layout: Layout
    taps: tuple[tuple[int, tuple[Op, ...]], ...]
    weights: frozenset[Array] = field(default=frozenset(), compare=False)

    @staticmethod
    def reading(points: tuple[int, ...]) -> Program:
        """A program that reads these points and does nothing else."""
        return build_program(tuple(sorted(points)), {})

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.taps))

    @cached_property
    def num_ops(self) -> int:
        return sum(len(ops) for _, ops in self.taps)

    @cached_property
    def arrays(self) -> set[Array]:
        """All that it needs on the device: its operations' vectors and its probes' weights."""
        return self.vectors | self.weights

    @cached_property
    def vectors(self) -> set[Array]:
        """The vectors of its operations."""
        return {op.vector for _, ops in self.taps for op in ops if op.vector is not None}


@dataclass(frozen=True)
class Cost:
    """What a request takes of the device tables while it runs. A probe's weight counts as its
    vectors do, though it has memory of its own."""

    vectors: int = 0
    programs: int = 0
    ops: int = 0

    @staticmethod
    def of(programs: Collection[Program]) -> Cost:
        """The cost of distinct programs; a vector that several of them use counts once."""
        arrays: set[Array] = set().union(*(program.arrays for program in programs))
        return Cost(sum(map(num_vectors, arrays)), len(programs), sum(p.num_ops for p in programs))

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.vectors + other.vectors, self.programs + other.programs, self.ops + other.ops
        )

    def __str__(self) -> str:
        return f"{self.vectors} vectors, {self.programs} programs and {self.ops} operations"

    def fits(self, capacity: Cost) -> bool:
        return (
            self.vectors <= capacity.vectors
            and self.programs <= capacity.programs
            and self.ops <= capacity.ops
        )


def num_vectors(array: Array) -> int:
    """How many vectors an array has."""
    return math.prod(array.shape[:-1])


def build_program(
    points: tuple[int, ...],
    edits: dict[tuple[int, int], list[Op]],
    encoded: tuple[tuple[Head, tuple[int, ...]], ...] = (),
    check: int | None = None,
    also: tuple[tuple[int, int], ...] = (),
    weights: frozenset[Array] = frozenset(),
) -> Program:
    """The program of these reads and edits.

    Args:
        points: where the row is read, ascending.
        edits: (boundary, group) -> the edits of that site, in order.
        encoded, also: as in Layout.
        check: the boundary after whose edits the row is checked, or None.
        weights: as in Program.
    """
    layout = Layout(points, encoded, also)
    read_at = {point: i for i, point in enumerate(layout.arena.points)}
    boundaries = {boundary_of_point(p) for p in read_at} | {b for b, _ in edits}
    boundaries |= set() if check is None else {check}
    taps = []
    for boundary in sorted(boundaries):
        ops: list[Op] = []
        for level in range(LEVELS):
            if level:
                ops += edits.get((boundary, level - 1), [])
            point = point_of(boundary, level)
            if point in read_at:
                ops.append(Op(OP_READ, read_at[point]))
        if boundary == check:
            ops.append(Op(OP_CHECK))
        taps.append((boundary, tuple(ops)))
    return Program(layout, tuple(taps), weights)


def edit_op(edit: ResolvedEdit, made: dict[Hashable, Op]) -> Callable[[int], Op]:
    """An edit's operation on a token, by the token's row of a replacement (from 1).

    Args:
        made: operations made so far, by content: edits that differ in their streams share one.
    """
    if edit.kind == "replace":
        return partial(_replacing, edit.values.numpy)
    op: Op | None = edit.__dict__.get("_op")
    if op is None:
        content = edit.kind, edit.values, edit.numbers, edit.norm_match
        op = made.get(content) or made.setdefault(content, _edit_op(edit))
        # Server-wide edits are compiled again with each spec.
        edit.__dict__["_op"] = op
    return lambda row: op


def _replacing(rows: NDArray[np.float32], row: int) -> Op:
    values = rows[row - 1]
    return Op(OP_SET, 0, Array(values.shape, values.tobytes()))


def _edit_op(edit: ResolvedEdit) -> Op:
    if edit.kind == "add" and not edit.norm_match:
        return Op(OP_ADD, 0, edit.values, edit.numbers[0])
    values = edit.values.numpy.astype(np.float64)
    direction = (values / np.linalg.norm(values)).astype("<f4")
    if edit.kind == "clamp":
        lo, hi, strength = edit.numbers
        # With k d in place of d the operation adds (clip(k p, k lo, k hi) - k p) k d: k * k times
        # as much.
        k = math.sqrt(strength)
        if k == 0:
            lo, hi, k = -math.inf, math.inf, 1  # 0 times infinity would be NaN
        direction = direction * np.float32(k)
        code, a, b = OP_CLAMP, k * lo, k * hi
    elif edit.kind == "add":
        code, a, b = OP_ADD_NORM, edit.numbers[0], 0.0
    else:
        code, a, b = OP_ABLATE, 0.0, 0.0
    return Op(code, 0, Array(edit.values.shape, direction.tobytes()), a, b)
