"""The sentence that answers a probe or an edit that cannot be."""

from __future__ import annotations

import base64
import json
import tracemalloc

import numpy as np
import pytest
import torch

from tests.unit.strategies import as_json, sentence
from vllm_scope import (
    Ablate,
    Add,
    Clamp,
    Features,
    Gate,
    Policy,
    Positions,
    Probe,
    Read,
    Replace,
    SetFeature,
    Spec,
    SpecError,
    TokenIds,
)
from vllm_scope.request.actions import MAX_NAME
from vllm_scope.request.actions.sparse import EncoderRows
from vllm_scope.request.arrays import MAX_NUMBERS, Array
from vllm_scope.request.spec import MAX_EDITS, MAX_PROBES

V = [1.0, -2.0, 0.5, 0.0]
ZERO = [0.0] * 4
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"probes": [{"name": "p", "layers": [1]}]}, "probes[0] has no weight."),
        ({"edits": [{"kind": "add", "layers": [1]}]}, "edits[0] has no vector."),
        ({"edits": [{"kind": "clamp", "layers": [1]}]}, "edits[0] has no direction."),
        ({"edits": [{"kind": "replace"}]}, "edits[0] has no values and no positions."),
        ({"edits": [{"kind": "replace", "values": [V]}]}, "edits[0] has no positions."),
        ({"edits": [{"kind": "set_feature", "index": 1}]}, "edits[0] has no sae."),
        (
            {"edits": [{"kind": "add", "vector": V}]},
            "edits[0] has no layers; name one, a list, or 'all'.",
        ),
        ({"features": [{"top_k": 4}]}, "features[0] has no sae."),
        (
            {"edits": [{"kind": "add", "vector": V, "layers": [1],
                        "gate": {"vector": V, "layer": 1, "state": {"kind": "ema"}}}]},
            "edits[0].gate.state has no decay.",
        ),
    ],
)  # fmt: skip
def test_a_missing_field_is_named_alone(body, sentence):
    with pytest.raises(SpecError) as refused:
        Spec.from_json(json.dumps(body))
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("make", "came", "allowed"),
    [
        pytest.param(lambda: Add("", layer=1), "''", "1 to 200 characters", id="no-name"),
        pytest.param(
            lambda: Add("m" * (MAX_NAME + 1)), "'mmm", "1 to 200 characters", id="a-long-name"
        ),
        pytest.param(lambda: Add(None, layer=1), "None", "a list of numbers", id="none"),
        pytest.param(lambda: Add([], layer=1), "shape (0,)", "none of size 0", id="no-numbers"),
        pytest.param(lambda: Add(1.0, layer=1), "shape ()", "1 to 3 dimensions", id="one-number"),
        pytest.param(lambda: Add(["a"], layer=1), "['a']", "a list of numbers", id="words"),
        pytest.param(lambda: Add([True], layer=1), "[True]", "a list of numbers", id="bools"),
        pytest.param(lambda: Add([1j], layer=1), "[1j]", "a list of numbers", id="complex"),
        pytest.param(
            lambda: Add(torch.ones(1, dtype=torch.complex64), layer=1),
            "1.+0.j",
            "list of numbers",
            id="a-complex-tensor",
        ),
        pytest.param(
            lambda: Add([[1, 2], [3]], layer=[1, 2]), "ragged", "of one length", id="ragged"
        ),
        pytest.param(lambda: Add([1, NAN], layer=1), "at [1]", "finite", id="nan"),
        pytest.param(
            lambda: Add([[1, 2], [INF, 3]], layer=[0, 1]), "at [1, 0]", "finite", id="infinite"
        ),
        pytest.param(lambda: Add([1e300], layer=1), "at [0]", "finite", id="beyond-float32"),
        pytest.param(lambda: Add(torch.tensor([NAN]), layer=1), "at [0]", "finite", id="tensor"),
        pytest.param(
            lambda: Add([[[1.0]]], layer=1), "(1, 1, 1)", "at most 2 dimensions", id="three-deep"
        ),
        pytest.param(lambda: Add([V, V], layer="all"), "for each layer", "name the", id="rows-all"),
        pytest.param(
            lambda: Add([V, V], layer=[0, 1, 2]), "2 rows", "3 layers", id="fewer-rows-than-layers"
        ),
        pytest.param(lambda: Add(V), "Add has no layer", "'all'", id="add-without-a-layer"),
        pytest.param(lambda: Ablate(V), "Ablate has no layer", "'all'", id="ablate-without-one"),
        pytest.param(
            lambda: Replace(V, positions=0), "Replace has no layer", "'all'", id="replace-without"
        ),
        pytest.param(
            lambda: Add(V, layer=1, layers=1), "layer and layers", "one of them", id="twice-a-layer"
        ),
        pytest.param(lambda: Add(V, layer=-1), "-1", "site='embed'", id="layer-minus-one"),
        pytest.param(
            lambda: Add(V, site="attention", layer=1), "'attention'", "resid_post", id="a-site"
        ),
        pytest.param(
            lambda: Add(V, site="embed", layer=2), "2", "has no layers", id="embed-with-a-layer"
        ),
        pytest.param(lambda: Add(V, layer=1, tokens="first"), "'first'", "last_prompt", id="word"),
        pytest.param(
            lambda: Add(V, layer=1, scale="2"), "'2'", "it must be a number", id="scale-text"
        ),
        pytest.param(lambda: Add(V, layer=1, scale=True), "True", "it must be a number", id="bool"),
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
        pytest.param(
            lambda: Clamp(ZERO, lo=0, hi=1, layer=1), "direction is zero", "length", id="clamp"
        ),
        pytest.param(
            lambda: Clamp(V, lo=2, hi=1, layer=1), "lo is 2 and hi 1", "at most hi", id="lo-hi"
        ),
        pytest.param(lambda: Clamp(V, lo=NAN, hi=1, layer=1), "lo is nan", "finite", id="lo-nan"),
        pytest.param(
            lambda: Clamp(V, lo=INF, hi=1, layer=1), "lo is inf", "finite", id="lo-infinite"
        ),
        pytest.param(
            lambda: Clamp(V, lo=0, hi=-INF, layer=1), "hi is -inf", "finite", id="hi-infinite"
        ),
        pytest.param(lambda: Clamp(V, layer=1), "no bound", "lo, hi or both", id="no-bound-at-all"),
        pytest.param(
            lambda: Clamp(V, lo=-INF, hi=INF, layer=1), "no bound", "lo, hi", id="all-inside"
        ),
        pytest.param(
            lambda: Clamp(V, lo=0, hi=1, layer=1, strength=1.5),
            "strength is 1.5",
            "0 to 1",
            id="strength-above-1",
        ),
        pytest.param(
            lambda: Clamp(V, lo=0, hi=1, layer=1, strength=True),
            "strength is True",
            "a number",
            id="strength-no-number",
        ),
        pytest.param(
            lambda: Clamp(V, lo="0", hi=1, layer=1), "lo is '0'", "a number", id="lo-is-text"
        ),
        pytest.param(
            lambda: Replace([V, V], positions=[0], layer=1), "2 rows", "1 positions", id="more-rows"
        ),
        pytest.param(
            lambda: Replace(V, positions=[0, 1], layer=1), "1 rows", "2 positions", id="fewer-rows"
        ),
        pytest.param(
            lambda: Replace([V, V], positions=[3, 3], layer=1), "position twice", ".", id="twice"
        ),
        pytest.param(
            lambda: Replace(V, positions=[], layer=1), "empty", "at least one", id="no-position"
        ),
        pytest.param(
            lambda: Replace(V, positions=[True], layer=1), "True", "whole numbers", id="bool-place"
        ),
        pytest.param(
            lambda: Replace(V, positions=["0"], layer=1), "'0'", "whole numbers", id="text-place"
        ),
        pytest.param(
            lambda: Replace(V, positions="last", layer=1), "'last'", "list of positions", id="last"
        ),
        pytest.param(
            lambda: Replace(V, positions=slice(0, 1), layer=1),
            "slice(0",
            "list of positions",
            id="a-slice",
        ),
        pytest.param(
            lambda: Replace(V, positions=TokenIds(1), layer=1),
            "TokenIds",
            "list of positions",
            id="ids",
        ),
        pytest.param(
            lambda: Replace([[V], [V], [V]], positions=[0], layer=[0, 1]),
            "3 rows",
            "2 layers",
            id="layers",
        ),
        pytest.param(
            lambda: Replace([[[V]]], positions=[0], layer=1),
            "(1, 1, 1, 4)",
            "1 to 3 dimensions",
            id="deep",
        ),
        pytest.param(lambda: Probe(V, layer=1), "''", "1 to 200 characters", id="probe-no-name"),
        pytest.param(lambda: Probe(V, name=7, layer=1), "7", "a string", id="a-number-as-name"),
        pytest.param(
            lambda: Probe([V, V], name="p", layer=1), "2 weights", "for each layer", id="two-rows"
        ),
        pytest.param(
            lambda: Probe([[V]], name="p", layer=1), "(1, 1, 4)", "[num_layers, width]", id="cube"
        ),
        pytest.param(lambda: Probe(V, name="p"), "None", "one layer", id="probe-without-a-layer"),
        pytest.param(
            lambda: Probe(V, name="p", layer="all"), "'all'", "one layer", id="probe-everywhere"
        ),
        pytest.param(
            lambda: Probe(V, name="p", layer=[1, 2]), "1 weight", "each layer", id="probe-at-two"
        ),
        pytest.param(
            lambda: Probe(V, name="p", site="logits", layer=1), "'logits'", "mlp_out", id="no-site"
        ),
        pytest.param(
            lambda: Probe(V, bias=INF, layer=1, name="p"), "inf", "finite", id="bias-infinite"
        ),
        pytest.param(lambda: Read("embed", when="now"), "'now'", "after, before", id="when"),
        pytest.param(lambda: Read("embed", when=None), "None", "after, before", id="when-none"),
    ],
)
def test_an_action_that_cannot_be_names_what_came_and_what_is_allowed(make, came, allowed):
    text = sentence(make)
    assert came in text
    assert allowed in text


@pytest.mark.parametrize(
    ("vector", "came", "allowed"),
    [
        pytest.param({}, "{}", "{dtype, shape, data}", id="an-empty-object"),
        pytest.param({"data": ""}, "{'data': ''}", "{dtype, shape, data}", id="data-alone"),
        pytest.param(as_json() | {"x": 1}, "'x': 1", "{dtype, shape, data}", id="an-unknown-field"),
        pytest.param(as_json("int8"), "'int8'", "float32, float16", id="an-unknown-dtype"),
        pytest.param(as_json(None), "None", "float32, float16", id="no-dtype"),
        pytest.param(as_json(shape=4), "shape is 4", "positive whole numbers", id="shape-a-number"),
        pytest.param(as_json(shape=()), "shape is []", "positive whole numbers", id="no-shape"),
        pytest.param(as_json(shape=(4, 0)), "[4, 0]", "positive whole numbers", id="empty-shape"),
        pytest.param(as_json(shape=(-4,)), "[-4]", "positive whole numbers", id="a-negative-shape"),
        pytest.param(as_json(shape=(4.0,)), "[4.0]", "positive whole numbers", id="a-float-shape"),
        pytest.param(as_json(shape=(True,)), "[True]", "positive whole numbers", id="a-bool-shape"),
        pytest.param(as_json(shape=(1, 1, 1, 4)), "[1, 1, 1, 4]", "1 to 3", id="four-dimensions"),
        pytest.param(as_json(data=7), "7", "base64 string", id="data-is-a-number"),
        pytest.param(as_json(data="@@@@"), "not base64", ".", id="not-base64"),
        pytest.param(as_json(data="AAA"), "not base64", ".", id="half-of-base64"),
        pytest.param(as_json(data="é" * 8), "not base64", ".", id="not-ascii"),
        pytest.param(as_json(data=""), "0 bytes", "takes 16", id="no-bytes"),
        pytest.param(as_json(shape=(5,)), "16 bytes", "takes 20", id="fewer-bytes"),
        pytest.param(as_json("float16"), "24 characters", "take 12", id="bytes-of-another-dtype"),
        pytest.param(
            as_json(data=base64.b64encode(np.array([0, 0, NAN, 0], "<f4")).decode()),
            "at [2]", "finite", id="a-nan-in-bytes",
        ),
        pytest.param(
            as_json("bfloat16", data=base64.b64encode(b"\x80\x7f" * 4).decode()),
            "at [0]", "finite", id="an-infinity-in-bfloat16",
        ),
        pytest.param(
            as_json("float64", (2,), base64.b64encode(np.array([1, 1e300])).decode()),
            "at [1]", "finite", id="beyond-float32",
        ),
        pytest.param([1, 1e39], "at [1]", "finite", id="beyond-float32-as-json"),
        pytest.param({"module": 3}, "module is 3", "1 to 200", id="module-is-a-number"),
        pytest.param(None, "None", "a list of numbers", id="null"),
        pytest.param([[1], 2], "ragged", "one length", id="ragged"),
    ],
)  # fmt: skip
def test_a_vector_in_json_that_cannot_be_names_its_path(vector, came, allowed):
    ok = {"kind": "add", "site": "embed", "vector": V}
    bad = {"kind": "add", "site": "resid_post", "layers": [1], "vector": vector}
    text = sentence(lambda: Spec.from_json(json.dumps({"edits": [ok, bad]})))
    assert text.startswith("edits[1].vector")
    assert came in text
    assert allowed in text


@pytest.mark.parametrize(
    "shape", [(MAX_NUMBERS + 1,), (1 << 40,), (1 << 62, 1 << 62, 1 << 62), (4096, 4097)]
)
def test_a_huge_shape_is_refused_before_anything_is_allocated(shape):
    tracemalloc.start()
    text = sentence(lambda: Array.parse(as_json(shape=shape), "x"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "at most 16,777,216" in text
    assert peak < 1 << 20


def test_a_shape_whose_product_python_cannot_print_is_refused():
    text = sentence(lambda: Array.parse(as_json(shape=[10**4000] * 3), "x"))
    assert text.startswith("x.shape is [1000")
    assert "at most 63 bits" in text


def test_a_huge_array_is_refused_before_it_is_copied():
    view = np.broadcast_to(np.float32(1), (MAX_NUMBERS + 1,))  # one number in memory
    assert "16,777,217 numbers; at most" in sentence(lambda: Add(view, layer=1))


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
        pytest.param({"edits": [{"kind": "add"}]}, "edits[0] has no", "vector.", id="no-field"),
        pytest.param(
            {"edits": [{"kind": "add", "site": "embed"}]}, "edits[0] has no", "vector.", id="no-vec"
        ),
        pytest.param(
            {"edits": [{"kind": "clamp", "site": "embed", "direction": V}]},
            "edits[0].lo and hi are missing", "Give lo, hi or both", id="no-bound",
        ),
        pytest.param(
            {"probes": [{"site": "embed"}]}, "probes[0] has no", "weight.", id="no-weight"
        ),
        pytest.param(
            {"edits": [{"kind": "add", "site": "embed", "vector": V, "scales": 2}]},
            "'scales'", "layers, max_relative_norm, name, norm_match, scale, site, tokens, vector",
            id="unknown-field",
        ),
        pytest.param(
            {"edits": [{"kind": "add", "site": "embed", "vector": V, "layer": 0}]},
            "'layer'", "layers, max_relative_norm", id="layer-for-layers",
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
            {"probes": [{"site": "embed", "weight": V, "name": f"{i}"}
                        for i in range(MAX_PROBES + 1)]},
            f"{MAX_PROBES + 1:,} probes", "at most", id="many-probes",
        ),
        pytest.param(
            {"edits": [{"kind": "add", "site": "embed", "vector": V}] * 257},
            "257 edits", f"at most {MAX_EDITS}", id="many-edits",
        ),
    ],
)  # fmt: skip
def test_json_of_an_action_that_cannot_be_names_what_came_and_what_is_allowed(body, came, allowed):
    text = sentence(lambda: Spec.from_json(json.dumps(body)))
    assert came in text
    assert allowed in text


def test_a_number_too_large_for_a_float_is_a_spec_error():
    body = {"kind": "add", "site": "embed", "vector": V, "scale": 10**400}
    assert "edits[0].scale" in sentence(lambda: Spec.from_json(json.dumps({"edits": [body]})))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Add(V, layer=1, scale=1e39), id="scale"),
        pytest.param(lambda: Probe(V, bias=1e39, layer=1, name="p"), id="bias"),
    ],
)
def test_a_number_that_is_infinite_in_float32_is_refused(make):
    assert "finite" in sentence(make)


@pytest.mark.parametrize(
    ("make", "came"),
    [
        pytest.param(lambda v: Clamp(V, lo=v, layer=1), "Clamp.lo is", id="lo"),
        pytest.param(lambda v: Clamp(V, hi=v, layer=1), "Clamp.hi is", id="hi"),
        pytest.param(
            lambda v: Probe(V, activation=v, layer=1, name="p"), "Probe.activation is", id="word"
        ),
    ],
)
def test_an_array_in_place_of_one_value_is_refused(make, came):
    for value in (np.array([1.0, 2.0]), torch.ones(2), [1.0, 2.0]):
        assert sentence(lambda value=value: make(value)).startswith(came)


@pytest.mark.parametrize("place", ["vector", "lo", "hi"])
def test_texts_in_a_list_of_numbers_are_refused_at_a_cost_in_proportion_to_their_bytes(place):
    """numpy gives each text of a list the room of the longest one."""
    texts = ["a" * 2_000, *[""] * 20_000]
    body = {"kind": "add", "vector": V} if place == "vector" else {"kind": "clamp", "direction": V}
    body |= {"site": "embed", place: [texts, texts]}
    text = json.dumps({"edits": [body]})
    tracemalloc.start()
    try:
        assert f"edits[0].{place} is" in sentence(lambda: Spec.from_json(text))
        assert tracemalloc.get_traced_memory()[1] < 30 * len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "value", [[[1], [2, 3]], ["a", [2]], [None], [[]], [{}], {"a": 1}], ids=str
)
def test_lists_in_place_of_a_bound_are_refused(value):
    body = {"kind": "clamp", "direction": V, "site": "embed", "hi": value}
    text = sentence(lambda: Spec.from_json(json.dumps({"edits": [body]})))
    assert text.startswith("edits[0].hi is")


@pytest.mark.parametrize("index", [1 << 31, 1 << 63, 1 << 64, 10**400])
def test_the_number_of_a_feature_fits_int32(index):
    rows = EncoderRows(np.ones((1, 4)), [0.0], [0.0])
    for make in (
        lambda: Features(rows, layer=1, indices=[index], name="f"),
        lambda: SetFeature("toy", index, 2.0),
    ):
        assert "below 2,147,483,648" in sentence(make)
    assert Features(rows, layer=1, indices=[(1 << 31) - 1], name="f").indices


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, {"a": [10**30]}], ids=str)
def test_options_of_a_policy_with_more_than_64_bits_are_refused(value):
    assert "JSON cannot hold" in sentence(lambda: Policy("p", {"x": value}))
    assert Policy("p", {"x": (1 << 64) - 1}).options["x"] == (1 << 64) - 1


def test_positions_of_a_replacement_can_be_a_selector():
    rows = np.ones((2, 4))
    one, other = (Replace(rows, positions=p, layer=1) for p in (Positions(0, 1), [0, 1]))
    assert one == other


def test_numbers_of_numpy_are_numbers():
    assert Clamp(V, lo=np.float32(-INF), hi=np.int64(2), layer=1) == Clamp(V, hi=2.0, layer=1)
    assert Gate(V, np.int64(3)) == Gate(V, 3)
    assert "one layer" in sentence(lambda: Gate(V, [3]))


def test_a_dtype_that_is_a_list_is_a_sentence_about_the_dtype():
    body = {"kind": "add", "site": "embed", "vector": as_json(["float32"])}
    text = sentence(lambda: Spec.from_json(json.dumps({"edits": [body]})))
    assert text.startswith("edits[0].vector.dtype is ['float32']")


def test_a_probe_with_one_weight_for_two_layers_in_json_is_told_both_numbers():
    body = {"site": "resid_post", "layers": [1, 2], "weight": V, "name": "p"}
    text = sentence(lambda: Spec.from_json(json.dumps({"probes": [body]})))
    assert text.startswith("probes[0].weight has 1 weight")
    assert "2 layers" in text
