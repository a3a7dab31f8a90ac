"""The tables that taps read: programs, their operations and vectors, a step's tokens."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.programs import program_of
from vllm_scope import CapacityError, ScopeError
from vllm_scope.graph.tap import op as tap_op
from vllm_scope.graph.tap.definition import (
    CODE,
    NEXT,
    NUMBER_A,
    OWNER,
    PROGRAM,
    SINCE,
    SLOT,
    STEPS,
    STRIDE,
    TO_HOST,
    VECTOR,
    WORD,
    WORD_IN_TAP,
)
from vllm_scope.graph.tap.program_tables import HELD_OPS, HELD_PROGRAMS, capacity
from vllm_scope.graph.tap.tables import Repeat, Tables
from vllm_scope.program.layout import SLOT_BYTES, Widths
from vllm_scope.program.operations import (
    NO_PROGRAM,
    OP_ABLATE,
    OP_ADD,
    OP_CLAMP,
    OP_READ,
    OP_SET,
    Op,
    Program,
    build_program,
)
from vllm_scope.request.arrays import Array
from vllm_scope.request.heads import Bank, Encoding, Head
from vllm_scope.request.sites import point_of

CPU = torch.device("cpu")
BOUNDARIES = (0, 2, 3, 7)
HIDDEN_SIZE = 6
#: bf16 rows of 12 bytes: one slot each, of 4 words.
ROW_BYTES = 12
MIB = 2**20


def _tables(num_programs: int = 4, num_vectors: int = 8, num_ops: int = 64) -> Tables:
    vectors_mib = num_vectors * HIDDEN_SIZE * 4 / MIB
    return Tables(
        BOUNDARIES, 16, HIDDEN_SIZE, Widths((ROW_BYTES,)), CPU, vectors_mib, num_programs, num_ops
    )


def _vector(number: float) -> Array:
    return Array.parse([number] * HIDDEN_SIZE, "")


def _reads(*points: int) -> Program:
    return Program.reading(points)


def _adds(*numbers: float, boundary: int = 2) -> Program:
    edits = {(boundary, 0): [Op(OP_ADD, 0, _vector(n), n) for n in numbers]}
    return build_program((), edits)


def _on_the_device(tables: Tables, program_id: int) -> dict[int, list[tuple]]:
    """Boundary -> (code, word, word in the tap, vector's first number, a, b) of its chain."""
    found: dict[int, list[tuple]] = {}
    for tap, boundary in enumerate(BOUNDARIES):
        at = int(tables.programs[program_id, tap])
        while at >= 0:
            op = tables.ops[at]
            vector = None
            if int(op[VECTOR]) >= 0:
                vector = float(tables.vectors[int(op[VECTOR]), 0])
                assert (tables.vectors[int(op[VECTOR])] == vector).all()
            words = (int(op[WORD]), int(op[WORD_IN_TAP]))
            numbers = op[NUMBER_A : NUMBER_A + 2].view(torch.float32).tolist()
            found.setdefault(boundary, []).append((int(op[CODE]), *words, vector, *numbers))
            at = int(op[NEXT])
    return found


def _as_told(program: Program) -> dict[int, list[tuple]]:
    """The same, from what the program says; words of 4 to a row. What heads need is read."""
    layout, found = program.layout.arena, {}
    for boundary, ops in program.taps:
        local = layout.at(boundary)
        for op in ops:
            words = (-1, -1)
            if op.code == OP_READ:
                words = (4 * op.at, 4 * local.points.index(layout.points[op.at]))
            vector = None if op.vector is None else float(op.vector.numpy[0])
            found.setdefault(boundary, []).append((op.code, *words, vector, op.a, op.b))
    return found


def _load(tables: Tables, rows: list[int], ids: list[int], slots: list[int], **kwargs) -> None:
    owners = np.array([100 + row for row in rows], np.int32)
    tables.load_step(
        np.array(rows, np.int64), np.array(ids, np.int32), owners, np.array(slots, np.int64),
        **kwargs,
    )  # fmt: skip


def _flush(tables: Tables) -> None:
    """What a step does before its tokens."""
    _load(tables, [0], [NO_PROGRAM], [0])


@st.composite
def programs(draw) -> Program:
    """Any mix of reads, heads and edits at these boundaries."""
    levels = st.tuples(st.sampled_from(BOUNDARIES), st.integers(0, 2))
    points = {point_of(*place) for place in draw(st.lists(levels, max_size=4))}
    heads = st.sampled_from([Bank.of([b"a"], 1), Bank.of([b"b"], 9), Encoding("{}", 20)])
    probed: dict[Head, set[int]] = {}
    for place in draw(st.lists(levels, max_size=5)):
        probed.setdefault(draw(heads), set()).add(point_of(*place))
    edits: dict[tuple[int, int], list[Op]] = {}
    for boundary, group in draw(
        st.lists(st.tuples(st.sampled_from(BOUNDARIES), st.integers(0, 1)))
    ):
        code = draw(st.sampled_from([OP_ADD, OP_ABLATE, OP_CLAMP, OP_SET]))
        op = Op(code, 0, _vector(draw(st.integers(1, 4))), draw(st.integers(-4, 4)) / 2, 2.5)
        edits.setdefault((boundary, group), []).append(op)
    encoded = tuple((head, tuple(sorted(some))) for head, some in probed.items())
    return build_program(tuple(sorted(points)), edits, encoded)


@given(st.lists(programs(), min_size=1, max_size=3))
def test_a_program_is_on_the_device_as_chains_of_its_operations(some):
    tables = _tables(num_vectors=4, num_ops=512)
    ids = {program: tables.program_id(program, hold=True) for program in some}
    _flush(tables)
    for program, found in ids.items():
        assert _on_the_device(tables, found) == _as_told(program)
        assert tables.num_slots[found] == len(program.layout.arena.points)
        assert tables.num_delivered[found] == program.layout.slots(Widths((16,)))
        assert program_of(tables, found) == program


def test_an_id_given_to_another_program_forgets_the_first():
    tables = _tables(num_programs=1)
    tables.program_id(_reads(0, 6, 9, 21))
    tables.begin_step()
    found = tables.program_id(_reads(9))
    _flush(tables)
    assert _on_the_device(tables, found) == {3: [(OP_READ, 0, 0, None, 0, 0)]}
    assert tables.num_slots[found] == 1
    assert program_of(tables, found) == _reads(9)


def test_the_program_unused_for_longest_makes_room():
    tables = _tables(num_programs=2)
    old, new, third = _reads(0), _reads(6), _reads(9)
    old_id, new_id = tables.program_id(old), tables.program_id(new)
    tables.begin_step()
    tables.program_id(old)  # used again: now `new` is the older one
    tables.begin_step()
    assert tables.program_id(third) == new_id
    assert tables.program_id(old) == old_id


@pytest.mark.parametrize("limit", ["ids", "operations"])
def test_more_programs_in_one_step_than_fit_is_refused(limit):
    tables = _tables(num_programs=2) if limit == "ids" else _tables(num_programs=9, num_ops=2)
    first, second, third = (_reads(point) for point in (0, 6, 9))
    tables.program_id(first)
    tables.program_id(second)
    with pytest.raises(CapacityError, match="all tap programs are in use; send the request"):
        tables.program_id(third)
    assert tables.program_id(first) != tables.program_id(second)
    tables.begin_step()
    tables.program_id(third)


def test_a_held_id_stays_until_its_last_release():
    tables = _tables(num_programs=1)
    held = tables.program_id(_reads(0), hold=True)
    assert tables.program_id(_reads(0), hold=True) == held
    for _ in range(2):
        tables.begin_step()
        with pytest.raises(CapacityError):
            tables.program_id(_reads(6))
        tables.release(held)
    assert tables.program_id(_reads(6)) == held


def test_a_program_that_nobody_needs_makes_room_whatever_the_step_used():
    tables = _tables(num_programs=2)
    gone = tables.program_id(_reads(6), hold=True)
    tables.begin_step()
    used = tables.program_id(_reads(0))
    tables.release(gone)
    assert tables.program_id(_reads(9)) == gone
    assert tables.program_id(_reads(0)) == used


def test_a_released_program_of_reads_is_found_again():
    tables = _tables()
    found = tables.program_id(_reads(0), hold=True)
    _flush(tables)
    uploads = tables.num_uploads
    tables.release(found)
    tables.begin_step()
    assert tables.program_id(_reads(0)) == found
    _flush(tables)
    assert tables.num_uploads == uploads + 1  # the tokens alone


# Vectors


def _num_vectors_taken(tables: Tables) -> int:
    """How many vectors are held: what is left takes that many fewer new ones."""
    free = 0
    ids = []
    while True:
        try:
            ids.append(tables.program_id(_adds(1000.0 + free), hold=True))
        except CapacityError:
            break
        free += 1
    for found in ids:
        tables.release(found)
    return len(tables.vectors) - free


def test_programs_share_vectors_by_content():
    tables = _tables(num_programs=16, num_vectors=2)
    ids = [tables.program_id(_adds(1.0, 2.0, boundary=b), hold=True) for b in (0, 2, 3)]
    ids.append(tables.program_id(_adds(2.0, 1.0, 2.0), hold=True))
    with pytest.raises(CapacityError, match=r"all 2 vectors of .*vectors_mib are in use"):
        tables.program_id(_adds(3.0), hold=True)
    _flush(tables)
    assert _on_the_device(tables, ids[3])[2] == [(OP_ADD, -1, -1, n, n, 0) for n in (2.0, 1.0, 2.0)]
    for found in ids[:3]:
        tables.release(found)
    with pytest.raises(CapacityError):
        tables.program_id(_adds(3.0), hold=True)
    tables.release(ids[3])
    found = tables.program_id(_adds(3.0, 4.0), hold=True)
    _flush(tables)
    assert _on_the_device(tables, found) == _as_told(_adds(3.0, 4.0))


def test_a_program_with_vectors_goes_with_its_last_holder():
    tables = _tables(num_programs=1)
    first, second = (tables.program_id(_adds(1.0), hold=True) for _ in range(2))
    assert first == second
    tables.release(first)
    assert tables.program_id(_adds(1.0)) == first
    tables.release(second)
    with pytest.raises(ScopeError, match="its request never held"):
        tables.program_id(_adds(1.0))
    assert tables.program_id(_adds(2.0), hold=True) == first  # in the same step


def test_a_program_with_vectors_that_nobody_holds_is_never_planned():
    tables = _tables()
    with pytest.raises(ScopeError, match="its request never held") as caught:
        tables.program_id(_adds(1.0))
    assert not isinstance(caught.value, CapacityError)


@pytest.mark.parametrize(
    ("sizes", "program"),
    [
        pytest.param({"num_vectors": 2}, _adds(5.0, 6.0), id="no-vectors"),
        pytest.param({"num_programs": 1}, _adds(5.0), id="no-ids"),
        pytest.param({"num_ops": 3}, _adds(5.0, 5.0, 5.0), id="no-operations"),
    ],
)
def test_a_program_without_room_leaves_nothing_held(sizes, program):
    tables = _tables(**({"num_programs": 9, "num_vectors": 9} | sizes))
    held = tables.program_id(_adds(1.0), hold=True)
    taken = _num_vectors_taken(_refilled(tables))
    for _ in range(5):
        with pytest.raises(CapacityError, match="in use; send the request again"):
            tables.program_id(program, hold=True)
        tables.begin_step()
    assert _num_vectors_taken(_refilled(tables)) == taken
    tables.release(held)
    found = tables.program_id(program, hold=True)
    _flush(tables)
    assert _on_the_device(tables, found) == _as_told(program)


def _refilled(tables: Tables) -> Tables:
    """The same tables, after a step."""
    tables.begin_step()
    return tables


def test_the_capacity_is_what_all_requests_may_hold():
    cost = capacity(HIDDEN_SIZE, 5 * HIDDEN_SIZE * 4 / MIB)
    assert (cost.vectors, cost.programs, cost.ops) == (5, HELD_PROGRAMS, HELD_OPS)
    assert len(_tables(num_vectors=5).vectors) == 5
    assert capacity(1 << 20, 0.001).vectors == 1  # at least one


@given(st.data())
def test_held_programs_stay_unchanged_while_others_come_and_go(data):
    tables = _tables(num_programs=4, num_vectors=3, num_ops=24)
    some = [
        _reads(0), _reads(6, 9), _reads(0, 6, 9, 21), _adds(1.0), _adds(2.0, 3.0),
        _adds(1.0, boundary=7), _adds(4.0, 1.0, 4.0),
    ]  # fmt: skip
    held: list[tuple[Program, int]] = []
    this_step: dict[Program, int] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["ask", "hold", "hold", "release", "step"])):
            case "step":
                tables.begin_step()
                this_step = {}
            case "release" if held:
                program, found = held.pop(data.draw(st.integers(0, len(held) - 1)))
                tables.release(found)
                if program.vectors and program not in dict(held):
                    this_step.pop(program, None)
            case action:
                program = data.draw(st.sampled_from(some))
                try:
                    found = tables.program_id(program, hold=action == "hold")
                except ScopeError:
                    continue
                this_step[program] = found
                if action == "hold":
                    held.append((program, found))
        in_use = dict(held) | this_step
        assert len(set(in_use.values())) == len(in_use)
        _flush(tables)
        for program, found in in_use.items():
            assert _on_the_device(tables, found) == _as_told(program)
            assert program_of(tables, found) == program
    for _, found in held:
        tables.release(found)
    # Nothing leaked: the largest program finds room again.
    tables.begin_step()
    tables.program_id(_adds(5.0, 6.0, 7.0), hold=True)


# Uploads


def test_a_steps_new_programs_are_sent_in_one_piece_for_each_table():
    tables = _tables(num_programs=9)
    tables.program_id(_adds(1.0, 2.0), hold=True)
    tables.program_id(_adds(3.0), hold=True)
    tables.program_id(_reads(0, 6))
    assert tables.num_uploads == 0  # nothing is sent before a step needs it
    _flush(tables)
    assert tables.num_uploads == 5  # vectors, operations, programs, tokens; that no tap acts
    tables.program_id(_reads(9))
    _flush(tables)
    assert tables.num_uploads == 5 + 3  # no vectors this time
    tables.program_id(_adds(3.0), hold=True)
    tables.program_id(_reads(9))
    _flush(tables)
    assert tables.num_uploads == 5 + 3 + 1


def test_a_place_reused_before_a_step_has_its_last_content():
    tables = _tables(num_programs=1, num_vectors=1, num_ops=1)
    tables.release(tables.program_id(_adds(1.0), hold=True))
    found = tables.program_id(_adds(2.0), hold=True)
    _flush(tables)
    assert _on_the_device(tables, found) == _as_told(_adds(2.0))


# Steps


def test_before_and_after_a_step_no_token_has_a_program():
    tables = _tables()
    assert (tables.tokens[:, PROGRAM] == NO_PROGRAM).all()
    _load(tables, [1, 4], [2, 0], [9, 5])
    assert tables.tokens[:, PROGRAM].tolist() == [-1, 2, -1, -1, 0] + [-1] * 11
    assert tables.tokens[[1, 4], SLOT].tolist() == [9, 5]
    assert tables.tokens[[1, 4], TO_HOST].tolist() == [0, 0]
    tables.clear_step()
    assert (tables.tokens[:, PROGRAM] == NO_PROGRAM).all()


def test_a_step_says_whether_its_slots_are_in_host_memory():
    tables = _tables()
    _load(tables, [1, 4], [2, 0], [9, 5], to_host=True)
    assert tables.tokens[[1, 4], TO_HOST].tolist() == [1, 1]
    _load(tables, [1, 4], [2, 0], [9, 5])
    assert tables.tokens[[1, 4], TO_HOST].tolist() == [0, 0]


def test_a_smaller_step_keeps_nothing_of_the_larger_one_before_it():
    tables = _tables()
    _load(tables, list(range(16)), [3] * 16, list(range(16)))
    tables.clear_step()
    _load(tables, [2], [1], [7])
    assert tables.tokens[:, PROGRAM].tolist() == [-1, -1, 1] + [-1] * 13


def test_the_tables_keep_their_addresses():
    # CUDA graphs and the taps hold them.
    tables = _tables()

    def addresses() -> list[int]:
        held = (tables.tokens, tables.programs, tables.ops, tables.vectors, tables.host)
        return [table.data_ptr() for table in (*held, tables.taps)]

    before = addresses()
    _load(tables, [15], [tables.program_id(_adds(1.0, 2.0), hold=True)], [3])
    tables.clear_step()
    assert addresses() == before


def test_without_a_clear_between_them_a_step_replaces_the_one_before_it():
    tables = _tables()
    _load(tables, list(range(16)), [3] * 16, list(range(16)))
    _load(tables, [2, 5], [1, 0], [7, 8])
    assert tables.tokens[:, PROGRAM].tolist() == [-1, -1, 1, -1, -1, 0] + [-1] * 10
    _load(tables, [0], [2], [4])
    assert tables.tokens[:, PROGRAM].tolist() == [2] + [-1] * 15
    tables.clear_step()
    assert (tables.tokens[:, PROGRAM] == NO_PROGRAM).all()


def test_a_step_is_identified_by_its_array_of_ids():
    tables, rows = _tables(), np.array([1])
    ids = np.array([2], np.int32)
    assert not tables.has_loaded(ids)
    tables.load_step(rows, ids, ids, rows)
    assert tables.has_loaded(ids)
    assert not tables.has_loaded(ids.copy())
    tables.clear_step()
    assert not tables.has_loaded(ids)


@pytest.mark.parametrize(
    ("ids", "acting"),
    [([NO_PROGRAM], []), ([NO_PROGRAM, 0], [2]), ([0, 0], [2]), ([0, 1], [1, 2])],
)
def test_those_taps_act_at_which_a_program_of_the_step_does_something(ids, acting):
    tables = _tables()
    tables._host_programs[0, 2] = tables._host_programs[1, 1] = 0
    tables._host_programs[-1] = 0  # acts everywhere, and no row has it
    rows, programs = np.arange(len(ids)), np.array(ids, np.int32)
    tables.load_step(rows, programs, np.zeros_like(programs), rows)
    assert np.flatnonzero(tables.acting).tolist() == acting


def test_each_tap_is_told_its_number_by_the_device():
    tables = _tables()
    assert tables.taps[:, 0].tolist() == [0, 1, 2, 3]
    # The kernel has one variant for all of them if the rows begin at multiples of 16 bytes.
    assert tables.taps.stride() == (4, 1)
    assert tables.taps.dtype == torch.int32


def test_clearing_a_step_that_loaded_nothing_touches_nothing():
    tables = _tables()
    tables.tokens.fill_(77)
    tables.clear_step()
    assert (tables.tokens == 77).all()


def test_an_array_of_ids_can_be_loaded_again_after_larger_steps():
    tables, rows, many = _tables(), np.array([3]), np.arange(16)
    again = np.array([1], np.int32)
    for _ in range(4):  # more than there are buffers
        tables.load_step(many, np.full(16, 2, np.int32), many, many)
    tables.clear_step()
    for _ in range(4):
        tables.load_step(rows, again, rows, rows)
        assert tables.tokens[:, PROGRAM].tolist() == [-1, -1, -1, 1] + [-1] * 12
        tables.load_step(many, np.full(16, 3, np.int32), many, many)
        assert (tables.tokens[:, PROGRAM] == 3).all()


def test_a_step_with_the_same_array_of_ids_gets_its_own_slots():
    tables = _tables()
    ids = np.array([1, 0, 2], np.int32)
    for rows in (np.array([2, 3, 4]), np.array([1, 4, 9])):
        again = ids.copy()
        for first in range(10, 50, 10):
            to_host = first % 20 == 0
            tables.load_step(rows, again, 7 * rows, first + np.arange(3), to_host)
            assert tables.tokens[rows, OWNER].tolist() == (7 * rows).tolist()
            assert tables.tokens[rows, PROGRAM].tolist() == [1, 0, 2]
            assert tables.tokens[rows, SLOT].tolist() == [first, first + 1, first + 2]
            assert tables.tokens[rows, TO_HOST].tolist() == [to_host] * 3
            assert (tables.tokens[:, PROGRAM] >= 0).sum() == 3


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize(
    "change", ["nothing", "ids", "slot", "host-memory", "cleared", "another-step", "programs"]
)
def test_a_table_is_right_for_the_next_step_if_each_row_is_one_position_further(change, to_host):
    tables, rows, ids = _tables(), np.array([2, 3]), np.array([1, 0], np.int32)
    repeat = Repeat(np.array([7, 90]), 4, 30)
    tables.load_step(rows, ids, rows, np.array([20, 21]), to_host, repeat)
    assert tables.tokens[rows][:, [SINCE, STRIDE, STEPS]].tolist() == [[7, 4, 30], [90, 4, 30]]
    assert tables.move_on(ids, 24, to_host)
    assert tables.move_on(ids, 28, to_host)
    uploads = tables.num_uploads
    if change == "cleared":
        tables.clear_step()
    elif change == "another-step":
        tables.load_step(rows, ids.copy(), rows, np.array([28, 29]), to_host, repeat)
    elif change == "programs":  # the device does not have them all
        tables.program_id(_adds(1.0), hold=True)
    else:
        assert tables.num_uploads == uploads
    again = ids.copy() if change == "ids" else ids
    slot = 28 if change == "slot" else 32
    assert tables.move_on(again, slot, to_host ^ (change == "host-memory")) == (change == "nothing")


def test_a_step_that_may_not_be_repeated_takes_back_the_stride_of_the_step_before_it():
    tables, rows, ids = _tables(), np.array([2, 3]), np.array([1, 0], np.int32)
    for stride in (4, 0, 9, 5):
        repeat = Repeat(rows, stride, 1) if stride else None
        tables.load_step(rows, ids, rows, rows, False, repeat)
        assert tables.tokens[rows, STRIDE].tolist() == [stride, stride]
        assert not tables.move_on(ids, 2 if stride == 0 else 3, False)


def test_taps_read_positions_only_if_they_are_a_contiguous_int64_tensor():
    tables = _tables()
    positions = torch.arange(8)
    assert tables.point_at(positions)
    assert tables.host[5] == positions.data_ptr()
    for other in (positions.int(), positions[1::2]):
        assert not tables.point_at(other)
        with pytest.raises(ScopeError, match="states need a contiguous int64 tensor"):
            tables.load_walks(np.array([0]), np.zeros((1, 8), np.int32), other)
    assert tables.host[5] == positions.data_ptr()


def test_a_step_says_at_which_taps_some_row_does_anything():
    tables = _tables()

    def acting() -> list[int]:
        acts = [False] * len(BOUNDARIES) if tables.acting is None else tables.acting
        return [boundary for boundary, one in zip(BOUNDARIES, acts, strict=True) if one]

    def told() -> list[int]:
        """The same, of the device."""
        return [
            boundary for boundary, acts in zip(BOUNDARIES, tables.taps[:, 1], strict=True) if acts
        ]

    assert acting() == []
    reads, adds = tables.program_id(_reads(point_of(3, 0))), tables.program_id(_adds(1.0), True)
    _load(tables, [0, 1], [reads, reads], [0, 1])
    assert acting() == told() == [3]
    _load(tables, [0, 1], [reads, adds], [0, 1])
    assert acting() == told() == [2, 3]
    tables.clear_step()
    assert acting() == []
    _load(tables, [0, 1], [adds, adds], [0, 1])
    assert acting() == told() == [2]
    assert tables.taps[:, 0].tolist() == list(range(len(BOUNDARIES)))


def test_the_device_is_told_which_taps_act_only_if_that_has_changed():
    tables = _tables()
    reads = tables.program_id(_reads(point_of(3, 0)))
    _load(tables, [0], [reads], [0])
    before = tables.num_uploads
    for rows in ([0, 1], [1], [0, 1, 2]):
        _load(tables, rows, [reads] * len(rows), rows)
    assert tables.num_uploads == before + 3  # the rows themselves


def test_taps_do_not_keep_the_state_of_a_worker_that_is_gone():
    """vLLM does not shut down the worker of an engine that does not start, and the worker's state
    leads to the model."""

    class Route:
        active = True

    tap_op.register()
    tables = Tables((0,), 2, 4, Widths((16,)), torch.device("cpu"))
    route, rows = Route(), torch.ones(2, 4)
    gone = weakref.ref(route)
    tap_op.connect(tables.taps, route)
    del route
    assert gone() is None
    torch.ops.vllm_scope.tap(
        rows, None, torch.zeros(4, SLOT_BYTES // 4), tables.tokens, tables.programs, tables.ops,
        tables.vectors, tables.taps[0], tables.host,
    )  # fmt: skip
    assert rows.tolist() == torch.ones(2, 4).tolist()
    tap_op.disconnect(tables.taps)
