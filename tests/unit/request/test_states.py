"""States of gates: their JSON, what is refused, and what they mean on an engine."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.unit.programs import runs
from vllm_scope import Add, Ema, Gate, Hysteresis, Latch, Pid, Replace, Spec, SpecError, spec_schema
from vllm_scope.core.registry import Registry
from vllm_scope.program.block_keys import BlockKeys
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.operations import (
    MOST_GATES,
    OP_ADD,
    OP_CHECK,
    OP_GATE,
    OP_HYSTERESIS,
    OP_PID,
)
from vllm_scope.request.packed import pack, unpack
from vllm_scope.request.resolve_edits import check_stages
from vllm_scope.request.sites import Place, Sites

V, W = [1.0, -2.0, 3.0, 0.5], [0.0, 1.0, 0.0, 0.0]
INNER = tuple(Place("attn_out", layer).boundary for layer in range(3))
SITES = Sites(3, 4, "float32", (*range(7), *INNER))
STATES = {
    "ema": ({"decay": 0.5}, Ema(0.5)),
    "latch": ({}, Latch()),
    "hysteresis": ({"low": -1.0}, Hysteresis(-1.0)),
    "pid": ({"setpoint": 1.0, "kp": 0.5, "ki": 0.0, "kd": 0.0}, Pid(1.0, 0.5)),
}


def resolved(*edits):
    return Spec(edits=edits).resolve(SITES)


def gated(state, layer=2, **options):
    where = {name: options.pop(name) for name in ("site", "tokens", "dose") if name in options}
    return Add(V, layer=layer, gate=Gate(W, 0, state=state, **options), **where)


# JSON


@pytest.mark.parametrize("kind", STATES)
def test_a_state_travels_as_json_and_between_processes(kind):
    fields, state = STATES[kind]
    spec = Spec(edits=(gated(state, name="g"),))
    text = spec.to_json()
    (edit,) = json.loads(text)["edits"]
    assert edit["gate"]["state"] == {"kind": kind, **fields}
    assert Spec.from_json(text) == spec
    asked = resolved(*spec.edits)
    packed, arrays = pack((asked.reads, asked.probes, asked.edits))
    assert unpack(packed, arrays)[2] == asked.edits


@pytest.mark.parametrize("kind", STATES)
def test_the_schema_has_states(kind):
    import jsonschema

    text = json.loads(Spec(edits=(gated(STATES[kind][1]),)).to_json())
    validator = jsonschema.Draft202012Validator(spec_schema())
    assert validator.is_valid(text)
    text["edits"][0]["gate"]["state"]["high"] = 1
    assert not validator.is_valid(text)


WRONG = {
    "a-word": ("latch", "gate.state is 'latch'; it must be one of Ema, Latch, Hysteresis, Pid"),
    "no-kind": ({}, "gate.state.kind is None; it must be one of ema, latch, hysteresis, pid"),
    "another-kind": ({"kind": "pi"}, "gate.state.kind is 'pi'"),
    "another-field": ({"kind": "latch", "low": 1}, "gate.state has 'low'; the fields are kind."),
    "a-missing-field": ({"kind": "pid", "kp": 1}, "gate.state has no setpoint."),
    "a-decay": ({"kind": "ema", "decay": 1}, "gate.state.decay is 1; it must be a number from 0"),
    "a-number": ({"kind": "pid", "setpoint": "x", "kp": 1}, "gate.state.setpoint is 'x'"),
    "a-bound": (
        {"kind": "pid", "setpoint": 0, "kp": 1, "most_sum": -1}, "gate.state.most_sum is -1",
    ),
    "no-gains": ({"kind": "pid", "setpoint": 0, "kp": 0}, "gate.state.kp, ki and kd are 0"),
    "low-above": ({"kind": "hysteresis", "low": 2}, "gate.state.low is 2; with a threshold of 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_state_that_cannot_be_names_the_field(case):
    state, sentence = WRONG[case]
    body = {
        "kind": "add",
        "vector": V,
        "layers": 2,
        "gate": {"vector": W, "layer": 0, "state": state},
    }
    with pytest.raises(SpecError) as error:
        Spec.from_json(json.dumps({"edits": [body]}))
    assert f"edits[0].{sentence}" in str(error.value)


def test_a_smooth_gate_has_no_latch_and_low_is_on_the_other_side_of_the_threshold():
    for state in (Latch(), Hysteresis(-1.0)):
        with pytest.raises(SpecError, match=r"Gate.kind is 'sigmoid', and Gate.state is"):
            Gate(W, 0, kind="sigmoid", state=state)
    Gate(W, 0, above=False, state=Hysteresis(1.0))
    with pytest.raises(
        SpecError, match=r"Gate.state.low is -1; .* it must be at least the threshold"
    ):
        Gate(W, 0, above=False, state=Hysteresis(-1.0))


def test_the_sum_of_errors_is_bounded_so_that_it_opens_the_gate_and_no_more():
    assert Pid(0.0, 1.0).bound == 0
    assert Pid(0.0, 1.0, -0.25).bound == 4
    assert Pid(0.0, 1.0, 0.25, most_sum=1.5).bound == 1.5
    assert np.isfinite(np.float32(Pid(0.0, 1.0, 1e-45).bound))


# On an engine


def taps_of(*edits, generated=True):
    asked = resolved(*edits)
    program = RequestProgram.compile(asked, SITES, frozenset(SITES.boundaries), 4, [0] * 4)
    ((_, _, found),) = runs(program, 4 if generated else 0, 1)
    return dict(found.taps)


def test_a_state_is_advanced_at_each_edits_place_and_told_at_the_first():
    state = Latch()
    edits = [gated(state, layer, name="g") for layer in (1, 2)]
    taps = taps_of(*edits, gated(None, 2), Add(V, layer=2, gate=Gate(W, 1, state=Pid(0, 1))))
    assert [op.code for op in taps[2]] == [OP_GATE, OP_GATE]
    assert [op.code for op in taps[4]] == [OP_HYSTERESIS, OP_GATE, OP_ADD]
    assert [op.code for op in taps[6]] == [
        OP_HYSTERESIS, OP_PID, OP_ADD, OP_ADD, OP_ADD, OP_CHECK,
    ]  # fmt: skip
    gate, alone = taps[2]
    first, second = taps[4][0], taps[6][0]
    # The states' registers come first: they number their places.
    assert (gate.register, alone.register, taps[6][1].register) == (0, 2, 1)
    assert (gate.told, gate.source, alone.source) == (None, first.source, -1)
    assert first.told is not None
    assert first.told[0] == Place("resid_post", 1)
    assert second.told is None
    assert len({0, 1, 2, first.source, taps[6][1].source}) == 5


def test_a_gate_with_a_state_takes_two_registers():
    many = [gated(Pid(float(i), 1.0)) for i in range(MOST_GATES // 2)]
    taps_of(*many)
    with pytest.raises(SpecError, match=r"9 different gates.*8 of them with a state, which count"):
        taps_of(*many, gated(None))


@pytest.mark.parametrize(
    ("gate", "edit", "fits"),
    [
        (("resid_post", 0), ("resid_post", 1), True),
        (("resid_post", 0), ("attn_out", 1), True),
        (("resid_pre", 1), ("resid_mid", 1), True),
        (("resid_post", 1), ("resid_post", 1), False),
        (("resid_post", 0), ("resid_pre", 1), False),
    ],
)
def test_a_gate_with_a_state_is_at_an_earlier_place(gate, edit, fits):
    seen = Gate(V, gate[1], site=gate[0], state=Latch())
    one = Add(V, site=edit[0], layer=edit[1], gate=seen)
    if fits:
        resolved(one)
    else:
        with pytest.raises(
            SpecError, match=r"edits\[0\].gate reads .* must be at an earlier place"
        ):
            resolved(one)


def test_a_state_follows_all_generated_tokens():
    for tokens in ("all", "generated"):
        resolved(gated(Latch(), tokens=tokens))
    for tokens in ("prompt", [5], "last", {"slice": [3, None, None]}):
        with pytest.raises(SpecError, match=r"edits\[0\].tokens is .* take 'all' or"):
            resolved(gated(Latch(), tokens=tokens))
    with pytest.raises(SpecError, match=r"edits\[0\].tokens is "):
        resolved(Replace(V, positions=[5], layer=2, gate=Gate(W, 0, state=Latch())))


def test_stages_and_server_wide_edits_refuse_states():
    asked = resolved(gated(Latch()))
    check_stages(asked, 1)
    with pytest.raises(SpecError, match=r"edits\[0\].gate has a state, and this engine has 2"):
        check_stages(asked, 2)
    registry = Registry(SITES)
    registry.parse_edits(Spec(edits=(gated(None),)).to_json())
    with pytest.raises(SpecError, match=r"edits\[0\].gate has a state; server-wide edits"):
        registry.parse_edits(Spec(edits=(gated(Latch()),)).to_json())


# KV blocks


def keys_of(edit, num_prompt=8):
    keys = BlockKeys(resolved(edit).edits, num_prompt, np.ones(num_prompt, np.int64))
    return [keys.key(start, start + 4) for start in range(0, 16, 4)]


@pytest.mark.parametrize("tokens", ["all", "generated"])
def test_keys_of_a_prompt_are_those_without_a_state_and_others_say_where_it_begins(tokens):
    without, latched = (keys_of(gated(state, tokens=tokens)) for state in (None, Latch()))
    assert latched[:2] == without[:2]
    assert not set(latched[2:]) & set(without[2:])
    assert latched[2] == latched[3] is not None
    longer = keys_of(gated(Latch(), tokens=tokens), 12)
    # Generated text in a prompt has no state.
    assert longer[2] == without[0]
    assert longer[3] not in (latched[3], without[3], None)
    others = [Pid(0.0, 1.0), Pid(0.0, 1.0, 0.5), Pid(0.0, 2.0), Ema(0.5), Ema(0.6)]
    found = {keys_of(gated(state, tokens=tokens))[3] for state in others}
    assert len(found) == len(others)


def test_a_block_with_the_end_of_the_prompt_has_a_key_of_its_own():
    found = [
        keys_of(gated(state), num_prompt)[1] for state in (None, Latch()) for num_prompt in (6, 7)
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 3
