"""What a tap does to rows, against a loop over rows and operations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.taps import CODES, COPIES, OVERFLOWING, POISON, check, outcome, random_tap
from vllm_scope.graph.tap.definition import NUM_COLUMNS, fault_at, tap_rows
from vllm_scope.program.operations import (
    OP_ABLATE,
    OP_ADD,
    OP_ADD_NORM,
    OP_CHECK,
    OP_CLAMP,
    OP_READ,
    OP_SCORE,
    OP_SET,
    REGISTERS,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = st.sampled_from([1, 2, 3, 7, 8, 9, 64, 65, 127])


@given(
    st.builds(
        dict,
        seed=st.integers(0, 1 << 31),
        hidden_size=SIZES,
        dtype=st.sampled_from(list(DTYPES.values())),
        num_rows=st.integers(0, 8),
        codes=st.sampled_from([CODES, COPIES, (OP_READ,)]),
        with_residual=st.booleans(),
        tap_by_tap=st.booleans(),
        strided=st.booleans(),
        on_grid=st.booleans(),
    )
)
def test_a_tap_equals_a_loop_over_rows_and_operations(arguments):
    before = random_tap(**arguments)
    check(random_tap(**arguments).run(tap_rows), before, outcome(before))


@given(
    st.builds(
        dict,
        seed=st.integers(0, 1 << 31),
        hidden_size=SIZES,
        dtype=st.sampled_from(list(DTYPES.values())),
        num_rows=st.integers(1, 8),
        codes=st.just(OVERFLOWING),
        with_residual=st.booleans(),
        huge=st.just(True),
    )
)
def test_rows_that_overflow_are_reported_and_left_as_they_were(arguments):
    before = random_tap(**arguments)
    check(random_tap(**arguments).run(tap_rows), before, outcome(before))


def test_random_taps_overflow_and_do_not():
    reported = [
        outcome(random_tap(seed, 8, torch.float32, codes=OVERFLOWING, huge=True)).faults
        for seed in range(400)
    ]
    assert {fault_at(f)[1] for faults in reported for f in faults.values()} == {True, False}
    assert any(not faults for faults in reported)


# One row at a time

#: A direction of length 1, and a row whose length is 5 and whose part along it is 3.
DIRECTION = [1.0, 0.0, 0.0, 0.0]
ROW = [3.0, 4.0, 0.0, 0.0]


def _run(
    hidden: Tensor,
    residual: Tensor | None,
    *ops: tuple,
    vectors: list[list[float]] | None = None,
    tokens: list[list[int]] | None = None,
    slots: tuple[int, int] = (0, 0),
    num_slots: int = 8,
    faults: Tensor | None = None,
    told: bool = True,
) -> Tensor:
    """The arena after a tap whose one program is a chain of (code, word, vector, a, b).

    Unless `tokens` says otherwise each row runs it, from slot 4 * row on. `word` may be a
    pair: where the operation stores in a whole step, and in one that is drained tap by tap.

    Args:
        faults: int32 by owner, written in place.
        told: somebody reads them.
    """
    faults = torch.zeros(8, dtype=torch.int32) if faults is None else faults
    table = torch.zeros((max(len(ops), 1), NUM_COLUMNS), dtype=torch.int32)
    registers = torch.zeros((len(hidden) + 8, REGISTERS))
    for i, (code, word, vector, a, b) in enumerate(ops):
        numbers = torch.tensor([a, b], dtype=torch.float32).view(torch.int32).tolist()
        following = i + 1 if i + 1 < len(ops) else -1
        words = word if isinstance(word, tuple) else (word, word)
        words = words if code in (OP_READ, OP_SCORE) else (-1, -1)
        columns = [code, *words, vector, *numbers, following, -1, 0, 0, 0, 0]
        table[i] = torch.tensor(columns)
    if tokens is None:
        tokens = [[0, 4 * row, 0, 0] for row in range(len(hidden))]
    arena = torch.full((num_slots, 4), POISON, dtype=torch.int32).view(hidden.dtype)
    tap_rows(
        hidden, residual, arena, torch.tensor([[*row, 0, 0, 0, 0] for row in tokens]).int(),
        torch.tensor([[0 if ops else -1]], dtype=torch.int32), table,
        torch.tensor(vectors or [[0.0] * hidden.shape[1]], dtype=torch.float32),
        torch.tensor([0, 1, 0, 0], dtype=torch.int32),
        torch.tensor([0, faults.data_ptr() if told else 0, registers.data_ptr()]), *slots,
    )  # fmt: skip
    return arena


@pytest.mark.parametrize("with_residual", [False, True], ids=["one-tensor", "with-residual"])
@pytest.mark.parametrize(
    ("op", "vector", "row"),
    [
        pytest.param((OP_ADD, 2.0), [0, 1, 0, -1], [3, 6, 0, -2], id="add"),
        pytest.param((OP_ADD_NORM, 2.0), DIRECTION, [13, 4, 0, 0], id="add-norm"),
        pytest.param((OP_ADD_NORM, -1.0), DIRECTION, [-2, 4, 0, 0], id="take-norm"),
        pytest.param((OP_ABLATE,), DIRECTION, [0, 4, 0, 0], id="ablate"),
        pytest.param((OP_CLAMP, -1.0, 2.0), DIRECTION, [2, 4, 0, 0], id="clamp-from-above"),
        pytest.param((OP_CLAMP, 7.0, 9.0), DIRECTION, [7, 4, 0, 0], id="clamp-from-below"),
        pytest.param((OP_CLAMP, -math.inf, 2.0), DIRECTION, [2, 4, 0, 0], id="clamp-above"),
        pytest.param((OP_CLAMP, 7.0, math.inf), DIRECTION, [7, 4, 0, 0], id="clamp-below"),
        pytest.param((OP_SET,), [5, 6, 7, 8], [5, 6, 7, 8], id="set"),
    ],
)
def test_an_edit_writes_the_stream_back_in_one_tensor(op, vector, row, with_residual):
    code, a, b = (*op, 0.0, 0.0)[:3]
    hidden, residual = torch.tensor([ROW]), None
    if with_residual:
        residual = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        hidden = hidden - residual
    _run(hidden, residual, (code, 0, 0, a, b), vectors=[vector])
    if residual is not None:
        assert not hidden.any()
    assert (hidden if residual is None else residual).tolist() == [row]


@pytest.mark.parametrize("with_residual", [False, True], ids=["one-tensor", "with-residual"])
@pytest.mark.parametrize(
    ("op", "vector"),
    [
        pytest.param((OP_ADD, 0.0), [9, 9, 9, 9], id="scale-0"),
        pytest.param((OP_ADD, 9.0), [0, 0, 0, 0], id="zeros"),
        pytest.param((OP_ABLATE,), [0, 0, 1, 0], id="nothing-along"),
        pytest.param((OP_CLAMP, -9.0, 9.0), DIRECTION, id="clamp-inside"),
        pytest.param((OP_CLAMP, -math.inf, math.inf), DIRECTION, id="clamp-without-bounds"),
        pytest.param((OP_SET,), ROW, id="set-to-what-it-is"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_an_edit_that_changes_nothing_leaves_both_parts_of_the_row(
    op, vector, dtype, with_residual
):
    """The next norm adds the parts in float32; their sum, rounded once more, is another row."""
    code, a, b = (*op, 0.0, 0.0)[:3]
    row = torch.tensor([ROW])
    residual = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).to(dtype) if with_residual else None
    hidden = (row if residual is None else row - residual).to(dtype)
    before = hidden.clone(), None if residual is None else residual.clone()
    _run(hidden, residual, (code, 0, 0, a, b), vectors=[vector], num_slots=64)
    assert torch.equal(hidden, before[0])
    assert residual is None or torch.equal(residual, before[1])


@pytest.mark.parametrize(
    ("dtype", "op", "vector"),
    [
        pytest.param(torch.float32, (OP_ADD, 3e38), [3e38] * 4, id="infinite-in-float32"),
        pytest.param(torch.float32, (OP_ADD, 3e38), [3e38, 0, 0, 0], id="one-number"),
        pytest.param(torch.bfloat16, (OP_ADD, 1.0), [3.4e38] * 4, id="rounds-to-infinity"),
        pytest.param(torch.float16, (OP_ADD, 1e5), DIRECTION, id="past-float16"),
        pytest.param(torch.float16, (OP_SET,), [7e4, 0, 0, 0], id="set-past-float16"),
        pytest.param(torch.float32, (OP_ADD_NORM, 3e38), DIRECTION, id="norm"),
    ],
)
@pytest.mark.parametrize("checked", [False, True], ids=["edited", "edited-and-checked"])
def test_an_edit_that_overflows_is_reported_and_does_not_change_the_row(dtype, op, vector, checked):
    hidden, residual = torch.tensor([ROW, ROW]).to(dtype), torch.ones(2, 4).to(dtype)
    kept, faults = hidden.clone(), torch.zeros(8, dtype=torch.int32)
    tokens = [[0, 0, 0, 5], [-1, 0, 0, 6]]
    check = [(OP_CHECK, 0, 0, 0, 0)] if checked else []
    _run(
        hidden, residual, (op[0], 0, 0, (*op, 0.0)[1], 0), *check,
        vectors=[vector], tokens=tokens, num_slots=64, faults=faults,
    )  # fmt: skip
    kept[0] = 0 if checked else kept[0]
    assert torch.equal(hidden, kept)
    assert residual.tolist() == [[0 if checked else 1] * 4, [1] * 4]
    assert faults.nonzero().flatten().tolist() == [5]
    assert fault_at(int(faults[5])) == (0, True)


@pytest.mark.parametrize("with_residual", [False, True], ids=["one-tensor", "with-residual"])
def test_a_row_that_is_not_finite_is_written_where_faults_are_not_read(with_residual):
    hidden, residual = torch.tensor([ROW]), torch.ones(1, 4) if with_residual else None
    _run(hidden, residual, (OP_ADD, 0, 0, 3e38, 0), vectors=[[3e38] * 4], told=False)
    assert (hidden if residual is None else residual).isinf().all()
    assert residual is None or not hidden.any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_is_reported_where_it_is_checked(bad):
    hidden = torch.tensor([ROW, [0, bad, 0, 0]])
    faults = torch.zeros(8, dtype=torch.int32)
    tokens = [[0, 0, 0, 5], [0, 0, 0, 6]]
    _run(hidden, None, (OP_CHECK, 0, 0, 0, 0), tokens=tokens, faults=faults)
    assert faults.nonzero().flatten().tolist() == [6]
    assert fault_at(int(faults[6])) == (0, False)
    # Of logits that are no numbers a sampler may make a token that does not exist.
    assert hidden.tolist() == [ROW, [0, 0, 0, 0]]


def test_a_read_stores_the_row_at_its_place_in_the_chain():
    vectors = [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]]
    arena = _run(
        torch.tensor([ROW]), None,
        (OP_READ, 0, 0, 0, 0), (OP_ADD, 0, 1, 1.0, 0), (OP_ABLATE, 0, 0, 0, 0),
        (OP_READ, 4, 0, 0, 0),
        vectors=vectors,
    )  # fmt: skip
    assert arena[:2].tolist() == [ROW, [0, 4, 2, 0]]
    assert (arena[2:].view(torch.int32) == POISON).all()


@pytest.mark.parametrize("tap_by_tap", [False, True], ids=["whole-steps", "tap-by-tap"])
def test_a_score_is_of_the_row_rounded_to_the_dtype_of_the_model(tap_by_tap):
    """So that it is that of the row which a read delivers."""
    torch.manual_seed(0)
    hidden, residual = torch.randn(3, 65).bfloat16(), torch.randn(3, 65).bfloat16()
    hidden[1, 7] = math.nan
    vectors, b = torch.randn(2, 65), -0.75
    kept = hidden.clone(), residual.clone()
    # Of each token two slots; tap by tap they follow slot 1, and the scores are swapped.
    tokens = [[0, row if tap_by_tap else 2 * row + 1, 0, 0] for row in range(3)]
    arena = _run(
        hidden, residual, (OP_SCORE, (0, 5), 0, 9.0, 0.0), (OP_SCORE, (6, 1), 1, 9.0, b),
        vectors=vectors.tolist(), tokens=tokens, slots=(1, 2) if tap_by_tap else (0, 0),
    )  # fmt: skip
    assert torch.equal(hidden.nan_to_num(), kept[0].nan_to_num())
    assert torch.equal(residual, kept[1])
    words = arena.view(torch.int32).view(-1)
    places = [5, 1] if tap_by_tap else [0, 6]
    at = torch.tensor([[4 + 8 * row + place for place in places] for row in range(3)])
    found = words[at].view(torch.float32).double()
    row = (kept[0].float() + kept[1].float()).to(torch.bfloat16).double()
    biases = torch.tensor([0.0, b], dtype=torch.float64)
    assert found.isnan().tolist() == [[False, False], [True, True], [False, False]]
    finite, v = [0, 2], vectors.double().T
    torch.testing.assert_close(found[finite], (row @ v + biases)[finite], rtol=0, atol=1e-5)
    unrounded = (kept[0].double() + kept[1].double()) @ v + biases
    assert ((found - unrounded)[finite].abs() > 1e-3).any(), "rounding tells"
    words[at.flatten()] = POISON
    assert (words == POISON).all()


def test_a_score_that_nobody_asks_for_is_not_stored():
    arena = _run(torch.tensor([ROW]), None, (OP_SCORE, -1, 0, 0, 0), vectors=[DIRECTION])
    assert (arena.view(torch.int32) == POISON).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_scores_and_reads_between_edits_see_the_same_row(dtype):
    vectors = [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0], [1.0, 2.0, 3.0, -1.0]]
    arena = _run(
        torch.tensor([ROW]).to(dtype), None,
        (OP_SCORE, 0, 2, 0, 0.5), (OP_READ, 4, 0, 0, 0), (OP_ADD, 0, 1, 1.0, 0),
        (OP_SCORE, 1, 2, 0, 0), (OP_ABLATE, 0, 0, 0, 0), (OP_SCORE, 2, 2, 0, 0),
        (OP_READ, 8, 0, 0, 0), (OP_SCORE, 3, 0, 0, 0),
        vectors=vectors, num_slots=16,
    )  # fmt: skip
    words = arena.view(torch.int32).view(-1)
    assert words[:4].view(torch.float32).tolist() == [3 + 8 + 0.5, 3 + 8 + 6, 8 + 6, 0]
    rows = [words[first : first + 4].view(dtype)[:4].tolist() for first in (4, 8)]
    assert rows == [ROW, [0, 4, 2, 0]]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_the_stream_is_the_sum_in_float32_rounded_once(dtype):
    hidden = torch.tensor([[1.0, 0.1, 60000.0]]).to(dtype)
    residual = torch.tensor([[0.0040, 0.2, -59900.0]]).to(dtype)
    arena = _run(hidden, residual, (OP_READ, 0, 0, 0, 0)).view(-1)
    exact = (hidden.double() + residual.double()).float().to(dtype)
    assert torch.equal(arena[:3], exact[0])


def test_an_edited_row_is_rounded_once_after_its_last_edit():
    hidden = torch.tensor([[256.0]]).bfloat16()  # its neighbour is 258
    _run(hidden, None, *[(OP_ADD, 0, 0, 0.5, 0)] * 4, vectors=[[1.0]])
    assert hidden.item() == 258.0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("hidden_size", [1, 3, 5, 9])
def test_an_odd_row_fills_its_own_words_and_no_others(hidden_size, dtype):
    hidden = torch.arange(1, 1 + hidden_size)[None].to(dtype)
    arena = _run(hidden, None, (OP_READ, 4, 0, 0, 0))
    words = -(-hidden_size * dtype.itemsize // 4)
    assert torch.equal(arena.view(-1)[16 // dtype.itemsize :][:hidden_size], hidden[0])
    rest = torch.cat(
        [arena.view(torch.int32).view(-1)[:4], arena.view(torch.int32).view(-1)[4 + words :]]
    )
    assert (rest == POISON).all()


def test_without_a_residual_the_row_is_copied_bit_by_bit():
    hidden = torch.randn(3, 8).bfloat16()
    kept = hidden.clone()
    tokens = [[-1, 0, 0, 0], [0, 4, 0, 0], [-1, 1, 0, 0]]
    arena = _run(hidden, None, (OP_READ, 0, 0, 0, 0), tokens=tokens)
    assert torch.equal(arena[4], kept[1])
    assert (arena.view(torch.int32)[[0, 1, 2, 3, 5, 6, 7]] == POISON).all()
    assert torch.equal(hidden, kept)


@pytest.mark.parametrize("tokens", [[[-1, 0, 0, 0]] * 3, [[0, 0, 0, 0]] * 3])
def test_rows_without_an_operation_at_this_tap_are_left_alone(tokens):
    ops = [(OP_READ, 0, 0, 0, 0), (OP_SET, 0, 0, 0, 0)] if tokens[0][0] < 0 else []
    hidden = torch.ones(3, 4)
    arena = _run(hidden, None, *ops, tokens=tokens)
    assert (arena.view(torch.int32) == POISON).all()
    assert (hidden == 1).all()


def test_tap_by_tap_a_tokens_slot_is_its_number_times_the_slots_per_token():
    arena = _run(
        torch.tensor([ROW, ROW]) * torch.tensor([[1.0], [2.0]]), None,
        (OP_READ, 0, 0, 0, 0), (OP_ABLATE, 0, 0, 0, 0), (OP_READ, 4, 0, 0, 0),
        vectors=[DIRECTION], tokens=[[0, 1, 0, 0], [0, 0, 0, 0]], slots=(3, 2),
    )  # fmt: skip
    assert arena[[3, 5]].tolist() == [[6, 8, 0, 0], ROW]
    assert arena[[4, 6]].tolist() == [[0, 8, 0, 0], [0, 4, 0, 0]]
    assert (arena[[0, 1, 2, 7]].view(torch.int32) == POISON).all()
