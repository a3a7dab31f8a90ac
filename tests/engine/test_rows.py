"""Exactly one right row per position, whatever the scheduler does with a request.

Engines live in this process (two seconds each) on a random float32 checkpoint, so
that a row of the wrong token, layer or step is far off its reference.
"""

from __future__ import annotations

import pytest
import torch

from tests.asking import check, counters, params, rejects_drafts, run
from tests.conftest import local_engine, preempted_in, process_engine
from vllm_scope import Except, Read, TokenIds, Union, scope

READ_ALL = scope(Read("resid_post"), Read("embed"))


@pytest.fixture(scope="module")
def llm(llama):
    """Chunks of 32 tokens, prefix caching on."""
    with local_engine(
        llama, dtype="float32", max_num_batched_tokens=32, max_num_seqs=16, block_size=32
    ) as llm:
        yield llm


def test_chunked_prefill(llm, ref):
    outputs = run(llm, [range(5, 205), range(300, 410), [9, 8, 7]], params(READ_ALL))
    check(outputs, ref)


def test_prefix_cache_hit_gives_the_reader_all_rows_and_plain_requests_still_hit(llm, ref):
    prompt = list(range(40, 140))
    run(llm, [prompt], params())
    (plain,) = run(llm, [prompt], params())
    assert plain.num_cached_tokens == 96
    (reading,) = run(llm, [prompt], params(READ_ALL))
    assert reading.num_cached_tokens == 0
    check([reading], ref)
    (plain,) = run(llm, [prompt], params())
    assert plain.num_cached_tokens == 96


def test_a_read_of_late_positions_keeps_the_hit_below_them(llm, ref):
    prompt = list(range(140, 240))
    run(llm, [prompt], params())
    spec = scope(Read("resid_post", layers=[1], tokens=[50, 99]))
    (output,) = run(llm, [prompt], params(spec))
    assert output.num_cached_tokens == 32
    assert output.scope.status == "complete"
    assert output.scope.positions("resid_post", 1).tolist() == [50, 99]
    expected = ref.streams(prompt)[2][[50, 99]]
    torch.testing.assert_close(output.scope["resid_post", 1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "positions"),
    [
        pytest.param("prompt", range(20), id="prompt"),
        pytest.param("generated", range(20, 31), id="generated"),
        pytest.param("last_prompt", [19], id="last-prompt"),
        pytest.param("last", [30], id="last"),
        pytest.param([0, -1, 25], [0, 19, 25], id="positions"),
        pytest.param(slice(18, 30, 4), [18, 22, 26], id="slice"),
        pytest.param(TokenIds(7, 11), [7, 11], id="token-ids"),
        pytest.param(Union("last_prompt", "last"), [19, 30], id="union"),
        pytest.param(Except("prompt", [0, 1]), range(2, 20), id="except"),
    ],
)
def test_selectors_pick_their_tokens(tokens, positions, llm, ref):
    # Token ids equal positions, so that TokenIds has a plain answer in the prompt.
    prompt = list(range(20))
    (output,) = run(llm, [prompt], params(scope(Read("resid_post", layers=[2], tokens=tokens))))
    ids = prompt + list(output.outputs[0].token_ids)
    if isinstance(tokens, TokenIds):
        positions = [i for i, t in enumerate(ids[:-1]) if t in tokens.ids]
    result = output.scope
    assert result.status == "complete"
    assert result.positions("resid_post", 2).tolist() == list(positions)
    expected = ref.streams(ids[:-1])[3][list(positions)]
    torch.testing.assert_close(result["resid_post", 2], expected, rtol=1e-4, atol=1e-4)


def test_reads_with_different_tokens_in_one_request(llm, ref):
    spec = scope(
        Read("resid_post", layers=[0], tokens="last_prompt"),
        Read("resid_post", layers=[0, 2], tokens="generated"),
        Read("resid_pre", layers=[1], tokens=[3]),
    )
    (output,) = run(llm, [range(30, 70)], params(spec))
    positions = {s: output.scope.positions(*s).tolist() for s in output.scope.keys()}
    assert positions == {
        ("resid_post", 0): list(range(39, 51)),
        ("resid_post", 2): list(range(40, 51)),
        ("resid_pre", 1): [3],
    }
    streams = ref.streams([*range(30, 70), *output.outputs[0].token_ids][:-1])
    torch.testing.assert_close(output.scope["resid_pre", 1], streams[1][[3]], rtol=1e-4, atol=1e-4)


def test_one_token_and_one_prompt_token(llm, ref):
    for prompt, most in (([5], 1), ([5, 6, 7], 1), ([5], 4)):
        (output,) = run(llm, [prompt], params(READ_ALL, max_tokens=most))
        check([output], ref)


def test_every_completion_of_n_has_its_own_rows(llm, ref):
    (output,) = run(llm, [range(60, 100)], params(READ_ALL, n=3, temperature=1.0, max_tokens=10))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    check([output], ref)
    with pytest.raises(Exception, match=r"3 completions; use output\.outputs\[i\]\.scope"):
        _ = output.scope


def test_sixty_four_mixed_requests_half_of_them_plain(llm, ref):
    ids = [list(range(i, i + 3 + i % 37)) for i in range(64)]
    parameters = [params(READ_ALL if i % 2 else None, max_tokens=1 + i % 9) for i in range(64)]
    outputs = run(llm, ids, parameters)
    for i, output in enumerate(outputs):
        if i % 2:
            check([output], ref)
        else:
            assert output.scope is None


def test_sampling_params_are_not_changed_and_can_be_reused(llm, ref):
    parameters = params(READ_ALL)
    before = repr(parameters)
    for _ in range(2):
        for output in run(llm, [[4, 5, 6], range(20)], parameters):
            check([output], ref)
    assert repr(parameters) == before


def test_preemption_and_recompute(llama, ref):
    """A KV cache of 9 blocks cannot hold four growing requests."""
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=9, block_size=32,
        max_model_len=128, max_num_seqs=4, enable_prefix_caching=True,
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        ids = [list(range(i, i + 20)) for i in (10, 50, 90, 130)]
        outputs = run(llm, ids, params(READ_ALL, max_tokens=80))
    assert preempted, "the cache was large enough; the test shows nothing"
    check(outputs, ref)


@rejects_drafts
def test_ngram_speculation_with_rejected_drafts(llama, ref):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with process_engine(
        llama, dtype="float32", speculative_config=config, enforce_eager=True,
        skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        ids = [[1, 2, 3, 4] * 8, [11, 12] * 10, list(range(50, 80))]
        outputs = run(llm, ids, params(READ_ALL, max_tokens=60))
        steps = counters(llm)["steps"]
    assert steps < 60, "no draft was accepted; the test shows nothing"
    check(outputs, ref)


def test_steps_larger_than_the_arena_are_drained_tap_by_tap(llama, ref):
    """0.4 MiB holds one tap of a 512-token step, not five."""
    with local_engine(
        llama, dtype="float32", max_num_batched_tokens=512,
        additional_config={"scope": {"arena_mib": 0.4}},
    ) as llm:  # fmt: skip
        outputs = run(llm, [range(500), range(300, 350), range(5, 9)], params(READ_ALL))
    check(outputs, ref)


def test_configured_layers_only(llama, ref):
    from vllm_scope import SpecError

    options = {"scope": {"sites": ["resid_post"], "layers": [1]}}
    with local_engine(llama, dtype="float32", additional_config=options) as llm:
        # One more, at which edited requests are checked.
        assert llm.collective_rpc("scope_describe")[0]["taps_here"] == [4, 6]
        (output,) = run(llm, [range(10)], params(scope(Read("resid_post"))))
        assert output.scope.keys() == [("resid_post", 1)]
        check([output], ref)
        with pytest.raises(SpecError, match="does not tap 'resid_post' there"):
            run(llm, [range(10)], params(scope(Read("resid_post", layers=[0]))))
        with pytest.raises(SpecError, match="does not tap 'resid_post' there"):
            run(llm, [range(10)], params(scope(Read("resid_post", layers=[2]))))
        with pytest.raises(SpecError, match="'embed', which this engine does not tap"):
            run(llm, [range(10)], params(scope(Read("embed"))))
