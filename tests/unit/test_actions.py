"""Probes and edits: what they may be, what they mean on an engine, and their JSON."""

from __future__ import annotations

import base64
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.unit.strategies import edits, probes, specs
from vllm_scope import Ablate, Add, Clamp, Probe, Read, Replace, Spec, SpecError, TokenIds, scope
from vllm_scope.actions import KINDS, MAX_NAME, Module
from vllm_scope.arrays import MAX_NUMBERS, Array
from vllm_scope.sites import Sites
from vllm_scope.spec import MAX_EDITS, MAX_PROBES, ResolvedEdit

V = [1.0, -2.0, 0.5, 0.0]
ZERO = [0.0] * 4
SITES = Sites(3, 4, "float32", tuple(range(7)))
NAN, INF = float("nan"), float("inf")


def _sentence(call: Any) -> str:
    with pytest.raises(SpecError) as caught:
        call()
    text = str(caught.value)
    assert text.endswith("."), text
    assert "\n" not in text
    assert len(text) < 2000
    return text


def _values(action: Any) -> list:
    array = getattr(action, action.fields[0])
    return array.numpy.tolist()


# What may not be asked


@pytest.mark.parametrize(
    ("make", "came", "allowed"),
    [
        pytest.param(lambda: Add("", layer=1), "''", "1 to 200 characters", id="no-name"),
        pytest.param(
            lambda: Add("m" * (MAX_NAME + 1)), "'mmm", "1 to 200 characters", id="a-long-name"
        ),
        pytest.param(lambda: Add(None, layer=1), "None", "a list of numbers", id="none"),
        pytest.param(lambda: Add([], layer=1), "shape (0,)", "none empty", id="no-numbers"),
        pytest.param(lambda: Add(1.0, layer=1), "shape ()", "1 to 3 dimensions", id="one-number"),
        pytest.param(lambda: Add(["a"], layer=1), "['a']", "a list of numbers", id="words"),
        pytest.param(lambda: Add([True], layer=1), "[True]", "a list of numbers", id="bools"),
        pytest.param(lambda: Add([1j], layer=1), "[1j]", "a list of numbers", id="complex"),
        pytest.param(
            lambda: Add([[1, 2], [3]], layer=[1, 2]), "ragged", "of one length", id="ragged"
        ),
        pytest.param(lambda: Add([1, NAN], layer=1), "at [1]", "finite", id="nan"),
        pytest.param(
            lambda: Add([[1, 2], [INF, 3]], layer=[0, 1]), "at [1, 0]", "finite", id="infinite"
        ),
        pytest.param(lambda: Add([1e300], layer=1), "at [0]", "finite", id="beyond-float32"),
        pytest.param(lambda: Add(torch.tensor([NAN]), layer=1), "at [0]", "finite", id="nan-tensor"),
        pytest.param(
            lambda: Add([[[1.0]]], layer=1), "(1, 1, 1)", "at most 2 dimensions", id="three-deep"
        ),
        pytest.param(lambda: Add([V, V], layer="all"), "for each layer", "name the", id="rows-all"),
        pytest.param(
            lambda: Add([V, V], layer=[0, 1, 2]), "2 rows", "3 layers", id="fewer-rows-than-layers"
        ),
        pytest.param(lambda: Add(V), "Add has no layer", "'all'", id="add-without-a-layer"),
        pytest.param(lambda: Ablate(V), "Ablate has no layer", "'all'", id="ablate-without-one"),
        pytest.param(lambda: Replace(V, 0), "Replace has no layer", "'all'", id="replace-without"),
        pytest.param(
            lambda: Add(V, layer=1, layers=1), "layer and layers", "one of them", id="twice-a-layer"
        ),
        pytest.param(lambda: Add(V, layer=-1), "-1", "site='embed'", id="layer-minus-one"),
        pytest.param(lambda: Add(V, "attention", 1), "'attention'", "resid_post", id="a-site"),
        pytest.param(lambda: Add(V, "embed", 2), "2", "has no layers", id="embed-with-a-layer"),
        pytest.param(lambda: Add(V, layer=1, tokens="first"), "'first'", "last_prompt", id="word"),
        pytest.param(lambda: Add(V, layer=1, scale="2"), "'2'", "it is a number", id="scale-text"),
        pytest.param(lambda: Add(V, layer=1, scale=True), "True", "it is a number", id="scale-bool"),
        pytest.param(lambda: Add(V, layer=1, scale=NAN), "nan", "finite", id="scale-nan"),
        pytest.param(lambda: Add(V, layer=1, scale=-INF), "-inf", "finite", id="scale-infinite"),
        pytest.param(
            lambda: Add(V, layer=1, norm_match=1), "norm_match is 1", "true or false", id="match-1"
        ),
        pytest.param(
            lambda: Add(ZERO, layer=1, norm_match=True), "vector is zero", "length", id="match-zero"
        ),
        pytest.param(lambda: Ablate(ZERO, layer=1), "direction is zero", "length", id="zero"),
        pytest.param(
            lambda: Ablate([V, ZERO], layer=[0, 1]), "direction is zero", "length", id="one-of-two"
        ),
        pytest.param(lambda: Clamp(ZERO, 0, 1, layer=1), "direction is zero", "length", id="clamp-0"),
        pytest.param(lambda: Clamp(V, 2, 1, layer=1), "lo is 2 and hi 1", "not above", id="lo-hi"),
        pytest.param(lambda: Clamp(V, NAN, 1, layer=1), "lo is nan", "finite", id="lo-nan"),
        pytest.param(lambda: Clamp(V, 0, INF, layer=1), "hi is inf", "finite", id="hi-infinite"),
        pytest.param(lambda: Clamp(V, None, 1, layer=1), "lo is None", "a number", id="no-lo"),
        pytest.param(
            lambda: Replace([V, V], [0], layer=1), "2 rows", "1 positions", id="more-rows"
        ),
        pytest.param(lambda: Replace(V, [0, 1], layer=1), "1 rows", "2 positions", id="fewer-rows"),
        pytest.param(lambda: Replace([V, V], [3, 3], layer=1), "position twice", ".", id="twice"),
        pytest.param(lambda: Replace(V, [], layer=1), "empty", "at least one", id="no-position"),
        pytest.param(lambda: Replace(V, [True], layer=1), "True", "whole numbers", id="bool-place"),
        pytest.param(lambda: Replace(V, ["0"], layer=1), "'0'", "whole numbers", id="text-place"),
        pytest.param(lambda: Replace(V, "last", layer=1), "'last'", "list of positions", id="last"),
        pytest.param(
            lambda: Replace(V, slice(0, 1), layer=1), "slice(0", "list of positions", id="a-slice"
        ),
        pytest.param(
            lambda: Replace(V, TokenIds(1), layer=1), "TokenIds", "list of positions", id="ids"
        ),
        pytest.param(
            lambda: Replace([[V], [V], [V]], [0], layer=[0, 1]), "3 rows", "2 layers", id="layers"
        ),
        pytest.param(
            lambda: Replace([[[V]]], [0], layer=1), "4,", "1 to 3 dimensions", id="four-deep"
        ),
        pytest.param(lambda: Probe(V, layer=1), "''", "1 to 200 characters", id="probe-no-name"),
        pytest.param(lambda: Probe(V, name=7, layer=1), "7", "a string", id="a-number-as-name"),
        pytest.param(lambda: Probe([V, V], name="p", layer=1), "(2, 4)", "one vector", id="two"),
        pytest.param(lambda: Probe(V, name="p"), "None", "one layer", id="probe-without-a-layer"),
        pytest.param(
            lambda: Probe(V, name="p", layer="all"), "'all'", "one layer", id="probe-everywhere"
        ),
        pytest.param(
            lambda: Probe(V, name="p", layer=[1, 2]), "[1, 2]", "one layer", id="probe-at-two"
        ),
        pytest.param(lambda: Probe(V, INF, layer=1, name="p"), "inf", "finite", id="bias-infinite"),
        pytest.param(lambda: Read("embed", when="now"), "'now'", "after, before", id="when"),
        pytest.param(lambda: Read("embed", when=None), "None", "after, before", id="when-none"),
    ],
)  # fmt: skip
def test_an_action_that_cannot_be_names_what_came_and_what_is_allowed(make, came, allowed):
    text = _sentence(make)
    assert came in text
    assert allowed in text


def _json(dtype: object = "float32", shape: object = (4,), data: object = None) -> dict:
    shape = list(shape) if isinstance(shape, tuple) else shape
    if data is None:
        data = base64.b64encode(np.array(V, "<f4").tobytes()).decode()
    return {"dtype": dtype, "shape": shape, "data": data}


@pytest.mark.parametrize(
    ("vector", "came", "allowed"),
    [
        pytest.param({}, "{}", "{dtype, shape, data}", id="an-empty-object"),
        pytest.param({"data": ""}, "{'data': ''}", "{dtype, shape, data}", id="data-alone"),
        pytest.param(_json() | {"x": 1}, "'x': 1", "{dtype, shape, data}", id="an-unknown-field"),
        pytest.param(_json("int8"), "'int8'", "float32, float16", id="an-unknown-dtype"),
        pytest.param(_json(None), "None", "float32, float16", id="no-dtype"),
        pytest.param(_json(shape=4), "shape is 4", "positive whole numbers", id="shape-a-number"),
        pytest.param(_json(shape=()), "shape is []", "positive whole numbers", id="no-shape"),
        pytest.param(_json(shape=(4, 0)), "[4, 0]", "positive whole numbers", id="an-empty-shape"),
        pytest.param(_json(shape=(-4,)), "[-4]", "positive whole numbers", id="a-negative-shape"),
        pytest.param(_json(shape=(4.0,)), "[4.0]", "positive whole numbers", id="a-float-shape"),
        pytest.param(_json(shape=(True,)), "[True]", "positive whole numbers", id="a-bool-shape"),
        pytest.param(_json(shape=(1, 1, 1, 4)), "[1, 1, 1, 4]", "1 to 3", id="four-dimensions"),
        pytest.param(_json(data=7), "7", "base64 string", id="data-is-a-number"),
        pytest.param(_json(data="@@@@"), "not base64", ".", id="not-base64"),
        pytest.param(_json(data="AAA"), "not base64", ".", id="half-of-base64"),
        pytest.param(_json(data="é" * 8), "not base64", ".", id="not-ascii"),
        pytest.param(_json(data=""), "0 bytes", "takes 16", id="no-bytes"),
        pytest.param(_json(shape=(5,)), "16 bytes", "takes 20", id="fewer-bytes"),
        pytest.param(_json("float16"), "16 bytes", "takes 8", id="bytes-of-another-dtype"),
        pytest.param(
            _json(data=base64.b64encode(np.array([0, 0, NAN, 0], "<f4")).decode()),
            "at [2]", "finite", id="a-nan-in-bytes",
        ),
        pytest.param(
            _json("bfloat16", data=base64.b64encode(b"\x80\x7f" * 4).decode()),
            "at [0]", "finite", id="an-infinity-in-bfloat16",
        ),
        pytest.param(
            _json("float64", (2,), base64.b64encode(np.array([1, 1e300])).decode()),
            "at [1]", "finite", id="beyond-float32",
        ),
        pytest.param([1, NAN], "at [1]", "finite", id="nan-as-json"),
        pytest.param({"module": 3}, "module is 3", "1 to 200 characters", id="a-module-is-a-number"),
        pytest.param(None, "None", "a list of numbers", id="null"),
        pytest.param([[1], 2], "ragged", "one length", id="ragged"),
    ],
)  # fmt: skip
def test_a_vector_in_json_that_cannot_be_names_its_path(vector, came, allowed):
    ok = {"kind": "add", "site": "embed", "vector": V}
    bad = {"kind": "add", "site": "resid_post", "layers": [1], "vector": vector}
    text = _sentence(lambda: Spec.from_json(json.dumps({"edits": [ok, bad]})))
    assert text.startswith("edits[1].vector")
    assert came in text
    assert allowed in text


@pytest.mark.parametrize(
    "shape", [(MAX_NUMBERS + 1,), (1 << 40,), (1 << 62, 1 << 62, 1 << 62), (4096, 4097)]
)
def test_a_huge_shape_is_refused_before_anything_is_allocated(shape):
    tracemalloc.start()
    text = _sentence(lambda: Array.parse(_json(shape=shape), "x"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "at most 16,777,216" in text
    assert peak < 1 << 20


def test_a_huge_array_is_refused_before_it_is_copied():
    view = np.broadcast_to(np.float32(1), (MAX_NUMBERS + 1,))  # one number in memory
    assert "16,777,217 numbers; at most" in _sentence(lambda: Add(view, layer=1))


@pytest.mark.parametrize(
    ("body", "came", "allowed"),
    [
        pytest.param({"probes": 1}, "probes is 1", "a list", id="probes-is-a-number"),
        pytest.param({"edits": {}}, "edits is {}", "a list", id="edits-is-an-object"),
        pytest.param({"probes": ["p"]}, "probes[0] is 'p'", "an object", id="a-probe-is-a-word"),
        pytest.param({"edits": [7]}, "edits[0].kind is None", "add, ablate", id="an-edit-is-7"),
        pytest.param({"edits": [{}]}, "kind is None", "add, ablate, clamp, replace", id="no-kind"),
        pytest.param({"edits": [{"kind": "read"}]}, "'read'", "add, ablate", id="a-read-as-edit"),
        pytest.param({"edits": [{"kind": ["add"]}]}, "['add']", "add, ablate", id="kind-a-list"),
        pytest.param({"edits": [{"kind": "add"}]}, "has no 'site'", "resid_post", id="no-site"),
        pytest.param(
            {"edits": [{"kind": "add", "site": "embed"}]}, "edits[0] needs", "vector", id="no-vector"
        ),
        pytest.param(
            {"edits": [{"kind": "clamp", "site": "embed", "direction": V, "lo": 1}]},
            "edits[0] needs", "direction, lo, hi", id="no-hi",
        ),
        pytest.param(
            {"probes": [{"site": "embed"}]}, "probes[0] needs", "weight, bias, name", id="no-weight"
        ),
        pytest.param(
            {"edits": [{"kind": "add", "site": "embed", "vector": V, "scales": 2}]},
            "'scales'", "layers, norm_match, scale, site, tokens, vector", id="unknown-field",
        ),
        pytest.param(
            {"edits": [{"kind": "add", "site": "embed", "vector": V, "layer": 0}]},
            "'layer'", "layers, norm_match", id="layer-for-layers",
        ),
        pytest.param(
            {"edits": [{"kind": "replace", "site": "embed", "values": V, "positions": [0],
                        "tokens": "all"}]},
            "'tokens'", "layers, positions, site, values", id="replace-has-no-tokens",
        ),
        pytest.param(
            {"edits": [{"kind": "ablate", "site": "embed", "direction": ZERO}]},
            "edits[0].direction is zero", "length", id="a-zero-direction",
        ),
        pytest.param(
            {"probes": [{"site": "embed", "weight": V, "name": "p"}] * 2},
            "two probes are called 'p'", ".", id="two-of-a-name",
        ),
        pytest.param(
            {"probes": [{"site": "embed", "weight": V, "name": f"{i}"} for i in range(257)]},
            "257 probes", f"at most {MAX_PROBES}", id="many-probes",
        ),
        pytest.param(
            {"edits": [{"kind": "add", "site": "embed", "vector": V}] * 257},
            "257 edits", f"at most {MAX_EDITS}", id="many-edits",
        ),
    ],
)  # fmt: skip
def test_json_of_an_action_that_cannot_be_names_what_came_and_what_is_allowed(body, came, allowed):
    text = _sentence(lambda: Spec.from_json(json.dumps(body)))
    assert came in text
    assert allowed in text


@pytest.mark.xfail(strict=True, raises=OverflowError, reason="math.isfinite of a huge int")
def test_a_number_too_large_for_a_float_is_a_spec_error():
    body = {"kind": "add", "site": "embed", "vector": V, "scale": 10**400}
    assert "edits[0].scale" in _sentence(lambda: Spec.from_json(json.dumps({"edits": [body]})))


@pytest.mark.xfail(strict=True, reason="numbers are checked as float64 and used as float32")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Add(V, layer=1, scale=1e39), id="scale"),
        pytest.param(lambda: Probe(V, 1e39, layer=1, name="p"), id="bias"),
    ],
)
def test_a_number_that_is_infinite_in_float32_is_refused(make):
    assert "finite" in _sentence(make)


@pytest.mark.xfail(strict=True, reason="an unhashable dtype is a TypeError")
def test_a_dtype_that_is_a_list_is_a_sentence_about_the_dtype():
    body = {"kind": "add", "site": "embed", "vector": _json(["float32"])}
    text = _sentence(lambda: Spec.from_json(json.dumps({"edits": [body]})))
    assert text.startswith("edits[0].vector.dtype is ['float32']")


@pytest.mark.xfail(strict=True, reason="the sentence shows `layer` where `layers` was given")
def test_a_probe_at_two_layers_in_json_is_told_what_came():
    body = {"site": "resid_post", "layers": [1, 2], "weight": V, "name": "p"}
    assert "[1, 2]" in _sentence(lambda: Spec.from_json(json.dumps({"probes": [body]})))


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
        pytest.param(_json(), id="json-float32"),
        pytest.param(
            _json("float16", data=base64.b64encode(np.array(V, "<f2")).decode()), id="json-float16"
        ),
        pytest.param(
            _json("float64", data=base64.b64encode(np.array(V, "<f8")).decode()), id="json-float64"
        ),
        pytest.param(
            _json(
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


def test_equal_numbers_of_another_shape_are_other_content():
    flat, row = Array.parse(V, ""), Array.parse([V], "")
    assert flat.data == row.data
    assert flat.digest != row.digest
    assert flat != row


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(Add(V, layer=[1]), Add(V, layers=1), id="layer-and-layers"),
        pytest.param(Add(V, "post_block", 1), Add(V, "resid_post", 1), id="an-alias"),
        pytest.param(Add(V, "embed"), Add(V, "embed", 0), id="embed-is-layer-0"),
        pytest.param(Add("m"), Add({"module": "m"}), id="a-module-by-name"),
        pytest.param(Add("m"), Add(Module("m"), layer="all"), id="a-module-everywhere"),
        pytest.param(Add(V, layer=1, scale=2), Add(V, layer=1, scale=np.float32(2)), id="scale"),
        pytest.param(Replace(V, 3, layer=1), Replace([V], [3], layer=1), id="one-position"),
        pytest.param(
            Replace([V, V], range(2), layer=1), Replace([V, V], [0, 1], layer=1), id="a-range"
        ),
        pytest.param(
            Replace([V, V], torch.tensor([4, 2]), layer=1), Replace([V, V], (4, 2), layer=1),
            id="a-tensor",
        ),
    ],
)  # fmt: skip
def test_an_action_is_the_same_in_any_spelling(one, other):
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)


def test_the_order_of_layers_is_kept_where_each_has_its_row():
    edit = Add([V, ZERO], layer=[2, 0])
    assert edit.layer_numbers == (2, 0)
    resolved = Spec(edits=(edit,)).resolve(SITES).edits
    assert [(e.stream[1], e.values.numpy.tolist()) for e in resolved] == [(2, V), (0, ZERO)]


def test_the_rows_of_a_replacement_stay_with_their_positions():
    edit = Replace([V, ZERO], [5, 2], layer=0)
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


@given(probes(3, 4), edits(3, 4))
def test_numbers_survive_their_json_bit_by_bit(probe, edit):
    again = Spec.from_json(Spec((), (probe,), (edit,)).to_json())
    assert again.probes[0].weight.data == probe.weight.data
    assert _values(again.edits[0]) == _values(edit)
    assert type(again.edits[0]) is type(edit)


def test_edits_of_one_spec_keep_their_order_and_kinds():
    actions = (Ablate(V, layer=1), Add(V, layer=1), Clamp(V, 0, 1, layer=1), Add(V, layer=0))
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
            Replace([[1.0] * 3], [0], layer=1), ["edits[0].values has 3", "have 4"], id="replace"
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
            Add("one", "resid_pre", layer=1), ["of 'resid_pre'", "resid_post 1"], id="another-site"
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
    text = _sentence(lambda: spec.resolve(SITES, modules))
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
    assert [e.stream for e in found(Clamp("m", 0, 1, "embed"))] == [("embed", 0)]


@pytest.mark.parametrize(
    "edit",
    [Ablate("m"), Clamp("m", 0, 1), Add("m", norm_match=True)],
    ids=["ablate", "clamp", "norm-match"],
)
def test_a_zero_vector_of_a_module_has_no_direction(edit):
    modules = {"m": {("resid_post", 1): Array.parse(ZERO, "")}}
    assert "no direction" in _sentence(lambda: Spec(edits=(edit,)).resolve(SITES, modules))
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
        pytest.param(Add(V, "resid_pre", 1, scale=2), False, id="another-site"),
        pytest.param(Add([1, -2, 0.5, 1], layer=1, scale=2), False, id="another-vector"),
        pytest.param(Add(V, layer=1, scale=2, norm_match=True), False, id="norm-match"),
        pytest.param(Ablate(V, layer=1), False, id="another-kind"),
    ],
)
def test_the_digest_of_an_edit_is_of_what_it_does_to_a_token(other, same):
    one = Spec(edits=(Add(V, layer=1, scale=2),)).resolve(SITES).edits[0]
    (two,) = Spec(edits=(other,)).resolve(SITES).edits
    assert (one.digest == two.digest) is same
