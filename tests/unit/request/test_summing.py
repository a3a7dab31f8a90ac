"""Moments as an action: its JSON, its errors, and how it travels."""

from __future__ import annotations

import json

import jsonschema
import pytest

from vllm_scope import Moments, Read, Spec, SpecError, scope, spec_schema
from vllm_scope.core.news import packed_of
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.layout import Layout, Widths
from vllm_scope.request.heads import Summed
from vllm_scope.request.packed import unpack
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Place, Sites

SITES = Sites(3, 8, "float32", (0, 2, 4, 6))
EVERY = [
    Moments(),
    Moments("resid_post", layers=[0, 2], by="b", target=1.5, tokens="prompt"),
    Moments("embed", name="other", covariance=False),
]


def test_the_json_is_valid_and_means_the_same():
    text = scope(*EVERY, Read("embed"))["scope"]
    jsonschema.validate(json.loads(text), spec_schema())
    again = Spec.from_json(text)
    assert list(again.moments) == EVERY
    assert Spec.unpack(again.packed, again.arrays) == again
    asked = again.resolve(SITES)
    packed, arrays = packed_of(asked)
    assert Resolved(*unpack(packed, arrays)) == asked
    assert asked.moments[1].streams == (Place("resid_post", 0), Place("resid_post", 2))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"by": ""}, r"Moments\.by is ''; a name is a string of 1 to 200"),
        ({"by": 3}, r"Moments\.by is 3; a name is a string"),
        ({"name": "x" * 201}, r"Moments\.name is 'x"),
        ({"target": "1"}, r"Moments\.target is '1'; it must be a number"),
        ({"target": float("nan")}, r"Moments\.target is nan; it must be finite"),
        ({"covariance": 1}, r"Moments\.covariance is 1; it must be true or false"),
        ({"site": "nowhere"}, r"Moments\.site is 'nowhere'; sites are"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(given, sentence):
    with pytest.raises(SpecError, match=sentence):
        Moments(**given)


def test_too_many_and_unknown_layers_are_refused():
    with pytest.raises(SpecError, match="the spec has 33 moments; at most 32"):
        scope(*[Moments()] * 33)
    with pytest.raises(SpecError, match=r"moments\[0\]\.layers has 3; this model has"):
        Spec.from_json(scope(Moments(layers=[3]))["scope"]).resolve(SITES)


def test_rows_that_are_summed_leave_nothing_to_deliver():
    asked = Spec.from_json(scope(Moments(layers=[0, 1]))["scope"]).resolve(SITES)
    assert asked.delivering == () == asked.destinations
    assert [selector.word for selector in asked.read_selectors] == ["all"]
    widths = Widths((32,))
    program = RequestProgram.compile(asked, SITES, frozenset(SITES.boundaries), 2, [1, 2])
    layout = program.generated_superset().layout
    points = tuple(Place("resid_post", layer).point() for layer in (0, 1))
    assert layout.encoded == ((Summed.of(0), points),)
    assert layout.arena.slots(widths) == 4
    assert layout.slots(widths) == 0
    assert layout.sent == Layout()
