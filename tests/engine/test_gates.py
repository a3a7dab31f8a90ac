"""A gate decides, from the model's own rows, how much of an edit each token gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.asking import rejects_drafts, run
from tests.checkpoints import reference, row_error
from tests.conftest import local_engine, long_except, preempted_in, process_engine
from tests.engine.test_edits import (
    EDITS,
    ENGINE,
    PROMPT,
    READ_ALL,
    V,
    check,
    direction,
    params,
)
from vllm_scope import Add, Gate, Probe, Read, Replace, SpecError

W = direction(5)
UNIT_W = W / W.norm()
#: Far beyond any score of these models.
FAR = 1e6


def _cosine(x, w):
    return (x * w).sum(1) / (x.norm(dim=1) * w.norm(dim=-1))


#: kind -> (its arguments, what the value is of rows [n, hidden])
GATES = {
    "step": ({"threshold": 0.1}, lambda x: (x @ W > 0.1).float()),
    "below": ({"threshold": 0.1, "above": False}, lambda x: (x @ W < 0.1).float()),
    "sigmoid": (
        {"kind": "sigmoid", "threshold": 0.2, "sharpness": 0.5, "bias": 0.1},
        lambda x: torch.sigmoid(0.5 * (x @ W + 0.1 - 0.2)),
    ),
    "cosine": (
        {"kind": "cosine", "threshold": 0.02}, lambda x: (_cosine(x, W[None]) > 0.02).float(),
    ),
    "cast": (
        {"kind": "cast", "threshold": 0.05},
        lambda x: (_cosine(x, torch.tanh((x @ UNIT_W)[:, None] * UNIT_W)) > 0.05).float(),
    ),
}  # fmt: skip


def gated(gate_at, edit_at, value, mean):
    """The reference's edits: one looks, the other does part of what it does without a gate."""
    seen = []

    def look(x):
        seen[:] = [value(x)]
        return x

    def edit(x):
        (part,) = seen
        return x + part[:, None] * (mean(x) - x)

    return [(*gate_at, look), (*edit_at, edit)], seen


@pytest.fixture(scope="module", params=long_except(["llama", "qwen3", "gemma2"], "llama"))
def family(request, checkpoints):
    path = checkpoints(request.param)
    with local_engine(path, **ENGINE) as llm:
        yield llm, reference(path, torch.float32)


@pytest.mark.parametrize("across", [False, True], ids=["same-place", "across-layers"])
@pytest.mark.parametrize("kind", GATES)
def test_a_gated_edit_equals_a_hook_that_does_the_same(kind, across, family):
    llm, ref = family
    options, value = GATES[kind]
    gate_at = ("resid_mid", 0) if across else ("resid_post", 1)
    gate = Gate(W, gate_at[1], site=gate_at[0], name="g", **options)
    for ask, mean in EDITS.values():
        (output,) = run(llm, [PROMPT], params(ask(layer=1, gate=gate), *READ_ALL))
        edits, seen = gated(gate_at, ("resid_post", 1), value, mean)
        check(output, ref, edits)
        scores = output.scope.scores
        at = scores.positions("g")
        torch.testing.assert_close(scores["g"], seen[0][at], rtol=1e-3, atol=1e-3)
        some = 0.02 < float(scores["g"].mean()) < 0.98
        assert some or len(at) < 5, "the gate is always open or always closed"


@pytest.mark.parametrize("kind", EDITS)
def test_an_open_gate_is_the_plain_edit_and_a_closed_one_no_edit_bit_by_bit(kind, family):
    llm, _ = family
    ask, _ = EDITS[kind]
    for options in ({}, {"kind": "sigmoid", "sharpness": 2.0}):
        open_, shut = (Gate(W, 0, threshold=far, **options) for far in (-FAR, FAR))
        asked = [[ask(layer=1)], [ask(layer=1, gate=open_)], [], [ask(layer=1, gate=shut)]]
        outputs = run(llm, [PROMPT] * 4, [params(*some, *READ_ALL) for some in asked])
        for one, other in (outputs[:2], outputs[2:]):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            for stream in one.scope.keys():
                assert torch.equal(one.scope[stream], other.scope[stream]), stream


def test_twelve_requests_with_gates_of_their_own_beside_plain_ones(family):
    llm, ref = family
    kinds = [*GATES, *GATES, None, None]
    prompts = [list(range(10 + 7 * i, 40 + 9 * i)) for i in range(len(kinds))]
    asked, wanted = [], []
    for i, kind in enumerate(kinds):
        if kind is None:
            asked.append(params(*READ_ALL))
            wanted.append([])
            continue
        options, value = GATES[kind]
        ask, mean = EDITS["add"] if i % 2 else EDITS["ablate"]
        gate_at = ("resid_pre", i % 3)
        gate = Gate(W, i % 3, site="resid_pre", **options)
        asked.append(params(ask(site="resid_post", layer=2, gate=gate), *READ_ALL))
        wanted.append(gated(gate_at, ("resid_post", 2), value, mean)[0])
    for output, edits in zip(run(llm, prompts, asked), wanted, strict=True):
        check(output, ref, edits)


def test_doses_are_how_much_longer_the_change_is_than_the_row(family):
    llm, _ = family
    gate = Gate(W, 0, kind="sigmoid", sharpness=0.3)
    before = Read("resid_post", layers=[1], when="before")
    for ask, _ in EDITS.values():
        edit = ask(layer=1, gate=gate, dose="d")
        (output,) = run(llm, [PROMPT], params(edit, before, Read("resid_post", layers=[1])))
        result = output.scope
        old, new = result["resid_post", 1, "before"], result["resid_post", 1, "after"]
        at = result.scores.positions("d")
        wanted = ((new - old).norm(dim=1) / old.norm(dim=1))[at]
        torch.testing.assert_close(result.scores["d"], wanted, rtol=1e-3, atol=1e-4)
        assert float(result.scores["d"].max()) > 0


MOST = 0.25


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("norm_match", [False, True], ids=["plain", "norm-matched"])
def test_an_add_is_never_longer_than_its_bound(norm_match, sign, family):
    llm, ref = family
    edit = Add(
        V, layer=1, scale=sign * 4.0, norm_match=norm_match, max_relative_norm=MOST, dose="d"
    )
    (output,) = run(llm, [PROMPT], params(edit, *READ_ALL))

    def mean(x):
        length = x.norm(dim=1, keepdim=True)
        full = 4.0 * (length if norm_match else V.norm().expand_as(length))
        return x + sign * torch.minimum(full, MOST * length) * V / V.norm()

    check(output, ref, [("resid_post", 1, mean)])
    doses = output.scope.scores["d"]
    assert float(doses.max()) == pytest.approx(MOST, rel=1e-4)
    assert (doses <= MOST * (1 + 1e-4)).all()


# Whatever the scheduler does

GATE = Gate(W, 0, kind="sigmoid", sharpness=0.3, name="g")
EMBED_GATE = Gate(W, site="embed", kind="sigmoid", sharpness=0.3, name="e")
LONG = list(range(40, 140))
BOTH = [Add(V, layer=1, gate=GATE), Add(V, layer=2, gate=EMBED_GATE)]


def same(one, other):
    """Tokens and values. The model's own rows of two chunk sizes differ in their last bits; the
    embedding's do not, so the gate there has the same value bit by bit."""
    assert one.token_ids == other.token_ids
    assert one.scope.status == other.scope.status == "complete"
    assert torch.equal(one.scope.scores["e"], other.scope.scores["e"])
    torch.testing.assert_close(one.scope.scores["g"], other.scope.scores["g"], rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_chunks_and_prefix_hits_change_no_token_and_no_value(llama):
    other = Add(V, layer=1, gate=replace(GATE, sharpness=0.31))
    found = []
    for tokens in (16, 64, 512):
        options = {"max_num_batched_tokens": tokens, "max_num_seqs": 8, "block_size": 32}
        with local_engine(llama, **ENGINE | options) as llm:
            asked = [params(*some, max_tokens=20) for some in (BOTH, BOTH, [other], [])]
            outputs = [run(llm, [LONG], one)[0] for one in asked]
        assert [o.num_cached_tokens for o in outputs] == [0, 96, 0, 0]
        found += [output.outputs[0] for output in outputs[:2]]
    for one in found[1:]:
        same(found[0], one)


@pytest.mark.long
def test_preempted_requests_have_the_values_of_those_that_ran_alone(llama):
    ids = [range(i, i + 30) for i in (10, 50, 90)]
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        together = run(llm, ids, params(*BOTH, max_tokens=60))
        assert preempted, "the cache was large enough; the test shows nothing"
        alone = [run(llm, [one], params(*BOTH, max_tokens=60))[0] for one in ids]
    for one, other in zip(together, alone, strict=True):
        same(one.outputs[0], other.outputs[0])


@pytest.mark.long
@rejects_drafts
def test_drafts_and_several_completions(llama):
    repeated = list(range(60, 70)) * 6
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    found = []
    for options in ({}, {"speculative_config": drafts}):
        with local_engine(llama, **ENGINE | options) as llm:
            found += run(llm, [repeated], params(*BOTH, max_tokens=24))
            (several,) = run(llm, [repeated], params(*BOTH, n=2, temperature=1.0, max_tokens=9))
        for one in several.outputs:
            assert one.scope.status == "complete"
            assert len(one.scope.scores["g"]) == len(repeated) + 8
    same(found[0].outputs[0], found[1].outputs[0])


@pytest.mark.long
def test_compiled_and_with_other_processes(llama, ref):
    gate_at, edit_at = ("resid_post", 0), ("resid_post", 1)
    ask, mean = EDITS["add"]
    value = lambda x: torch.sigmoid(0.3 * (x @ W))  # noqa: E731
    with process_engine(llama, dtype="float32", skip_tokenizer_init=True) as llm:
        (output,) = run(llm, [PROMPT], params(ask(layer=1, gate=GATE), Read("resid_post")))
    edits, seen = gated(gate_at, edit_at, value, mean)
    check(output, ref, edits)
    torch.testing.assert_close(output.scope.scores["g"], seen[0], rtol=1e-3, atol=1e-3)


# What is refused

WRONG = {
    "after-the-edit": (Add(W, layer=0, gate=Gate(W, 1)), "a gate must be at or before its edit"),
    "another-size": (Add(W, layer=1, gate=Gate([1.0, 2.0], 0)), "have 128"),
    "no-such-layer": (Add(W, layer=1, gate=Gate(W, 99)), "has layers 0 to 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_gate_that_the_engine_cannot_have_is_refused(case, family):
    llm, _ = family
    edit, sentence = WRONG[case]
    with pytest.raises(SpecError, match=sentence):
        run(llm, [PROMPT], params(edit))
    run(llm, [PROMPT], params())


def test_names_are_for_one_thing(family):
    llm, _ = family
    twice = [Add(W, layer=1, gate=Gate(W, 0, name="g")), Add(W, layer=2, dose="g")]
    with pytest.raises(SpecError, match="two gates or doses are called 'g'"):
        run(llm, [PROMPT], params(*twice))
    with pytest.raises(SpecError, match="probes, features, lenses, gates and doses are called 'g'"):
        run(llm, [PROMPT], params(twice[0], Probe(W, layer=0, name="g")))
    shared = Gate(W, 0, name="g")
    edits = [Add(W, layer=layer, gate=shared) for layer in (1, 2)]
    (output,) = run(llm, [PROMPT], params(*edits))
    assert output.scope.scores.keys() == {"g"}


def test_replaced_rows_and_a_gate_of_a_probe(family):
    llm, _ = family
    probe = Probe(W, layer=1, bias=-0.5, name="p")
    assert Gate(probe) == Gate(W, 1, bias=-0.5)
    row = direction(9)
    edit = Replace(row, positions=[3], layer=1, gate=Gate(probe, kind="sigmoid", name="g"))
    sides = [Read("resid_post", layers=[1], when=when) for when in ("before", "after")]
    (output,) = run(llm, [PROMPT], params(edit, *sides))
    result = output.scope
    assert result.scores.positions("g").tolist() == [3]
    old, new = result["resid_post", 1, "before"][3], result["resid_post", 1, "after"][3]
    part = torch.sigmoid(old @ W - 0.5)
    torch.testing.assert_close(result.scores["g"][0], part, rtol=1e-3, atol=1e-3)
    assert row_error((old + part * (row - old))[None], new[None]) < 1e-4
