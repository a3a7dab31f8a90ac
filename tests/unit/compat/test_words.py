"""Errors name the key and the index that the caller wrote, whichever part finds them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_scope import Add, Features, Probe, Read, SpecError, scope
from vllm_scope import compat as all_faces
from vllm_scope.compat.act_capture import translate as act_capture
from vllm_scope.compat.vllm_lens import SteeringVector
from vllm_scope.engine.frontend import translators
from vllm_scope.engine.frontend.connection import Connection
from vllm_scope.engine.frontend.translators import (
    Translation,
    applying,
    in_words,
    named,
    translated,
)
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Spec

#: Of three layers, whose last one is not tapped; no middle of a layer is.
SITES = Sites(3, 4, "float32", (0, 2, 4))
IDS = np.arange(5)
V = [1.0, 2.0, 0.0, -1.0]
CONFIG = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=""))
GOOD = {"activations": [V], "layer_indices": [0]}
THREE = {"activations": [[V, V]], "layer_indices": [0]}


@pytest.fixture(autouse=True)
def faces(monkeypatch):
    monkeypatch.setattr(translators, "_entries", {})
    monkeypatch.setattr(translators, "_everywhere", ())
    monkeypatch.setattr(translators, "_keys", frozenset())
    monkeypatch.delenv("VLLM_ACT_CAPTURE", raising=False)
    all_faces.register()


def sentence(extra, optimistic=False, max_tokens=3):
    """What a request with these keys is told, by the translator or by the engine's checks."""
    limits = Limits((16,), 0, 100, 100, 100, 100, optimistic)
    connection = Connection(SITES, None, 1, 1.0, limits, {}, {})
    params = SimpleNamespace(extra_args=extra)
    try:
        params = translated(params, applying(params, CONFIG), SITES, {})
    except SpecError as error:
        return str(error)
    try:
        asked = Spec.from_json(params.extra_args["scope"]).resolve(SITES, {})
        connection.check(asked, IDS, max_tokens)
    except SpecError as error:
        return in_words(str(error), params.extra_args[translators.DECORATORS].paths)
    raise AssertionError("it was let in")


def lens(*vectors):
    return {"apply_steering_vectors": list(vectors)}


def third(**fields):
    """The vector at fault is the caller's third, and an edit with a much higher number."""
    return lens(THREE, THREE, GOOD | fields)


def hooks(key, entry, hook="post_block", layer="0"):
    return {key: {hook: {layer: entry}}}


NAN = float("nan")
ROWS = {"encoder": [V], "bias": [0.0], "threshold": [0.0]}
#: What is asked, and how the sentence begins.
CASES = {
    "lens-a-number": (lens(GOOD, 3), "apply_steering_vectors[1] is 3;"),
    "lens-no-json": ({"apply_steering_vectors": "["}, "apply_steering_vectors is not JSON"),
    "lens-a-field": (third(name=1), "apply_steering_vectors[2] has 'name';"),
    "lens-a-missing-field": (lens({"scale": 1}), "apply_steering_vectors[0] has no 'activations'"),
    "lens-a-shape": (third(activations=V), "apply_steering_vectors[2].activations has shape [4];"),
    "lens-a-size": (third(activations=[V[1:]]), "apply_steering_vectors[2].activations has 3"),
    "lens-rows": (third(activations=[V, V]), "apply_steering_vectors[2].activations has 2 rows"),
    "lens-a-nan": (
        third(activations=np.array([[NAN] * 4])), "apply_steering_vectors[2].activations is NaN",
    ),
    "lens-a-zero": (
        third(activations=[[0.0] * 4], norm_match=True),
        "apply_steering_vectors[2].activations is zero;",
    ),
    "lens-a-scale": (third(scale="big"), "apply_steering_vectors[2].scale is 'big';"),
    "lens-a-word": (third(norm_match=3), "apply_steering_vectors[2].norm_match is 3;"),
    "lens-a-layer": (third(layer_indices=[9]), "apply_steering_vectors[2].layer_indices has 9;"),
    "lens-a-layer-before": (
        third(layer_indices=[-1]), "apply_steering_vectors[2].layer_indices has -1;",
    ),
    "lens-no-tap": (third(layer_indices=[2]), "apply_steering_vectors[2].layer_indices has 2; th"),
    "lens-no-layers": (third(layer_indices=0), "apply_steering_vectors[2].layer_indices is 0;"),
    "lens-a-position": (
        third(position_indices=[9]), "apply_steering_vectors[2].position_indices has 9;",
    ),
    "lens-a-position-of-three": (
        lens(THREE, GOOD, THREE | {"position_indices": [1, 9]}),
        "apply_steering_vectors[2].position_indices has 9;",
    ),
    "lens-positions-left-out": (
        lens(GOOD, {"activations": [[V] * 8], "layer_indices": [0]}),
        "apply_steering_vectors[1].position_indices, which is 0 to 7 as it was left out, has 7;",
    ),
    "lens-an-object": (
        lens(GOOD, SteeringVector([V], [0], position_indices=[9])),
        "apply_steering_vectors[1].position_indices has 9;",
    ),
    "lens-behind-native-edits": (
        scope(Add(V, layer=1), Add(V, layer=1)) | lens(GOOD | {"position_indices": [9]}),
        "apply_steering_vectors[0].position_indices has 9;",
    ),
    "lens-behind-features": (
        scope(Features(ROWS, indices=[3], layer=0, name="f"))
        | lens(GOOD | {"position_indices": [9]}),
        "apply_steering_vectors[0].position_indices has 9;",
    ),
    "lens-a-capture": ({"output_residual_stream": [0, 9]}, "output_residual_stream has 9; this mo"),
    "lens-a-capture-without-a-tap": (
        {"output_residual_stream": [2], "apply_steering_vectors": [GOOD]},
        "output_residual_stream has 2; this engine does not tap",
    ),
    "lens-a-capture-of-words": ({"output_residual_stream": "3x"}, "output_residual_stream is not"),
    "lens-queries": ({"output_qk": [0]}, "output_qk is asked for, and this engine does not tap q"),
    "lens-hooks": ({"apply_hooks": [3]}, "apply_hooks is [3];"),
    "fork-a-hook": ({"steering_vectors": {"mlp": {}}}, "steering_vectors has 'mlp';"),
    "fork-a-hook-without-a-tap": (
        hooks("steering_vectors", V, "post_attn"), "steering_vectors['post_attn'] has 0; this eng",
    ),
    "fork-a-layer": (
        hooks("decode_steering_vectors", V, layer="9"),
        "decode_steering_vectors['post_block'] has layer 9;",
    ),
    "fork-a-layer-without-a-tap": (
        hooks("steering_vectors", V) | hooks("decode_steering_vectors", V, layer="2"),
        "decode_steering_vectors['post_block'] has 2; this engine does not tap",
    ),
    "fork-a-size": (
        hooks("steering_vectors", [1.0]), "steering_vectors['post_block']['0'] has 1 numbers;",
    ),
    "fork-a-size-of-an-array": (
        hooks("steering_vectors", np.ones(3)), "steering_vectors['post_block']['0'] has 3 numb",
    ),
    "fork-a-clamp": (
        hooks("steering_clamps", [{"vector": V, "max": 1}, {"vector": V}]),
        "steering_clamps['post_block']['0'][1] has no bound;",
    ),
    "fork-a-clamp-without-a-vector": (
        hooks("steering_clamps", [{"vector": None, "max": 1}]),
        "steering_clamps['post_block']['0'][0] is {'max': 1, 'vector': None}; a clamp is {vector,",
    ),
    "fork-a-clamp-without-a-tap": (
        hooks("steering_vectors", V)
        | hooks("steering_clamps", [{"vector": V, "max": 1}, {"vector": V, "max": 1}], layer="2"),
        "steering_clamps['post_block'] has 2; this engine does not tap",
    ),
    "fork-a-bound": (
        hooks("steering_clamps", [{"vector": V, "max": 1e39}]),
        "steering_clamps['post_block']['0'][0].max is 1e+39;",
    ),
    "fork-a-size-of-a-clamp": (
        hooks("steering_clamps", [{"vector": np.ones(3), "max": 1}]),
        "steering_clamps['post_block']['0'][0].vector has 3 numbers;",
    ),
    "fork-a-module": (
        {"steering_module_ref": ("nobody", 1.0)}, "steering_module_ref names the steering module",
    ),
    "fork-a-module-by-name": ({"steering_name": "x" * 300}, "steering_name is 'xxx"),
    "fork-a-module-s-scale": ({"steering_module_ref": ("a", "b")}, "steering_module_ref[1] is 'b'"),
    "fork-a-consumer": (
        {"capture": {"mine": {"hooks": {"post_block": [1]}}}}, "capture's consumer is 'mine';",
    ),
    "fork-a-captured-layer": (
        {"capture": {"mine": {"hooks": {"pre_attn": [0], "post_block": [9]}}}},
        "capture['mine']['hooks']['post_block'] has 9;",
    ),
    "fork-a-tag": (
        {"capture": {"mine": {"tag": "", "hooks": {"pre_attn": [0]}}}},
        "capture['mine']['tag'] is '';",
    ),
    "fork-a-request-id": (
        {"capture": {"mine": {"request_id": 3, "hooks": {"pre_attn": [0]}}}},
        "capture['mine']['request_id'] is 3;",
    ),
    "fork-a-captured-position": (
        {"capture": {"mine": {"positions": [99], "hooks": {"pre_attn": [0], "post_block": [1]}}}},
        "capture['mine']['positions'] has 99;",
    ),
    "fork-patch": ({"patch": {}}, "patch cannot be met:"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_error_begins_with_what_the_caller_wrote(case):
    extra, words = CASES[case]
    assert sentence(extra).startswith(words)


def test_speculation_refuses_positions_in_the_callers_words():
    said = sentence(third(position_indices=[3, 6]), optimistic=True, max_tokens=9)
    assert said.startswith("apply_steering_vectors[2].position_indices picks some of the generated")


def test_errors_of_json_are_those_of_objects():
    text = {"apply_steering_vectors": json.dumps([GOOD, GOOD | {"position_indices": [9]}])}
    assert sentence(text).startswith("apply_steering_vectors[1].position_indices has 9;")


def test_probes_and_reads_are_counted_by_themselves():
    """Two translators beside actions of the caller's own."""

    def translate(values, sites):
        said = [
            (Read("resid_post", layers=[1]), {"": "mine.rows"}),
            (Add(V, layer=1), {"": "mine.add", ".tokens": "mine.where"}),
            (Read("embed"), {"": "mine.embed"}),
        ]
        return Translation(tuple(action for action, _ in said), paths=named(said))

    translators.register("a", ["a"], translate)
    translators.register("b", ["b"], translate)
    probe = Probe(V, bias=0.0, layer=1, name="p")
    own = scope(Read("embed"), probe, Add(V, layer=0))
    given = SimpleNamespace(extra_args=own | {"a": 1, "b": 2})
    params = translated(given, applying(given, CONFIG), SITES, {})
    spec = Spec.from_json(params.extra_args["scope"])
    assert [len(some) for some in (spec.reads, spec.probes, spec.edits)] == [5, 1, 3]
    said = params.extra_args[translators.DECORATORS].paths
    assert {name: path for name, path in said.items() if name.startswith("reads")} == {
        "reads[1]": "mine.rows", "reads[2]": "mine.embed", "reads[3]": "mine.rows",
        "reads[4]": "mine.embed",
    }  # fmt: skip
    for text, words in {
        "edits[0].tokens has 9.": "edits[0].tokens has 9.",
        "edits[1].tokens has 9.": "mine.where has 9.",
        "edits[2].vector has 9.": "mine.add.vector has 9.",
        "edits[2] names edits[1].": "mine.add names edits[1].",
        "probes[0].to is 'x'.": "probes[0].to is 'x'.",
        "no room.": "no room.",
    }.items():
        assert in_words(text, said) == words


def test_errors_name_the_environment_variable():
    paths = act_capture({}, SITES).paths
    said = in_words("reads[0].site is 'resid_post', which this engine does not tap.", paths)
    assert said.startswith("the stream that VLLM_ACT_CAPTURE reads is 'resid_post', which")
