"""The steering fork's gates: each means Adds with a Gate, or is refused with the reason."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from vllm_scope import Add, Gate, SpecError
from vllm_scope.compat.steering_http.keys import translate
from vllm_scope.engine.frontend.translators import in_words
from vllm_scope.request.sites import Sites
from vllm_scope.request.spec import Spec, scope

SITES = Sites(3, 4, "float32", tuple(range(7)))
P, V, W = np.array([1.0, -2, 0, 1], "f4"), np.array([1.0, 0, 2, 0], "f4"), np.ones(4, "f4")


def packed(*rows, layers, **more):
    data = base64.b64encode(np.stack(rows).tobytes()).decode()
    return {
        "dtype": "float32", "shape": [len(rows), 4], "layer_indices": layers, "data": data, **more
    }  # fmt: skip


def inline(**hooks):
    return {"kind": "inline", "packed": hooks}


PROBE = {"kind": "probe", "probe": inline(post_block=packed(P, layers=[1])), "threshold": 0.5}
ADD = {"kind": "add", "steer": inline(post_block=packed(V, layers=[1]))}
OPEN = {"when": {"kind": "always"}, "scope": "rest_of_request", "apply": ADD}
GATE = {"when": PROBE, "scope": "this_token", "apply": ADD}
OF_P = Gate(P, 1, kind="sigmoid", threshold=0.5)
MANY = inline(post_block=packed(V, W, layers=[1, 2], scales=[1.0, 2.0]),
              pre_attn=packed(W, layers=[2]))  # fmt: skip

MEANT = {
    "a-probe": ([GATE], [Add(V[None], layers=[1], tokens="generated", gate=OF_P)]),
    "always": ([OPEN], [Add(V[None], layers=[1], tokens="generated")]),
    "always-this-token": (
        [OPEN | {"scope": "this_token"}], [Add(V[None], layers=[1], tokens="generated")],
    ),
    "sharpness-and-strength": (
        [GATE | {"when": PROBE | {"sharpness": 3}, "apply": ADD | {"strength": -2}}],
        [Add(
            V[None], layers=[1], tokens="generated", scale=-2,
            gate=Gate(P, 1, kind="sigmoid", threshold=0.5, sharpness=3),
        )],
    ),
    "several-places": (
        [GATE | {"apply": {"kind": "add", "steer": MANY}}],
        [
            Add(np.stack([V, 2 * W]), layers=[1, 2], tokens="generated", gate=OF_P),
            Add(W[None], site="resid_pre", layers=[2], tokens="generated", gate=OF_P),
        ],
    ),
    "a-probe-of-another-hook": (
        [GATE | {"when": PROBE | {"probe": inline(post_attn=packed(P, layers=[0]))}}],
        [Add(
            V[None], layers=[1], tokens="generated",
            gate=Gate(P, 0, site="resid_mid", kind="sigmoid", threshold=0.5),
        )],
    ),
    "a-module": (
        [GATE | {"apply": {"kind": "add", "steer": {"kind": "name", "name": "formal"}}}],
        [Add("formal", tokens="generated", gate=OF_P)],
    ),
    "two-gates": (
        [GATE, OPEN],
        [
            Add(V[None], layers=[1], tokens="generated", gate=OF_P),
            Add(V[None], layers=[1], tokens="generated"),
        ],
    ),
    "json": (json.dumps([GATE]), [Add(V[None], layers=[1], tokens="generated", gate=OF_P)]),
    "none": ([], []),
    "null": (None, []),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANT)
def test_gates_are_adds(case):
    said, wanted = MEANT[case]
    found = translate({"steering": said}, SITES).actions
    assert [one.to_json() for one in found] == [one.to_json() for one in wanted]


def test_gated_adds_come_after_the_vectors_and_before_the_clamps():
    clamps = {"post_block": {1: [{"vector": W, "max": 1}]}}
    said = {"steering_clamps": clamps, "steering": [GATE], "steering_vectors": {"pre_attn": {0: V}}}
    found = translate(said, SITES).actions
    assert [(one.kind, one.gate is not None) for one in found] == [
        ("add", False), ("add", True), ("clamp", False),
    ]  # fmt: skip


def apply_(**fields):
    return GATE | {"apply": fields}


def when(**fields):
    return GATE | {"when": PROBE | fields}


REFUSED = {
    "not-a-list": (GATE, "^steering is .*; it must be a list of gates"),
    "no-scope": (
        {"when": PROBE, "apply": ADD}, r"^steering\[0\] has .*its fields are when, scope, apply",
    ),
    "unknown-scope": (GATE | {"scope": "soon"},
        r"\[0\]\.scope is 'soon'; it must be this_token or rest_of_request\.$"),
    "a-step": (GATE | {"scope": "next_step"}, r"scope is 'next_step': the scheduler decides when"),
    "a-conversation": (OPEN | {"scope": "rest_of_conversation"}, "requests share no state"),
    "a-latch": (
        GATE | {"scope": "rest_of_request"}, "is 'rest_of_request': a sigmoid cannot stay open",
    ),
    "attenuate": (
        OPEN | {"apply": {"kind": "attenuate", "strength": 0.5}}, "'attenuate': it would weaken",
    ),
    "clamp": (apply_(kind="clamp"), "vllm_scope.Clamp takes a gate"),
    "unknown-kind": (apply_(kind="sub"), r"apply\.kind is 'sub'; it must be add\.$"),
    "kind-is-a-list": (apply_(kind=["add"]), r"apply\.kind is \['add'\]"),
    "unknown-field": (
        apply_(**ADD, gain=2), r"apply has .*'gain'.* its fields are kind, steer, strength",
    ),
    "no-threshold": (
        GATE | {"when": {k: v for k, v in PROBE.items() if k != "threshold"}},
        r"when has \['kind', 'probe'\]; its fields are kind, probe, threshold, sharpness",
    ),
    "always-with-a-probe": (
        OPEN | {"when": PROBE | {"kind": "always"}}, r"when has .* its fields are kind\.$",
    ),
    "a-probes-name": (
        when(probe={"kind": "name", "name": "p"}),
        r"when\.probe\.kind is 'name': a name stands for",
    ),
    "two-probes": (
        when(probe=inline(post_block=packed(P, P, layers=[0, 1]))),
        r"^steering\[0\]\.when\.probe\.packed has 2 vectors; a probe is one",
    ),
    "no-probe": (when(probe=inline()), "has 0 vectors"),
    "a-probe-of-zeros": (
        when(probe=inline(post_block=packed(0 * P, layers=[1]))),
        r"^steering\[0\]\.when\.probe\.packed is zero",
    ),
    "sharpness-of-zero": (
        when(sharpness=0), r"^steering\[0\]\.when\.sharpness is 0; it must be above 0",
    ),
    "threshold-of-infinity": (when(threshold=float("inf")), r"when\.threshold is inf"),
    "threshold-of-a-word": (when(threshold="1"), r"when\.threshold is '1'; it must be a number"),
    "strength-of-infinity": (apply_(**ADD, strength=1e300), r"apply\.strength is 1e\+300"),
    "nothing-to-add": (apply_(kind="add", steer=inline()), r"steer\.packed has no vectors"),
    "no-name": (
        apply_(kind="add", steer={"kind": "name", "name": [1.0]}), r"steer\.name is \[1\.0\]",
    ),
    "another-size": (
        apply_(kind="add", steer=inline(post_block={"0": [1.0]})), "rows have 4",
    ),
    "a-branch": (when(probe=inline(mlp_in=packed(P, layers=[1]))), "hooks are pre_attn, post_attn"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_gate_cannot_do_is_refused_with_the_reason(case):
    said, sentence = REFUSED[case]
    with pytest.raises(SpecError, match=sentence):
        translate({"steering": said if case == "not-a-list" else [said]}, SITES)


ENGINES = {
    "before-the-probe": (
        apply_(kind="add", steer=inline(post_block=packed(V, W, layers=[1, 0]))),
        "steering[1].when.probe reads 'resid_post' 1, which comes after the edited "
        "'resid_post' 0; a gate must be at or before its edit.",
    ),
    "unknown-module": (
        apply_(kind="add", steer={"kind": "name", "name": "nobody"}),
        "steering[1].apply.steer names the steering module 'nobody', which this engine does "
        "not hold. It holds: none. Register it first.",
    ),
    "no-such-layer": (
        when(probe=inline(post_block=packed(P, layers=[7]))),
        "steering[1].when.probe.layers has 7; this model has layers 0 to 2.",
    ),
}


@pytest.mark.parametrize("case", ENGINES)
def test_errors_of_the_engine_name_the_gate(case):
    said, sentence = ENGINES[case]
    made = translate({"steering": [OPEN, said]}, SITES)
    with pytest.raises(SpecError) as error:
        Spec.from_json(scope(*made.actions)["scope"]).resolve(SITES, {})
    assert in_words(str(error.value), made.paths) == sentence
