"""Random tables and streams of one tap, and what the tap must make of them, row by row.

Shared by the tests of the definition, of the kernel in Triton's interpreter, and of
the kernel on a GPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from vllm_scope.graph.tap.definition import CHECKED, NUM_COLUMNS, NUM_TOKEN_COLUMNS
from vllm_scope.program.layout import SLOT_BYTES, slots_of_row
from vllm_scope.program.operations import (
    ADVANCING,
    OP_ABLATE,
    OP_ADD,
    OP_ADD_BOUND,
    OP_ADD_FEATURE,
    OP_ADD_NORM,
    OP_CHECK,
    OP_CLAMP,
    OP_EMA,
    OP_FEATURE,
    OP_GATE,
    OP_GATE_CAST,
    OP_HYSTERESIS,
    OP_READ,
    OP_SCORE,
    OP_SET,
    REGISTERS,
    SETTERS,
    STATE_NUMBERS,
)

CODES = (
    OP_READ, OP_SCORE, OP_ADD, OP_ADD_NORM, OP_ABLATE, OP_CLAMP, OP_SET, OP_CHECK, OP_ADD_BOUND,
    OP_ADD_FEATURE, *SETTERS, *ADVANCING,
)  # fmt: skip
#: Codes whose overflow is the same however sums are ordered.
OVERFLOWING = (OP_READ, OP_ADD, OP_SET, OP_CHECK)
#: Codes whose result is a copy, bit by bit.
COPIES = (OP_READ, OP_SET)
#: What no tap writes: the bits of every word before it runs.
POISON = -0x21524111
NUM_VECTORS = 6
#: Rows of the token table after the batch. They look alive.
PADDING = 3


@dataclass(frozen=True)
class Tap:
    """The arguments of `tap_rows`. `wide_...` hold the stream in their first columns."""

    hidden_size: int
    wide_hidden: Tensor
    wide_residual: Tensor | None
    arena: Tensor
    tokens: Tensor
    programs: Tensor
    ops: Tensor
    vectors: Tensor
    tap: Tensor
    host: Tensor
    faults: Tensor
    registers: Tensor
    walks: Tensor
    log: Tensor
    positions: Tensor
    slot_base: int
    slots_per_token: int

    @property
    def hidden(self) -> Tensor:
        return self.wide_hidden[:, : self.hidden_size]

    @property
    def residual(self) -> Tensor | None:
        wide = self.wide_residual
        return None if wide is None else wide[:, : self.hidden_size]

    def run(self, tap_rows: Callable[..., None]) -> Tap:
        tap_rows(
            self.hidden, self.residual, self.arena, self.tokens, self.programs, self.ops,
            self.vectors, self.tap, self.host, self.slot_base, self.slots_per_token,
        )  # fmt: skip
        return self

    def to(self, device: str) -> Tap:
        """A copy."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "faults"}
        moved = {
            name: value.to(device, copy=True)
            for name, value in tensors.items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved).with_faults(self.faults.clone())

    def unreported(self) -> Tap:
        """The same where nobody reads faults."""
        host = self.host.clone()
        host[1] = 0
        return replace(self, host=host)

    def with_faults(self, faults: Tensor) -> Tap:
        """The same with its own memory for faults: the host's, which a GPU can write."""
        faults = faults.pin_memory() if self.host.is_cuda else faults
        host = self.host.clone()
        memory = (faults, self.registers, self.walks, self.log, self.positions)
        host[1:] = torch.tensor([tensor.data_ptr() for tensor in memory])
        return replace(self, host=host, faults=faults)


def random_tap(
    seed: int,
    hidden_size: int,
    dtype: torch.dtype,
    num_rows: int = 5,
    codes: tuple[int, ...] = CODES,
    with_residual: bool = True,
    tap_by_tap: bool = False,
    strided: bool = False,
    on_grid: bool = True,
    huge: bool = False,
) -> Tap:
    """Some rows without a program, some programs without an operation at this tap; if the seed is a
    multiple of 8, the tap is told that no row does anything there.

    Args:
        codes: the operations that programs are made of.
        tap_by_tap: slots are laid out as where a step is drained tap by tap.
        strided: rows lie further apart than they are wide.
        on_grid: values whose copies and sums are exact in every dtype (the interpreter
            truncates where a GPU rounds).
        huge: some vectors are near float32's end, some near the dtype's, and some rows are
            not finite.
    """
    rng = random.Random(seed)
    telling, gated = 0.0 if huge else 0.5, bool(set(codes) & {*SETTERS, *ADVANCING})
    generator = torch.Generator().manual_seed(seed)
    num_taps, num_programs = rng.randint(1, 4), rng.randint(1, 5)
    tap = rng.randrange(num_taps)
    acts = seed % 8 != 0

    def values(rows: int, columns: int) -> Tensor:
        if on_grid:
            return torch.randint(-64, 65, (rows, columns), generator=generator) / 16
        return torch.randn(rows, columns, generator=generator) * 3

    def stream() -> Tensor:
        found = values(num_rows, hidden_size + (7 if strided else 0)).to(dtype)
        if huge:
            found[rng.choices((True, False, False), k=num_rows), 0] = float("inf")
        return found

    vectors = values(NUM_VECTORS, hidden_size).float()
    # Directions: the second half. A zero one keeps its length.
    half = NUM_VECTORS // 2
    lengths = vectors[half:].norm(dim=1, keepdim=True)
    vectors[half:] /= torch.where(lengths > 0, lengths, 1)
    if huge:
        # A product with a number up to 2 is finite, so that only sums overflow: where the product
        # is not rounded (fma), it may be infinite and the sum finite.
        vectors[0] *= 2.0**124  # float32 ends below 2**128
        vectors[1] *= torch.finfo(dtype).max / 8

    row_slots = slots_of_row(hidden_size * dtype.itemsize)
    row_words = row_slots * SLOT_BYTES // 4
    some = (0, 0, 1, 2, 3, 4, 5)
    chains = [
        [rng.choices(codes, k=rng.choice(some)) for _ in range(num_taps)]
        for _ in range(num_programs)
    ]
    programs = torch.full((num_programs, num_taps), -1, dtype=torch.int32)
    num_ops = sum(len(chain) for program in chains for chain in program)
    free = rng.sample(range(num_ops + 2), num_ops + 2)
    ops = torch.full((num_ops + 2, NUM_COLUMNS), -9, dtype=torch.int32)
    token_slots = tap_slots = 1
    for p, program in enumerate(chains):
        read = 0
        for t, chain in enumerate(program):
            read_here = 0
            following, places = -1, []
            for code in chain:
                word = word_in_tap = -1
                # A number that is told takes the place of a row.
                if code in (OP_READ, OP_SCORE) or (code not in COPIES and rng.random() < telling):
                    word, word_in_tap = read * row_words, read_here * row_words
                    read, read_here = read + 1, read_here + 1
                free_length = (OP_SCORE, OP_ADD, OP_SET, OP_ADD_FEATURE, OP_FEATURE, OP_GATE)
                vector = rng.randrange(half) + (0 if code in free_length else half)
                a = rng.randint(-32, 32) / 16
                b = a + rng.randint(0, 32) / 16
                c, d = rng.choice((0, 0.5, 4)), rng.choice((-1, 1))
                if code in (OP_ADD_BOUND, OP_ADD_FEATURE):
                    b, d = abs(b), rng.randint(-16, 16) / 16
                if code == OP_ADD_FEATURE:
                    b = rng.choice((0, 1))
                e = 0.0
                if code in ADVANCING:
                    vector = -1
                    a, b, c, d, e = _numbers_of_state(rng, code)
                register = rng.randrange(4)
                if code not in (*SETTERS, *ADVANCING) and (not gated or rng.random() < 0.5):
                    register = -1
                numbers = torch.tensor([a, b, c, d, e], dtype=torch.float32)
                bits = numbers.view(torch.int32).tolist()
                # A register. No operation of these taps writes the score of a state.
                reads = rng.randrange(4) + (4 if code in ADVANCING else 0)
                reads = -1 if code in SETTERS and rng.random() < 0.5 else reads
                places.append(
                    (code, word, word_in_tap, vector, *bits[:2], register, reads, *bits[2:])
                )
            for *entry, register, reads, c_bits, d_bits, e_bits in reversed(places):
                at = free.pop()
                columns = [*entry, following, register, reads, c_bits, d_bits, e_bits]
                ops[at] = torch.tensor(columns, dtype=torch.int32)
                following = at
            programs[p, t] = following
            if t == tap:
                tap_slots = max(tap_slots, read_here * row_slots)
        token_slots = max(token_slots, read * row_slots)

    places_of = rng.sample(range(num_rows + PADDING), num_rows + PADDING)
    stride = 1 if tap_by_tap else token_slots
    walks, log, positions = _walks(rng, num_rows + PADDING)
    tokens = torch.zeros((num_rows + PADDING, NUM_TOKEN_COLUMNS), dtype=torch.int32)
    tokens[:, 0] = torch.tensor(rng.choices(range(-1, num_programs), k=num_rows + PADDING))
    tokens[num_rows:, 0] = num_programs - 1
    tokens[:, 1] = torch.tensor(places_of) * stride + (0 if tap_by_tap else 1)
    tokens[:, 3] = torch.arange(num_rows + PADDING) + 1
    if not tap_by_tap:
        # Some rows were told their slots at an earlier position.
        ago = torch.tensor(rng.choices(range(4), k=num_rows + PADDING))
        strides = torch.tensor(rng.choices((0, 1, 7), k=num_rows + PADDING))
        # Some of these may move fewer steps than their positions did.
        steps = (ago - torch.tensor(rng.choices((0, 1), k=num_rows + PADDING))).clamp(min=0)
        tokens[:, 1] -= steps * strides
        tokens[:, 4], tokens[:, 5], tokens[:, 6] = positions - ago, strides, steps
    num_slots = (num_rows + PADDING) * (tap_slots if tap_by_tap else token_slots) + 2
    arena = torch.full((num_slots, SLOT_BYTES // 4), POISON, dtype=torch.int32).view(dtype)
    return Tap(
        hidden_size, stream(), stream() if with_residual else None, arena, tokens, programs,
        ops, vectors, torch.tensor([tap, acts, 7, 7], dtype=torch.int32),
        torch.zeros(6, dtype=torch.int64),
        torch.zeros(0), _registers(rng, num_rows + PADDING), walks, log, positions,
        1 if tap_by_tap else 0, tap_slots if tap_by_tap else 0,
    ).with_faults(torch.zeros(num_rows + PADDING + 2, dtype=torch.int32))  # fmt: skip


def _registers(rng: random.Random, num_rows: int) -> Tensor:
    rows = torch.tensor(rng.choices((0.0, 0.5, 1.0), k=REGISTERS)).repeat(num_rows, 1)
    scores = [[rng.randint(-32, 32) / 16 for _ in range(4)] for _ in range(num_rows)]
    rows[:, 4:8] = torch.tensor(scores)
    return rows


def _numbers_of_state(rng: random.Random, code: int) -> tuple[float, ...]:
    a, sign = rng.randint(-32, 32) / 16, rng.choice((-1, 1))
    if code == OP_EMA:
        decay = rng.choice((0.0, 0.5, 0.9))
        return decay, 1 - decay, rng.choice((0, 0.5, 4)), sign, a
    if code == OP_HYSTERESIS:
        return a, a - sign * rng.choice((0, 0.5, 2, math.inf)), 0, sign, 0
    return a, *(rng.randint(-16, 16) / 16 for _ in range(3)), rng.choice((0, 0.5, 3))


def _walks(rng: random.Random, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Walks, the log, and positions: of requests with up to four rows each, in the prompt or behind
    it, whose tokens may have their states."""
    walks, positions, start = [], [], 0
    while len(walks) < num_rows:
        width, tokens, begin = rng.randint(4, 5), rng.randint(8, 9), rng.randint(0, 4)
        first = rng.randint(0, begin + 4)
        known = rng.choice((0, first, first + 2))
        for index in range(rng.randint(1, 4)):
            walks.append((start, width, tokens, begin, known, index, -9, -9))
            positions.append(first + index)
        start += width * tokens
    log = torch.tensor([[rng.randint(-16, 16) / 8] * STATE_NUMBERS for _ in range(start)])
    table = torch.tensor(walks[:num_rows], dtype=torch.int32)
    return table, log, torch.tensor(positions[:num_rows])


@dataclass(frozen=True)
class Stored:
    """A row in the arena.

    Attributes:
        word: where it begins.
        values: [hidden_size] of the model's dtype.
        slack: by how much another way to compute it may differ; 0 for a copy.
    """

    word: int
    values: Tensor
    slack: Tensor


@dataclass(frozen=True)
class Outcome:
    """What one run of a tap leaves behind.

    Attributes:
        told: (word, value, slack) of single numbers in the arena.
        stored: all that it writes to the arena.
        edited: row -> (values, slack) of the stream where it changed, or may have.
        barely: of these, rows that may be left as they were: rounding tells whether they changed.
        faults: owner -> what is reported of it.
        log: place -> what is kept of a state there.
    """

    stored: list[Stored]
    told: list[tuple[int, float, float]]
    edited: dict[int, tuple[Tensor, Tensor]]
    barely: set[int]
    faults: dict[int, int]
    log: dict[int, tuple[float, ...]]


def outcome(tap: Tap) -> Outcome:
    """What the tap must do, one row and one operation at a time, in float64."""
    found = Outcome([], [], {}, set(), {}, {})
    dtype, registers = tap.hidden.dtype, tap.registers.clone()
    number, acts = tap.tap[:2].tolist()
    for row in range(tap.hidden.shape[0]) if acts else ():
        program, slot, _, owner, since, stride, steps = tap.tokens[row, :7].tolist()
        slot += stride * min(max(int(tap.positions[row]) - since, 0), steps)
        if program < 0:
            continue
        at = int(tap.programs[program, number])
        x = tap.hidden[row].float()
        if tap.residual is not None:
            x = x + tap.residual[row].float()
        came, x, is_copy, edited = x, x.double(), True, False
        if tap.slots_per_token:
            slot = tap.slot_base + slot * tap.slots_per_token
        while at >= 0:
            entry = tap.ops[at].tolist()
            code, vector, following, register, reads = (entry[i] for i in (0, 3, 6, 7, 8))
            numbers = tap.ops[at, [4, 5, 9, 10, 11]].view(torch.float32).tolist()
            v = tap.vectors[vector].double()
            offset = entry[2] if tap.slots_per_token else entry[1]
            word = slot * SLOT_BYTES // 4 + offset
            if code in SETTERS:
                value, score = _condition(code, x.double(), v, *numbers)
                if code != OP_FEATURE and reads >= 0:
                    registers[row, reads] = score
                registers[row, register] = value
                if offset >= 0:
                    found.told.append((word, value, 1e-4 * (abs(value) + 1)))
            elif code in ADVANCING:
                value = float(registers[row, register])
                start, width, _, begin, known, index, *_ = tap.walks[row].tolist()
                position = int(tap.positions[row])
                known = max(known, begin, position - index)

                def place(of: int, at: int = start + register, wide: int = width) -> int:
                    return at + of * wide

                if begin <= position < known:
                    value = float(tap.log[place(position - begin), 0])
                elif position >= begin:
                    state = None if known == begin else tap.log[place(known - begin - 1)].tolist()
                    for i in range(row - (position - known), row + 1):
                        state = _advanced(code, state, float(tap.registers[i, reads]), *numbers)
                    found.log[place(position - begin)] = state
                    value = state[0]
                registers[row, register] = value
                if offset >= 0:
                    found.told.append((word, value, 1e-4 * (abs(value) + 1)))
            elif code == OP_READ:
                found.stored.append(Stored(word, x.to(dtype), _slack(x, dtype, is_copy)))
            elif code == OP_SCORE:
                value, slack = float(x.to(dtype).double() @ v) + numbers[1], 0.0
                if not is_copy:  # a row that an edit changed may be rounded the other way
                    slack = float((_slack(x, dtype, False) * v.abs()).sum())
                found.told.append((word, value, 1e-4 * (abs(value) + 1) + slack))
            elif code == OP_CHECK:
                if not x.to(dtype).isfinite().all():
                    found.faults[owner] = (0 if edited else CHECKED) | number + 1
                    x, is_copy, edited = torch.zeros_like(x), True, True
            else:
                part = 1.0 if register < 0 else float(registers[row, register])
                old, x = x.double(), x.double()
                if part:
                    x = old + part * (
                        _edit(code, old, v, float(registers[row, reads]), *numbers) - old
                    )
                    x = (v if code == OP_SET and part == 1 else x).float().double()
                    is_copy, edited = code == OP_SET and part == 1, True
                if offset >= 0:
                    length = float(old.norm())
                    change = float((x - old).norm()) / length if length else 0.0
                    found.told.append((word, change, 1e-4 * (change + 1)))
            at = following
        if edited and not x.to(dtype).isfinite().all():
            found.faults[owner] = number + 1
        elif edited:
            slack = _slack(x, dtype, is_copy)
            barely = not is_copy and ((x - came).abs() <= 1e-5 * (float(x.norm()) + 1)).all()
            if barely:
                found.barely.add(row)
            if barely or not torch.equal(x.float(), came):
                found.edited[row] = (x.to(dtype), slack)
    return found


def _advanced(
    code: int, state: list[float] | None, score: float,
    a: float, b: float, c: float, d: float, e: float,
) -> list[float]:  # fmt: skip
    """A gate's value and its state, one token later."""
    _, one, two = state or (0.0, 0.0, None)
    if code == OP_EMA:
        one = score if state is None else a * one + b * score
        beyond = d * (one - e)
        value = 1 / (1 + math.exp(-c * beyond)) if c else float(beyond > 0)
        return [value, one, two or 0.0]
    if code == OP_HYSTERESIS:
        if d * (score - a) > 0:
            one = 1.0
        elif d * (score - b) < 0:
            one = 0.0
        return [one, one, two or 0.0]
    error = score - a
    one = min(max(one + error, -e), e)
    change = 0.0 if state is None else error - two
    return [min(max(b * error + c * one + d * change, 0.0), 1.0), one, error]


def _condition(
    code: int, x: Tensor, v: Tensor, a: float, b: float, c: float, d: float, e: float
) -> tuple[float, float]:
    """The value, and the score."""
    score = float(x @ v) + b
    if code == OP_FEATURE:
        return (score if score > c else 0.0), score
    if code != OP_GATE:
        w = torch.tanh(float(x @ v) * v) if code == OP_GATE_CAST else v
        lengths = float(x.norm()) * float(w.norm())
        score = float(x @ w) / lengths if lengths else 0.0
    beyond = d * (score - a)
    return 1 / (1 + math.exp(-max(c * beyond, -700.0))) if c else float(beyond > 0), score


def _edit(
    code: int, x: Tensor, v: Tensor, feature: float,
    a: float, b: float, c: float, d: float, e: float,
) -> Tensor:  # fmt: skip
    along = float(x @ v)
    most = b * float(x.norm())
    return {
        OP_ADD_BOUND: lambda: x + min(max(a, -most), most) * v,
        OP_ADD_FEATURE: lambda: x if b and not feature > 0 else x + (a + d * feature) * v,
        OP_ADD: lambda: x + a * v,
        OP_ADD_NORM: lambda: x + a * x.norm() * v,
        OP_ABLATE: lambda: x - along * v,
        OP_CLAMP: lambda: x + (min(max(along, a), b) - along) * v,
        OP_SET: lambda: v,
    }[code]()


def _slack(x: Tensor, dtype: torch.dtype, is_copy: bool) -> Tensor:
    """Of a row: one unit in the last place, and float32's sums."""
    if is_copy:
        return torch.zeros(x.shape)
    # Infinite numbers and NaNs do not change the slack of the row's other numbers.
    ulp, sums = torch.finfo(dtype).eps, 1e-5 * (float(x.nan_to_num(0, 0, 0).norm()) + 1)
    return (ulp * x.abs() + sums).float()


def check(ran: Tap, before: Tap, expected: Outcome, twin: Tap | None = None) -> None:
    """What a tap left behind is what was expected, and nothing else was touched.

    Args:
        ran: after the run.
        before: the same before it.
        expected: where, and within which slack.
        twin: after a run by another implementation, whose values are then expected.
    """
    words, untouched = ran.arena.view(torch.int32).view(-1), before.arena.clone()
    blank = untouched.view(torch.int32).view(-1)
    for stored in expected.stored:
        size = stored.values.numel() * stored.values.element_size()
        stop = stored.word + -(-size // 4)
        wanted = stored.values
        if twin is not None:
            wanted = twin.arena.view(torch.int32).view(-1)[stored.word : stop]
            wanted = wanted.view(stored.values.dtype)[: stored.values.numel()]
        got = words[stored.word : stop].view(stored.values.dtype)[: stored.values.numel()]
        _near(got, wanted, stored.slack, f"word {stored.word}")
        # Of an odd row the last half word is nobody's.
        blank[stored.word : stop] = words[stored.word : stop]
    floats = words.view(torch.float32)
    other = None if twin is None else twin.arena.view(torch.float32).view(-1)
    for word, value, slack in expected.told:
        wanted = value if other is None else float(other[word])
        assert abs(float(floats[word]) - wanted) <= slack, f"word {word} tells {floats[word]}"
        blank[word] = words[word]
    assert torch.equal(words, blank), "a word outside the plan was written"

    for name in ("wide_hidden", "wide_residual"):
        wide, old = getattr(ran, name), getattr(before, name)
        if wide is None:
            continue
        kept = old.clone()
        holds_stream = name == ("wide_hidden" if ran.residual is None else "wide_residual")
        for row, (values, slack) in expected.edited.items():
            part = kept[row, : ran.hidden_size]
            if row in expected.barely and _same_row(ran, before, row):
                continue
            if not holds_stream:
                part[:] = 0
                continue
            wanted = values
            if twin is not None and not _same_row(twin, before, row):
                wanted = getattr(twin, name)[row, : ran.hidden_size]
            _near(wide[row, : ran.hidden_size], wanted, slack, f"row {row}")
            part[:] = wide[row, : ran.hidden_size]
        assert torch.equal(wide, kept), f"{name} was changed where nothing is edited"
    log = before.log.clone()
    for place, state in expected.log.items():
        wanted = torch.tensor(state) if twin is None else twin.log[place]
        _near(ran.log[place], wanted, 1e-4 * (wanted.abs() + 1), f"place {place}")
        log[place] = ran.log[place]
    assert torch.equal(ran.log, log), "the log was changed where no state is advanced"
    for name in ("tokens", "programs", "ops", "vectors", "tap", "walks", "positions"):
        assert torch.equal(getattr(ran, name), getattr(before, name)), f"{name} was changed"
    reported = {o: int(ran.faults[o]) for o in range(len(ran.faults)) if ran.faults[o]}
    assert reported == expected.faults


def _same_row(ran: Tap, before: Tap, row: int) -> bool:
    """The stream's row was left as it was."""
    pairs = [(ran.hidden, before.hidden), (ran.residual, before.residual)]
    return all(now is None or torch.equal(now[row], old[row]) for now, old in pairs)


def _near(got: Tensor, wanted: Tensor, slack: Tensor, where: str) -> None:
    # Which number that is not finite depends on rounding: a * v may overflow before x is added.
    same = (got == wanted) | ~(got.isfinite() | wanted.isfinite())
    apart = (got.double() - wanted.double()).abs()
    assert (same | (apart <= slack)).all(), f"{where}: {got} is not {wanted}"
