"""The steering fork's clamps of features: each means SetFeatures, or is refused with the reason."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from vllm_scope import SetFeature, SpecError
from vllm_scope.compat.steering_http.keys import translate
from vllm_scope.engine.frontend.translators import in_words
from vllm_scope.request.sites import Place, Sites
from vllm_scope.request.spec import Spec, scope

SITES = Sites(3, 4, "float32", tuple(range(7)))
TO_5 = {"feature_idx": 34, "kind": "absolute", "value": 5.0}
BY_2 = {"feature_idx": 7, "kind": "additive", "value": 2, "only_if_active": True}
AT_1 = {"post_block": {"1": [TO_5]}}


def spec(clamps=AT_1, **more):
    return {"module_name": "toy", "clamps": clamps, **more}


def edit(index, value, tokens="all", site="resid_post", layer=1, name="toy", **more):
    return SetFeature(name, index, value, site=site, layer=layer, tokens=tokens, **more)


MEANT = {
    "absolute": ([spec()], [edit([34], [5.0])]),
    "both-kinds-see-one-row": (
        [spec({"post_block": {1: [TO_5, BY_2]}})],
        [edit([34, 7], [5.0, 2.0], add=[False, True], only_if_active=[False, True])],
    ),
    "prefill": ([spec(phase="prefill")], [edit([34], [5.0], "prompt")]),
    "decode": ([spec(phase="decode")], [edit([34], [5.0], "generated")]),
    "phases-that-differ": (
        [
            spec(phase="prefill"), spec(phase="decode") | {"clamps": {"post_block": {1: [BY_2]}}},
        ],
        [
            edit([34], [5.0], "prompt"),
            edit([7], [2.0], "generated", add=True, only_if_active=True),
        ],
    ),
    "two-specs-that-share-a-phase-see-one-row": (
        [spec(), spec({"post_block": {1: [BY_2]}}, phase="decode")],
        [
            edit([34], [5.0], "prompt"),
            edit([34, 7], [5.0, 2.0], "generated", add=[False, True], only_if_active=[False, True]),
        ],
    ),
    "hooks-layers-and-saes": (
        [
            spec({"pre_attn": {"2": [TO_5]}, "post_attn": {0: [TO_5], 1: [TO_5]}}),
            spec(module_name="other"),
        ],
        [
            edit([34], [5.0], site="resid_pre", layer=2),
            edit([34], [5.0], site="resid_mid", layer=0),
            edit([34], [5.0], site="resid_mid", layer=1), edit([34], [5.0], name="other"),
        ],
    ),
    "json": (json.dumps([spec(gated=False)]), [edit([34], [5.0])]),
    "none": ([], []),
    "null": (None, []),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANT)
def test_clamps_are_set_features(case):
    said, wanted = MEANT[case]
    found = translate({"sae_clamp_specs": said}, SITES).actions
    assert list(found) == wanted
    text = scope(*found)["scope"] if found else None
    assert text is None or list(Spec.from_json(text).edits) == wanted


def test_clamps_of_features_come_last():
    vector = [1.0, 0, 0, 0]
    said = {
        "sae_clamp_specs": [spec()], "decode_steering_vectors": {"post_block": {1: vector}},
        "steering_clamps": {"post_block": {1: [{"vector": vector, "max": 1}]}},
    }  # fmt: skip
    assert [one.kind for one in translate(said, SITES).actions] == ["add", "clamp", "set_feature"]


def of(**entry):
    return spec({"post_block": {"1": [TO_5 | entry]}})


MANY = [TO_5 | {"feature_idx": i} for i in range(17)]
REFUSED = {
    "not-a-list": ({"module_name": "toy"}, r"^sae_clamp_specs is .*; it must be a list of objects"),
    "no-module": (
        [{"clamps": AT_1}], r"^sae_clamp_specs\[0\] has \['clamps'\]; its fields are module_name",
    ),
    "unknown-field": (
        [spec(strength=1)], r"\[0\] has .*'strength'.*; its fields are module_name, clamps",
    ),
    "no-name": ([spec(module_name=3)], r"\[0\]\.module_name is 3; a name is"),
    "phase": ([spec(phase="all")], r"\[0\]\.phase is 'all'; it must be both or prefill or decode"),
    "gated": ([spec(gated=True)], r"\[0\]\.gated is True: .* no monitor of vllm-scope does this"),
    "hook": ([spec({"mlp_out": {1: [TO_5]}})], r"clamps has 'mlp_out'; hooks are pre_attn"),
    "layer": ([spec({"post_block": {"x": [TO_5]}})], "has 'x'; layers are whole numbers"),
    "one-clamp": ([spec({"post_block": {1: TO_5}})], r"\[1\] is .*; it must be a list of clamps"),
    "no-value": ([spec({"post_block": {1: [{"kind": "absolute"}]}})], r"\[1\]\[0\] has \['kind'\]"),
    "kind": ([of(kind="scale")], r"kind is 'scale'; it must be absolute or additive"),
    "feature": ([of(feature_idx=-1)], r"feature_idx is -1; it must be a whole number"),
    "value": ([of(value="1")], r"\['1'\]\[0\]\.value is '1'; it must be a number"),
    "infinity": ([of(value=float("inf"))], r"^sae_clamp_specs\[0\]\.clamps\['post_block'\]\['1'\]"),
    "active": ([of(only_if_active=1)], r"only_if_active is 1; it must be true or false"),
    "many": ([spec({"post_block": {1: MANY}})], "has 17 features; at most 16"),
    "many-of-two": (
        [spec({"post_block": {1: MANY[:16]}}), spec({"post_block": {1: MANY[16:]}})],
        "has 17 features, with the other clamps of this SAE at this place; at most 16",
    ),
    "twice": (
        [spec(), spec(phase="decode")],
        r"\[1\]\.clamps\['post_block'\]\['1'\]\[0\]\.feature_idx is 34, which "
        r"sae_clamp_specs\[0\]\.clamps\['post_block'\]\['1'\]\[0\] clamps too",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_clamped_is_refused_with_the_reason(case):
    said, sentence = REFUSED[case]
    with pytest.raises(SpecError, match=sentence):
        translate({"sae_clamp_specs": said}, SITES)


def test_an_sae_is_clamped_at_its_own_place():
    made = translate({"sae_clamp_specs": [spec()]}, SITES)
    for place in (Place("resid_post", 1), Place("resid_pre", 2)):  # the same rows
        made.check({"toy": SimpleNamespace(place=place)})
    with pytest.raises(SpecError) as error:
        made.check({"toy": SimpleNamespace(place=Place("resid_post", 2))})
    assert str(error.value) == (
        "sae_clamp_specs[0].clamps['post_block']['1'] is 'resid_post' 1, and the SAE 'toy' is of "
        "'resid_post' 2; clamp its features there."
    )


def test_errors_of_the_engine_name_the_spec():
    made = translate({"sae_clamp_specs": [spec(phase="prefill"), spec(module_name="no")]}, SITES)
    made.check({})
    with pytest.raises(SpecError) as error:
        Spec.from_json(scope(*made.actions[1:])["scope"]).of_engine({})
    moved = {path.replace("edits[1]", "edits[0]"): words for path, words in made.paths.items()}
    assert in_words(str(error.value), moved).startswith(
        "sae_clamp_specs[1].module_name is 'no', which this engine does not hold; it holds: none."
    )
