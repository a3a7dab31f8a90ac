"""What happens to each token of a request, against its actions one at a time."""

from __future__ import annotations

import time
import tracemalloc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.collector import collector_off
from tests.unit.oracle import Edited, edits_at, known, level_of, named_point
from tests.unit.programs import all_programs, rows_of_nets, runs, weights_of
from tests.unit.strategies import VOCAB, is_selected, selectors, specs
from vllm_scope import (
    Ablate,
    Add,
    AttentionPool,
    Clamp,
    Mlp,
    Probe,
    Read,
    Replace,
    Spec,
    SpecError,
    TokenIds,
)
from vllm_scope.program import compiled as compiling
from vllm_scope.program import operations
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.program.operations import (
    OP_ABLATE,
    OP_ADD,
    OP_CHECK,
    OP_READ,
    OP_SCORE,
    Cost,
    Op,
    Program,
)
from vllm_scope.request.actions import Action
from vllm_scope.request.heads import Bank, Head, Scored
from vllm_scope.request.resolved import Resolved, ResolvedProbe, ResolvedRead
from vllm_scope.request.selectors import Selector
from vllm_scope.request.sites import (
    Phase,
    Place,
    SiteLayer,
    Sites,
    boundary_of_point,
    point_of,
)

NUM_LAYERS, HIDDEN_SIZE = 2, 4
EVERYWHERE = tuple(range(2 * NUM_LAYERS + 1))
SITES = Sites(NUM_LAYERS, HIDDEN_SIZE, "float32", EVERYWHERE)
V, W = [1.0, 2.0, 0.0, -1.0], [0.0, 3.0, 0.0, 4.0]
#: Of which a tap makes the numbers itself, and of which a bank makes them of rows that it copies.
FEW, MANY = 1, 5


def _compile(
    spec: Spec | Resolved,
    prompt: Sequence[int],
    here: tuple[int, ...] = EVERYWHERE,
    drains: bool = True,
) -> RequestProgram:
    ids = np.array(prompt, np.int64)
    asked = spec.resolve(SITES) if isinstance(spec, Spec) else spec
    return RequestProgram.compile(asked, SITES, frozenset(here), len(ids), ids, drains)


def _probes(count: int, name: str = "p", weight: Sequence[float] = V, **fields: Any) -> list[Probe]:
    """Probes at one place."""
    return [Probe(weight, name=f"{name} {i}", **fields) for i in range(count)]


def _spec(*actions: Action) -> Spec:
    kinds = (Read, Probe, (Add, Ablate, Clamp, Replace))
    return Spec(*(tuple(a for a in actions if isinstance(a, kind)) for kind in kinds))


class Unread:
    """A prompt that has a length, and ids that nobody may look at."""

    def __len__(self) -> int:
        return 3

    def _look(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("looked at")

    __array__ = __iter__ = __getitem__ = _look


def test_the_ids_of_a_prompt_are_read_only_if_a_selector_may_use_them():
    uniform = [
        Read("embed", tokens="generated"),
        Probe(V, layer=0, name="p"),
        Add(V, layer=0, tokens="prompt"),
    ]
    asked = _spec(*uniform).resolve(SITES)
    assert isinstance(asked.ids_of(Unread()), Unread)
    program = RequestProgram.compile(asked, SITES, frozenset(EVERYWHERE), 3, Unread())
    assert [length for _, length, _ in runs(program, 0, 5)] == [3, 2]
    for selector in (asked.edits[0].tokens, asked.reads[0].tokens):
        selector.check_decided(3, Unread(), 10, "tokens")
        assert selector.first_position(3, Unread()) in (0, 3)
    other = _spec(*uniform, Read("embed", tokens=TokenIds(7))).resolve(SITES)
    assert other.ids_of([7, 8, 7]).tolist() == [7, 8, 7]
    with pytest.raises(AssertionError, match="looked at"):
        other.ids_of(Unread())


def _same_edits(ops: list[Op], expected: list[Edited]) -> bool:
    return len(ops) == len(expected) and all(
        (op.code, op.a, op.b) == (code, a, b)
        and op.vector is not None
        and np.allclose(op.vector.numpy, v, rtol=1e-6)
        for op, (code, a, b, v) in zip(ops, expected, strict=True)
    )


@dataclass
class Walked:
    """A program, walked: what each row sees, what is made of it, and all edits of a boundary.

    Attributes:
        points: of the rows that taps write.
        scored: bank whose numbers taps tell, and its point -> (operation, what the row sees).
        made: (what is made of the row, None for the row itself; point).
        check: the boundary at whose end the row is checked.
    """

    points: dict[int, list[Op]]
    scored: dict[tuple[Head, int], list[tuple[Op, list[Op]]]]
    made: set[tuple[Head | None, int]]
    edits: dict[int, list[Op]]
    check: int | None = None


def _walk(program: Program | None) -> Walked:
    found = Walked({}, {}, set(), {})
    for boundary, ops in program.taps if program is not None else ():
        applied: list[Op] = []
        for op in ops:
            if op.code == OP_READ:
                point = program.layout.arena.points[op.at]
                assert boundary_of_point(point) == boundary
                assert point not in found.points
                found.points[point] = list(applied)
            elif op.code == OP_SCORE:
                place, bank, _ = op.told
                assert place.boundary == boundary
                row = bank, program.layout.row_of(place.point())
                found.scored.setdefault(row, []).append((op, list(applied)))
            elif op.code == OP_CHECK:
                assert found.check is None
                assert op is ops[-1]
                found.check = boundary
            else:
                applied.append(op)
        found.edits[boundary] = applied
    if program is not None:
        layout = program.layout
        assert sorted(found.points) == list(layout.arena.points)
        listed = [(None, layout.points), *layout.encoded]
        assert all(list(points) == sorted(points) for _, points in listed)
        found.made = {(head, point) for head, points in listed for point in points}
        assert len(found.made) == sum(len(points) for _, points in listed)
        scored = {pair for pair in found.made if isinstance(pair[0], Scored)}
        assert scored == set(found.scored)
        assert {point for _, point in found.made - scored} == set(found.points)
    return found


def _check_token(
    program: Program | None,
    asked: Resolved,
    position: int,
    prompt: Sequence[int],
    here: tuple[int, ...],
) -> None:
    """One token's program does what its actions say, and nothing else."""
    walked, due = _walk(program), set()
    for item, stream, when, head in _delivered(asked):
        boundary = stream.boundary
        if boundary not in here or not known(item.tokens, position, prompt)[1]:
            continue
        # The front-end finds a row, and the numbers of a bank, by the point that it named.
        assert program is not None
        named = named_point(SITES, stream, when)
        point = program.layout.row_of(named)
        assert named in program.layout.names_of(point)
        due.add((head, point))
        expected = edits_at(asked, SITES, boundary, level_of(SITES, stream, when), position, prompt)
        if not isinstance(head, Scored):
            assert _same_edits(walked.points[point], expected)
            continue
        ops = [op for op, _ in walked.scored[head, point]]
        assert [op.told[2] for op in ops] == list(range(head.row_bytes // 4))
        assert [op.vector.numpy.tolist() for op in ops] == rows_of_nets(asked)[head]
        assert all(_same_edits(seen, expected) for _, seen in walked.scored[head, point])
    checked = bool(asked.edits) and EVERYWHERE[-1] in here
    assert walked.check == (EVERYWHERE[-1] if checked else None)
    assert walked.made == due
    if program is not None:
        on_rows = asked.banks_on_rows()
        nets = [net for head, _ in due for net in on_rows.get(head, ())]
        assert weights_of(program, on_rows) == {w for net in nets for w, _ in net.layers}
    for boundary in EVERYWHERE:
        expected = edits_at(asked, SITES, boundary, 2, position, prompt) if boundary in here else []
        assert _same_edits(walked.edits.get(boundary, []), expected)


def _delivered(
    asked: Resolved,
) -> list[tuple[ResolvedRead | ResolvedProbe, Place, Phase, Head | None]]:
    """(who asks, where, on which side of the edits, what is made of the row)"""
    reads = [(r, stream, r.when, r.encoding) for r in asked.reads for stream in r.streams]
    cells = [(p, cell.place, "after", cell.bank) for p in asked.probes for cell in p.cells]
    return [*reads, *cells]


def _cost(program: RequestProgram, num_positions: int) -> Cost:
    """What the request takes of the device tables, with what drafts may need."""
    return program.held(program.columns(num_positions)).cost


def _by_position(program: RequestProgram, first: int, count: int) -> list[Program | None]:
    found: list[Program | None] = [None] * count
    for offset, length, one in runs(program, first, count):
        assert found[offset : offset + length] == [None] * length
        found[offset : offset + length] = [one] * length
    return found


_PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
_HERE = st.sampled_from([EVERYWHERE, (0, 1, 2), (2, 3), (4,)])


@given(specs(NUM_LAYERS), _PROMPTS, _HERE, st.data())
def test_each_token_gets_its_actions_whatever_the_chunks(spec, prompt, here, data):
    asked = spec.resolve(SITES)
    program = _compile(spec, prompt, here)
    num_positions = len(prompt) + 6
    whole = _by_position(program, 0, num_positions)
    for position, one in enumerate(whole):
        _check_token(one, asked, position, prompt, here)
    first = 0
    while first < num_positions:
        count = data.draw(st.integers(1, num_positions - first))
        assert _by_position(program, first, count) == whole[first : first + count]
        first += count
    assert set(all_programs(program, num_positions)) == {one for one in whole if one is not None}
    if program.generated_is_uniform:
        assert set(whole[len(prompt) :]) == {program.generated_superset()}
    # Of a request with vectors plan.py holds all of these.
    distinct = {one for one in (*whole, program.generated_superset()) if one is not None}
    arrays = {
        array.digest: array
        for one in distinct
        for array in one.vectors | weights_of(one, asked.banks_on_rows())
    }
    num_vectors = sum(len(array.data) // (4 * array.shape[-1]) for array in arrays.values())
    takes = Cost(num_vectors, len(distinct), sum(one.num_ops for one in distinct))
    assert takes == _cost(program, num_positions)


@given(specs(NUM_LAYERS), _PROMPTS)
def test_a_rank_that_delivers_nothing_edits_like_the_others(spec, prompt):
    silent = _compile(spec, prompt, drains=False)
    assert silent.empty == (not spec.edits)
    loud = _by_position(_compile(spec, prompt), 0, len(prompt) + 4)
    for one, other in zip(_by_position(silent, 0, len(prompt) + 4), loud, strict=True):
        walked = _walk(one)
        assert not walked.points
        assert not walked.made
        assert one is None or not one.layout.encoded
        whole = _walk(other)
        assert {b: ops for b, ops in walked.edits.items() if ops} == {
            b: ops for b, ops in whole.edits.items() if ops
        }
        assert walked.check == whole.check


@given(specs(NUM_LAYERS, only_reads=True), st.lists(selectors(), max_size=2), _PROMPTS, st.data())
def test_every_row_that_may_be_wanted_is_delivered(spec, probed, prompt, data):
    probes = tuple(
        Probe([V, W], layers=[0, 1], name=f"{i}", tokens=s) for i, s in enumerate(probed)
    )
    asked = Spec(spec.reads, probes).resolve(SITES)
    program = _compile(asked, prompt)
    ids = [*prompt, *data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))]
    superset = program.generated_superset()
    for position, one in enumerate(_by_position(program, 0, len(ids))):
        # Where positions are guessed, every generated token gets the superset.
        for walked in (_walk(one), *([_walk(superset)] if position >= len(prompt) else [])):
            for item, stream, _, head in _delivered(asked):
                form = item.tokens.to_json()
                if is_selected(form, position, len(prompt), ids[position], len(ids)):
                    came = {(made, boundary_of_point(point)) for made, point in walked.made}
                    assert (head, stream.boundary) in came


@given(specs(NUM_LAYERS))
def test_the_numbers_of_a_bank_are_those_of_its_probes_in_order(spec):
    asked = spec.resolve(SITES)
    assert len(asked.probes) == len(spec.probes)
    seen: dict[Place, dict[int, object]] = {}
    for probe, given_probe in zip(asked.probes, spec.probes, strict=True):
        assert [cell.place.layer for cell in probe.cells] == list(given_probe.layer_numbers)
        for cell in probe.cells:
            nets = asked.banks[cell.bank]
            assert cell.bank.row_bytes == 4 * sum(net.num_values for net in nets)
            firsts = np.cumsum([0, *(net.num_values for net in nets)]).tolist()
            assert nets[firsts.index(cell.first)] == cell.net
            # No two probes have the same numbers of a place.
            assert seen.setdefault(cell.place, {}).setdefault(cell.first, cell) is cell
    for place, cells in seen.items():
        (bank,) = {cell.bank for cell in cells.values()}
        assert len(asked.banks[bank]) == len(cells), place


# Points and layouts


@pytest.mark.parametrize(
    ("actions", "points", "also"),
    [
        pytest.param([Read("resid_post", layer=0)], [(2, 1)], [], id="nothing-edits"),
        pytest.param(
            [
                Read("resid_post", layer=0),
                Read("resid_pre", layer=1),
                Read("resid_pre", layer=1, when="before"),
            ],
            [(2, 1)],
            [((2, 2), (2, 1))],
            id="three-names-of-one-row",
        ),
        pytest.param(
            [Read("resid_post", layer=0), Add(V, layer=0)],
            [(2, 1)],
            [],
            id="after-an-edit-of-its-own-site",
        ),
        pytest.param(
            [Read("resid_post", layer=0, when="before"), Add(V, layer=0)],
            [(2, 0)],
            [],
            id="before-it",
        ),
        pytest.param(
            [
                Read("resid_post", layer=0),
                Read("resid_post", layer=0, when="before"),
                Add(V, layer=0),
            ],
            [(2, 0), (2, 1)],
            [],
            id="on-both-sides",
        ),
        pytest.param(
            [Read("resid_pre", layer=1), Add(V, layer=0)],
            [(2, 2)],
            [],
            id="the-next-entry-sees-the-edit",
        ),
        pytest.param(
            [Read("resid_post", layer=0), Add(V, site="resid_pre", layer=1)],
            [(2, 1)],
            [],
            id="an-exit-does-not-see-the-next-entry's-edit",
        ),
        pytest.param(
            [
                Read("resid_post", layer=0),
                Read("resid_pre", layer=1),
                Add(V, site="resid_pre", layer=1),
            ],
            [(2, 1), (2, 2)],
            [],
            id="around-the-entry's-edit",
        ),
        pytest.param(
            [
                Read("resid_post", layer=0, when="before"),
                Read("resid_post", layer=0),
                Read("resid_pre", layer=1),
                Add(V, layer=0),
                Add(V, site="resid_pre", layer=1),
            ],
            [(2, 0), (2, 1), (2, 2)],
            [],
            id="all-three",
        ),
        pytest.param(
            [
                Read("resid_pre", layer=1, when="before"),
                Add(V, layer=0),
                Add(V, site="resid_pre", layer=1),
            ],
            [(2, 1)],
            [],
            id="between-the-two",
        ),
        pytest.param([Read("embed"), Add(V, site="embed")], [(0, 1)], [], id="the-embedding"),
        pytest.param(
            [Read("resid_pre", layer=0), Add(V, site="embed")],
            [(0, 2)],
            [],
            id="the-first-entry-after-it",
        ),
        pytest.param(
            [Read("resid_mid", layer=0), Add(V, site="resid_mid", layer=0)],
            [(1, 1)],
            [],
            id="the-middle",
        ),
        pytest.param(
            [Read("resid_post", layer=1), Add(V, layer=0)], [(4, 1)], [], id="an-edit-elsewhere"
        ),
    ],
)
def test_a_row_is_read_once_and_has_all_names_that_were_asked_for(actions, points, also):
    program = _compile(_spec(*actions), [1, 1, 1])
    ((_, count, one),) = runs(program, 0, 5)
    assert count == 5
    assert one.layout.points == tuple(point_of(*place) for place in points)
    assert one.layout.also == tuple((point_of(*a), point_of(*b)) for a, b in also)


def test_where_a_read_looks_does_not_depend_on_which_tokens_an_edit_takes():
    # Or a request's rows of one stream would lie under two points.
    program = _compile(_spec(Read("resid_post", layer=0), Add(V, layer=0, tokens=[1])), [1, 1, 1])
    layouts = {one.layout for _, _, one in runs(program, 0, 5)}
    assert layouts == {Layout((point_of(2, 1),))}
    assert [(o, n) for o, n, _ in runs(program, 0, 5)] == [(0, 1), (1, 1), (2, 3)]


def test_edits_of_a_site_apply_in_the_order_given():
    spec = _spec(Ablate(V, layer=0), Add(W, layer=0), Ablate(V, layer=0))
    ((_, _, program),) = runs(_compile(spec, [1]), 0, 1)
    (_, ops), (last, checks) = program.taps
    assert [op.code for op in ops] == [OP_ABLATE, OP_ADD, OP_ABLATE]
    assert (last, [op.code for op in checks]) == (EVERYWHERE[-1], [OP_CHECK])


def test_a_layout_is_rows_and_then_the_numbers_of_each_bank():
    spec = _spec(
        Read("resid_post", layers=[0, 1]), Read("embed"),
        *(Probe([i + 1.0, 0, 0, 0], layer=int(i > 4), name=f"{i}") for i in range(7)),
    )  # fmt: skip
    asked = spec.resolve(SITES)
    ((_, _, program),) = runs(_compile(asked, [1]), 0, 1)
    points = tuple(point_of(b, 1) for b in (0, 2, 4))
    five, two = (asked.probes[i].cells[0].bank for i in (0, 6))
    made = sorted([(five, points[1:2]), (two, points[2:])], key=lambda pair: pair[0].text)
    assert program.layout == Layout(points, tuple(made))
    # Five numbers of 4 bytes take two slots, two numbers one.
    assert (five.row_bytes, two.row_bytes) == (20, 8)
    assert [program.layout.slots(Widths((16 * n,))) for n in (1, 7)] == [3 + 3, 21 + 3]
    assert program.layout.at(2) == Layout((points[1],), ((five, points[1:2]),))
    assert program.layout.at(3) == Layout()
    assert Layout().slots(Widths((112,))) == 0
    # What five probes need is read where it is read anyway. A tap makes the numbers of two.
    assert (type(five), type(two)) == (Bank, Scored)
    assert program.layout.arena == Layout(points, ((two, points[2:]),))
    scores = [(tap, op) for tap, ops in program.taps for op in ops if op.code == OP_SCORE]
    place = Place("resid_post", 1)
    assert [(tap, op.told) for tap, op in scores] == [(4, (place, two, i)) for i in range(2)]
    without = [(tap, tuple(op for op in ops if op.code != OP_SCORE)) for tap, ops in program.taps]
    assert tuple(without) == Program.reading(points).taps


@pytest.mark.parametrize("count", [FEW, MANY])
def test_equal_probes_at_two_layers_are_one_bank(count):
    probes = (probe for i in (0, 1) for probe in _probes(count, f"{i}", layer=i))
    asked = _spec(*probes).resolve(SITES)
    ((_, _, program),) = runs(_compile(asked, [1]), 0, 1)
    (bank,) = asked.banks
    assert program.layout == Layout((), ((bank, (point_of(2, 1), point_of(4, 1))),))


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_probe_sees_a_row_that_a_read_names_otherwise(count):
    """The exit of a layer is the entry of the next, unless an edit is between them."""
    probes, read = _probes(count, site="resid_pre", layer=1), Read("resid_post", layer=0)
    exit_, entry = point_of(2, 1), point_of(2, 2)
    for edits, point, also in (
        ((), exit_, ((entry, exit_),)),
        ((Add(V, site="resid_pre", layer=1),), entry, ()),
    ):
        asked = _spec(*probes, read, *edits).resolve(SITES)
        ((_, _, program),) = runs(_compile(asked, [1]), 0, 1)
        (bank,) = asked.banks
        assert program.layout == Layout((exit_,), ((bank, (point,)),), also)


def test_the_rows_of_a_replacement_go_to_their_positions():
    rows = [[float(i), 0, 0, 1] for i in range(3)]
    program = _compile(_spec(Replace(rows, positions=[4, -1, 0], layer=0)), [1, 1, 1])
    found = [(o, n, p.taps[0][1][0].vector) for o, n, p in runs(program, 0, 6)]
    rows_of = [(o, n, None if v is None else v.numpy[0]) for o, n, v in found]
    assert rows_of == [(0, 1, 2), (1, 1, None), (2, 1, 1), (3, 1, None), (4, 1, 0), (5, 1, None)]


# What it costs


@pytest.mark.parametrize(
    ("actions", "cost"),
    [
        pytest.param([Read("embed")], Cost(0, 1, 1), id="a-read"),
        pytest.param(
            [Read("resid_post", layers=[0, 1], tokens="prompt")], Cost(0, 1, 2), id="two-layers"
        ),
        # With an edit, each token is checked once, at the last tap.
        pytest.param([Add(V, layer=0)], Cost(1, 1, 1 + 1), id="an-edit"),
        pytest.param([Add(V, layer=[0, 1])], Cost(1, 1, 2 + 1), id="one-vector-at-two-layers"),
        pytest.param([Add([V, W], layer=[0, 1])], Cost(2, 1, 2 + 1), id="two-vectors"),
        pytest.param(
            [Add(V, layer=0), Add(V, layer=0, tokens="prompt")], Cost(1, 2, 3 + 2), id="two-phases"
        ),
        pytest.param(
            [Ablate(V, layer=0), Ablate(np.array(V) * 2, layer=1)],
            Cost(1, 1, 2 + 1),
            id="one-direction-of-two-lengths",
        ),
        pytest.param(
            [Replace([V, W], positions=[0, 1], layer=0)], Cost(2, 3, 2 + 3), id="two-rows"
        ),
        pytest.param([Replace(V, positions=[50], layer=0)], Cost(0, 1, 0 + 1), id="past-the-end"),
        pytest.param(
            [*_probes(2, layer=0), Clamp(V, lo=0, hi=1, layer=0)],
            # A score for each probe. Equal weights have one vector.
            Cost(2, 1, 2 + 1 + 1),
            id="probes-and-a-clamp",
        ),
        pytest.param(
            [*_probes(MANY, layer=0), Clamp(V, lo=0, hi=1, layer=0)],
            # One read, of which all probes are computed.
            Cost(2, 1, 2 + 1),
            id="many-probes-and-a-clamp",
        ),
        pytest.param(
            [Probe([V, W], layers=[0, 1], name="p")], Cost(2, 1, 2), id="a-probe-of-two-layers"
        ),
        pytest.param(
            [*_probes(MANY, layers=[0, 1], weight=[V, W])], Cost(2, 1, 2), id="many-of-two-layers"
        ),
        pytest.param(
            [Probe(AttentionPool([V, W], [W, V]), layer=0, name="p")],
            Cost(4, 1, 4),
            id="a-pool-of-two-heads-has-four-scores",
        ),
        pytest.param(
            [Probe(AttentionPool([V, W, V], [W, V, V]), layer=0, name="p")],
            Cost(6, 1, 1),
            id="a-pool-of-three-heads-has-a-row",
        ),
        pytest.param(
            [Probe(Mlp([([V, W, V], [0, 0, 0]), ([[1, 2, 3]], [0])]), layer=0, name="p")],
            Cost(3 + 1, 1, 1),
            id="an-mlp-has-the-rows-of-its-matrices",
        ),
        pytest.param(
            [Probe(V, layer=0, name="p", tokens="prompt"), Probe(W, layer=0, name="q")],
            # One bank: a token that is scored by one of them is scored by both.
            Cost(2, 1, 2),
            id="probes-of-unlike-tokens",
        ),
        pytest.param(
            [*_probes(MANY, layer=0, tokens="prompt"), Probe(W, layer=0, name="q")],
            Cost(2, 1, 1),
            id="many-probes-of-unlike-tokens",
        ),
    ],
)
def test_a_request_costs_distinct_vectors_programs_and_their_operations(actions, cost):
    assert _cost(_compile(_spec(*actions), [1, 1, 1]), 10) == cost


@pytest.mark.parametrize(
    ("actions", "cost"),
    [
        pytest.param(
            [Replace([V, W, V], positions=[0, 1, 2], layer=0)], Cost(2, 3, 2 + 3), id="equal-rows"
        ),
        pytest.param([Read("embed"), Read("embed", tokens=[0])], Cost(0, 1, 1), id="read-twice"),
    ],
)
def test_a_program_that_tokens_get_for_two_reasons_counts_once(actions, cost):
    assert _cost(_compile(_spec(*actions), [1, 1, 1]), 10) == cost


def test_a_cost_fits_where_each_of_its_parts_does():
    most = Cost(2, 3, 4)
    assert Cost(2, 3, 4).fits(most)
    assert not any(c.fits(most) for c in (Cost(3, 0, 0), Cost(0, 4, 0), Cost(0, 0, 5)))
    assert Cost(1, 1, 1) + Cost(1, 2, 3) == most


@pytest.mark.parametrize(
    ("actions", "vectors", "uniform"),
    [
        ([Read("embed")], False, True),
        ([Read("embed", tokens=[0])], False, False),
        ([Read("embed", tokens="last")], False, False),
        (_probes(FEW, layer=0, tokens="generated"), True, True),
        (_probes(FEW, layer=0, tokens=[0]), True, False),
        (_probes(MANY, layer=0, tokens="generated"), False, True),
        (_probes(MANY, layer=0, tokens=[0]), False, False),
        ([Add(V, layer=0)], True, True),
        ([Read("embed"), Add(V, layer=0, tokens=[0])], True, False),
        ([Replace(V, positions=[0], layer=0)], True, False),
    ],
)
def test_a_request_knows_what_it_needs(actions, vectors, uniform):
    program = _compile(_spec(*actions), [1, 1])
    assert (program.has_vectors, program.generated_is_uniform) == (vectors, uniform)
    assert not program.empty


NOTHING_HERE = [
    pytest.param((Read("resid_post", layer=1),), (0, 1), True, id="a-read-of-another-stage"),
    *(
        pytest.param(probes, here, drains, id=f"{len(probes)}-{where}")
        for probes in (_probes(FEW, layer=1), _probes(MANY, layer=1))
        for here, drains, where in (
            ((0, 1), True, "probes-of-another-stage"),
            (EVERYWHERE, False, "probes-on-a-rank-that-delivers-nothing"),
        )
    ),
    pytest.param((Add(V, layer=0), Read("embed")), (1,), True, id="edits-of-another-stage"),
    pytest.param((Read("embed"),), EVERYWHERE, False, id="reads-on-a-rank-that-delivers-nothing"),
]


@pytest.mark.parametrize(("actions", "here", "drains"), NOTHING_HERE)
def test_a_request_may_have_nothing_to_do_on_a_worker(actions, here, drains):
    program = _compile(_spec(*actions), [1, 1], here, drains)
    assert program.empty
    assert not program.has_vectors
    assert program.generated_is_uniform


@pytest.mark.parametrize(("actions", "here", "drains"), NOTHING_HERE)
def test_a_request_with_nothing_to_do_on_a_worker_has_no_programs_there(actions, here, drains):
    program = _compile(_spec(*actions), [1, 1], here, drains)
    assert runs(program, 0, 5) == []
    assert all_programs(program, 9) == []
    assert program.generated_superset() is None
    assert _cost(program, 9) == Cost()


def test_a_stream_is_at_its_boundary():
    streams: dict[SiteLayer, int] = {
        ("embed", 0): 0, ("resid_pre", 0): 0, ("resid_mid", 0): 1, ("resid_post", 0): 2,
        ("resid_pre", 1): 2, ("resid_mid", 1): 3, ("resid_post", 1): 4,
    }  # fmt: skip
    assert {stream: Place(*stream).boundary for stream in streams} == streams


def test_token_ids_are_looked_up_in_the_prompt_alone():
    program = _compile(_spec(Read("embed", tokens=TokenIds(7))), [7, 1, 7])
    assert [(o, n) for o, n, _ in runs(program, 0, 6)] == [(0, 1), (2, 4)]


def test_programs_are_remembered_up_to_so_many_bytes_of_all_specs(monkeypatch):
    monkeypatch.setattr(compiling, "REMEMBERED_BYTES", 1 << 20)
    monkeypatch.setattr(compiling, "programs", compiling._Programs())
    sites = Sites(2, 4, "float32", (0, 2, 4))
    here, ids = frozenset((0, 2, 4)), np.ones(64, np.int64)
    kept = []
    for n in range(24):
        rows = np.arange(n, n + 256.0).reshape(64, 4) + 1
        asked = Spec(edits=(Replace(rows, positions=range(64), layer=1),)).resolve(sites)
        program = RequestProgram.compile(asked, sites, here, 64, ids)
        if n == 2:
            tracemalloc.start()
        first = all_programs(program, 64)
        assert len(first) == 64
        assert all_programs(program, 64) == first
        kept.append(asked)
        assert compiling.programs.num_bytes <= 1 << 20
    # Those that went are built again.
    again = RequestProgram.compile(kept[0], sites, here, 64, ids)
    assert len(all_programs(again, 64)) == 64
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 3 << 20


def _at_one_place(i: int, tokens: Selector) -> Probe:
    return Probe(V, layer=0, name=f"{i}", tokens=tokens)


def _at_32_places(i: int, tokens: Selector) -> Probe:
    return Probe(V, layer=i % 32, name=f"{i}", tokens=tokens)


def _at_all_layers(i: int, tokens: Selector) -> Probe:
    site = ("resid_pre", "resid_mid", "resid_post")[i % 3]
    return Probe([V] * 32, site=site, layers=range(32), name=f"{i}", tokens=tokens)


def _edits(i: int, tokens: Selector) -> Add:
    return Add(V, layer=i % 32, tokens=tokens)


@pytest.mark.parametrize(
    ("bits", "layers", "beside", "words"),
    [
        pytest.param(12, [0], None, "in more than 1,024 different ways", id="programs"),
        pytest.param(10, "all", None, "and edits together; at most 16,384", id="operations"),
        pytest.param(12, [0], _at_one_place, "in more than 1,024 different ways", id="with-probes"),
        pytest.param(11, [0], _at_32_places, "in more than 1,024 different ways", id="with-scores"),
        pytest.param(10, [0], _edits, "in more than 512 different ways", id="with-vectors"),
        pytest.param(9, "all", _edits, "and edits together; at most 8,192", id="ops-with-vectors"),
        pytest.param(
            9,
            [0],
            _at_all_layers,
            "scores and edits together; at most 16,384",
            id="ops-with-scores",
        ),
    ],
)
def test_a_request_whose_tokens_are_treated_in_too_many_ways_builds_nothing(
    bits, layers, beside, words, monkeypatch
):
    sites = Sites(32, 4, "float32", tuple(range(65)))
    reads = [
        Read("resid_post", layers=layers, tokens=[p for p in range(4096) if p >> bit & 1])
        for bit in range(bits)
    ]
    others = [] if beside is None else [beside(i, read.tokens) for i, read in enumerate(reads)]
    asked = _spec(*reads, *others).resolve(sites)
    monkeypatch.setattr(compiling, "build_program", lambda *_: pytest.fail("built"))
    ids = np.ones(4096, np.int64)
    program = RequestProgram.compile(asked, sites, frozenset(sites.boundaries), 4096, ids)
    with collector_off():
        started = time.thread_time()
        with pytest.raises(SpecError, match=words):
            all_programs(program, 4200)
        assert time.thread_time() - started < 0.1


def test_a_probe_beside_reads_does_not_make_them_too_many():
    """An operator's monitor is such a probe."""
    sites = Sites(32, 4, "float32", tuple(range(65)))
    reads = [
        Read("resid_post", layers=[bit], tokens=[p for p in range(1000) if p >> bit & 1])
        for bit in range(10)
    ]
    alone, beside = _spec(*reads), _spec(*reads, Probe(V, layer=0, name="p"))
    counts = []
    for spec in (alone, beside):
        asked, ids = spec.resolve(sites), np.ones(1000, np.int64)
        program = RequestProgram.compile(asked, sites, frozenset(sites.boundaries), 1000, ids)
        held = program.held(program.columns(1000))
        counts.append((held.num_programs, held.num_ops))
    (num_programs, num_ops), scored = counts
    # One for each of 999 positions, and one for drafts. With the probe position 0 has one too, and
    # each program has a score more.
    assert num_programs == 999 + 1
    assert scored == (num_programs + 1, num_ops + num_programs + 1)


def test_programs_go_with_the_spec_that_they_are_of():
    """And then nothing holds its vectors: one of 64 MB is counted as its programs alone."""
    sites = Sites(2, 1 << 20, "float32", (0, 2, 4))
    here, ids = frozenset((0, 2, 4)), np.ones(4, np.int64)
    edit = Add(np.ones((2, 1 << 20), np.float32), layers=[0, 1], tokens=[0])
    asked = Spec(edits=(edit,)).resolve(sites)
    program = RequestProgram.compile(asked, sites, here, 4, ids)
    assert len(all_programs(program, 4)) == 2
    held = weakref.ref(asked.edits[0].values), weakref.ref(program._compiled)
    del edit, asked, program
    assert [one() for one in held] == [None, None]


def test_a_long_replacement_is_not_built_before_its_rows_are_counted(monkeypatch):
    sites = Sites(2, 4, "float32", (0, 2, 4))
    rows = np.arange(1.0, 1.0 + 4 * 60_000).reshape(-1, 4)
    asked = Spec(edits=(Replace(rows, positions=range(60_000), layer=1),)).resolve(sites)
    monkeypatch.setattr(operations, "Op", lambda *_: pytest.fail("built"))
    ids = np.ones(60_000, np.int64)
    program = RequestProgram.compile(asked, sites, frozenset((0, 2, 4)), 60_000, ids)
    with pytest.raises(SpecError, match="in more than"):
        all_programs(program, 60_001)


def test_a_direction_for_all_layers_is_normalised_once():
    sites = Sites(32, 4, "float32", tuple(range(65)))
    asked = Spec(edits=(Ablate(V, layers="all"), Clamp(V, lo=0, hi=1, layers="all"))).resolve(sites)
    ids = np.ones(4, np.int64)
    program = RequestProgram.compile(asked, sites, frozenset(sites.boundaries), 4, ids)
    (one,) = all_programs(program, 4)
    ops = [op for _, ops in one.taps for op in ops if op.vector is not None]
    assert len(ops) == 64
    assert len({id(op.vector) for op in ops}) == 2
