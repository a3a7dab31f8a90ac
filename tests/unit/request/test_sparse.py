"""Features as an action: its JSON, its errors, and what it is on an engine."""

from __future__ import annotations

import json

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.unit.request.test_packed import _through_a_ticket
from tests.unit.saes import published
from tests.unit.saes.published import D_IN, D_SAE, K
from vllm_scope import Features, Probe, Spec, SpecError, scope, spec_schema
from vllm_scope.request.heads import Bank, Scored, Strongest, known_head
from vllm_scope.request.packed import pack, unpack
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites
from vllm_scope.saes.load import load_sae

SITES = Sites(14, D_IN, "float32", tuple(range(0, 29, 2)))


@pytest.fixture
def saes(tmp_path):
    made = {name: getattr(published, name)(tmp_path / name) for name in ("jumprelu", "topk")}
    return {name: load_sae(one.path, name=name) for name, one in made.items()}


def resolved(saes, *features: Features) -> Resolved:
    spec = Spec.from_json(scope(*features)["scope"]).of_engine(saes)
    there = _through_a_ticket(spec)
    asked = there.resolve(SITES)
    assert asked == spec.resolve(SITES)
    whole = (asked.reads, asked.probes, asked.edits, asked.features)
    packed, arrays = pack(whole)
    assert Resolved(*unpack(packed, arrays)) == asked
    return asked


@pytest.mark.parametrize(
    ("given", "body"),
    [
        pytest.param({}, {"top_k": 32, "name": "sae"}, id="defaults"),
        pytest.param({"top_k": 5, "name": "n"}, {"top_k": 5, "name": "n"}, id="top-k"),
        pytest.param(
            {"indices": np.array([4, 2]), "threshold": 0.5, "tokens": "prompt", "layer": 3},
            {"indices": [4, 2], "threshold": 0.5, "name": "sae", "tokens": "prompt",
             "site": None, "layers": [3]}, id="indices",
        ),
    ],
)  # fmt: skip
def test_an_action_comes_back_from_json(given, body):
    one = Features("sae", **given)
    (found,) = json.loads(scope(one)["scope"])["features"]
    assert found == {k: v for k, v in ({"sae": "sae"} | body).items() if v is not None}
    assert Spec.from_json(scope(one)["scope"]).features == (one,)
    Draft202012Validator(spec_schema()).validate(json.loads(scope(one)["scope"]))


def test_rows_come_back_from_json(saes):
    one = Features(saes["jumprelu"], indices=[7, 2])
    text = scope(one)["scope"]
    assert Spec.from_json(text).features == (one,)
    Draft202012Validator(spec_schema()).validate(json.loads(text))
    for wrong in ({"top_k": 0}, {"top_k": 1.5}, {"indices": []}, {"indices": [1, 1]}, {"sae": 3}):
        body = {"features": [json.loads(text)["features"][0] | wrong]}
        assert not Draft202012Validator(spec_schema()).is_valid(body), wrong


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"top_k": 0}, "Features.top_k is 0; it must be a whole number from 1 to 1,024"),
        ({"top_k": True}, "Features.top_k is True"),
        ({"top_k": 1025}, "Features.top_k is 1025"),
        ({"top_k": 3, "indices": [1]}, "Features has top_k and indices; give one of them"),
        ({"indices": []}, "Features.indices has 0 features; it has 1 to 256"),
        ({"indices": [1, 1]}, "must name each feature one time"),
        ({"indices": [-1]}, "must name each feature one time"),
        ({"layer": [1, 2]}, "Features.layers is .* it must be one layer"),
        ({"layer": "all"}, "it must be one layer"),
        ({"threshold": float("nan")}, "Features.threshold is nan"),
        ({"site": "resid"}, "Features.site is 'resid'"),
        ({"site": 0}, "Features.site is 0; a site is a string"),
        ({"name": False}, "Features.name is False; a name is a string"),
        ({"sae": {"encoder": [[1]]}, "indices": [1]}, "Features.sae is .* object with"),
        ({"sae": 3}, "top_k needs a whole encoder"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(given, sentence):
    with pytest.raises(SpecError, match=sentence):
        Features(**({"sae": "sae"} | given))


@pytest.mark.parametrize("site", [0, False, []])
def test_an_edit_of_features_takes_no_other_value_for_a_missing_site(site):
    rows = {"encoder": [[1.0]], "decoder": [[1.0]], "bias": [0.0], "threshold": [0.0]}
    for fields in ({"sae": "a", "index": 1}, {"sae": rows, "layers": 1}):
        body = {"edits": [{"kind": "set_feature", "site": site} | fields]}
        with pytest.raises(SpecError, match=r"edits\[0\].site is .*; a site is a string"):
            Spec.from_json(json.dumps(body))


def test_names_are_of_one_action_each():
    with pytest.raises(SpecError, match="two of the probes and features are called 'a'"):
        scope(Features("a"), Features("a", top_k=3))
    with pytest.raises(SpecError, match="two of the probes and features are called 'a'"):
        scope(Features("a"), Probe([1.0], layer=0, name="a"))


def test_a_request_names_so_many_features_at_most():
    many = [Features("a", indices=list(range(128))[i::2], name=f"{i}") for i in range(2)]
    scope(*many, Features("a", indices=list(range(128)), name="c"))
    with pytest.raises(SpecError, match="the features have 257 indices together; at most 256"):
        scope(*many, Features("a", indices=list(range(129)), name="c"))


def test_the_strongest_features_name_the_sae_alone(saes):
    (one,) = resolved(saes, Features("jumprelu", top_k=4)).features
    (cell,) = one.cells
    assert (cell.net, cell.place, one.num_features) == (None, ("resid_post", 12), D_SAE)
    assert isinstance(cell.bank, Strongest)
    assert (cell.bank.sae, cell.bank.count, one.num_values) == ("jumprelu", 4, 8)
    assert known_head(cell.bank.text, cell.bank.row_bytes) == cell.bank == cell.bank.nameless
    assert Strongest.of_sae("a name: 3", 2).sae == "a name: 3"


def test_single_features_are_a_net_in_the_bank_of_the_place(saes):
    asked = resolved(saes, Features("jumprelu", indices=[7, 2], threshold=1.0))
    (one,) = asked.features
    (cell,) = one.cells
    assert type(cell.bank) is Scored
    assert cell.net.num_values == one.num_values == 2
    feature = saes["jumprelu"].feature(7)
    weight, bias = cell.net.layers[0]
    np.testing.assert_array_equal(weight.numpy[0], feature.encoder.numpy())
    assert bias.numpy[0] == np.float32(feature.encoder_bias)
    assert one.thresholds.numpy[0] == np.float32(feature.threshold)
    assert asked.banks == {cell.bank: (cell.net,)}
    probe = Probe(np.ones(D_IN), layer=12, name="p")
    both = Spec(probes=(probe,), features=(Features("jumprelu", indices=[7]),)).of_engine(saes)
    (scored,), (sparse,) = (getattr(both.resolve(SITES), x) for x in ("probes", "features"))
    assert scored.cells[0].bank == sparse.cells[0].bank
    assert (scored.cells[0].first, sparse.cells[0].first) == (0, 1)
    (many,) = resolved(saes, Features("jumprelu", indices=[7, 2, 3, 5, 10])).features
    assert type(many.cells[0].bank) is Bank
    assert many.cells[0].net.num_values == many.num_values == 5


def test_a_topk_sae_delivers_its_own_k_at_most(saes):
    for given in ({"top_k": 9}, {"indices": [3, 4]}):
        (one,) = resolved(saes, Features("topk", **given)).features
        assert one.cells[0].bank.count == K
    with pytest.raises(SpecError, match="is a TopK SAE: whether a feature is active depends"):
        Features(saes["topk"], indices=[1])


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        (Features("no"), r"features\[0\]\.sae is 'no', .* it holds: jumprelu, topk"),
        (Features("topk", layer=3), r"features\[0\]\.layers is 3; the SAE 'topk' is of .* 12"),
        (Features("topk", top_k=12), r"features\[0\]\.top_k is 12; the SAE 'topk' has 11 features"),
        (Features("topk", indices=[11]), r"features\[0\]\.indices has 11; .* features 0 to 10"),
    ],
)
def test_what_the_engine_does_not_hold_is_refused(one, sentence, saes):
    with pytest.raises(SpecError, match=sentence):
        Spec(features=(one,)).of_engine(saes)


def test_rows_of_another_width_are_refused(saes):
    spec = Spec(features=(Features("jumprelu", top_k=2),)).of_engine(saes)
    with pytest.raises(SpecError, match=r"features\[0\]\.sae takes rows of 6 numbers; .* have 8"):
        spec.resolve(Sites(14, 8, "float32", tuple(range(0, 29, 2))))


def test_scores_alone_covers_features(saes):
    asked = resolved(saes, Features("jumprelu", top_k=4))
    other = resolved(saes, Features("jumprelu", top_k=5))
    assert asked.scores_alone
    assert asked.scores_alone != other.scores_alone
    assert (asked.score_bytes, other.score_bytes) == (32, 48)
