"""A probe's verdict: told where the value is first above the threshold; a probe that stops ends
its request there, and its neighbours notice nothing."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.asking import rejects_drafts, run
from tests.conftest import (
    async_engine,
    local_engine,
    long_except,
    preempted_in,
    process_engine,
)
from tests.engine.probing import mlp, numbers, pool
from tests.engine.test_edits import params
from vllm_scope import Ema, Probe, Read, RollingMean, scope

PROMPT = list(range(5, 75))
MANY = [PROMPT, list(range(90, 130)), [7] * 9]
#: How the value of a request's tokens is made; each is tried with thresholds at many positions.
KINDS = {
    "score": {"weight": numbers(1, 128), "layer": 1},
    "sigmoid": {"weight": numbers(1, 128) / 10, "layer": 1, "activation": "sigmoid"},
    "max": {"weight": numbers(2, 128), "layer": 2, "aggregate": "max"},
    "ema": {"weight": numbers(3, 2, 128), "layers": [0, 2], "aggregate": Ema(0.7)},
    "rolling": {"weight": mlp(4, 128), "layer": 1, "aggregate": RollingMean(4, "max")},
    "pool": {"weight": pool(5, 128), "layer": 1},
}


def probe(kind, threshold, action="stop", tokens="generated"):
    return Probe(name=kind, threshold=threshold, action=action, tokens=tokens, **KINDS[kind])


def values_of(result, name):
    return (result.aggregates if name in result.aggregates else result.scores)[name]


def run_to_the_end(llm, kind, prompt, num_tokens, tokens="generated"):
    (output,) = run(llm, [prompt], params(probe(kind, 1e30, "flag", tokens), max_tokens=num_tokens))
    assert output.scope.verdicts == {}
    return output


def record(values):
    """(index, threshold) of each new maximum after the first value: a threshold just below it is
    first passed there."""
    best, found = float(values[0]), []
    for i, value in enumerate(values[1:].tolist(), 1):
        if value > best + 1e-4:
            found.append((i, (best + value) / 2))
            best = value
    return found


def rising(llm, prompt, num_tokens):
    """(kind, index, threshold) of a request whose value rises after its first token."""
    for kind in KINDS:
        whole = run_to_the_end(llm, kind, prompt, num_tokens)
        for at, threshold in record(values_of(whole.scope, kind))[:1]:
            return kind, at, threshold
    pytest.fail("no value rises; the test shows nothing")


@pytest.fixture(scope="module")
def llm(llama):
    """In chunks of 32 tokens."""
    with local_engine(llama, dtype="float32", max_num_batched_tokens=32, max_num_seqs=8) as llm:
        yield llm


@pytest.mark.parametrize("kind", long_except(KINDS, "score", "rolling"))
def test_a_request_ends_one_token_after_the_one_whose_value_is_above_the_threshold(kind, llm):
    tried = []
    for prompt in MANY:
        whole = run_to_the_end(llm, kind, prompt, 24)
        values = values_of(whole.scope, kind)
        tried += [(whole, values, *one) for one in record(values)[:2]]
    assert tried, "the values only fall; the test shows nothing"
    for whole, values, at, threshold in tried:
        prompt = whole.prompt_token_ids
        (output,) = run(llm, [prompt], params(probe(kind, threshold), max_tokens=24))
        (completion,) = output.outputs
        position = len(prompt) + at
        assert completion.finish_reason == "stop"
        assert completion.stop_reason.startswith(f"probe {kind!r}: ")
        assert completion.stop_reason.endswith(f" at position {position}")
        # The token at `position`, and the one that the same step sampled.
        assert completion.token_ids == whole.outputs[0].token_ids[: at + 2]
        result = completion.scope
        assert result.status == "complete"
        assert result.verdicts[kind].position == position
        assert result.verdicts[kind].value == pytest.approx(float(values[at]), rel=1e-4)
        torch.testing.assert_close(result.scores[kind], whole.scope.scores[kind][: at + 1])


def test_a_flag_is_told_and_the_request_goes_on(llm):
    kind, at, threshold = rising(llm, PROMPT, 24)
    whole = run_to_the_end(llm, kind, PROMPT, 24)
    (output,) = run(llm, [PROMPT], params(probe(kind, threshold, "flag"), max_tokens=24))
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "length"
    assert output.scope.verdicts[kind].position == len(PROMPT) + at


def test_neighbours_of_a_stopped_request_are_bit_identical(llm):
    alone = [params(logprobs=3, max_tokens=30)] * 3
    before = run(llm, MANY, alone)
    kind, at, threshold = rising(llm, MANY[1], 30)
    asked = [alone[0], params(probe(kind, threshold), max_tokens=30), alone[2]]
    for _ in range(2):
        outputs = run(llm, MANY, asked)
        assert len(outputs[1].outputs[0].token_ids) == at + 2
        for i in (0, 2):
            assert outputs[i].outputs[0].token_ids == before[i].outputs[0].token_ids
            ours, theirs = outputs[i].outputs[0].logprobs, before[i].outputs[0].logprobs
            assert [{t: x.logprob for t, x in one.items()} for one in ours] == [
                {t: x.logprob for t, x in one.items()} for one in theirs
            ]
    assert llm.collective_rpc("scope_counters")[0]["requests"] == 0


def test_a_prompt_can_be_stopped_before_it_is_computed_whole(llm):
    """70 tokens in chunks of 32: the first chunk is enough."""
    stops = probe("score", -1e30, tokens="prompt")
    (output,) = run(llm, [PROMPT], params(stops, max_tokens=24, prompt_logprobs=1))
    # Over HTTP, `echo` joins them with the prompt's tokens.
    assert output.prompt_logprobs == [None] * 70
    assert output.outputs[0].finish_reason == "stop"
    assert list(output.outputs[0].token_ids) == []
    assert output.scope.verdicts["score"].position == 0
    assert output.scope.scores.positions("score").tolist() == list(range(32))
    assert output.scope.status == "incomplete"


def test_each_completion_is_stopped_by_itself(llm):
    kind, _, threshold = rising(llm, PROMPT, 30)
    sampled = params(probe(kind, threshold), max_tokens=30, n=3, temperature=1.0)
    (output,) = run(llm, [PROMPT], sampled)
    for completion in output.outputs:
        verdict = completion.scope.verdicts.get(kind)
        assert (completion.finish_reason == "stop") is (verdict is not None)
        if verdict is not None:
            assert len(completion.token_ids) == verdict.position - len(PROMPT) + 2


def test_two_probes_the_first_that_is_above_ends_it(llm):
    ends = {kind: run_to_the_end(llm, kind, PROMPT, 24).scope for kind in KINDS}
    where = {kind: record(values_of(end, kind))[:1] for kind, end in ends.items()}
    asked = [probe(kind, threshold) for kind, some in where.items() for _, threshold in some]
    assert len(asked) > 1
    (output,) = run(llm, [PROMPT], params(*asked, max_tokens=24))
    first = min(at for some in where.values() for at, _ in some)
    assert len(output.outputs[0].token_ids) == first + 2


@pytest.mark.long
def test_after_a_preemption_a_position_counts_once(llama):
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3,
    ) as llm:  # fmt: skip
        ids = [list(range(i, i + 30)) for i in (10, 50, 90)]
        ends = [run_to_the_end(llm, "rolling", some, 60) for some in ids]
        tried = [record(values_of(end.scope, "rolling"))[-1] for end in ends]
        preempted = preempted_in(llm)
        for i, (at, threshold) in enumerate(tried):
            asked = [params(max_tokens=60)] * 3
            asked[i] = params(probe("rolling", threshold), max_tokens=60)
            outputs = run(llm, ids, asked)
            assert len(outputs[i].outputs[0].token_ids) == at + 2
    assert preempted, "the cache was large enough; the test shows nothing"


@pytest.mark.long
def test_with_async_scheduling_nothing_of_the_step_in_flight_is_left(llama):
    """As users start it: its own process, async scheduling."""

    async def main():
        engine = async_engine(llama, skip_tokenizer_init=True, async_scheduling=True)

        async def one(name, *probes, num_tokens=40):
            sampling = params(*probes, max_tokens=num_tokens, logprobs=None)
            stream = engine.generate({"prompt_token_ids": PROMPT}, sampling, name)
            return [output async for output in stream][-1]

        try:
            whole = await one("whole", probe("ema", 1e30, "flag"))
            at, threshold = record(values_of(whole.outputs[0].scope, "ema"))[0]
            both = await asyncio.gather(
                one("stopped", probe("ema", threshold)), one("beside", num_tokens=40)
            )
            after = await one("after", probe("ema", threshold))
            return whole, at, *both, after
        finally:
            engine.shutdown()

    whole, at, stopped, beside, after = asyncio.run(main())
    for output in (stopped, after):
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids[: at + 2]
        assert output.outputs[0].scope.status == "complete"
    assert beside.outputs[0].token_ids == whole.outputs[0].token_ids


@pytest.mark.long
@rejects_drafts
def test_with_drafts_a_token_that_is_rejected_does_not_count(llama):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    prompt = [3, 4, 5] * 8
    with process_engine(
        llama, dtype="float32", speculative_config=config, enforce_eager=True,
        skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        whole = run_to_the_end(llm, "max", prompt, 40)
        at, threshold = record(values_of(whole.scope, "max"))[0]
        (output,) = run(llm, [prompt], params(probe("max", threshold), max_tokens=40))
    tokens = output.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "stop"
    assert output.scope.verdicts["max"].position == len(prompt) + at
    # The step after it tells that the token was accepted; it may bring four tokens.
    assert at + 2 <= len(tokens) <= at + 2 + 4
    assert tokens == whole.outputs[0].token_ids[: len(tokens)]


def test_what_stops_takes_whole_phases_and_a_threshold(llm):
    assert "threshold" in scope(probe("score", 1.0))["scope"]
    for options, sentence in (
        ({"threshold": None}, "Probe.action is 'stop'; give a threshold with it"),
        ({"tokens": "last"}, "a probe that stops its request takes 'all', 'prompt' or 'generated'"),
        ({"to": "webhook"}, "a threshold needs scores that go to memory"),
    ):
        asked = {"threshold": 1.0, "action": "stop", "name": "p", "layer": 1} | options
        with pytest.raises(Exception, match=sentence):
            Probe(numbers(1, 128), **asked)


@pytest.mark.long
def test_the_text_has_every_token_of_a_stopped_request():
    from tests.conftest import TOYWORLD

    text = "My father told me about the book Goldette. Happily, it was"
    weight = numbers(1, 256)
    with local_engine(TOYWORLD, dtype="float32", skip_tokenizer_init=False) as llm:
        stop = Probe(weight, layer=2, name="p", threshold=-1e30, action="stop", tokens="generated")
        sampling = params(stop, max_tokens=9, detokenize=True)
        (output,) = llm.generate(text, sampling, use_tqdm=False)
        (completion,) = output.outputs
        assert len(completion.token_ids) == 2
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids)


@pytest.mark.long
def test_a_stop_beside_steps_that_are_larger_than_the_arena_hangs_nothing(llama):
    """Those are drained tap by tap, and wait for room that the watch holds."""
    config = {"scope": {"sites": ["embed", "resid_post", "resid_mid"], "arena_mib": 0.3}}
    with local_engine(
        llama, dtype="float32", max_num_batched_tokens=256, additional_config=config
    ) as llm:
        readers = params(*(Read(site) for site in ("resid_post", "resid_mid", "embed")))
        asked = [params(probe("score", 1e30, tokens="all"), max_tokens=12), readers, readers]
        prompts = [PROMPT, list(range(5, 205)), list(range(100, 300))]
        for _ in range(3):
            outputs = run(llm, prompts, asked)
        assert llm.collective_rpc("scope_describe")[0]["arena_mib"] < 0.4
    assert [output.scope.status for output in outputs] == ["complete"] * 3


def test_too_many_probes_that_stop_are_refused(llm):
    many = [
        Probe(numbers(i, 128), layer=1, name=str(i), threshold=1.0, action="stop") for i in range(9)
    ]
    with pytest.raises(Exception, match="9 probes have action 'stop'; at most 8"):
        params(*many)
