"""The steering fork's words: each value has a meaning or is a SpecError."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_scope import SpecError, scope
from vllm_scope.compat import KEYS
from vllm_scope.compat.bounds import Room
from vllm_scope.compat.steering_http.capture import CaptureResult, reads_of, results_of
from vllm_scope.compat.steering_http.keys import translate
from vllm_scope.compat.steering_http.tiers import Wanted, merged, status
from vllm_scope.request.sites import ALIASES, Sites
from vllm_scope.sinks import Manifest
from vllm_scope.vectors.hooks import parse_module

SITES = Sites(2, 4, "float32", (0, 1, 2, 3, 4))
odd = [0, 1, -1, 2**31, 2**70, 10**400, "all", "last_prompt", "1", "[", "99999999"]
anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=6) | st.sampled_from(odd),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
numbers = st.lists(st.floats(-9, 9) | st.sampled_from([3e38, 1e-40, 0.0]), min_size=4, max_size=4)
vectors = anything | numbers


def objects(**fields):
    return anything | st.fixed_dictionaries(
        {}, optional={k: v | anything for k, v in fields.items()}
    )


rows = st.integers(1, 3).flatmap(
    lambda n: st.lists(st.floats(-9, 9, width=32), min_size=4 * n, max_size=4 * n)
)
texts = rows.map(lambda some: base64.b64encode(np.array(some, "<f4").tobytes()).decode())
packed = objects(
    dtype=st.just("float32"), shape=st.tuples(st.integers(0, 3), st.just(4)).map(list), data=texts,
    layer_indices=st.lists(st.integers(-1, 3), max_size=3),
    scales=st.lists(st.floats(), max_size=3),
    bounds=st.lists(st.lists(st.none() | st.floats(), max_size=3), max_size=3),
    strengths=st.lists(st.floats(), max_size=3),
)  # fmt: skip
hooks = st.sampled_from([*ALIASES, "mlp_in", ""])
layers = st.sampled_from(["0", "1", 0, 1, 2, -1, "x", "00", 1.5])


def tier(entries):
    by_layer = st.dictionaries(layers, entries, max_size=2)
    return anything | st.dictionaries(hooks, by_layer | packed, max_size=2)


of_vectors = tier(vectors | objects(vector=vectors, scale=st.floats()))
bound = st.none() | st.floats()
of_clamps = tier(
    st.lists(objects(vector=vectors, min=bound, max=bound, value=bound, strength=bound), max_size=2)
)
captures = st.dictionaries(
    st.sampled_from(["filesystem", "mine", "memory", ""]),
    objects(
        hooks=st.dictionaries(
            hooks, objects(layers=st.lists(layers), ranges=st.lists(st.lists(layers, max_size=3))),
        ),
        positions=st.lists(st.integers()), tag=st.text(), request_id=st.text(),
    ),
)  # fmt: skip
fields = {"capture": captures, "steering_module_ref": st.tuples(st.text(), st.floats()).map(list)}
fields |= {key: of_vectors for key in KEYS["steering_http"] if key.endswith("vectors")}
fields |= {key: of_clamps for key in KEYS["steering_http"] if key.endswith("clamps")}
sources = objects(
    kind=st.sampled_from(["inline", "name"]), packed=of_vectors, name=st.text(max_size=4)
)
when = objects(
    kind=st.sampled_from(["always", "probe"]), probe=sources, threshold=st.floats(),
    sharpness=st.floats(),
)  # fmt: skip
apply = objects(kind=st.just("add"), steer=sources, strength=st.floats())
scopes = st.sampled_from(["this_token", "rest_of_request", "next_step"])
fields["steering"] = st.lists(objects(when=when, scope=scopes, apply=apply), max_size=3)
words = st.fixed_dictionaries({}, optional={key: fields[key] | anything for key in fields})
bodies = st.fixed_dictionaries(
    {},
    optional={
        name: of_clamps if name.endswith("clamps") else of_vectors
        for name in ("vectors", "prefill_vectors", "decode_vectors", "clamps", "decode_clamps")
    },
)


@settings(max_examples=150, deadline=None)
@given(words)
def test_words_of_a_request_mean_actions_or_are_refused(said):
    try:
        actions = translate(said, SITES).actions
    except SpecError:
        return
    if actions:
        json.loads(scope(*actions)["scope"])


@settings(max_examples=150, deadline=None)
@given(st.lists(bodies, min_size=1, max_size=3))
def test_bodies_of_a_set_become_edits_or_are_refused(said):
    text = None
    for body in said:
        try:
            text = merged(text, Wanted.parse(body, SITES), False)
        except SpecError:
            continue
        json.dumps(status(text), allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(bodies | anything)
def test_bodies_of_a_module_are_modules_or_refused(said):
    with suppress(SpecError):
        assert parse_module(said, "the body").hidden_size


def test_memory_is_no_consumer():
    with pytest.raises(SpecError, match="is no consumer"):
        reads_of({"memory": {"hooks": {"post_block": [1]}}}, SITES, Room())


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        pytest.param(["/a"], {"items": ["/a"]}, id="paths"),
        pytest.param(None, {}, id="nothing"),
        pytest.param({"reward": 1}, {"reward": 1}, id="an-object"),
    ],
)
def test_a_result_in_an_answer_has_an_object(payload, told):
    result = CaptureResult("ok", None, payload)
    assert result.to_json() == {"status": "ok", "error": None, "payload": told}


@pytest.mark.parametrize(
    ("details", "payload"),
    [
        pytest.param([{"root": "/srv", "paths": ["/srv/run/q.npz"]}], ["/srv/run/q.npz"], id="all"),
        pytest.param([], ["q.npz"], id="over-http-without-the-operators-key"),
    ],
)
def test_a_payload_has_what_the_caller_may_know_of_files(details, payload):
    manifest = Manifest("ok", None, 2, 2, 0, ["q.npz"], {}, details)
    told = SimpleNamespace(manifests={"filesystem": manifest}, error=None)
    (result,) = results_of(told, ("filesystem",)).values()
    assert (result.status, result.payload) == ("ok", payload)
