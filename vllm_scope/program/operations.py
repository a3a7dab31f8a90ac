"""What a tap does to one token's row: operations, and programs of them.

Owns:  Op, Program, and Cost, what a request takes of the device tables.
Runs:  in workers, when a request arrives and when its tokens are planned; in
       EngineCore, to count what a request needs. numpy, no torch.
From:  compile, layout.   To: plan (per token), tap.tables (on the device).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from vllm_scope.program.layout import Layout
from vllm_scope.request.arrays import Array
from vllm_scope.request.encoding import Encoding
from vllm_scope.request.sites import LEVELS, boundary_of_point, point_of

#: Store the row, or a score of it.
OP_READ, OP_DOT = 1, 2
#: x + a * v; x + a * ||x|| * v; x - (x.v) * v; x + (clip(x.v, a, b) - x.v) * v; v.
OP_ADD, OP_ADD_NORM, OP_ABLATE, OP_CLAMP, OP_SET = 3, 4, 5, 6, 7
#: Report the token's owner if a number of the row is not finite.
OP_CHECK = 8

#: No program: the tap leaves the row alone.
NO_PROGRAM = -1


@dataclass(frozen=True)
class Op:
    """One operation on a row.

    Attributes:
        code: OP_...
        at: OP_READ: which of the arena layout's points; OP_DOT: which of its scores.
        vector: content of the row's vector (weight, direction, replacement).
        a, b: numbers of the operation.
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
        taps: (boundary, operations in order), for the boundaries that do something.
    """

    layout: Layout
    taps: tuple[tuple[int, tuple[Op, ...]], ...]

    @staticmethod
    def reading(points: tuple[int, ...]) -> Program:
        """Just reads."""
        return assemble(tuple(sorted(points)), {}, {})

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.taps))

    @cached_property
    def num_ops(self) -> int:
        return sum(len(ops) for _, ops in self.taps)

    @cached_property
    def vectors(self) -> set[Array]:
        return {op.vector for _, ops in self.taps for op in ops if op.vector is not None}


@dataclass(frozen=True)
class Cost:
    """What a request takes of the device tables while it runs."""

    vectors: int = 0
    programs: int = 0
    ops: int = 0

    @staticmethod
    def of(programs: Collection[Program]) -> Cost:
        """Of distinct programs; a vector that several use is one."""
        vectors: set[Array] = set().union(*(program.vectors for program in programs))
        return Cost(len(vectors), len(programs), sum(program.num_ops for program in programs))

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


def assemble(
    points: tuple[int, ...],
    scores: dict[int, list[tuple[int, Op]]],
    edits: dict[tuple[int, int], list[Op]],
    encoded: tuple[tuple[Encoding, tuple[int, ...]], ...] = (),
    check: int | None = None,
) -> Program:
    """A program from what happens where.

    Args:
        points: at which the row is read, ascending.
        scores: point -> (probe number, its operation).
        edits: (boundary, group) -> the edits of that site, in order.
        encoded: as in Layout.
        check: the boundary at whose end the row is checked, or None.
    """
    listed = sorted(
        (boundary_of_point(point), number) for point, ops in scores.items() for number, _ in ops
    )
    layout = Layout(points, tuple(listed), encoded)
    read_at = {point: i for i, point in enumerate(layout.arena.points)}
    score_at = {score: i for i, score in enumerate(listed)}
    boundaries = {boundary_of_point(p) for p in (*read_at, *scores)} | {b for b, _ in edits}
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
            for number, op in scores.get(point, []):
                ops.append(replace(op, at=score_at[boundary, number]))
        if boundary == check:
            ops.append(Op(OP_CHECK))
        taps.append((boundary, tuple(ops)))
    return Program(layout, tuple(taps))
