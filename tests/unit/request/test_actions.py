"""Probes and edits: what they may be, what they mean on an engine, and their JSON."""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.unit.strategies import as_json, edits, probes, sentence, specs
from vllm_scope import Ablate, Add, Clamp, Positions, Probe, Read, Replace, Spec, scope
from vllm_scope.request.actions import KINDS, Module
from vllm_scope.request.arrays import Array
from vllm_scope.request.nets import net_of
from vllm_scope.request.resolved import ResolvedEdit
from vllm_scope.request.sites import Sites

V = [1.0, -2.0, 0.5, 0.0]
ZERO = [0.0] * 4
SITES = Sites(3, 4, "float32", tuple(range(7)))


def _values(action: Any) -> list:
    array = getattr(action, action.fields[0])
    return array.numpy.tolist()


# What may be asked, in any spelling


@pytest.mark.parametrize(
    "vector",
    [
        pytest.param(tuple(V), id="tuple"),
        pytest.param(np.array(V), id="float64"),
        pytest.param(np.array(V, np.float16), id="float16"),
        pytest.param(np.array(V, ">f4"), id="big-endian"),
        pytest.param(np.array([V, V]).T[:, 0], id="strided"),
        pytest.param(torch.tensor(V), id="tensor"),
        pytest.param(torch.tensor(V).bfloat16(), id="bfloat16-tensor"),
        pytest.param(torch.nn.Parameter(torch.tensor(V)), id="parameter"),
        pytest.param(Array.parse(V, ""), id="array"),
        pytest.param(as_json(), id="json-float32"),
        pytest.param(
            as_json("float16", data=base64.b64encode(np.array(V, "<f2")).decode()),
            id="json-float16",
        ),
        pytest.param(
            as_json("float64", data=base64.b64encode(np.array(V, "<f8")).decode()),
            id="json-float64",
        ),
        pytest.param(
            as_json(
                "bfloat16",
                data=base64.b64encode(
                    torch.tensor(V).bfloat16().view(torch.int16).numpy().tobytes()
                ).decode(),
            ),
            id="json-bfloat16",
        ),
    ],
)
def test_a_vector_is_the_same_in_any_spelling(vector):
    add = Add(vector, layer=1)
    assert add == Add(V, layer=1)
    assert add.vector.digest == Array.parse(V, "").digest
    assert add.vector.numpy.dtype == np.float32
    assert not add.vector.numpy.flags.writeable


def test_a_list_of_tensors_is_the_same_as_one_tensor():
    rows = torch.tensor([V, V[::-1]])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        exact = Array.parse(rows.to(dtype), "")
        one, other = rows.to(dtype)
        for some in ([one, other], (one, [*other]), [one.requires_grad_(), np.array(V[::-1])]):
            assert Array.parse(some, "") == exact
        assert Array.parse([[one, other]], "") == Array.parse(rows.to(dtype)[None], "")
    assert Probe([one, other], layers=[0, 1], name="p").weight == exact


def test_equal_numbers_of_another_shape_are_other_content():
    flat, row = Array.parse(V, ""), Array.parse([V], "")
    assert flat.data == row.data
    assert flat.digest != row.digest
    assert flat != row


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(Add(V, layer=[1]), Add(V, layers=1), id="layer-and-layers"),
        pytest.param(
            Add(V, site="post_block", layer=1), Add(V, site="resid_post", layer=1), id="an-alias"
        ),
        pytest.param(Add(V, site="embed"), Add(V, site="embed", layer=0), id="embed-is-layer-0"),
        pytest.param(Add("m"), Add({"module": "m"}), id="a-module-by-name"),
        pytest.param(Add("m"), Add(Module("m"), layer="all"), id="a-module-everywhere"),
        pytest.param(Add(V, layer=1, scale=2), Add(V, layer=1, scale=np.float32(2)), id="scale"),
        pytest.param(
            Add(V, layer=1, scale=2), Add(V, layer=1, scale=torch.tensor(2.0)), id="scale-of-torch"
        ),
        pytest.param(
            Replace(V, positions=3, layer=1),
            Replace([V], positions=[3], layer=1),
            id="one-position",
        ),
        pytest.param(
            Replace([V, V], positions=range(2), layer=1),
            Replace([V, V], positions=[0, 1], layer=1),
            id="a-range",
        ),
        pytest.param(
            Replace([V, V], positions=torch.tensor([4, 2]), layer=1),
            Replace([V, V], positions=(4, 2), layer=1),
            id="a-tensor",
        ),
    ],
)
def test_an_action_is_the_same_in_any_spelling(one, other):
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)


@pytest.mark.parametrize(
    "action",
    [
        Add(V, layer=2),
        Ablate(V, layers=[2]),
        Clamp(V, lo=0, hi=1, layer=2),
        Replace(V, positions=0, layer=2),
        Probe(V, layer=2, name="p"),
        Read("resid_post", layer=2),
    ],
    ids=lambda action: action.kind,
)
def test_an_action_shows_its_layers(action):
    assert "layers=(2,)" in repr(action)
    assert "layer=" not in repr(action)


@pytest.mark.parametrize("name", ["layer", "layers"])
@pytest.mark.parametrize(
    ("given", "layer", "layers"),
    [
        pytest.param(2, 2, (2,), id="one"),
        pytest.param([2], 2, (2,), id="a-list-of-one"),
        pytest.param(np.array([2]), 2, (2,), id="an-array-of-one"),
        pytest.param([0, 2], (0, 2), (0, 2), id="several"),
        pytest.param("all", "all", "all", id="all"),
    ],
)
def test_layer_and_layers_are_one_argument(name, given, layer, layers):
    for action in (Add(V, **{name: given}), Read("resid_post", **{name: given})):
        assert (action.layer, action.layers) == (layer, layers)
        other = dataclasses.replace(action, tokens="prompt")
        assert (other.layer, other.layers) == (layer, layers)
    assert Add(V, site="embed").layer == 0


@pytest.mark.parametrize(
    ("kind", "first"),
    [(Read, "resid_post"), (Probe, V), (Add, V), (Ablate, V), (Clamp, V), (Replace, V)],
)
def test_every_argument_after_the_first_is_named(kind, first):
    parameters = list(inspect.signature(kind).parameters.values())
    assert [p.kind for p in parameters].count(inspect.Parameter.POSITIONAL_OR_KEYWORD) == 1
    with pytest.raises(TypeError, match="positional argument"):
        kind(first, 2)


def test_the_order_of_layers_is_kept_where_each_has_its_row():
    edit = Add([V, ZERO], layer=[2, 0])
    assert edit.layer_numbers == (2, 0)
    resolved = Spec(edits=(edit,)).resolve(SITES).edits
    assert [(e.stream[1], e.values.numpy.tolist()) for e in resolved] == [(2, V), (0, ZERO)]


def test_the_rows_of_a_replacement_stay_with_their_positions():
    edit = Replace([V, ZERO], positions=[5, 2], layer=0)
    (resolved,) = Spec(edits=(edit,)).resolve(SITES).edits
    assert resolved.positions == (5, 2)
    assert resolved.values.numpy.tolist() == [V, ZERO]
    assert resolved.tokens.to_json() == [2, 5]


# JSON


@given(specs(num_layers=3))
def test_actions_of_every_kind_survive_their_json(spec):
    again = Spec.from_json(spec.to_json())
    assert again == spec
    assert again.to_json() == spec.to_json()
    assert scope(*spec.reads, *spec.probes, *spec.edits) == {"scope": spec.to_json()}


def _weights(probe):
    """All numbers of a probe's weights."""
    parts = [p for w in probe.weights() for layer in net_of(w).layers for p in layer if p]
    return [(part.shape, part.data) for part in parts]


@given(probes(3, 4), edits(3, 4))
def test_numbers_survive_their_json_bit_by_bit(probe, edit):
    again = Spec.from_json(Spec((), (probe,), (edit,)).to_json())
    assert _weights(again.probes[0]) == _weights(probe)
    assert _values(again.edits[0]) == _values(edit)
    assert type(again.edits[0]) is type(edit)


def test_edits_of_one_spec_keep_their_order_and_kinds():
    actions = (Ablate(V, layer=1), Add(V, layer=1), Clamp(V, lo=0, hi=1, layer=1), Add(V, layer=0))
    spec = Spec.from_json(scope(Read("embed"), *actions)["scope"])
    assert spec.edits == actions
    assert {type(edit) for edit in spec.edits} <= set(KINDS.values())


# On an engine


@pytest.mark.parametrize(
    ("action", "words"),
    [
        pytest.param(Add([1.0] * 5, layer=1), ["edits[0].vector has 5", "have 4"], id="add"),
        pytest.param(
            Ablate([[1.0] * 3] * 2, layer=[0, 1]), ["edits[0].direction has 3", "have 4"], id="rows"
        ),
        pytest.param(
            Replace([[1.0] * 3], positions=[0], layer=1),
            ["edits[0].values has 3", "have 4"],
            id="replace",
        ),
        pytest.param(
            Probe([1.0], layer=1, name="p"), ["probes[0].weight has 1", "have 4"], id="probe"
        ),
        pytest.param(Add(V, layer=3), ["edits[0].layers has 3", "0 to 2"], id="a-layer-too-far"),
        pytest.param(
            Probe(V, layer=3, name="p"), ["probes[0].layers has 3", "0 to 2"], id="probe-too-far"
        ),
        pytest.param(
            Add("gone"), ["'gone'", "holds: both, one.", "Register it first"], id="unknown-module"
        ),
        pytest.param(
            Add("one", layer=2), ["edits[0].layers", "'one'", "it has resid_post 1"], id="no-vector"
        ),
        pytest.param(
            Add("one", site="resid_pre", layer=1),
            ["of 'resid_pre'", "resid_post 1"],
            id="another-site",
        ),
    ],
)
def test_what_the_engine_lacks_is_refused_with_its_path(action, words):
    array = Array.parse(V, "")
    modules = {
        "one": {("resid_post", 1): array},
        "both": {("resid_post", 1): array, ("embed", 0): array},
    }
    spec = Spec.from_json(scope(action)["scope"])
    text = sentence(lambda: spec.resolve(SITES, modules))
    assert all(word in text for word in words), text


def test_a_module_applies_where_it_has_vectors_or_at_the_layers_that_are_named():
    arrays = [Array.parse([float(i), 1, 0, 0], "") for i in range(3)]
    streams = [("embed", 0), ("resid_post", 0), ("resid_post", 2)]
    modules = {"m": dict(zip(streams, arrays, strict=True))}

    def found(edit) -> list[ResolvedEdit]:
        return list(Spec(edits=(edit,)).resolve(SITES, modules).edits)

    everywhere = found(Add("m", scale=2.0, tokens="generated"))
    assert [e.stream for e in everywhere] == streams
    assert [e.values for e in everywhere] == arrays
    assert all(e.numbers == (2.0,) and e.tokens.to_json() == "generated" for e in everywhere)
    assert [e.stream for e in found(Ablate("m", layer=[2]))] == [("resid_post", 2)]
    assert [e.stream for e in found(Clamp("m", lo=0, hi=1, site="embed"))] == [("embed", 0)]


@pytest.mark.parametrize(
    "edit",
    [Ablate("m"), Clamp("m", lo=0, hi=1), Add("m", norm_match=True)],
    ids=["ablate", "clamp", "norm-match"],
)
def test_a_zero_vector_of_a_module_has_no_direction(edit):
    modules = {"m": {("resid_post", 1): Array.parse(ZERO, "")}}
    assert "no direction" in sentence(lambda: Spec(edits=(edit,)).resolve(SITES, modules))
    Spec(edits=(Add("m"),)).resolve(SITES, modules)


def test_a_spec_names_the_modules_that_it_refers_to_once():
    spec = Spec((Read("embed"),), (), (Add("a"), Ablate("b"), Add(V, layer=0), Add("a", scale=2)))
    assert spec.modules == ("a", "b")
    assert Spec.from_json(spec.to_json()).modules == ("a", "b")


@pytest.mark.parametrize(
    ("other", "same"),
    [
        pytest.param(Add(V, layer=1, scale=2, tokens=[0]), True, id="other-tokens"),
        pytest.param(Add(np.array(V), layer=1, scale=2), True, id="another-spelling"),
        pytest.param(Add(V, layer=1, scale=2.5), False, id="another-scale"),
        pytest.param(Add(V, layer=2, scale=2), False, id="another-layer"),
        pytest.param(Add(V, site="resid_pre", layer=1, scale=2), False, id="another-site"),
        pytest.param(Add([1, -2, 0.5, 1], layer=1, scale=2), False, id="another-vector"),
        pytest.param(Add(V, layer=1, scale=2, norm_match=True), False, id="norm-match"),
        pytest.param(Ablate(V, layer=1), False, id="another-kind"),
    ],
)
def test_the_digest_of_an_edit_is_of_what_it_does_to_a_token(other, same):
    one = Spec(edits=(Add(V, layer=1, scale=2),)).resolve(SITES).edits[0]
    (two,) = Spec(edits=(other,)).resolve(SITES).edits
    assert (one.digest == two.digest) is same


def test_numbers_of_numpy_and_torch_are_numbers():
    rows = torch.ones(2, 4)
    for positions in (np.array([3, 1]), torch.tensor([3, 1]), (3, 1), range(3, 0, -2)):
        assert Replace(rows, positions=Positions(positions), layer=0).positions == (3, 1)
        assert Replace(rows, positions=positions, layer=0).positions == (3, 1)
    assert Replace(rows[0], positions=np.int64(3), layer=0).positions == (3,)
    assert Replace(rows, positions=Positions(0, -1), layer=0).positions == (0, -1)
    assert Read("resid_post", layers=np.array([1, 0])).layers == (0, 1)
    assert Read("resid_post", layers=torch.tensor(1)).layers == (1,)


# One-sided clamps


@pytest.mark.parametrize(
    ("clamp", "bounds"),
    [
        pytest.param(Clamp(V, hi=1.5, layer=1), (-math.inf, 1.5), id="from-above"),
        pytest.param(Clamp(V, lo=-2, layer=1), (-2.0, math.inf), id="from-below"),
        pytest.param(
            Clamp(V, lo=-math.inf, hi=1.5, layer=1), (-math.inf, 1.5), id="minus-infinity"
        ),
        pytest.param(Clamp(V, lo=-2, hi=np.inf, layer=1), (-2.0, math.inf), id="infinity"),
        pytest.param(Clamp(V, lo=None, hi=1.5, layer=1), (-math.inf, 1.5), id="none"),
    ],
)
def test_a_clamp_may_have_one_bound(clamp, bounds):
    text = scope(clamp)["scope"]
    assert "Infinity" not in text
    assert "null" not in text
    (edit,) = Spec.from_json(text).resolve(SITES).edits
    assert edit.numbers == (*bounds, 1.0)
    body = {"kind": "clamp", "site": "resid_post", "layers": [1], "direction": V}
    body |= {"lo": None, "hi": 1.5} if bounds[0] == -math.inf else {"lo": -2, "hi": None}
    (again,) = Spec.from_json(json.dumps({"edits": [body]})).resolve(SITES).edits
    assert again.digest == edit.digest


def test_edits_and_probes_are_at_resid_post_unless_json_names_another_site():
    edit, probe = (
        '{"kind":"add","layers":[1],"vector":[1,2]}',
        '{"name":"p","layers":[1],"weight":[1]}',
    )
    spec = Spec.from_json(f'{{"edits":[{edit}],"probes":[{probe}]}}')
    assert (spec.edits[0].site, spec.probes[0].site) == ("resid_post", "resid_post")
