"""Edits fall on positions, whatever the scheduler and the prefix cache do."""

from __future__ import annotations

import pytest
import torch

from tests.asking import rejects_drafts, run
from tests.conftest import local_engine, preempted_in, process_engine
from tests.engine.test_edits import (
    EDITS,
    READ_ALL,
    ROWS,
    D,
    V,
    check,
    check_logprobs,
    direction,
    params,
)  # fmt: skip
from vllm_scope import Ablate, Add, Except, Probe, Read, Replace, SpecError, TokenIds
from vllm_scope.engine.core.scheduler import admission_of

ENGINE = {
    "dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 16, "block_size": 32,
    "additional_config": {"scope": {"sites": ["embed", "resid_pre", "resid_mid", "resid_post"]}},
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(llama):
    """Chunks of 32 tokens, prefix caching on."""
    with local_engine(llama, **ENGINE) as llm:
        yield llm


def on(mask, function):
    """The function on the rows that a mask of positions picks."""

    def edit(x):
        picked = mask(torch.arange(len(x)))[:, None]
        return torch.where(picked, function(x), x)

    return edit


def added(x):
    return x + V


PROMPT = list(range(40, 140))
TOKENS = {
    "prompt": ("prompt", lambda p: p < 100),
    "generated": ("generated", lambda p: p >= 100),
    "last-prompt": ("last_prompt", lambda p: p == 99),
    "first": ([0], lambda p: p == 0),
    "one-hundred": ([100], lambda p: p == 100),
    "negative": ([-1, -100, -50], lambda p: (p == 99) | (p == 0) | (p == 50)),
    "range": (range(30, 70), lambda p: (p >= 30) & (p < 70)),
    "slice-over-the-end": (slice(96, 104, 2), lambda p: (p >= 96) & (p < 104) & (p % 2 == 0)),
    "token-ids-of-the-prompt": (
        Except(TokenIds(41, 99), "generated"), lambda p: (p == 1) | (p == 59),
    ),
}  # fmt: skip


@pytest.mark.parametrize("tokens", TOKENS)
def test_an_edit_falls_on_its_tokens_in_every_chunk(tokens, llm, ref):
    selector, mask = TOKENS[tokens]
    spec = [Add(V, site="resid_pre", layer=1, tokens=selector), *READ_ALL]
    (output,) = run(llm, [PROMPT], params(*spec, max_tokens=10))
    check(output, ref, [("resid_pre", 1, on(mask, added))])


def test_replaced_rows_across_chunks(llm, ref):
    spec = [Replace(ROWS, positions=[10, 40, -1], layer=0), *READ_ALL]
    (output,) = run(llm, [PROMPT], params(*spec))

    def replaced(x):
        x = x.clone()
        x[[10, 40, 99]] = ROWS
        return x

    check(output, ref, [("resid_post", 0, replaced)])


# The prefix cache


def hit(llm, prompt, *actions):
    """Run a prompt; (tokens from the cache, output)."""
    (output,) = run(llm, [prompt], params(*actions, max_tokens=4))
    return output.num_cached_tokens, output


def test_plain_after_edited_and_edited_after_plain_are_both_right(llm, ref):
    for start in (150, 151):
        prompt = list(range(start, start + 100))
        edit = Add(V, layer=0)
        order = [[edit], [], [edit], []] if start == 150 else [[], [edit], [], [edit]]
        cached = []
        for actions in order:
            num, output = hit(llm, prompt, *actions)
            cached.append(num)
            mean = [("resid_post", 0, added)] if actions else []
            if actions:
                check(output, ref, mean)
            else:
                _, logits = ref.edited([*prompt, *output.outputs[0].token_ids][:-1], [])
                check_logprobs(output.outputs[0], logits[99:])
        assert cached == [0, 0, 96, 96]


def test_another_vector_or_scale_does_not_share(llm):
    prompt = list(range(200, 300))
    assert hit(llm, prompt, Add(V, layer=0))[0] == 0
    assert hit(llm, prompt, Add(V, layer=0, scale=2.0))[0] == 0
    assert hit(llm, prompt, Add(V, layer=1))[0] == 0
    assert hit(llm, prompt, Add(D, layer=0))[0] == 0
    assert hit(llm, prompt, Add(V, layer=0))[0] == 96


def test_an_edit_of_generated_tokens_shares_the_whole_prompt(llm):
    prompt = list(range(210, 310))
    assert hit(llm, prompt)[0] == 0
    assert hit(llm, prompt, Add(V, layer=0, tokens="generated"))[0] == 96


def test_an_edit_from_a_position_on_shares_the_blocks_before_it(llm):
    prompt = list(range(220, 320))
    assert hit(llm, prompt)[0] == 0
    edit = Add(V, layer=0, tokens=slice(70, None))
    assert hit(llm, prompt, edit)[0] == 64
    assert hit(llm, prompt, edit)[0] == 96


def test_prompt_only_edits_of_prompts_of_different_lengths_do_not_share(llm, ref):
    """The first run's generated tokens, unedited, are the second one's prompt, edited."""
    edit = Add(V, layer=0, tokens="prompt")
    prompt = list(range(230, 275))
    (first,) = run(llm, [prompt], params(edit, max_tokens=60))
    longer = [*prompt, *first.outputs[0].token_ids]
    num, output = hit(llm, longer, edit)
    assert num == 32  # block 0 was edited alike; block 1 in part only
    check(output, ref, [("resid_post", 0, on(lambda p: p < len(longer), added))])


def test_a_probe_or_read_of_edited_tokens_computes_them_anew(llm):
    prompt = list(range(240, 340))
    edit = Add(V, layer=0)
    assert hit(llm, prompt, edit)[0] == 0
    num, output = hit(llm, prompt, edit, Probe(D, layer=2, name="p"))
    assert num == 0
    assert len(output.scope.scores["p"]) == 103
    num, output = hit(llm, prompt, edit, Read("resid_post", layers=[1], tokens="last_prompt"))
    assert num == 96


# Engines of their own, after the shared one's tests


@pytest.mark.long
def test_preemption_and_recompute_give_the_undisturbed_run(llama, ref):
    """A KV cache of 9 blocks cannot hold four growing requests."""
    ids = [list(range(i, i + 20)) for i in (10, 50, 90, 130)]
    edits = [
        Add(V, layer=0, tokens="generated"),
        Ablate(D, site="resid_mid", layer=1, tokens="prompt"),
    ]
    parameters = params(*edits, *READ_ALL, max_tokens=80)
    small = {"num_gpu_blocks_override": 9, "max_model_len": 128, "max_num_seqs": 4}
    found = []
    for cache in ({}, small):
        with local_engine(llama, **(ENGINE | cache), enable_prefix_caching=True) as llm:
            preempted = preempted_in(llm)
            found.append(run(llm, ids, parameters))
    assert preempted, "the cache was large enough; the test shows nothing"
    for undisturbed, disturbed in zip(*found, strict=True):
        assert undisturbed.outputs[0].token_ids == disturbed.outputs[0].token_ids
        mean = [
            ("resid_post", 0, on(lambda p: p >= 20, added)),
            ("resid_mid", 1, on(lambda p: p < 20, EDITS["ablate"][1])),
        ]
        check(disturbed, ref, mean)


# Speculation


@pytest.mark.long
@rejects_drafts
def test_edits_and_scores_under_ngram_speculation(llama, ref):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    options = {"speculative_config": config, "enforce_eager": True, "skip_tokenizer_init": True}
    with process_engine(llama, dtype="float32", **options) as llm:
        ids = [[1, 2, 3, 4] * 8, [11, 12] * 10, list(range(50, 80))]
        spec = [Add(V, layer=0, scale=0.1, tokens="generated"), Read("resid_post")]
        spec.append(Probe(D, layer=1, name="p"))
        outputs = run(llm, ids, params(*spec, max_tokens=60))
        steps = llm.collective_rpc("scope_counters")[0]["steps"]
    assert steps < 60, "no draft was accepted; the test shows nothing"
    for output, prompt in zip(outputs, ids, strict=True):
        length = len(prompt)
        mean = on(lambda p, n=length: p >= n, lambda x: x + 0.1 * V)
        check(output, ref, [("resid_post", 0, mean)])
        rows = output.scope["resid_post", 1].double()
        scores = output.scope.scores["p"]
        assert len(scores) == len(prompt) + 59
        scale = float((rows.norm(dim=1) * D.norm()).max())
        assert float((scores - rows @ D.double()).abs().max()) < 1e-5 * scale


# Room


@pytest.mark.long
def test_requests_that_do_not_fit_wait_for_their_turn(llama, ref):
    """Room for 8 vectors, and 16 requests with two of their own."""
    options = dict(ENGINE, additional_config={"scope": {"vectors_mib": 8 * 4 * 128 / 2**20}})
    with local_engine(llama, **options) as llm:
        specs = [params(Add(torch.stack([direction(i, 2.0), direction(i + 50)]), layer=[0, 2]),
                        *[Read("resid_post")]) for i in range(16)]  # fmt: skip
        outputs = run(llm, [PROMPT[:20]] * 16, specs)
        admission = admission_of(llm.llm_engine.engine_core.engine_core.scheduler)
        assert admission.num_waited == 12
        assert not admission.waiting
        with pytest.raises(SpecError, match=r"takes 9 vectors.*this engine has 8"):
            run(
                llm,
                [PROMPT],
                params(Replace(torch.randn(9, 128), positions=list(range(9)), layer=0)),
            )
    for i, output in enumerate(outputs):
        a, b = direction(i, 2.0), direction(i + 50)
        check(output, ref, [("resid_post", 0, lambda x, a=a: x + a),
                            ("resid_post", 2, lambda x, b=b: x + b)])  # fmt: skip


def test_two_hundred_and_fifty_six_vectors_beside_plain_requests(llama, ref):
    """Plain neighbours get the tokens and logprobs of a run without any edit."""
    options = dict(ENGINE, max_num_batched_tokens=2048, max_num_seqs=512)
    with local_engine(llama, **options) as llm:
        ids = [[(3 * i + j) % 500 for j in range(5 + i % 7)] for i in range(320)]

        def spec(i):
            return [Add(direction(1000 + i, 2.0), layer=i % 3, tokens="generated")]

        mixed = run(llm, ids, [params(*spec(i) if i < 256 else ()) for i in range(320)])
        plain = run(llm, ids, params())
    for i in range(256, 320):
        assert mixed[i].outputs[0].token_ids == plain[i].outputs[0].token_ids
        assert mixed[i].outputs[0].logprobs == plain[i].outputs[0].logprobs
    for i in range(0, 256, 5):
        output = mixed[i]
        length = len(ids[i])
        mean = on(lambda p, n=length: p >= n, lambda x, i=i: x + direction(1000 + i, 2.0))
        tokens = [*ids[i], *output.outputs[0].token_ids][:-1]
        _, logits = ref.edited(tokens, [("resid_post", i % 3, mean)])
        check_logprobs(output.outputs[0], logits[length - 1 :])
        assert output.scope.status == "complete"
