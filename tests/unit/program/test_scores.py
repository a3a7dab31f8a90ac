"""Numbers that taps make of rows: which each token gets, of which row, and what they take."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.program.test_widths import Step, check_scores
from tests.unit.programs import runs
from vllm_scope import Ablate, Add, AttentionPool, Features, Probe, Read, Replace, Spec
from vllm_scope.batch.labels import Labels
from vllm_scope.graph.tap.tables import Tables
from vllm_scope.program import held as held_programs
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.program.operations import OP_ABLATE, OP_ADD, OP_CHECK, OP_READ, OP_SCORE, Program
from vllm_scope.request.actions import Action
from vllm_scope.request.heads import Bank, Scored, Told
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Place, Sites, point_of

SIZE = 4
BOUNDARIES = tuple(range(5))
SITES = Sites(2, SIZE, "float32", BOUNDARIES)
WIDTHS = Widths((4 * SIZE,))
V, W, X = [1.0, 2.0, 0.0, -1.0], [0.0, 3.0, 0.0, 4.0], [5.0, 0.0, 1.0, 0.0]
#: The exit of layer 0, which is the entry of layer 1.
EXIT, ENTRY = Place("resid_post", 0), Place("resid_pre", 1)
NUM_PROMPT = 4


def resolved(*actions: Action) -> Resolved:
    kinds = (Read, Probe, (Add, Ablate, Replace), Features)
    reads, probes, edits, features = (
        tuple(a for a in actions if isinstance(a, kind)) for kind in kinds
    )
    return Spec(reads, probes, edits, features).resolve(SITES)


def compiled(asked: Resolved) -> RequestProgram:
    ids = np.ones(NUM_PROMPT, np.int64)
    return RequestProgram.compile(asked, SITES, frozenset(BOUNDARIES), NUM_PROMPT, ids)


def by_position(asked: Resolved, count: int) -> list[Program | None]:
    found: list[Program | None] = [None] * count
    for first, length, one in runs(compiled(asked), 0, count):
        found[first : first + length] = [one] * length
    return found


def test_probes_of_unlike_tokens_share_a_bank_and_each_token_has_all_its_numbers_in_order():
    asked = resolved(
        Probe(V, layer=0, name="prompt", tokens="prompt"),
        Probe(AttentionPool(W, X), layer=0, name="pool", tokens=[1, 6]),
        Probe(X, layer=0, name="late", tokens=[8]),
        Add(W, layer=0),
        Ablate(V, site="resid_pre", layer=1),
    )
    (bank,) = asked.banks
    assert (type(bank), bank.row_bytes) == (Scored, 4 * 4)
    for position, program in enumerate(by_position(asked, 10)):
        (at, ops), (last, checks) = program.taps
        assert (at, last, [op.code for op in checks]) == (2, 4, [OP_CHECK])
        add, *scores, ablate = ops
        assert (add.code, ablate.code) == (OP_ADD, OP_ABLATE)
        if position not in (*range(NUM_PROMPT), 6, 8):
            assert (scores, program.layout) == ([], Layout())
            continue
        assert program.layout == Layout((), ((bank, (EXIT.point(),)),))
        assert {op.code for op in scores} == {OP_SCORE}
        assert [op.told for op in scores] == [(EXIT, bank, i) for i in range(4)]
        # The queries of a pool come before its values.
        assert [op.vector.numpy.tolist() for op in scores] == [V, W, X, X]


def test_a_score_stands_where_a_read_of_its_site_would():
    """Between the edits of two sites that share a boundary, or after both."""
    edits = Add(W, layer=0), Ablate(V, site="resid_pre", layer=1)
    probes = [
        Probe(V, site=place.site, layer=place.layer, name=place.site) for place in (EXIT, ENTRY)
    ]
    reads = [Read(place.site, layer=place.layer) for place in (EXIT, ENTRY)]
    ((_, ops), _) = by_position(resolved(*probes, *reads, *edits), 1)[0].taps
    codes = [OP_ADD, OP_READ, OP_SCORE, OP_ABLATE, OP_READ, OP_SCORE]
    assert [op.code for op in ops] == codes
    assert [op.told[0] for op in ops if op.code == OP_SCORE] == [EXIT, ENTRY]
    # Without an edit between them the two sites have one row. Its numbers stay apart.
    program = by_position(resolved(*probes, *reads), 1)[0]
    ((_, ops),) = program.taps
    assert [op.code for op in ops] == [OP_READ, OP_SCORE, OP_SCORE]
    assert program.layout.points == (EXIT.point(),)
    assert [points for _, points in program.layout.encoded] == [(EXIT.point(),)] * 2


def test_the_pre_activation_of_a_feature_has_its_bias():
    rows = {"encoder": [V, W], "bias": [0.5, -2.0], "threshold": [0.0, 0.0]}
    some = Features(rows, indices=[7, 2], name="f", site="resid_post", layer=0)
    asked = resolved(some, Probe(X, layer=0, name="p"))
    ((_, ops),) = by_position(asked, 1)[0].taps
    assert [(op.vector.numpy.tolist(), op.b, op.told[2]) for op in ops] == [
        (X, 0.0, 0), (V, 0.5, 1), (W, -2.0, 2)
    ]  # fmt: skip


def test_nothing_is_left_to_compute_of_numbers_that_taps_tell():
    point, row = EXIT.point(), point_of(4, 1)
    scored, told, on_rows = (kind.of([b"a"], 3) for kind in (Scored, Told, Bank))
    layout = Layout((row,), ((scored, (point,)), (told, (point, row))))
    assert layout.arena is layout
    assert layout.slots(WIDTHS) == 1 + 1 + 2
    mixed = Layout((row,), ((on_rows, (point,)), (scored, (row,))))
    assert mixed.arena == Layout((point, row), ((scored, (row,)),))
    none = np.zeros(0, np.int64)
    for layouts, encodes in (((layout,), False), ((), False), ((layout, mixed), True)):
        labels = Labels(none, none, none.astype(np.int32), layouts, none)
        assert labels.encodes is encodes


@pytest.mark.parametrize("tap_by_tap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_of_the_row_that_the_edits_of_their_site_leave(dtype, tap_by_tap):
    weights = np.random.default_rng(0).normal(size=(3, 6))
    probes = [
        Probe(weights[0], layer=0, name="a", bias=0.25),
        Probe(weights[:2], site="resid_mid", layers=[1, 0], name="b"),
        Probe(weights[2], layer=0, name="c"),
    ]
    edits = Add(2 * weights[1], layer=0), Ablate(weights[0], site="resid_mid", layer=1)
    asked = [Spec(probes=tuple(probes), edits=edits), Spec(probes=tuple(probes))]
    step = Step(asked, dtype, 7)
    before = {boundary: rows.clone() for boundary, rows in step.hidden.items()}
    step.run(tap_by_tap)
    changed = [b for b, rows in before.items() if not torch.equal(rows, step.hidden[b])]
    assert changed == [EXIT.boundary, Place("resid_mid", 1).boundary]
    assert not step.plan.labels.encodes
    for key, pending in enumerate(step.pending):
        pending.finish(0, None)
        result = pending.snapshot([9], "length")
        assert (result.status, result.dropped) == ("complete", 0)
        check_scores(step, key, result)


@pytest.mark.parametrize("few", [0, 1 << 20], ids=["at-once", "one-by-one"])
@pytest.mark.parametrize(
    ("weight", "rows"), [(V, [V]), (AttentionPool(V, W), [V, W])], ids=["a-vector", "a-pool"]
)
def test_a_weight_with_the_numbers_of_a_replacement_takes_what_is_counted(
    few, weight, rows, monkeypatch
):
    monkeypatch.setattr(held_programs, "_FEW", few)
    tables = Tables(BOUNDARIES, 4, SIZE, WIDTHS, torch.device("cpu"), 2**-8, 64, 1024)
    places = tables._vector_places
    all_places = places.num_free
    edit = Replace(rows, positions=range(len(rows)), layer=0)
    program = compiled(resolved(Probe(weight, layer=0, name="p"), edit))
    held = program.held(program.columns(NUM_PROMPT))
    tables.hold(held)
    assert all_places - places.num_free == held.cost.vectors
    tables.release_set(held)
    assert tables._drop_idle_sets()
    assert places.num_free + len(list(places.idle())) == all_places
