"""A policy decides token by token: its scales hold from a position that is told, and replay."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch
from prometheus_client import REGISTRY

from tests.asking import run
from tests.conftest import async_engine, local_engine, preempted_in, process_engine
from tests.engine.test_edits import PROMPT, READ_ALL, V, check, direction, params
from tests.policies import Script, install, scale_of
from vllm_scope import Ablate, Add, ConfigError, Gate, Policy, Probe
from vllm_scope.control.running import Policies

W = direction(5)
SCORE = Probe(W, layer=1, name="p")
STEER = Add(V, layer=1, scale=0.3, tokens="generated", name="steer")
POLICIES = {"follow": {"most_changes": 64}, "script": {"most_changes": 3, "timeout_s": 0.5}}
SCOPE = {"sites": ["embed", "resid_pre", "resid_mid", "resid_post"], "policies": POLICIES}
OPTIONS = {"dtype": "float32", "additional_config": {"scope": SCOPE}}
OTHERS = [list(range(90, 130)), [7] * 9]
GAIN = 0.01


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        install(tmp_path_factory.mktemp("installed"), patch)
        yield


@pytest.fixture(scope="module")
def llm(llama):
    """In chunks of 32 tokens."""
    with local_engine(llama, max_num_batched_tokens=32, max_num_seqs=8, **OPTIONS) as llm:
        yield llm


def following(gain=GAIN, **options):
    return params(
        SCORE, STEER, *READ_ALL, Policy("follow", {"gain": gain}), **({"max_tokens": 10} | options)
    )


def scripted(script, *actions, **options):
    actions = actions or (SCORE, STEER)
    script = {str(at): todo for at, todo in script.items()}
    return params(*actions, Policy("script", script), **({"max_tokens": 10} | options))


def scales_of(output):
    """The scale of each position, by the result's decisions."""
    num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    found = torch.zeros(num_tokens - 1)
    found[len(output.prompt_token_ids) :] = STEER.scale
    for decided in output.outputs[0].scope.decisions:
        if decided.acts_from is not None:
            found[decided.acts_from :] = decided.scale["steer"]
    return found


def decided_by(ref, output, lag):
    """The scale of each position: token by token, by the reference's scores."""
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    num_prompt = len(output.prompt_token_ids)
    scales = torch.zeros(len(ids))
    scales[num_prompt:] = STEER.scale
    for p in range(num_prompt - 1, len(ids)):
        streams, _ = ref.edited(ids[: p + 1], [steered(scales[: p + 1])])
        scales[p + 1 + lag :] = scale_of(float(streams["resid_post", 1][p] @ W), GAIN)
    return scales


def steered(scales):
    return ("resid_post", 1, lambda x: x + scales[: len(x), None] * V)


def check_closed_loop(output, ref, lag):
    num_prompt, result = len(output.prompt_token_ids), output.outputs[0].scope
    for decided in result.decisions:
        assert decided.acts_from == max(decided.position, num_prompt - 1) + 1 + lag
        assert decided.error is None
    scales = scales_of(output)
    assert len(set(scales.tolist())) > 4, "the scales stay the same; the test shows nothing"
    torch.testing.assert_close(scales, decided_by(ref, output, lag), rtol=0, atol=0)
    check(output, ref, [steered(scales)])


def same(one, other):
    """Bit for bit."""
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    told, again = ([{t: x.logprob for t, x in each.items()} for each in out.outputs[0].logprobs]
                   for out in (one, other))  # fmt: skip
    assert told == again


def test_a_closed_loop_equals_hooks_that_do_the_same(llm, ref):
    for prompt in (PROMPT, *OTHERS):
        (output,) = run(llm, [prompt], following())
        check_closed_loop(output, ref, 0)


def test_a_mixed_batch_has_loops_of_its_own_and_neighbours_that_notice_nothing(llm, ref):
    edit = params(Ablate(V, layer=1), max_tokens=10)
    prompts = [PROMPT, OTHERS[0], OTHERS[1], PROMPT, OTHERS[0]]
    alone = [params(max_tokens=10), edit]
    before = run(llm, prompts, [alone[0], alone[1], alone[0], params(max_tokens=10), alone[0]])
    asked = [alone[0], alone[1], following(), following(), alone[0]]
    outputs = run(llm, prompts, asked)
    for i in (0, 1, 4):
        same(outputs[i], before[i])
    for i in (2, 3):
        check_closed_loop(outputs[i], ref, 0)


def test_each_scored_position_is_seen_once_in_order_with_its_scores(llm):
    gate = Gate(W, layer=0, name="open")
    probes = [SCORE, Probe(W, layer=2, name="late", tokens="generated", aggregate="max")]
    edit = Add(V, layer=1, gate=gate, dose="moved", tokens="generated")
    Script.seen.clear()
    (output,) = run(llm, [PROMPT], scripted({}, *probes, edit))
    (seen,) = Script.seen.values()
    assert [position for position, _ in seen] == list(range(len(PROMPT) + 9))
    result = output.scope
    for position, scores in seen:
        generated = position >= len(PROMPT)
        assert set(scores) == ({"p", "late", "open", "moved"} if generated else {"p"})
        assert scores["p"] == float(result.scores["p"][position])
        if generated:
            at = position - len(PROMPT)
            assert scores["late"] == float(result.aggregates["late"][at])
            assert scores["open"] == float(result.scores["open"][at])
            assert scores["moved"] == float(result.scores["moved"][at])


def test_a_policy_ends_a_request_and_flags_it(llm):
    (whole,) = run(llm, [PROMPT], scripted({}))
    before = [counted(what) for what in ("stop", "flag", "failed")]
    script = {1: {"flag": "odd"}, 4: {"stop": True, "flag": "over"}}
    (output,) = run(llm, [PROMPT], scripted(script))
    (completion,) = output.outputs
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == f"policy 'script' at position {len(PROMPT) + 4}"
    assert completion.token_ids == whole.outputs[0].token_ids[:6]
    told = [(x.position - len(PROMPT), x.flag, x.stop) for x in completion.scope.decisions]
    assert told == [(1, "odd", False), (4, "over", True)]
    assert completion.scope.status == "complete"
    after = [counted(what) for what in ("stop", "flag", "failed")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 2, 0]


def counted(what):
    name = "vllm_scope_policy_decisions_total"
    return REGISTRY.get_sample_value(name, {"policy": "script", "what": what}) or 0


def test_what_is_decided_in_the_prompt_holds_from_the_first_generated_token(llm, ref):
    """70 tokens in chunks of 32: the decision comes long before."""
    prompt = list(range(5, 75))
    asked = [SCORE, STEER, *READ_ALL, Policy("script", {"-60": {"scale": {"steer": 0.9}}})]
    (output,) = run(llm, [prompt], params(*asked, max_tokens=8))
    (decided,) = output.scope.decisions
    assert (decided.position, decided.acts_from) == (10, 70)
    scales = scales_of(output)
    assert scales[70:].eq(0.9).all()
    check(output, ref, [steered(scales)])


@pytest.mark.parametrize(
    ("script", "why"),
    [
        pytest.param({0: {"raise": "broken"}}, "it raised RuntimeError", id="raises"),
        pytest.param({"at start": True}, "it raised RuntimeError", id="raises-at-start"),
        pytest.param({0: {"returns": 3}}, "it returned 3", id="no-decision"),
        pytest.param({0: {"sleep": 0.6}}, "s in one step; at most 0.5", id="slow"),
        pytest.param({0: {"scale": {"other": 1.0}}}, "names 'other'", id="unknown-edit"),
        pytest.param({0: {"scale": {"steer": "much"}}}, "it must be a number", id="no-number"),
        pytest.param({0: {"scale": {"steer": 1e39}}}, "finite in float32", id="too-large"),
        pytest.param({0: {"scale": 3}}, "names to numbers", id="no-mapping"),
        pytest.param({0: {"stop": 1}}, "true or false", id="stop"),
        pytest.param({0: {"flag": "x" * 201, "stop": True}}, "1 to 200 characters", id="flag"),
        pytest.param(
            {i: {"scale": {"steer": i / 8}} for i in range(1, 5)}, "more than 3 times",
            id="too-many",
        ),
    ],
)  # fmt: skip
def test_a_policy_that_fails_leaves_its_request_and_its_neighbours_as_they_are(script, why, llm):
    prompts = [PROMPT, OTHERS[0], OTHERS[1]]
    plain = params(max_tokens=10)
    kept = dict(list(script.items())[:-1])
    before = run(llm, prompts, [plain, scripted(kept), plain])
    outputs = run(llm, prompts, [plain, scripted(script), plain])
    for one, other in zip(outputs, before, strict=True):
        same(one, other)
    *earlier, failed = outputs[1].scope.decisions
    assert [x.error for x in earlier] == [None] * len(kept)
    assert why in failed.error
    assert failed.acts_from is None
    assert outputs[1].scope.status == "complete"


def test_a_failure_is_in_the_log_once(llm, caplog):
    with caplog.at_level(logging.ERROR, "vllm.vllm_scope"):
        for _ in range(2):
            run(llm, [PROMPT], scripted({0: {"returns": 3}}))
    assert len([one for one in caplog.records if "policy" in one.getMessage()]) <= 1


def test_a_decision_that_comes_too_late_ends_its_request_and_no_other(llm, monkeypatch):
    """As if vLLM had begun a step more than it says."""
    begin = Policies.begin

    def early(self, *args):
        found = begin(self, *args)
        if found is not None:
            found._lag = -1
        return found

    prompts, plain = [OTHERS[0], PROMPT, OTHERS[1]], params(max_tokens=10)
    before = run(llm, prompts, plain)
    monkeypatch.setattr(Policies, "begin", early)
    asked = [plain, scripted({3: {"scale": {"steer": 2.0}}}), plain]
    outputs = run(llm, prompts, asked)
    for i in (0, 2):
        same(outputs[i], before[i])
    assert outputs[1].outputs[0].finish_reason == "error"
    assert (
        "came after the first tokens to which the decision applies"
        in outputs[1].outputs[0].stop_reason
    )
    assert outputs[1].scope.status == "failed"


def test_kv_of_tokens_with_decided_scales_is_nobody_elses(llm):
    """Blocks have 128 tokens: the second one has the prompt's end and 56 generated tokens."""
    prompt = list(range(200, 400))
    (first,) = run(llm, [prompt], following(max_tokens=70))
    longer = [*prompt, *first.outputs[0].token_ids]
    (again,) = run(llm, [longer], params(max_tokens=1))
    assert again.num_cached_tokens == 128
    (whole,) = run(llm, [longer], params(max_tokens=1))
    assert whole.num_cached_tokens == 256, "the plain request kept nothing; the test shows nothing"


def test_each_completion_has_a_running_policy_of_its_own(llm):
    sampled = scripted({4: {"stop": True}, 1: {"scale": {"steer": 0.7}}}, n=3, temperature=1.0)
    Script.seen.clear()
    (output,) = run(llm, [PROMPT], sampled)
    assert {key.split("/")[1] for key in Script.seen} == {"0", "1", "2"}
    for completion in output.outputs:
        assert len(completion.token_ids) == 6
        told = [(x.position - len(PROMPT), x.scale) for x in completion.scope.decisions]
        assert told == [(1, {"steer": 0.7}), (4, {})]


@pytest.mark.parametrize(
    ("actions", "sentence"),
    [
        pytest.param((SCORE, Policy("none")), "this engine has follow, script", id="unknown"),
        pytest.param(
            (SCORE, Policy("follow", {"game": 1})), "the options are gain and score", id="options"
        ),
        pytest.param(
            (SCORE, Policy("script", {"raise": "x"})), "failed on policy.options", id="check-fails"
        ),
        pytest.param((STEER, Policy("follow")), "has no scores for it", id="no-scores"),
        pytest.param(
            (Probe(W, layer=1, name="p", tokens=[3]), Policy("follow")), "has no scores for it",
            id="single-tokens",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_the_door(actions, sentence, llm):
    with pytest.raises(ValueError, match=sentence):
        run(llm, [PROMPT], params(*actions))
    (output,) = run(llm, [PROMPT], params(max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.long
def test_after_a_preemption_each_position_has_the_scale_that_it_had(llama, ref):
    with local_engine(
        llama, num_gpu_blocks_override=7, block_size=32, max_model_len=96, max_num_seqs=3, **OPTIONS
    ) as llm:  # fmt: skip
        ids = [list(range(i, i + 30)) for i in (10, 50, 90)]
        alone = [run(llm, [some], following(max_tokens=60))[0] for some in ids]
        preempted = preempted_in(llm)
        outputs = run(llm, ids, following(max_tokens=60))
        assert preempted, "the cache was large enough; the test shows nothing"
        for output, one in zip(outputs, alone, strict=True):
            assert output.outputs[0].token_ids == one.outputs[0].token_ids
            assert output.scope.decisions == one.scope.decisions
            check_closed_loop(output, ref, 0)


@pytest.mark.long
def test_in_processes_of_their_own_requests_have_the_same_loops(llama, ref):
    """On a CPU vLLM does not schedule ahead; tests/interpreter has that."""

    async def main():
        engine = async_engine(llama, skip_tokenizer_init=True, **OPTIONS)

        async def one(name, sampling):
            stream = engine.generate({"prompt_token_ids": PROMPT}, sampling, name)
            return [output async for output in stream][-1]

        try:
            plain = await one("plain", params(max_tokens=16))
            both = await asyncio.gather(
                one("loop", following(max_tokens=16)), one("beside", params(max_tokens=16))
            )
            stopped = await one("stopped", scripted({4: {"stop": True}}, max_tokens=16))
            return plain, *both, stopped
        finally:
            engine.shutdown()

    plain, loop, beside, stopped = asyncio.run(main())
    check_closed_loop(loop, ref, 0)
    same(plain, beside)
    assert len(stopped.outputs[0].token_ids) == 6


@pytest.mark.long
def test_tensor_parallel_ranks_have_the_same_scales(llama, ref, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with process_engine(
        llama, tensor_parallel_size=2, skip_tokenizer_init=True, enforce_eager=True, **OPTIONS
    ) as llm:
        outputs = run(llm, [PROMPT, OTHERS[0]], [following(), params(max_tokens=10)])
    check_closed_loop(outputs[0], ref, 0)


def test_an_engine_that_cannot_have_policies_does_not_start(llama):
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with (
        pytest.raises(ConfigError, match="policies has follow, script, and this engine has spec"),
        local_engine(llama, speculative_config=speculation, **OPTIONS),
    ):
        pass
