"""Edits that overflow end their own request with a sentence; nobody else notices."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

from tests.conftest import async_engine, local_engine, long_except, preempted_in
from vllm_scope import Add, Read, Replace, SpecError, scope
from vllm_scope.results.inbox import inbox

BLOCK = 32
#: Few blocks, so that each is soon another request's.
SMALL = {"num_gpu_blocks_override": 12, "block_size": BLOCK, "max_model_len": 128}
HUGE = [3e38] * 128
#: It stays in float32, and what a LayerNorm makes of it does not.
LATER = Add(HUGE, layer=0)
NOW = Add(HUGE, layer=1, scale=3e38)
MILD = Add([1.0] * 128, layer=0, tokens=[3])
PROMPTS = [list(range(i, i + 40)) for i in (10, 60, 110)]
MESSAGE = r"not finite in float32, so the request was ended\. Use a smaller scale"


def _params(*actions: Any, max_tokens: int = 8, **options: Any) -> SamplingParams:
    extra = scope(*actions) if actions else None
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, extra_args=extra,
        **options,
    )  # fmt: skip


def _run(llm: Any, prompts: list[list[int]], params: Any) -> list[Any]:
    tokens = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return llm.generate(tokens, params, use_tqdm=False)


def _said(output: Any) -> tuple[list[int], list[list[float]]]:
    """Tokens and logprobs."""
    completion = output.outputs[0]
    values = [[one.logprob for one in step.values()] for step in completion.logprobs]
    assert torch.tensor(values).isfinite().all()
    return list(completion.token_ids), values


def _failed(output: Any, where: str) -> None:
    completion = output.outputs[0]
    assert completion.finish_reason == "error"
    assert completion.scope.status == "failed"
    assert where in completion.scope.error
    assert "not finite in float32" in completion.scope.error


@pytest.fixture(scope="module", params=long_except(["llama", "gpt2"], "llama"))
def llm(request, checkpoints):
    options = {"sites": ["embed", "resid_mid", "resid_post"]}
    with local_engine(
        checkpoints(request.param), dtype="float32", additional_config={"scope": options}, **SMALL
    ) as engine:
        yield engine


def _norms_by_mean(llm: Any) -> bool:
    """A LayerNorm, of which a large constant row makes no number; RMSNorm makes zeros of it."""
    return "GPT2" in llm.llm_engine.model_config.architecture


@pytest.mark.parametrize(
    ("action", "where"),
    [
        pytest.param(
            NOW, "an edit at 'resid_post' of layer 1 ('resid_pre' of layer 2) makes", id="at-once"
        ),
        pytest.param(
            Add(HUGE, site="resid_mid", layer=1, scale=2.0), "'resid_mid' of layer 1", id="middle"
        ),
        pytest.param(
            Add(HUGE, site="embed", scale=2.0),
            "an edit at 'embed' ('resid_pre' of layer 0) makes",
            id="embedding",
        ),
        pytest.param(LATER, "after the request's edits 'resid_post' of layer 2 has", id="later"),
        pytest.param(
            Add(HUGE, layer=0, tokens=[3]), "after the request's edits", id="one-position"
        ),
        pytest.param(
            Add(HUGE, layer=0, tokens="generated"), "after the request's edits", id="generated"
        ),
        pytest.param(
            Replace([HUGE], positions=[39], layer=0), "after the request's edits", id="replaced"
        ),
    ],
)
@pytest.mark.parametrize("max_tokens", long_except([1, 2, 8], 2))
def test_neighbours_and_those_who_come_later_are_as_without_it(llm, action, where, max_tokens):
    if "after" in where and not _norms_by_mean(llm):
        pytest.skip("this model's norms take any finite row")
    if max_tokens == 1 and "generated" in str(action):
        pytest.skip("nothing that is generated is processed")
    before = [_said(output) for output in _run(llm, PROMPTS, _params())]
    bad, *beside = _run(
        llm, [PROMPTS[0], *PROMPTS], [_params(action, max_tokens=max_tokens), *[_params()] * 3]
    )
    _failed(bad, where)
    assert [_said(output) for output in beside] == before
    for _ in range(4):  # all blocks are given out again
        after = _run(llm, PROMPTS, _params())
        assert [_said(output) for output in after] == before
    llm.reset_prefix_cache()
    assert [_said(output) for output in _run(llm, PROMPTS, _params())] == before


def test_the_same_edit_fails_again_and_finds_nothing_in_the_cache(llm):
    for _ in range(2):
        (bad,) = _run(llm, PROMPTS[:1], _params(NOW))
        _failed(bad, "an edit at 'resid_post' of layer 1")
        assert not bad.num_cached_tokens or bad.num_cached_tokens < BLOCK


def test_requests_with_the_same_edit_at_once_all_fail(llm):
    for output in _run(llm, [PROMPTS[0]] * 3, _params(NOW)):
        _failed(output, "an edit at 'resid_post' of layer 1")


def test_requests_that_share_the_kv_of_a_faulty_one_fail_with_it(llm):
    """They find its blocks in the prefix cache in the same step, and compute none of its rows."""
    one = _params(Add(HUGE, site="resid_post", layer=1, tokens=[3], scale=3e38))
    prompt = list(range(20, 90))
    for output in _run(llm, [prompt] * 3, one):
        _failed(output, "an edit at 'resid_post' of layer 1")
    for output in _run(llm, [prompt] * 2, [_params(MILD), _params()]):
        _said(output)


def test_kv_of_a_step_in_flight_leaves_the_prefix_cache_with_its_request(llm):
    """An abort while a step computes: whether it overflows is not known yet."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    assert llm.reset_prefix_cache()
    prompt = TokensPrompt(prompt_token_ids=list(range(20, 90)))
    engine.add_request("gone", prompt, _params(MILD))
    scheduler.schedule()  # whose output nobody computes
    cached = scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    assert len(cached)
    engine.abort_request(["gone"], internal=False)
    assert not len(cached)


def test_an_edit_below_the_end_of_the_range_is_done(llm):
    row = torch.zeros(128)
    row[5] = 1e37
    (output,) = _run(llm, PROMPTS[:1], _params(Add(row, layer=2), Read("resid_post", layer=2)))
    assert output.scope.status == "complete"
    assert (output.scope["resid_post", 2][:, 5] == 1e37).all()


def test_in_float16_a_unit_vector_at_a_large_scale_is_enough(llama):
    unit = [1.0] + [0.0] * 127
    with local_engine(llama, dtype="float16", **SMALL) as llm:
        before = [_said(output) for output in _run(llm, PROMPTS, _params())]
        action = Add(unit, layer=1, scale=1e5)
        bad, *beside = _run(llm, [PROMPTS[0], *PROMPTS], [_params(action), *[_params()] * 3])
        assert "not finite in float16" in bad.outputs[0].scope.error
        assert [_said(output) for output in beside] == before
        assert [_said(output) for output in _run(llm, PROMPTS, _params())] == before


@pytest.mark.long
def test_preempted_requests_leave_nothing_for_those_who_get_their_blocks(checkpoints):
    small = SMALL | {
        "num_gpu_blocks_override": 7,
        "max_num_seqs": 3,
        "enable_prefix_caching": False,
    }
    with local_engine(checkpoints("gpt2"), dtype="float32", **small) as llm:
        plain = [_params(max_tokens=60)] * 2
        prompts = [PROMPTS[1], PROMPTS[2]]
        before = [_said(output) for output in _run(llm, prompts, plain)]
        preempted = preempted_in(llm)
        late = _params(Add(HUGE, layer=0, tokens=[70]), max_tokens=60)
        *beside, bad = _run(llm, [*prompts, PROMPTS[0]], [*plain, late])
        assert preempted, "the cache was large enough; the test shows nothing"
        _failed(bad, "after the request's edits")
        assert [_said(output) for output in beside] == before
        assert [_said(output) for output in _run(llm, prompts, plain)] == before


def test_the_servers_edits_that_overflow_end_each_request_with_the_sentence(llm):
    llm.collective_rpc("scope_set_edits", args=(scope(NOW)["scope"],))
    try:
        (bad,) = _run(llm, PROMPTS[:1], _params())
        assert bad.outputs[0].finish_reason == "error"
        assert "an edit at 'resid_post' of layer 1" in str(bad.outputs[0].stop_reason)
    finally:
        llm.collective_rpc("scope_set_edits", args=(None,))
    _said(_run(llm, PROMPTS[:1], _params())[0])


@pytest.mark.long
def test_a_stream_ends_with_the_error_where_steps_overlap(checkpoints):
    """Under async scheduling, in processes of their own."""
    late = Add(HUGE, layer=0, tokens=[42])

    async def one(engine: Any, name: str, *actions: Any) -> list[Any]:
        params = _params(*actions, max_tokens=20)
        params.output_kind = RequestOutputKind.CUMULATIVE
        prompt = TokensPrompt(prompt_token_ids=PROMPTS[0])
        return [output async for output in engine.generate(prompt, params, name)]

    async def run() -> None:
        engine = async_engine(checkpoints("gpt2"), async_scheduling=True, **SMALL)
        try:
            plain = _said((await one(engine, "before"))[-1])
            for action in (NOW, late):
                results = await asyncio.gather(
                    one(engine, f"bad-{action.scale}", action), one(engine, f"ok-{action.scale}"),
                    return_exceptions=True,
                )  # fmt: skip
                assert isinstance(results[0], SpecError)
                assert "not finite in float32, so the request was ended" in str(results[0])
                assert _said(results[1][-1]) == plain
            for i in range(6):
                assert _said((await one(engine, f"after-{i}"))[-1]) == plain
        finally:
            engine.shutdown()

    asyncio.run(run())
    gc.collect()
    assert len(inbox()) == 0
