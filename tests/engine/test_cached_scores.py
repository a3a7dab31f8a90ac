"""A request that only probes takes KV from the prefix cache as a plain one does, and has the scores
of all its tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.asking import rejects_drafts, run
from tests.conftest import local_engine, long_except, preempted_in, process_engine
from tests.engine import probing
from tests.engine.probing import READS, TOLERANCE, every_kind, numbers
from tests.engine.test_edits import params
from tests.engine.test_probes import CONFIG, widths
from tests.engine.test_verdicts import probe
from vllm_scope import Add, Probe, Read

BLOCK = 32


@pytest.fixture
def llm(llama):
    """In chunks of 64 tokens; a cache that nobody has filled."""
    with local_engine(
        llama, dtype="float32", max_num_batched_tokens=64, max_num_seqs=8, block_size=BLOCK,
        additional_config=CONFIG,
    ) as llm:  # fmt: skip
        yield llm


def prompt(seed: int, length: int = 150) -> list[int]:
    return np.random.default_rng(seed).integers(5, 400, length).tolist()


def same(first, second, most: int | None = None) -> None:
    """The scores of the tokens that both have, at most the first `most`."""
    assert second.status == "complete", (second, second.error)
    assert list(first.scores) == list(second.scores)
    for name in first.scores:
        ours, theirs = first.scores.positions(name), second.scores.positions(name)
        count = min(len(ours), len(theirs), most or len(ours))
        assert torch.equal(ours[:count], theirs[:count]), name
        torch.testing.assert_close(
            first.scores[name][:count], second.scores[name][:count], rtol=1e-3, atol=1e-4
        )


def test_a_second_identical_prompt_hits_the_cache_as_a_plain_one_does(llm):
    probes = every_kind(widths(llm))
    run(llm, [prompt(1)], params())
    (plain_again,) = run(llm, [prompt(1)], params())
    assert plain_again.num_cached_tokens == 128
    first, second, third = (run(llm, [prompt(2)], params(*probes))[0] for _ in range(3))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == third.num_cached_tokens == plain_again.num_cached_tokens
    same(first.scope, second.scope)
    same(first.scope, third.scope)
    assert len(second.scope.scores["deep"]) == 155
    # Against rows, which are computed anew.
    (exact,) = run(llm, [prompt(2)], params(*probes, *READS))
    assert exact.num_cached_tokens == 0
    probing.check(exact.scope, probes, TOLERANCE[torch.float32])
    same(exact.scope, second.scope)


def test_a_block_without_scores_is_computed_again(llm):
    probes = [Probe(numbers(1, 128), layer=1, name="p")]
    run(llm, [prompt(3)], params())
    (first,) = run(llm, [prompt(3)], params(*probes))
    assert first.num_cached_tokens == 0, "the KV is there, the scores are not"
    assert len(first.scope.scores["p"]) == 155
    longer = prompt(3) + prompt(4, 40)
    (second,) = run(llm, [longer], params(*probes))
    assert second.num_cached_tokens == 128
    same(first.scope, second.scope, 150)
    assert len(second.scope.scores["p"]) == 195


@pytest.mark.parametrize("max_tokens", long_except([43, 46, 60], 43))
def test_the_generated_tokens_of_one_turn_are_a_hit_of_the_next(llm, max_tokens):
    """With 43 tokens the last token that is computed fills a block. Requests that began together
    tell workers about their blocks in different steps, and most of them end before theirs."""
    asked = params(Probe(numbers(1, 128), layer=1, name="p"), max_tokens=max_tokens)
    firsts = run(llm, [prompt(seed) for seed in range(5, 13)], asked)
    turns = [
        prompt(5 + i) + list(f.outputs[0].token_ids) + prompt(i, 10) for i, f in enumerate(firsts)
    ]
    for first, second in zip(firsts, run(llm, turns, asked), strict=True):
        assert second.num_cached_tokens == (150 + max_tokens - 1) // BLOCK * BLOCK
        same(first.scope, second.scope)


@pytest.mark.long
def test_the_full_blocks_of_aborted_requests_are_hits_as_those_of_plain_ones_are(llm):
    engine, cached = llm.llm_engine, []
    probe = Probe(numbers(1, 128), layer=1, name="p")
    for seeds, asked in (
        (range(40, 48), params(max_tokens=90)), (range(50, 58), params(probe, max_tokens=90))
    ):  # fmt: skip
        for seed in seeds:
            engine.add_request(f"{seed}", {"prompt_token_ids": prompt(seed)}, asked)
        generated: dict[str, list[int]] = {f"{seed}": [] for seed in seeds}
        while min(map(len, generated.values())) < 43:  # a block ends at the 42nd
            for output in engine.step():
                generated[output.request_id] = list(output.outputs[0].token_ids)
        engine.abort_request(list(generated))
        turns = [prompt(seed) + generated[f"{seed}"][:43] + prompt(1, 10) for seed in seeds]
        found = run(llm, turns, asked)
        cached.append([one.num_cached_tokens for one in found])
        assert {one.scope.status for one in found if one.scope is not None} <= {"complete"}
    assert cached == [[192] * 8] * 2


def test_other_probes_never_get_these_scores(llm):
    one, other = ([Probe(numbers(i, 128), layer=1, name="p")] for i in (1, 2))
    (first,) = run(llm, [prompt(7)], params(*one))
    (second,) = run(llm, [prompt(7)], params(*other))
    assert second.num_cached_tokens == 0
    assert not torch.allclose(first.scope.scores["p"], second.scope.scores["p"])
    # The same weight elsewhere, and the same numbers in another order.
    for changed in (
        [Probe(numbers(1, 128), layer=2, name="p")],
        [Probe(numbers(1, 128), layer=1, site="resid_mid", name="p")],
        [*other, Probe(numbers(1, 128), layer=1, name="q")],
    ):
        (third,) = run(llm, [prompt(7)], params(*changed))
        assert third.num_cached_tokens == 0
    # A bias, an activation and an aggregate are made of the same numbers.
    (fourth,) = run(
        llm, [prompt(7)],
        params(Probe(numbers(1, 128), layer=1, name="q", bias=2.0, aggregate="max")),
    )  # fmt: skip
    assert fourth.num_cached_tokens == 128
    torch.testing.assert_close(fourth.scope.scores["q"], first.scope.scores["p"] + 2.0)
    assert float(fourth.scope.aggregates["q"][-1]) == float(fourth.scope.scores["q"].max())


def test_edited_tokens_have_scores_of_their_own(llm):
    probes = [Probe(numbers(1, 128), layer=1, name="p")]
    add = Add(numbers(9, 128), layer=0, scale=3.0)
    (plain,) = run(llm, [prompt(8)], params(*probes))
    first, second = (run(llm, [prompt(8)], params(add, *probes))[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 128
    same(first.scope, second.scope)
    assert not torch.allclose(plain.scope.scores["p"], second.scope.scores["p"])


@pytest.mark.long
def test_requests_that_read_or_pick_tokens_compute_theirs(llm):
    weight = numbers(1, 128)
    for actions in (
        [Probe(weight, layer=1, name="p"), Read("resid_post", layers=[1])],
        [Probe(weight, layer=1, name="p", tokens="prompt")],
        [Probe(weight, layer=1, name="p", tokens=[0, 20])],
    ):
        for _ in range(2):
            (output,) = run(llm, [prompt(10)], params(*actions))
            assert output.num_cached_tokens == 0
            assert output.scope.status == "complete"


def test_a_mixed_batch_of_hits_and_misses(llm):
    probes = every_kind({"resid_post": 128, "attn_out": 128})
    seen = [prompt(20 + i, 60 + 17 * i) for i in range(6)]
    before = run(llm, seen[:3], params(*probes))
    outputs = run(llm, seen, [params(*probes)] * 5 + [params()])
    for first, second in zip(before, outputs, strict=False):
        assert second.num_cached_tokens > 0
        same(first.scope, second.scope)
    for output in outputs[3:5]:
        assert output.scope.status == "complete"
        assert len(output.scope.scores["deep"]) == len(output.prompt_token_ids) + 5


def test_a_verdict_counts_cached_tokens(llm):
    flag = probe("max", 1e30, "flag", "all")
    (first,) = run(llm, [prompt(30)], params(flag))
    values = first.scope.aggregates["max"]
    at = int((values > float(values[20])).nonzero()[0])
    threshold = (float(values[at - 1]) + float(values[at])) / 2
    (second,) = run(llm, [prompt(30)], params(probe("max", threshold, "stop", "all")))
    assert second.num_cached_tokens == 128
    assert second.outputs[0].finish_reason == "stop"
    assert second.scope.verdicts["max"].position == at
    assert second.outputs[0].stop_reason.endswith(f" at position {at}")
    assert len(second.outputs[0].token_ids) <= 1


@pytest.mark.long
def test_preempted_requests_use_it_and_lose_nothing(llama):
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3, additional_config=CONFIG,
    ) as llm:  # fmt: skip
        probes = every_kind({"resid_post": 128})
        preempted = preempted_in(llm)
        ids = [list(range(i, i + 33)) for i in (10, 50, 90)]
        first = run(llm, ids, params(*probes, max_tokens=60))
        second = run(llm, ids, params(*probes, max_tokens=60))
    assert preempted, "the cache was large enough; the test shows nothing"
    for one, other in zip(first, second, strict=True):
        assert one.scope.status == "complete"
        same(one.scope, other.scope)


@pytest.mark.long
def test_memory_is_bounded_and_what_is_forgotten_is_computed_again(llama):
    """Room for scores of 100 tokens."""
    config = {"scope": CONFIG["scope"] | {"scores_mib": 100 * 16 / 2**20}}
    with local_engine(llama, dtype="float32", block_size=BLOCK, additional_config=config) as llm:
        probes = params(Probe(numbers(1, 128), layer=1, name="p"))
        first = [run(llm, [prompt(40 + i)], probes)[0] for i in range(3)]
        again = [run(llm, [prompt(40 + i)], probes)[0] for i in range(3)]
    for one, other in zip(first, again, strict=True):
        assert other.num_cached_tokens < 100
        same(one.scope, other.scope)


@pytest.mark.long
def test_without_memory_for_scores_nothing_is_kept(llama):
    config = {"scope": CONFIG["scope"] | {"scores_mib": 0}}
    with local_engine(llama, dtype="float32", block_size=BLOCK, additional_config=config) as llm:
        for _ in range(2):
            (output,) = run(llm, [prompt(50)], params(Probe(numbers(1, 128), layer=1, name="p")))
            assert output.num_cached_tokens == 0
            assert output.scope.status == "complete"


@pytest.mark.long
@rejects_drafts
def test_with_drafts_and_processes_of_its_own(llama):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with process_engine(
        llama, dtype="float32", speculative_config=config, enforce_eager=True,
        skip_tokenizer_init=True, block_size=BLOCK, additional_config=CONFIG,
    ) as llm:  # fmt: skip
        probes = every_kind({"resid_post": 128, "z": 128})
        (first,) = run(llm, [[3, 4, 5] * 20], params(*probes, max_tokens=80))
        turn = [3, 4, 5] * 20 + list(first.outputs[0].token_ids)
        (second,) = run(llm, [turn], params(*probes))
        (exact,) = run(llm, [turn], params(*probes, *READS))
    assert second.num_cached_tokens >= 96
    same(first.scope, second.scope)
    same(exact.scope, second.scope)


@pytest.mark.long
def test_two_sites_of_one_boundary_keep_their_own_scores(llm):
    """`resid_post` of layer 0 and `resid_pre` of layer 1 are the same row without edits."""
    probes = [
        Probe(numbers(1, 128), layer=0, name="a"),
        Probe(numbers(2, 128), site="resid_pre", layer=1, name="b"),
        Probe(numbers(1, 128), site="resid_pre", layer=1, name="c"),
    ]
    reads = [Read("resid_post", layers=[0]), Read("resid_pre", layers=[1])]
    first, second = (run(llm, [prompt(60)], params(*probes))[0] for _ in range(2))
    assert second.num_cached_tokens == 128
    same(first.scope, second.scope)
    (exact,) = run(llm, [prompt(60)], params(*probes, *reads))
    probing.check(exact.scope, probes, TOLERANCE[torch.float32])
    same(exact.scope, second.scope)
    edited = Add(numbers(9, 128), layer=0)
    (moved,) = run(llm, [prompt(60)], params(edited, *probes, *reads))
    probing.check(moved.scope, probes, TOLERANCE[torch.float32])


def test_after_a_reset_of_the_prefix_cache_no_old_score_is_delivered(llm):
    """vLLM resets it where the model's weights change."""
    asked = params(Probe(numbers(1, 128), layer=1, name="p"))
    run(llm, [prompt(61)], asked)
    assert llm.reset_prefix_cache()
    run(llm, [prompt(61)], params())
    (plain,) = run(llm, [prompt(61)], params())
    assert plain.num_cached_tokens == 128
    (after,) = run(llm, [prompt(61)], asked)
    assert after.num_cached_tokens == 0
    assert after.scope.status == "complete"
    (again,) = run(llm, [prompt(61)], asked)
    assert again.num_cached_tokens == 128
    same(after.scope, again.scope)


@pytest.mark.long
def test_scores_that_a_worker_lost_are_computed_again(llm, monkeypatch: pytest.MonkeyPatch):
    from vllm_scope.worker.score_store import ScoreStore

    asked = params(Probe(numbers(1, 128), layer=1, name="p"))
    with monkeypatch.context() as patch:
        patch.setattr(ScoreStore, "keep", lambda *_: None)
        (first,) = run(llm, [prompt(62)], asked)
    (missing,) = run(llm, [prompt(62)], asked)
    assert missing.scope.status == "incomplete"
    assert missing.scope.dropped == 128
    # The worker reports the loss while it goes on: requests in between may miss them as well, and
    # a late report may forget what was kept again since.
    answers = []
    while len(answers) < 20 and (not answers or answers[-1].num_cached_tokens == 0):
        answers += run(llm, [prompt(62)], asked)
        if answers[-1].scope.status == "incomplete":
            assert answers.pop().num_cached_tokens == 128
    *computed, cached = answers
    assert computed
    assert cached.num_cached_tokens == 128
    for answer in answers:
        assert answer.scope.status == "complete"
        same(first.scope, answer.scope)


@pytest.mark.long
def test_a_hit_that_is_larger_than_the_ring_is_delivered_in_pieces(llama):
    config = {"scope": CONFIG["scope"] | {"arena_mib": 0.6}}
    with local_engine(
        llama, dtype="float32", block_size=BLOCK, max_num_batched_tokens=64,
        additional_config=config,
    ) as llm:  # fmt: skip
        probes = params(*(Probe(numbers(i, 128), layer=1, name=str(i)) for i in range(600)))
        long = prompt(63, 480)
        first, second = (run(llm, [long], probes)[0] for _ in range(2))
    assert second.num_cached_tokens == 448
    assert second.scope.status == "complete"
    torch.testing.assert_close(first.scope.scores["599"], second.scope.scores["599"])
