"""A gate with a state: its value follows from the scores of all generated tokens so far."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.asking import rejects_drafts, run
from tests.checkpoints import reference
from tests.conftest import local_engine, long_except, preempted_in, process_engine
from tests.engine.test_edits import (
    ENGINE,
    READ_ALL,
    V,
    check,
    check_logprobs,
    direction,
    params,
)
from vllm_scope import Add, Ema, Gate, Hysteresis, Latch, Pid, Read, SpecError
from vllm_scope.graph.tap.tables import Tables

W = direction(5)
HIDDEN = len(W)
PROMPT = list(range(30, 50))
PROMPTS = [PROMPT, list(range(60, 97)), list(range(10, 21))]
MORE = {"max_tokens": 24}


def sigmoid(score, threshold, sharpness=0.3):
    return 1 / (1 + torch.exp(-sharpness * (score - threshold)))


def step(score):
    return (score > 0).float()


class Watching:
    """The values of a gate in a generation loop: a step without a state in the prompt."""

    def __init__(self, advance, stateless=step):
        self.advance, self.stateless = advance, stateless

    def values(self, scores, num_prompt):
        found, state = [self.stateless(scores[:num_prompt])], None
        for score in scores[num_prompt:]:
            value, state = self.advance(score, state)
            found.append(value.float()[None])
        return torch.cat(found)


def _ema(score, mean, decay=0.7):
    mean = score if mean is None else decay * mean + (1 - decay) * score
    return sigmoid(mean, 2.0), mean


def _latch(score, is_open):
    is_open = bool(is_open) or bool(score > 10)
    return torch.tensor(float(is_open)), is_open


def _hysteresis(score, is_open):
    is_open = bool(score > 5) or (bool(is_open) and not score < -20)
    return torch.tensor(float(is_open)), is_open


def _pid(score, state, setpoint=-9.0, kp=0.02, ki=0.005, kd=-0.01):
    total, last = state or (torch.tensor(0.0), None)
    error = score - setpoint
    total = (total + error).clamp(-1 / ki, 1 / ki)
    change = error - (error if last is None else last)
    return (kp * error + ki * total + kd * change).clamp(0, 1), (total, error)


def _below(score, is_open):
    is_open = bool(score < -5) or (bool(is_open) and not score > 12)
    return torch.tensor(float(is_open)), is_open


#: kind -> (the gate, what it is in a loop)
STATES = {
    "ema": (
        Gate(W, 0, kind="sigmoid", threshold=2.0, sharpness=0.3, state=Ema(0.7), name="g"),
        Watching(_ema, lambda s: sigmoid(s, 2.0)),
    ),
    "latch": (
        Gate(W, 0, threshold=10.0, state=Latch(), name="g"),
        Watching(_latch, lambda s: (s > 10).float()),
    ),
    "hysteresis": (
        Gate(W, 0, threshold=5.0, state=Hysteresis(-20.0), name="g"),
        Watching(_hysteresis, lambda s: (s > 5).float()),
    ),
    "below": (
        Gate(W, 0, threshold=-5.0, above=False, state=Hysteresis(12.0), name="g"),
        Watching(_below, lambda s: (s < -5).float()),
    ),
    "pid": (
        Gate(W, 0, state=Pid(-9.0, 0.02, 0.005, -0.01), name="g"),
        Watching(_pid),
    ),
}  # fmt: skip


def asked(kind, scale=0.7, **options):
    gate = replace(STATES[kind][0], **options)
    return Add(V, layer=1, scale=scale, gate=gate)


def looped(kind, num_prompt, scale=0.7):
    """Edits of the reference's forward over all tokens. The model is causal: the rows of a token
    do not depend on later ones, so that this equals a loop of one token at a time."""
    seen = []

    def look(x):
        seen[:] = [STATES[kind][1].values(x @ W, num_prompt)]
        return x

    def edit(x):
        return x + scale * seen[0][:, None] * V

    return [("resid_post", 0, look), ("resid_post", 1, edit)], seen


@pytest.fixture(scope="module", params=long_except(["llama", "qwen3"], "llama"))
def family(request, checkpoints):
    path = checkpoints(request.param)
    with local_engine(path, **ENGINE) as llm:
        yield llm, reference(path, torch.float32)


def test_tokens_and_values_equal_a_loop_that_keeps_the_state(family):
    """All kinds in one batch, each beside a plain request."""
    llm, ref = family
    ids, asking, plain = [], [], params(*READ_ALL, **MORE)
    for i, kind in enumerate(STATES):
        ids += [PROMPTS[i % 3], PROMPT]
        asking += [params(asked(kind), *READ_ALL, **MORE), plain]
    outputs = run(llm, ids, asking)
    changing = 0
    for i, kind in enumerate(STATES):
        output = outputs[2 * i]
        edits, seen = looped(kind, len(ids[2 * i]))
        check(output, ref, edits)
        scores = output.scope.scores
        assert scores.positions("g").tolist() == list(range(len(ids[2 * i]) + 23))
        torch.testing.assert_close(scores["g"], seen[0], rtol=1e-3, atol=1e-3)
        (once,) = run(llm, [ids[2 * i]], params(asked(kind, state=None), **MORE))
        same = torch.equal(scores["g"], once.scope.scores["g"])
        changing += not same
        n = len(ids[2 * i])
        assert torch.equal(scores["g"][:n], once.scope.scores["g"][:n])
    assert changing >= 4, "the states changed nothing"
    alone = run(llm, [PROMPT], plain)[0]
    for output in outputs[1::2]:
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        for stream in alone.scope:
            assert torch.equal(output.scope[stream], alone.scope[stream])


def check_values(llm):
    """The scores of an embedding are exact in every dtype, so that all kinds can be compared."""
    kinds = [*STATES, *STATES]
    gates = [replace(STATES[kind][0], site="embed", layer=None) for kind in kinds]
    ids = [PROMPTS[i % 3] for i in range(len(kinds))]
    asking = [
        params(Add(V, layer=1, scale=0.7, gate=gate), Read("embed"), max_tokens=24, logprobs=None)
        for gate in gates
    ]
    for kind, prompt, output in zip(kinds, ids, run(llm, ids, asking), strict=True):
        rows = output.scope["embed", 0].float()
        wanted = STATES[kind][1].values(rows @ W, len(prompt))
        torch.testing.assert_close(output.scope.scores["g"], wanted, rtol=1e-3, atol=1e-3)
        assert len(set(wanted[len(prompt) :].tolist())) > 1 or kind not in ("ema", "pid")


def test_values_follow_from_the_embeddings_of_the_generated_tokens(family):
    check_values(family[0])


# Whatever the scheduler does

#: The scores of an embedding have the same bits in every chunk.
EMBED = Gate(W, site="embed", threshold=4.0, state=Hysteresis(-4.0), name="e")
BOTH = [
    Add(V, layer=1, scale=0.7, gate=STATES["pid"][0]),
    Add(V, layer=2, scale=0.5, gate=EMBED),
    Add(
        V, site="resid_mid", layer=2, scale=0.1, tokens="generated", gate=replace(EMBED, name=None)
    ),
]
LONG = list(range(40, 140))


@pytest.fixture
def fresh(monkeypatch):
    """Of each row of a generated token, in all steps: how many rows of its request before it have
    no state yet; below 0 if the token has its state."""
    seen, load = [], Tables.load_walks

    def record(self, rows, walks, positions):
        _, _, _, begin, known, index, *_ = walks.T.astype("i8")
        at = positions.cpu().numpy()[rows]
        new = at - np.maximum(np.maximum(begin, known), at - index)
        seen.extend(new[at >= begin].tolist())
        load(self, rows, walks, positions)

    monkeypatch.setattr(Tables, "load_walks", record)
    return seen


def same(one, other):
    assert one.token_ids == other.token_ids
    assert one.scope.status == other.scope.status == "complete"
    assert torch.equal(one.scope.scores["e"], other.scope.scores["e"])
    torch.testing.assert_close(one.scope.scores["g"], other.scope.scores["g"], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_chunks_change_no_token_and_no_value(llama):
    found = []
    for tokens in (16, 64, 512):
        options = {"max_num_batched_tokens": tokens, "max_num_seqs": 8, "block_size": 32}
        with local_engine(llama, **ENGINE | options) as llm:
            outputs = [run(llm, [LONG], params(*BOTH, max_tokens=40))[0] for _ in range(2)]
        assert [output.num_cached_tokens for output in outputs] == [0, 96]
        found += [output.outputs[0] for output in outputs]
    for one in found[1:]:
        same(found[0], one)


def test_generated_text_in_a_later_prompt_has_no_state(llama, ref):
    """The KV of generated tokens depends on where the state began."""
    with local_engine(llama, **ENGINE | {"block_size": 32}) as llm:
        once = params(asked("latch", threshold=-3.0), max_tokens=60, logprobs=None)
        (first,) = run(llm, [LONG], once)
        (unnamed,) = run(llm, [LONG], params(asked("latch", threshold=-3.0, name=None)))
        plain = params(asked("latch", threshold=-3.0, name=None, state=None))
        (stateless,) = run(llm, [LONG], plain)
        longer = [*LONG, *first.outputs[0].token_ids]
        (later,) = run(llm, [longer], once)
        (again,) = run(llm, [LONG], once)
    assert stateless.num_cached_tokens == unnamed.num_cached_tokens == 96
    assert again.num_cached_tokens == later.num_cached_tokens == 96
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    values = later.scope.scores["g"][: len(longer)]
    assert set(values.tolist()) == {0.0, 1.0}
    assert first.scope.scores["g"][-20:].all(), "the latch never opened"
    assert not values[len(LONG) : len(longer)].all()


@pytest.mark.long
def test_preempted_requests_replay_their_states(llama, fresh):
    ids = [range(i, i + 30) for i in (10, 50, 90)]
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3, enable_prefix_caching=False,
        additional_config={"scope": {"sites": ["embed", "resid_mid", "resid_post"]}},
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        together = run(llm, ids, params(*BOTH, max_tokens=60))
        assert preempted, "the cache was large enough; the test shows nothing"
        assert min(fresh) < -10
        assert max(fresh) == 0
        alone = [run(llm, [one], params(*BOTH, max_tokens=60))[0] for one in ids]
    for one, other in zip(together, alone, strict=True):
        same(one.outputs[0], other.outputs[0])


@pytest.mark.long
@rejects_drafts
def test_drafts_and_several_completions(llama, ref, fresh):
    repeated = list(range(60, 70)) * 6
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    found = []
    for options in ({}, {"speculative_config": drafts}):
        fresh.clear()
        with local_engine(llama, **ENGINE | options) as llm:
            found += run(llm, [repeated], params(*BOTH, max_tokens=40))
            assert max(fresh) == (3 if options else 0)
            asking = params(asked("pid"), *READ_ALL, n=2, temperature=1.0, max_tokens=9)
            (several,) = run(llm, [repeated], asking)
        for one in several.outputs:
            edits, seen = looped("pid", len(repeated))
            ref.edited([*repeated, *one.token_ids][:-1], edits)
            assert one.scope.status == "complete"
            torch.testing.assert_close(one.scope.scores["g"], seen[0], rtol=1e-3, atol=1e-3)
    same(found[0].outputs[0], found[1].outputs[0])


@pytest.mark.long
def test_compiled_and_with_other_processes(llama, ref):
    with process_engine(llama, dtype="float32", skip_tokenizer_init=True) as llm:
        (output,) = run(llm, [PROMPT], params(asked("pid"), **MORE))
    edits, seen = looped("pid", len(PROMPT))
    _, logits = ref.edited([*PROMPT, *output.outputs[0].token_ids][:-1], edits)
    check_logprobs(output.outputs[0], logits[len(PROMPT) - 1 :])
    torch.testing.assert_close(output.scope.scores["g"], seen[0], rtol=1e-3, atol=1e-3)


def test_gates_without_a_state_upload_nothing(family, fresh):
    llm, _ = family
    run(llm, [PROMPT] * 2, [params(asked("latch", state=None)), params()])
    assert fresh == []


# What is refused

WRONG = {
    "same-place": (Add(W, layer=1, gate=Gate(W, 1, state=Latch())), "must be at an earlier place"),
    "one-boundary": (
        Add(W, site="resid_pre", layer=1, gate=Gate(W, 0, state=Latch())),
        "must be at an earlier place",
    ),
    "some-tokens": (
        Add(W, layer=1, tokens=[3, 50], gate=Gate(W, 0, state=Latch())),
        "take 'all' or 'generated'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_state_that_the_engine_cannot_have_is_refused(case, family):
    llm, _ = family
    edit, sentence = WRONG[case]
    with pytest.raises(SpecError, match=sentence):
        run(llm, [PROMPT], params(edit))
    run(llm, [PROMPT], params())


@pytest.mark.long
def test_a_request_waits_for_room_for_its_states_and_others_go_on(llama):
    config = {"scope": {"sites": ["resid_post"], "states_mib": 0.002}}
    with local_engine(llama, dtype="float32", additional_config=config) as llm:
        few, many = params(asked("latch"), max_tokens=8), params(asked("latch"), max_tokens=200)
        outputs = run(llm, [PROMPT] * 3, [few, params(), params(asked("latch", state=None))])
        assert all(output.outputs[0].finish_reason == "length" for output in outputs)
        with pytest.raises(SpecError, match="take 264 places for 200 tokens; this engine has 174"):
            run(llm, [PROMPT], many)
        three = run(llm, [PROMPT] * 3, few)
        assert len({tuple(o.outputs[0].token_ids) for o in three}) == 1
        assert all(o.scope.status == "complete" for o in three)
        assert run(llm, [PROMPT], few)[0].scope.scores["g"].shape == (len(PROMPT) + 7,)
