"""The operations that a tap can run on one token's row, and programs (lists of operations).

Owns:  Op, Program, and Cost (how many entries of the device tables a request uses).
Runs:  in workers, when a request arrives and when its tokens are planned; in
       EngineCore, to compute the Cost of a request. numpy, no torch.
From:  compiled, layout.   To: worker.plan (per token), graph.tap.program_tables (on the device).

A tap is the op in the compiled graph that runs a program on a row. Taps write results to slots of
16 bytes in the arena, which is device memory. The states of gates are in other device memory, the
log. In the formulas below, x is the row, and `.` is the dot product. The vector v and the numbers
a to e are attributes of Op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from vllm_scope.program.layout import Layout
from vllm_scope.request.actions.features import MAX_FEATURES
from vllm_scope.request.actions.states import Hysteresis, Latch, Pid, hysteresis_low
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Head, Scored
from vllm_scope.request.nets import Ema
from vllm_scope.request.resolved import Cell, ResolvedEdit, ResolvedGate, ToldAt
from vllm_scope.request.sites import LEVELS, boundary_of_point, point_of

#: Copy the row to the token's slots.
OP_READ = 1
#: Store x . v + b, the number of a linear probe. x is first rounded to the model's dtype.
OP_SCORE = 2
#: Edits, which replace the row x by: x + a * v (ADD), x + a * ||x|| * v (ADD_NORM),
#: x - (x . v) * v (ABLATE), x + (clip(x . v, a, b) - x . v) * v (CLAMP), v (SET).
OP_ADD, OP_ADD_NORM, OP_ABLATE, OP_CLAMP, OP_SET = 3, 4, 5, 6, 7
#: If the row is not finite, report a fault. The token's request then ends.
OP_CHECK = 8
#: Replace x by x + clip(a, -b * ||x||, b * ||x||) * v. The length of v is 1.
OP_ADD_BOUND = 9
#: Replace x by x + (a + d * f) * v. f is a feature's activation, from the register `source`. If b >
#: 0 and f <= 0, the row does not change.
OP_ADD_FEATURE = 10
#: Conditions. A condition computes a score s from the row: x . v + b (OP_GATE), the cosine of x and
#: v (OP_GATE_COSINE), or the cosine of x and tanh((x . v) v) (OP_GATE_CAST). The condition sets a
#: register to 1 if d * (s - a) > 0, else to 0. An OP_GATE with c > 0 sets the register to sigmoid(c
#: * d * (s - a)).
OP_GATE, OP_GATE_COSINE, OP_GATE_CAST = 11, 12, 13
#: Set a register to the activation of a feature, which is s if s > c, else 0. Here s = x . v + b.
OP_FEATURE = 14
#: The operations that set a register, and do not change the row.
SETTERS = (OP_GATE, OP_GATE_COSINE, OP_GATE_CAST, OP_FEATURE)
#: Update a gate's state with the gate's score, and set `register` to the gate's value
#: (request.actions.states). The register `source` contains the score, which an earlier tap has set.
#: If the row has no state, as in a prompt, `register` keeps its value.
#:   EMA: a is the decay, b is 1 - decay, c the sharpness, d the sign, and e the threshold.
#:   HYSTERESIS: with the score s, the gate opens if d * (s - a) > 0, and closes if d * (s - b) < 0.
#:   For a latch, b is infinite.
#: PID: a is the setpoint. b, c, d are kp, ki and kd times the sign. e is the bound of the sum of
#: the errors.
OP_EMA, OP_HYSTERESIS, OP_PID = 15, 16, 17
ADVANCING = (OP_EMA, OP_HYSTERESIS, OP_PID)
#: The log has three numbers for each gate with a state and each position. One of them is the gate's
#: value.
STATE_NUMBERS = 3


class LogRange(NamedTuple):
    """One request's entries in the log. The first entry is `start`. Each of `num_tokens` generated
    tokens has `num_states` entries."""

    start: int = 0
    num_tokens: int = 0
    num_states: int = 0

    @property
    def size(self) -> int:
        return self.num_tokens * self.num_states


NO_LOG = LogRange()

#: In one forward, each row has REGISTERS registers. A register is a number that one operation sets
#: and another operation reads. The first MOST_GATES registers contain the values of gates, and the
#: scores of gates with a state. The other registers contain the activations of the features of one
#: edit.
MOST_GATES = 16
REGISTERS = MOST_GATES + MAX_FEATURES

#: The program id of a row without a program. Taps do not read or change this row.
NO_PROGRAM = -1


class Op(NamedTuple):
    """One operation on a row.

    Attributes:
        code: OP_...
        at: for OP_READ, the index of the row's point in `Layout.arena.points`.
        vector: the vector v of the formulas at the top of this file, float32 [width of a row].
        a, b, c, d, e: the operation's numbers in the formulas at the top of this file.
        source: the register with a feature's activation, or with the score of a gate that has a
            state. A condition writes to this register, and other operations read it. -1 if there is
            no register.
        register: for a condition or a feature, the register that the operation sets. For an edit,
            the register whose number multiplies the change. -1 if there is no register.
        told: where the operation stores a number for the caller: a probe's number, a gate's value,
            or an edit's dose (`||change|| / ||x||`). None if the caller does not want the number.
    """

    code: int
    at: int = 0
    vector: Array | None = None
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    d: float = 0.0
    source: int = -1
    register: int = -1
    e: float = 0.0
    told: ToldAt | None = None


@dataclass(frozen=True)
class Program:
    """The operations of one token at all taps.

    Attributes:
        layout: the layout of the values that the token delivers.
        taps: for each boundary with operations, the boundary and its operations in order.
    """

    layout: Layout
    taps: tuple[tuple[int, tuple[Op, ...]], ...]

    @staticmethod
    def reading(points: tuple[int, ...]) -> Program:
        """A program that reads these points, and has no other operations."""
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
    def vectors(self) -> set[Array]:
        """The vectors of the program's operations."""
        return {op.vector for _, ops in self.taps for op in ops if op.vector is not None}


class Cost(Struct, frozen=True):
    """The number of entries that a running request uses in the device tables. Each row of a probe's
    weight counts as a vector, also if the weight is not in the tables.

    Attributes:
        lens_rows: the number of rows to which the request's lenses are applied.
    """

    vectors: int = 0
    programs: int = 0
    ops: int = 0
    lens_rows: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.vectors + other.vectors, self.programs + other.programs, self.ops + other.ops,
            self.lens_rows + other.lens_rows,
        )  # fmt: skip

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1

    def __mul__(self, times: int) -> Cost:
        return Cost(
            self.vectors * times, self.programs * times, self.ops * times, self.lens_rows * times
        )

    def without_vectors(self) -> Cost:
        return Cost(0, self.programs, self.ops)

    def __str__(self) -> str:
        return f"{self.vectors} vectors, {self.programs} programs and {self.ops} operations"

    def fits(self, capacity: Cost) -> bool:
        return (
            self.vectors <= capacity.vectors
            and self.programs <= capacity.programs
            and self.ops <= capacity.ops
            and self.lens_rows <= capacity.lens_rows
        )


def num_vectors(array: Array) -> int:
    """The number of vectors in an array whose last axis is one vector."""
    return math.prod(array.shape[:-1])


def build_program(
    points: tuple[int, ...],
    edits: Mapping[tuple[int, int], Sequence[Op]],
    encoded: tuple[tuple[Head, tuple[int, ...]], ...] = (),
    check: int | None = None,
    also: tuple[tuple[int, int], ...] = (),
    seeing: Mapping[tuple[int, int], Collection[Op]] = MappingProxyType({}),
) -> Program:
    """Build the program that does these reads and edits.

    Args:
        points: the points at which the row is read, ascending.
        edits: for each site, by (boundary, group), the operations of the site's edits, in order.
        encoded, also: the attributes of Layout with these names.
        check: the boundary at which the row is checked, after all edits. None for no check.
        seeing: the operations of probes and conditions, by (boundary, level). These operations get
            the row after the first `level` groups of edits at the boundary.
    """
    if not (points or encoded or seeing):
        return _editing(edits, check)
    layout = Layout(points, encoded, also)
    read_at = {point: i for i, point in enumerate(layout.arena.points)}
    boundaries = {boundary_of_point(p) for p in read_at} | {b for b, _ in (*edits, *seeing)}
    boundaries |= set() if check is None else {check}
    taps = []
    for boundary in sorted(boundaries):
        ops: list[Op] = []
        for level in range(LEVELS):
            if level:
                ops += edits.get((boundary, level - 1), ())
            point = point_of(boundary, level)
            if point in read_at:
                ops.append(Op(OP_READ, read_at[point]))
            ops += seeing.get((boundary, level), ())
        if boundary == check:
            ops.append(Op(OP_CHECK))
        taps.append((boundary, tuple(ops)))
    return Program(layout, tuple(taps))


def _editing(edits: Mapping[tuple[int, int], Sequence[Op]], check: int | None) -> Program:
    """The fast path of `build_program` for a program that only edits and checks."""
    if not edits and check is not None:
        return _checking(check)
    taps: dict[int, tuple[Op, ...]] = {}
    for boundary, group in sorted(edits):
        taps[boundary] = (*taps.get(boundary, ()), *edits[boundary, group])
    if check is not None:
        taps[check] = (*taps.get(check, ()), _CHECK)
    return Program(_NOTHING, tuple(sorted(taps.items(), key=_boundary_of)))


@lru_cache(maxsize=64)  # all requests with edits share these programs
def _checking(boundary: int) -> Program:
    return Program(_NOTHING, ((boundary, (_CHECK,)),))


#: The layout of a program that delivers nothing.
_NOTHING = Layout()
_CHECK = Op(OP_CHECK)
_boundary_of = itemgetter(0)


#: A function that returns the operations of an edit for a token. Its argument is the value of the
#: edit's pick for the token (`Pick.values`). For a replacement, this is the number of the new row,
#: counted from 1. For other edits, this is 1.
OpsOf = Callable[[int], Sequence[Op]]


def edit_ops(edit: ResolvedEdit, made: dict[Hashable, tuple[Op, ...]], register: int) -> OpsOf:
    """Make a function that returns the operations of an edit for a token.

    Args:
        made: a cache of operations by the content of edits. This function adds the operations of
            `edit` to the cache. Edits that differ only in their streams share operations.
        register: the register of the edit's gate. -1 if the edit has no gate.
    """
    if edit.kind == "replace":
        return partial(_replacing, edit, register)
    # The edit caches its operations, because a server-wide edit is compiled again for each spec.
    known: dict[int, tuple[Op, ...]] = edit.__dict__.setdefault("_ops", {})
    ops = known.get(register)
    if ops is None:
        content = (
            edit.kind, edit.values, edit.numbers, edit.norm_match, edit.limit, register, edit.dose,
            edit.reads,
        )  # fmt: skip
        ops = made.get(content)
        if ops is None:
            if edit.reads is not None:
                ops = _feature_ops(edit, edit.reads, register)
            else:
                code, vector, a, b = _edit_numbers(edit)
                ops = (Op(code, 0, vector, a, b, register=register, told=edit.dose),)
            made[content] = ops
        known[register] = ops
    return lambda row: ops


def _replacing(edit: ResolvedEdit, register: int, row: int) -> tuple[Op]:
    values, index = edit.values, row - 1
    if values.shape[0] == 1:
        vector = Array.known(values.shape[1:], values.data, row_key(values, 0))
        return (Op(OP_SET, 0, vector, register=register, told=edit.dose),)
    bits = values.numpy.view(np.int32)
    first = int((bits[:row] == bits[index]).all(1).argmax())
    # The new Array gets the key under which EngineCore counts the row, and not its digest. To
    # compute the digest would take longer than all other work for a cell of a sweep.
    numbers = values.numpy[index]
    vector = Array.known(numbers.shape, numbers.tobytes(), row_key(values, first))
    return (Op(OP_SET, 0, vector, register=register, told=edit.dose),)


def row_key(values: Array, row: int) -> bytes:
    """The key of a row of a replacement. Equal rows of one replacement must have equal keys.
    Therefore `row` must be the index of the first row with the same bits.
    """
    return values.digest + row.to_bytes(4, "little")


def _row_of(values: Array, index: int) -> Array:
    row = values.numpy[index]
    return Array(row.shape, row.tobytes())


def _feature_ops(edit: ResolvedEdit, encoder: Array, register: int) -> tuple[Op, ...]:
    """The operations of an edit that changes features. The tap computes all features before it
    changes the row."""
    computed, added = [], []
    for i in range(encoder.shape[0]):
        bias, threshold, a, d, active = edit.numbers[5 * i : 5 * i + 5]
        at = MOST_GATES + i
        computed.append(Op(OP_FEATURE, 0, _row_of(encoder, i), b=bias, c=threshold, register=at))
        vector = _row_of(edit.values, i)
        told = edit.dose
        added.append(
            Op(OP_ADD_FEATURE, 0, vector, a, active, d=d, source=at, register=register, told=told)
        )
    return (*computed, *added)


def score_ops(cell: Cell) -> tuple[Op, ...]:
    """The operations that compute and store the numbers of a linear probe at one place."""
    assert cell.net is not None
    assert isinstance(cell.bank, Scored)
    ((weight, bias),) = cell.net.layers
    count, width = weight.shape
    found = []
    for i in range(count):
        data = weight.data[4 * width * i : 4 * width * (i + 1)]
        # This key must differ from the key of an equal row of a replacement.
        row = Array.known((width,), data, b"score" + row_key(weight, i))
        b = 0.0 if bias is None else float(bias.numpy[i])
        found.append(Op(OP_SCORE, 0, row, b=b, told=(cell.place, cell.bank, cell.first + i)))
    return tuple(found)


def gate_op(gate: ResolvedGate, register: int, score: int) -> Op:
    """The operation that computes a gate's value without a state, and sets a register to this
    value.

    Args:
        score: if the gate has a state, the register for the gate's score, which the operation of
            `state_op` reads. Otherwise -1.
    """
    sign = 1.0 if gate.above else -1.0
    vector, code = gate.vector, OP_GATE
    sharpness = gate.sharpness if gate.kind == "sigmoid" else 0.0
    if gate.kind in ("cosine", "cast"):
        vector, code = _unit(vector), OP_GATE_COSINE if gate.kind == "cosine" else OP_GATE_CAST
    told = gate.told if score < 0 else None
    return Op(
        code, 0, vector, gate.threshold, gate.bias, sharpness, sign, score, register, told=told
    )


def state_op(gate: ResolvedGate, register: int, score: int) -> Op:
    """The operation that updates a gate's state, and sets `register` to the gate's value. `score`
    is the register of the gate's score."""
    state, sign = gate.state, 1.0 if gate.above else -1.0
    if isinstance(state, Ema):
        sharpness = gate.sharpness if gate.kind == "sigmoid" else 0.0
        decay = state.decay
        code, numbers = OP_EMA, (decay, 1 - decay, sharpness, sign, gate.threshold)
    elif isinstance(state, Pid):
        gains = (sign * state.kp, sign * state.ki, sign * state.kd)
        code, numbers = OP_PID, (state.setpoint, *gains, state.bound)
    else:
        assert isinstance(state, Latch | Hysteresis)
        low = hysteresis_low(state, gate.above)
        code, numbers = OP_HYSTERESIS, (gate.threshold, low, 0.0, sign, 0.0)
    a, b, c, d, e = numbers
    return Op(code, 0, None, a, b, c, d, score, register, e, gate.told)


def _unit(vector: Array, times: float = 1.0) -> Array:
    """A vector of length `times` in the direction of `vector`."""
    values = vector.numpy.astype(np.float64)
    direction = (values / np.linalg.norm(values)).astype("<f4")
    return Array(vector.shape, (direction * np.float32(times)).tobytes())


def _edit_numbers(edit: ResolvedEdit) -> tuple[int, Array, float, float]:
    """The attributes (code, vector, a, b) of an edit's operation."""
    if edit.kind == "add":
        return _add_numbers(edit)
    if edit.kind == "clamp":
        lo, hi, strength = edit.numbers
        # The operation has no number for the strength. With the unit vector d and p = x . d, the
        # full change is (clip(p, lo, hi) - p) d. If d, lo and hi are multiplied by k, the operation
        # adds k * k times the full change. Therefore k is the root of the strength.
        k = math.sqrt(strength)
        if k == 0:
            lo, hi, k = -math.inf, math.inf, 1  # 0 times infinity would be NaN
        return OP_CLAMP, _unit(edit.values, k), k * lo, k * hi
    return OP_ABLATE, _unit(edit.values), 0.0, 0.0


def _add_numbers(edit: ResolvedEdit) -> tuple[int, Array, float, float]:
    (scale,), limit = edit.numbers, edit.limit
    if edit.norm_match:
        if limit is not None:
            scale = min(max(scale, -limit), limit)
        return OP_ADD_NORM, _unit(edit.values), scale, 0.0
    if limit is None:
        return OP_ADD, edit.values, scale, 0.0
    length = float(np.linalg.norm(edit.values.numpy.astype(np.float64)))
    if not length:
        return OP_ADD, edit.values, scale, 0.0
    most = float(np.finfo(np.float32).max)
    bound = min(max(scale * length, -most), most)
    return OP_ADD_BOUND, _unit(edit.values), bound, limit
