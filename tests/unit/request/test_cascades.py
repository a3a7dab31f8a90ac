"""Cascades: where a later stage begins, what is refused, and what each stage computes by itself."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vllm_scope import Probe, Read, Spec, SpecError, scope
from vllm_scope.request.cascade import begins
from vllm_scope.request.packed import pack, unpack
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import Sites

SITES = Sites(4, 4, "float32", (0, 2, 4, 6, 8))
V = np.ones(4)


def probe(name: str, after: str | None = None, **fields: object) -> Probe:
    return Probe(V, name=name, after=after, **{"layer": 1, "threshold": 1.0} | fields)


@pytest.mark.parametrize(
    ("verdict", "num_prompt", "step_tokens", "first"),
    [
        pytest.param(20, 10, 1, 22, id="the-second-token-after-it"),
        pytest.param(10, 10, 1, 12, id="at-the-first-generated-token"),
        pytest.param(9, 10, 1, 11, id="at-the-prompt's-end"),
        pytest.param(0, 10, 1, 11, id="early-in-the-prompt"),
        pytest.param(20, 10, 4, 32, id="three-of-the-longest-steps-with-drafts"),
        pytest.param(0, 10, 4, 18, id="two-after-a-prompt-with-drafts"),
    ],
)
def test_where_a_stage_begins(verdict, num_prompt, step_tokens, first):
    assert begins(verdict, num_prompt, step_tokens) == first


@pytest.mark.parametrize(
    ("probes", "sentence"),
    [
        ([probe("a", "b")], "probes[0].after is 'b', and no probe has this name"),
        ([probe("a", "a")], "probes[0].after is 'a', which waits for this probe itself"),
        (
            [probe("a"), probe("b", "c"), probe("c", "b")],
            "probes[2].after is 'b', which waits for this probe itself",
        ),
        (
            [probe("0"), *(probe(str(i), str(i - 1)) for i in range(1, 5))],
            "probes[4].after makes a cascade of more than 4 stages",
        ),
        (
            [probe("a", threshold=None), probe("b", "a")],
            "probes[1].after is 'a', which cannot be a first stage; a first stage must have a "
            "threshold",
        ),
        ([probe("a", action="stop"), probe("b", "a")], "'a', which cannot be a first stage"),
        ([probe("a", tokens=[1]), probe("b", "a")], "'a', which cannot be a first stage"),
        (
            [probe(f"{i}", f"{i - 1}" if i % 2 else None) for i in range(18)],
            "9 probes have action 'stop' or are first stages of others; at most 8",
        ),
    ],
)
def test_a_wrong_cascade_is_refused_at_the_door(probes, sentence):
    with pytest.raises(SpecError) as error:
        Spec(probes=tuple(probes))
    assert sentence in str(error.value)
    with pytest.raises(SpecError):
        scope(*probes)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tokens": "prompt"}, "Probe.tokens is 'prompt', and the probe scores after 'a'"),
        ({"tokens": "last"}, "generated tokens only; take 'all' or 'generated'"),
        ({"to": "webhook", "threshold": None}, "scores of a probe with 'after' go to memory"),
        ({"after": ""}, "Probe.after is ''; a name is a string"),
        ({"after": 3}, "Probe.after is 3; a name is a string"),
    ],
)
def test_a_wrong_second_stage_is_refused(fields, sentence):
    with pytest.raises(SpecError, match=sentence.replace("?", r"\?")):
        probe("b", **{"after": "a"} | fields)


def test_it_travels_as_json_and_packed():
    spec = Spec(probes=(probe("b", "a"), probe("a")))
    again = Spec.from_json(spec.to_json())
    assert again == spec
    assert "after" not in json.loads(spec.to_json())["probes"][1]
    asked = spec.resolve(SITES)
    packed, arrays = pack((asked.reads, asked.probes, asked.edits))
    assert Resolved(*unpack(packed, arrays)) == asked


def test_each_stage_has_its_own_banks_and_the_first_one_keeps_the_prefix_cache():
    first, other = probe("a"), probe("d", layer=2)
    later = [probe("b", "a"), probe("c", "a", threshold=None), probe("e", "d")]
    asked = Spec(probes=(*later, first, other)).resolve(SITES)
    bank_of = {one.name: one.cells[0].bank for one in asked.probes}
    assert bank_of["b"] == bank_of["c"] != bank_of["e"]
    assert len(set(bank_of.values())) == len({bank.nameless for bank in bank_of.values()}) == 3
    assert [one.name for one in asked.watched] == ["a", "d"]
    alone = Spec(probes=(first, other)).resolve(SITES)
    assert alone.watched == ()
    assert asked.scores_alone == alone.scores_alone is not None
    assert asked.score_bytes == alone.score_bytes == 32
    read = Spec((Read("resid_post", layers=[1]),), (first, later[0]))
    assert read.resolve(SITES).scores_alone is None


def test_an_engine_says_how_far_its_steps_go():
    sites = Sites(4, 4, "float32", (0, 2, 4, 6, 8), step_tokens=4)
    asked = Spec(probes=(probe("a"), probe("b", "a"))).resolve(sites)
    assert asked.probes[1].begins(20, 10) == 32
