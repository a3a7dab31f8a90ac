"""Gates, doses and features of a spec: what they mean on an engine, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.unit.programs import runs
from vllm_scope import (
    Add,
    Clamp,
    Ema,
    Gate,
    Pid,
    Probe,
    ScaleFeature,
    SetFeature,
    Spec,
    SpecError,
)
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.operations import (
    MOST_GATES,
    OP_ADD,
    OP_ADD_BOUND,
    OP_ADD_FEATURE,
    OP_FEATURE,
    OP_GATE,
)
from vllm_scope.request import spec as spec_module
from vllm_scope.request.actions.features import FeatureRows
from vllm_scope.request.remembered import Remembered
from vllm_scope.request.sites import Place, Sites

V = [1.0, -2.0, 3.0, 0.5]
INNER = tuple(Place(site, layer).boundary for site in ("attn_out", "mlp_out") for layer in range(3))
SITES = Sites(3, 4, "float32", (*range(7), *INNER))


def resolved(*edits, probes=(), sites=SITES):
    return Spec(edits=edits, probes=probes).resolve(sites)


def ops_of(*edits):
    """(boundary, codes) of the program of every token."""
    asked = resolved(*edits)
    program = RequestProgram.compile(asked, SITES, frozenset(SITES.boundaries), 4, [0] * 4)
    ((_, _, found),) = runs(program, 0, 4)
    return found


def fake_sae(site="resid_pre", layer=2, kind="jumprelu"):
    def feature(index):
        return SimpleNamespace(
            encoder=torch.full((4,), 1.0 + index), encoder_bias=0.25, decoder=torch.ones(4),
            threshold=0.5, kind=kind,
        )  # fmt: skip

    return SimpleNamespace(name="fake", place=Place(site, layer), feature=feature)


# Where a gate may be


@pytest.mark.parametrize(
    ("gate", "edit", "fits"),
    [
        (("resid_post", 1), ("resid_post", 1), True),
        (("resid_post", 0), ("resid_pre", 1), True),
        (("resid_pre", 1), ("resid_post", 0), False),
        (("resid_mid", 1), ("resid_post", 0), False),
        (("resid_post", 0), ("attn_out", 1), True),
        (("resid_pre", 1), ("attn_out", 1), True),
        (("resid_mid", 1), ("attn_out", 1), False),
        (("resid_mid", 1), ("mlp_out", 1), True),
        (("resid_post", 1), ("mlp_out", 1), False),
        (("resid_post", 2), ("attn_out", 0), False),
    ],
)
def test_a_gate_is_computed_before_its_edit(gate, edit, fits):
    one = Add(V, site=edit[0], layer=edit[1], gate=Gate(V, gate[1], site=gate[0]))
    if fits:
        assert resolved(one).edits[0].gate.place == gate
    else:
        with pytest.raises(SpecError, match="a gate must be at or before its edit"):
            resolved(one)


def test_equal_gates_share_a_register_and_there_are_so_many():
    gate = Gate(V, 0)
    program = ops_of(Add(V, layer=1, gate=gate), Clamp(V, hi=1.0, layer=2, gate=gate))
    taps = dict(program.taps)
    assert [op.code for op in taps[2]] == [OP_GATE]
    assert {op.register for _, ops in program.taps for op in ops if op.code != 8} == {0}
    many = [Add(V, layer=1, gate=Gate(V, 0, threshold=float(i))) for i in range(MOST_GATES + 1)]
    ops_of(*many[1:])
    with pytest.raises(SpecError, match="17 different gates"):
        ops_of(*many)


def test_the_key_of_kv_blocks_has_everything_that_changes_a_row():
    edits = [
        Add(V, layer=1), Add(V, layer=1, max_relative_norm=0.5), Add(V, layer=1, gate=Gate(V, 0)),
        Add(V, layer=1, gate=Gate(V, 1)), Add(V, layer=1, gate=Gate(V, 0, threshold=1.0)),
        Add(V, layer=1, gate=Gate(V, 0, above=False)), Add(V, layer=1, gate=Gate(V, 0, bias=1.0)),
        Add(V, layer=1, gate=Gate(V, 0, kind="cast")), Add(V, layer=1, gate=Gate([1, 1, 1, 1], 0)),
        Add(V, layer=1, gate=Gate(V, 0, kind="sigmoid", sharpness=2.0)),
        SetFeature(fake_sae(), 1, 2.0), SetFeature(fake_sae(), 2, 2.0),
        SetFeature(fake_sae(), 1, 3.0), ScaleFeature(fake_sae(), 1, 3.0),
    ]  # fmt: skip
    digests = [resolved(edit).edits[0].digest for edit in edits]
    assert len(set(digests)) == len(edits)
    named = resolved(Add(V, layer=1, gate=Gate(V, 0, name="g"), dose="d")).edits[0]
    assert named.digest == digests[2]


# Names


def test_each_edit_has_a_dose_of_its_own_and_only_if_it_names_one():
    edits = [Add(V, layer=1, dose="a"), Add(V, layer=1), Add(V, layer=1, dose="b")]
    found = resolved(*edits)
    first, none, second = (edit.dose for edit in found.edits)
    assert none is None
    assert first is not None
    assert second is not None
    assert first[:2] == second[:2]
    assert {first[2], second[2]} == {0, 1}
    assert [probe.name for probe in found.probes] == ["a", "b"]
    with pytest.raises(SpecError, match="two gates or doses are called 'd'"):
        resolved(Add(V, layer=1, dose="d"), Add(V, layer=1, dose="d"))
    with pytest.raises(SpecError, match="probes, features, lenses, gates and doses are called 'd'"):
        resolved(Add(V, layer=1, dose="d"), probes=(Probe(V, layer=0, name="d"),))


PID = Pid(0.0, 1.0)


def probe(**options):
    return Probe(V, layer=1, name="p", **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Gate(Probe(V, layer=1, name="p"), 3),
            "the gate uses the probe.s layer, site and bias",
        ),
        (lambda: Gate(Probe([V, V], layers=[1, 2], name="p")), "a linear probe of one layer"),
        (lambda: Gate(V, 0, kind="sigmoid", sharpness=1e-46), "above 0 in float32"),
        (lambda: Gate(V, [1]), "a gate reads one layer"),
        (lambda: Gate(V, "all"), "a gate reads one layer"),
        (lambda: Gate(V, 0, site="attn_out"), "a gate reads embed, resid_pre"),
        (lambda: Gate([0.0] * 4, 0), "needs a direction"),
        (lambda: Gate(V, 0, kind="cosine", bias=1.0), "a cosine takes none"),
        (lambda: Gate(V, 0, sharpness=2.0), "sharpness is 2, .* 'step', which has no slope"),
        (lambda: Gate(V, 0, kind="cast", sharpness=0.5), "'cast', which has no slope"),
        (lambda: Gate(probe(aggregate="max")), "the aggregate 'max'; a gate takes a probe without"),
        (lambda: Gate(probe(aggregate=Ema(0.5))), r"the aggregate Ema\(decay=0.5\); a gate takes"),
        (lambda: Gate(probe(threshold=1.0, action="stop")), "action='stop', which a gate cannot"),
        (lambda: Gate(probe(after="q")), "after='q', which a gate cannot"),
        (lambda: Gate(probe(to="sink")), "to='sink', which a gate cannot"),
        (
            lambda: Gate(probe(threshold=5.0), kind="cosine"),
            "the threshold 5, which is for its score, .* give Gate.threshold",
        ),
        (
            lambda: Add(V, layer=1, gate=Gate(probe(tokens="last_prompt"))),
            "with tokens='last_prompt', and Add.tokens is 'all'; .* Give both the same tokens",
        ),
        (
            lambda: Add(V, layer=2, tokens="generated", gate=Gate(V, 0, threshold=5, state=PID)),
            "Add.gate.threshold is 5, and the gate has a Pid, .* give threshold=0",
        ),
        (
            lambda: Add(
                V,
                layer=2,
                tokens="generated",
                gate=Gate(V, 0, kind="sigmoid", sharpness=2, state=PID),
            ),
            "Add.gate.sharpness is 2, and the gate has a Pid, .* give sharpness=1",
        ),
        (lambda: Gate(V, 0, kind="soft"), "one of step, sigmoid, cosine, cast"),
        (lambda: Add("m", gate=Gate(V, 0, name="g")), "names a module"),
        (lambda: Add(V, layer=[0, 1], dose="d"), "a dose needs one named layer"),
        (lambda: Add(V, layer=0, max_relative_norm=-1), "0 or more"),
        (lambda: SetFeature(fake_sae(), [1, 1], 2.0), "must name each feature one time"),
        (lambda: SetFeature("toy", 1, 2.0, site="ln_final"), "'ln_final', which can be read and"),
        (lambda: SetFeature(fake_sae("ln_final", 0), 1, 2.0), "'ln_final', which can be read and"),
        (lambda: SetFeature(fake_sae(), [1, 2], 2.0, dose="d"), "there are 2 features"),
        (lambda: SetFeature(fake_sae(kind="topk"), 1, 2.0), "fake is a TopK SAE"),
        (
            lambda: SetFeature(fake_sae(), [1, 2], 2.0, add=[True]),
            r"add is \[True\]; .* 2 features",
        ),
        (
            lambda: SetFeature("toy", 1, only_if_active=1),
            "only_if_active is 1; it must be true or false",
        ),
    ],
)
def test_what_is_refused_when_it_is_made(make, words):
    with pytest.raises(SpecError, match=words):
        make()


def test_a_gate_has_the_threshold_of_its_probe_unless_it_gives_one():
    assert Gate(probe(threshold=1e9, bias=0.5)) == Gate(V, 1, bias=0.5, threshold=1e9)
    assert Gate(probe(threshold=3.0), kind="sigmoid").threshold == 3.0
    assert Gate(probe(threshold=3.0), threshold=0.0) == Gate(V, 1)
    assert Gate(probe(threshold=3.0), kind="cosine", threshold=0.5).threshold == 0.5
    assert Gate(probe()).threshold == 0.0
    kept = Spec(edits=(Add(V, layer=1, gate=Gate(probe(threshold=3.0))),))
    assert Spec.from_json(kept.to_json()) == kept
    assert resolved(*kept.edits).edits[0].gate.threshold == 3.0


def test_options_that_a_gate_may_have_are_taken():
    for options in (
        {"sharpness": 1.0},
        {"kind": "cosine", "sharpness": 1},
        {"threshold": None},
        {"threshold": 0.0, "sharpness": 1.0, "state": PID},
    ):
        gate = Gate(V, 0, **options)
        assert (gate.threshold, gate.sharpness) == (0.0, 1.0)
        assert "threshold" not in gate.to_json()
        assert replace(gate) == gate
        Add(V, layer=2, tokens="generated", gate=gate)
    # At tokens of the prompt such a gate has its value without the state.
    Add(V, layer=2, gate=Gate(V, 0, threshold=5.0, state=PID))
    Add(V, layer=1, tokens="generated", gate=Gate(probe(tokens="generated")))
    Add(V, layer=1, tokens=[3], gate=Gate(probe()))


# Features


def test_a_features_place_is_the_saes_unless_it_is_named():
    for site, layer, options, place in (
        ("resid_pre", 2, {}, ("resid_pre", 2)),
        ("resid_pre", 2, {"layer": 1}, ("resid_pre", 1)),
        ("resid_pre", 2, {"site": "resid_mid"}, ("resid_mid", 2)),
        ("embed", 0, {}, ("embed", 0)),
        ("embed", 0, {"site": "resid_post", "layer": 1}, ("resid_post", 1)),
    ):
        (edit,) = resolved(SetFeature(fake_sae(site, layer), 1, 2.0, **options)).edits
        assert edit.stream == place


def test_all_features_of_an_edit_are_computed_before_the_row_changes():
    program = ops_of(Add(V, site="resid_pre", layer=2), SetFeature(fake_sae(), [3, 1], [5.0, 6.0]))
    (ops,) = (ops for boundary, ops in program.taps if boundary == 4)
    assert [op.code for op in ops] == [OP_ADD, *[OP_FEATURE] * 2, *[OP_ADD_FEATURE] * 2]
    assert [op.register for op in ops[1:3]] == [op.source for op in ops[3:]]
    assert [(op.b, op.c) for op in ops[1:3]] == [(0.25, 0.5)] * 2
    assert [(op.a, op.b, op.d) for op in ops[3:]] == [(5.0, 0, -1.0), (6.0, 0, -1.0)]
    shifts = SetFeature(fake_sae(), [3, 1], [5.0, 6.0], add=True, only_if_active=[False, True])
    (ops,) = (ops for boundary, ops in ops_of(shifts).taps if boundary == 4)
    assert [(op.a, op.b, op.d) for op in ops[2:]] == [(5.0, 0, 0), (6.0, 1, 0)]


def test_layers_share_the_rows_of_features_and_memory_counts_them():
    edit = SetFeature(fake_sae(), [1, 2, 3], 2.0, layer="all", site="resid_post")
    asked = resolved(edit)
    program = RequestProgram.compile(asked, SITES, frozenset(SITES.boundaries), 4, [0] * 4)
    ((_, _, found),) = runs(program, 0, 4)
    vectors = [op.vector for _, ops in found.taps for op in ops if op.vector is not None]
    assert len({id(vector) for vector in vectors}) == 6
    small = resolved(SetFeature(fake_sae(), 1, 2.0, layer="all", site="resid_post"))
    assert asked.num_bytes - small.num_bytes == 2 * 2 * 2 * 4 * 4


# Numbers and JSON


def test_an_add_with_a_bound_is_finite_on_the_device():
    (op,) = (
        op for _, ops in ops_of(Add([1e30] * 4, layer=1, scale=1e30, max_relative_norm=0.5)).taps
        for op in ops if op.code == OP_ADD_BOUND
    )  # fmt: skip
    assert op.a == float(np.finfo(np.float32).max)


def test_json_has_every_field():
    gate = Gate(V, 1, threshold=0.5, kind="cast", above=False, name="g")
    rows = FeatureRows([V], [V], (0.5,), (0.0,))
    edits = (
        Add(V, layer=1, gate=gate, dose="d", max_relative_norm=0.25),
        Clamp(V, lo=0.0, layer=1, gate=Gate(V, site="embed", kind="sigmoid", sharpness=3.0)),
        SetFeature(rows, value=2.0, layer=1, gate=gate), ScaleFeature(rows, factor=[3.0], layer=2),
    )  # fmt: skip
    spec = Spec(edits=edits)
    assert Spec.from_json(spec.to_json()) == spec
    body = json.loads(spec.to_json())
    body["edits"][0]["gate"]["treshold"] = 1
    with pytest.raises(SpecError, match=r"edits\[0\]\.gate has 'treshold'"):
        Spec.from_json(json.dumps(body))


def test_a_name_stands_for_an_sae_until_the_engine_is_known():
    gate = Gate(V, 0, name="g")
    edits = (
        SetFeature("toy", [3, 1], [5.0, 6.0], add=[True, False], gate=gate, tokens="generated"),
        ScaleFeature("toy", 2, 0.5, layer=1, site="resid_mid"), Add(V, layer=1),
    )  # fmt: skip
    spec = Spec(edits=edits)
    assert Spec.from_json(spec.to_json()) == spec
    with pytest.raises(SpecError, match=r"edits\[0\]\.sae is 'toy'; server-wide edits take"):
        spec.resolve(SITES)
    with pytest.raises(SpecError, match=r"edits\[0\]\.sae is 'toy'.* it holds: other"):
        spec.of_engine({"other": fake_sae()})
    found = spec.of_engine({"toy": fake_sae()})
    direct = replace(edits[0], sae=fake_sae())
    assert found.edits[0] == direct
    assert found.edits[2] is edits[2]
    first, second, _ = found.resolve(SITES).edits
    assert (first.stream, second.stream) == (("resid_pre", 2), ("resid_mid", 1))
    assert found.of_engine({}) is found
    for index in ([], [1, 1], -1, "1", 1.5, True, list(range(17))):
        with pytest.raises(SpecError, match="index"):
            SetFeature("toy", index, 1.0)


def test_the_named_features_of_a_request_are_bounded():
    edits = [SetFeature("toy", list(range(16)), 0.0) for _ in range(17)]
    assert Spec(edits=tuple(edits[:16])).edits
    with pytest.raises(SpecError, match="272 features of SAEs together; at most 256"):
        Spec(edits=tuple(edits))


def test_a_spec_with_the_rows_of_an_sae_is_remembered_by_its_size(monkeypatch):
    monkeypatch.setattr(spec_module, "_expanded", Remembered(20_000))
    saes = {"toy": fake_sae()}
    specs = [Spec(edits=(SetFeature("toy", 1, float(i)),)) for i in range(9)]
    made = [spec.of_engine(saes) for spec in specs]
    assert all(one.edits[0].sae.count == 1 for one in made)
    assert specs[-1].of_engine(saes) is made[-1]
    assert specs[-1].of_engine(dict(saes)) is not made[-1]
    kept = spec_module._expanded
    assert 1 < len(kept) < 9
    assert kept.num_bytes <= 20_000
    plain = Spec(edits=(Add(V, layer=1),))
    assert plain.of_engine(saes) is plain
