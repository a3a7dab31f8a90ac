"""A lens as an action: its JSON, its errors, and what it is on an engine."""

from __future__ import annotations

import json

import pytest
import torch
from jsonschema import Draft202012Validator

from tests.unit.request.test_packed import _through_a_ticket
from vllm_scope import Features, LensTopK, Probe, Spec, SpecError, scope, spec_schema
from vllm_scope.batch.sparse import sparse_rows
from vllm_scope.request.actions import HeldSae
from vllm_scope.request.heads import LENS, Likeliest, known_head
from vllm_scope.request.packed import pack, unpack
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Place, Sites

SITES = Sites(6, 4, "float32", tuple(range(0, 13, 2)))


def resolved(*actions) -> Resolved:
    spec = Spec.from_json(scope(*actions)["scope"])
    asked = spec.resolve(SITES)
    assert _through_a_ticket(spec).resolve(SITES) == asked
    whole = (asked.reads, asked.probes, asked.edits, asked.features)
    packed, arrays = pack(whole)
    assert Resolved(*unpack(packed, arrays)) == asked
    return asked


@pytest.mark.parametrize(
    ("given", "body"),
    [
        pytest.param({}, {}, id="defaults"),
        pytest.param({"layer": 3, "top_k": 2}, {"layers": [3], "top_k": 2}, id="one-layer"),
        pytest.param(
            {
                "layers": [4, 1],
                "site": "pre_attn",
                "tokens": "prompt",
                "name": "n",
                "to": "sink",
                "lens": "tuned",
            },
            {
                "layers": [1, 4],
                "site": "resid_pre",
                "tokens": "prompt",
                "name": "n",
                "to": "sink",
                "lens": "tuned",
            },
            id="everything",
        ),
    ],
)
def test_an_action_comes_back_from_json(given, body):
    one = LensTopK(**given)
    text = scope(one)["scope"]
    whole = {"site": "resid_post", "layers": "all", "top_k": 10, "name": "lens"} | body
    assert json.loads(text) == {"lens": [whole]}
    assert Spec.from_json(text).lens == (one,)
    Draft202012Validator(spec_schema()).validate(json.loads(text))


@pytest.mark.parametrize("site", ["resid_pre", "resid_post"])
def test_a_layer_that_is_none_is_told_where_a_lens_reads_the_embedding(site):
    way = " For the embedding output use site='resid_pre' of layer 0."
    with pytest.raises(SpecError, match=r"^LensTopK.layers has -1; .* negative\." + way + "$"):
        LensTopK(site=site, layer=-1)
    with pytest.raises(SpecError, match=r"^lens\[0\].layers has 9; .* 0 to 5\." + way + "$"):
        resolved(LensTopK(site=site, layer=9))
    (found,) = resolved(LensTopK(site="resid_pre", layer=0)).features
    assert found.cells[0].place.boundary == Place("embed", 0).boundary


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(
            {"top_k": 0}, "top_k is 0; it must be a whole number from 1 to 1,024", id="zero"
        ),
        pytest.param({"top_k": 1025}, "top_k is 1025; it must be a whole", id="many"),
        pytest.param({"top_k": True}, "top_k is True; it must be a whole", id="a-bool"),
        pytest.param({"site": "q"}, "site is 'q'; it must be one of resid_pre", id="inside"),
        pytest.param({"site": "embed"}, "site is 'embed'; it must be one of", id="embed"),
        pytest.param({"name": ""}, "name is ''; a name is a string", id="no-name"),
        pytest.param({"layers": [-1]}, "layers", id="a-negative-layer"),
        pytest.param({"lens": ""}, "lens is ''; a name is a string", id="no-lens"),
    ],
)
def test_a_wrong_argument_is_named(given, words):
    with pytest.raises(SpecError) as caught:
        LensTopK(**given)
    assert f"LensTopK.{words}" in str(caught.value)
    body = {"lens": [given]}
    with pytest.raises(SpecError, match=r"lens\[0\]"):
        Spec.from_json(json.dumps(body))
    assert not Draft202012Validator(spec_schema()).is_valid(body)


def test_each_layer_is_one_row_of_tokens():
    pre = LensTopK(name="all", site="resid_mid")
    sites = Sites(6, 4, "float32", tuple(range(13)))
    asked = Spec(lens=(LensTopK(layers=[5, 2], top_k=7, tokens=[-1]), pre)).resolve(sites)
    first, second, *others = asked.features
    assert [one.name for one in asked.features][:3] == ["lens.2", "lens.5", "all.0"]
    assert (first.lens, second.lens, others[0].lens) == (("lens", 0), ("lens", 0), ("all", 1))
    assert len(others) == 6
    (cell,) = first.cells
    assert cell.place == ("resid_post", 2)
    assert (cell.bank.row_bytes, cell.bank.maker, first.num_values) == (56, LENS, 14)
    # The rows of all layers go through the unembedding together.
    assert cell.bank == second.cells[0].bank != others[0].cells[0].bank
    assert type(known_head(cell.bank.text, 56)) is Likeliest


def test_lenses_at_one_place_share_the_head_of_the_largest_top_k():
    lenses = [LensTopK(layers=[2, 3], top_k=k, name=f"l{k}") for k in (3, 9, 5)]
    asked = resolved(*lenses, LensTopK(layers=[4], top_k=2, name="alone"))
    heads = {one.name: one.cells[0].bank.count for one in asked.features}
    assert heads == {f"l{k}.{i}": 9 for k in (3, 9, 5) for i in (2, 3)} | {"alone.4": 2}
    assert len({one.cells[0].bank for one in asked.features}) == 2
    assert [one.top_k for one in asked.features] == [3, 3, 9, 9, 5, 5, 2]
    ids = torch.arange(9, dtype=torch.int32)[None]
    words = torch.cat([ids.view(torch.float32), -torch.arange(9.0)[None]], 1)
    found = sparse_rows(asked.features[0], words)
    assert found.indices.tolist() == [[0, 1, 2]]
    assert found.values.tolist() == [[0, -1, -2]]


def test_a_request_has_four_lenses_at_most():
    lenses = [LensTopK(name=f"l{i}") for i in range(5)]
    scope(*lenses[:4])
    with pytest.raises(SpecError, match="the spec has 5 lens; at most 4"):
        scope(*lenses)


def test_names_are_distinct():
    with pytest.raises(SpecError, match=r"two lenses are called 'lens'; give each a name"):
        Spec(lens=(LensTopK(layer=1), LensTopK(layer=2)))
    probe = Probe([1.0] * 4, layer=1, name="lens.2")
    with pytest.raises(SpecError, match=r"are called 'lens\.2', which stands for a lens"):
        Spec(probes=(probe,), lens=(LensTopK(layer=2),)).resolve(SITES)
    held = Features(HeldSae("s", 9, 4, None), site="resid_post", layer=1, name="lens")
    asked = Spec(probes=(probe,), features=(held,), lens=(LensTopK(layer=3),)).resolve(SITES)
    assert [one.name for one in asked.features] == ["lens", "lens.3"]


POST, PRE = ([Place(site, layer) for layer in (0, 1, 5)] for site in ("resid_post", "resid_pre"))
HELD = {"tuned": frozenset([*POST, *PRE]), "late": frozenset([Place("resid_mid", 3)])}


def test_a_named_lens_is_of_the_layers_that_it_maps():
    lenses = (
        LensTopK(lens="tuned", top_k=3), LensTopK(layer=5, lens="tuned", top_k=9, name="one"),
        LensTopK(layers=[1, 5], name="own"), LensTopK(site="resid_pre", lens="tuned", name="pre"),
    )  # fmt: skip
    spec = Spec(lens=lenses).of_engine({}, HELD)
    assert [one.layers for one in spec.lens] == [(0, 1, 5), (5,), (1, 5), (0, 1, 5)]
    asked = _through_a_ticket(spec).resolve(SITES)
    makers = {one.name: one.cells[0].bank.maker for one in asked.features}
    assert makers == {
        "lens.0": ("tuned", 2), "lens.1": ("tuned", 4), "lens.5": ("tuned", 12),
        "one.5": ("tuned", 12), "own.1": LENS, "own.5": LENS, "pre.0": ("tuned", 0),
        "pre.1": ("tuned", 2), "pre.5": ("tuned", 10),
    }  # fmt: skip
    heads = {one.name: one.cells[0].bank for one in asked.features}
    # Lenses of one name at one place share a head; the model's own lens has another.
    assert heads["lens.5"] == heads["one.5"] != heads["own.5"]
    for head in heads.values():
        again = known_head(head.text, head.row_bytes)
        assert (again, again.maker, again.count) == (head, head.maker, head.count)
    assert Likeliest.of_lens(3, 1, ("a b 7", 5)).maker == ("a b 7", 5)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (LensTopK(lens="no"), "lens[0].lens is 'no', which this engine does not hold; it holds: "
         "late, tuned"),
        (LensTopK(layers=[1, 3], lens="tuned"), "lens[0].layers has 3; the lens 'tuned' has maps "
         "of resid_post at layers 0, 1, 5 that"),
        (LensTopK(lens="late"), "lens[0].layers is all; the lens 'late' has maps of resid_post at "
         "no layer that"),
    ],
)  # fmt: skip
def test_a_lens_that_is_not_held_is_named(one, words):
    with pytest.raises(SpecError) as caught:
        Spec(lens=(one,)).of_engine({}, HELD)
    assert words in str(caught.value)
