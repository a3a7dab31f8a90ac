"""The sums of Moments equal those of the rows that the same requests read, summed in float64; under
chunked prefill, preemption, prefix caching, speculation, async scheduling and aborts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import vllm_scope
from tests.asking import rejects_drafts, run
from tests.conftest import (
    TOYWORLD,
    async_engine,
    local_engine,
    long_except,
    preempted_in,
    process_engine,
)
from tests.engine.test_cached_scores import prompt
from tests.engine.test_edits import params
from vllm_scope import Add, CapacityError, Moments, Probe, Read, SpecError, scope
from vllm_scope.analysis.moments import lda_probe, ridge_probe
from vllm_scope.batch.sums import Sums
from vllm_scope.engine.moments import drop_moments_of_async, moments_of_async

WIDTH = 128
CONFIG: dict[str, Any] = {"scope": {"moments_mib": 64}}
PROMPTS = [list(range(5, 75)), list(range(90, 100)), [7], list(range(200, 240))]
READ = Read("resid_post")


def selected(tokens: Any, positions: np.ndarray, num_prompt: int) -> np.ndarray:
    if isinstance(tokens, list):
        return np.isin(positions, tokens)
    return {
        "all": positions >= 0,
        "prompt": positions < num_prompt,
        "generated": positions >= num_prompt,
        "last_prompt": positions == num_prompt - 1,
    }[tokens]


def expected(asked: Iterable[tuple[Moments, Any]]) -> dict[tuple[str, int, str], Sums]:
    """The sums of (action, output), of the rows that each output has."""
    found: dict[tuple[str, int, str], Sums] = {}
    for action, output in asked:
        result = output.outputs[0].scope
        assert result.status == "complete", (result, result.error)
        words = getattr(action.tokens, "word", None)
        tokens = words if words is not None else list(action.tokens.positions)
        layers = range(3) if action.layers == "all" else action.layers
        for layer in layers:
            positions = result.positions(action.site, layer).numpy()
            at = selected(tokens, positions, len(output.prompt_token_ids))
            rows = result[action.site, layer].double().numpy()[at]
            y = action.target
            one = Sums(
                len(rows), rows.sum(0),
                rows.T @ rows if action.covariance else None,
                None if y is None else y * rows.sum(0),
                0.0 if y is None else y * len(rows), 0.0 if y is None else y * y * len(rows),
            )  # fmt: skip
            if len(rows):
                key = (action.site, layer, action.by)
                found[key] = found[key] + one if key in found else one
    return found


def same(found, wanted, tolerance: float = 1e-5) -> None:
    assert set(found) == set(wanted)
    for key, ours in found.items():
        theirs = wanted[key]
        assert ours.count == theirs.count, (key, ours.count, theirs.count)
        assert ours.missing == 0
        for name in ("x", "xx", "xy"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a is None) == (b is None), (key, name)
            if a is not None:
                # Of the sum's size: some sums of signed numbers are near 0.
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())
        np.testing.assert_allclose((ours.y, ours.yy), (theirs.y, theirs.yy), rtol=1e-12)


def asked_of(llm, ids, actions, **options):
    """Run requests with these Moments and a read; returns (action, output) of each."""
    outputs = run(llm, ids, [params(*some, READ, **options) for some in actions])
    return [
        (one, output)
        for some, output in zip(actions, outputs, strict=True)
        for one in some
        if isinstance(one, Moments)
    ]


@pytest.fixture(scope="module", params=long_except(["float32", "bfloat16"], "float32"))
def llm(request, checkpoints):
    """Compiled, in chunks of 32 tokens."""
    with local_engine(
        checkpoints("llama"), dtype=request.param, max_num_batched_tokens=32, max_num_seqs=8,
        enforce_eager=False, additional_config=CONFIG,
    ) as llm:  # fmt: skip
        yield llm


@pytest.fixture(autouse=True)
def no_sums(request):
    yield
    if "llm" in request.fixturenames:
        for name in ("moments", "other"):
            vllm_scope.drop_moments(request.getfixturevalue("llm"), name)


def test_labels_layers_and_targets_in_a_mixed_batch_of_chunks(llm):
    def of(by, y, tokens="all", layers="all"):
        return Moments(layers=layers, by=by, target=y, tokens=tokens)

    actions = [
        [of("a", 0.5), Probe(np.ones(WIDTH), layer=0, name="p")],
        [of("b", -2.0, "generated", [1, 2])],
        [of("a", 1.0, "prompt")],
        [of("b", 0.0, [0, 33, 36, 41], [0])],
    ]
    asked = asked_of(llm, PROMPTS, actions)
    same(vllm_scope.moments(llm), expected(asked))
    again = asked_of(llm, PROMPTS[::-1], actions)
    found, wanted = vllm_scope.moments(llm), expected(asked + again)
    same(found, wanted)
    # A probe made of the sums is that of the rows.
    for made in (
        lambda sums: ridge_probe(sums, ("resid_post", 1)),
        lambda sums: lda_probe(sums, ("resid_post", 1), "a", "b", shrinkage=0.1),
    ):
        ours, theirs = made(found), made(wanted)
        near = 1e-4 * np.abs(theirs.weight).max()
        np.testing.assert_allclose(ours.weight, theirs.weight, rtol=1e-4, atol=near)
        np.testing.assert_allclose(ours.bias, theirs.bias, rtol=1e-4)


def test_two_names_without_covariance_and_other_selectors_of_one_request(llm):
    some = [
        Moments(name="moments", covariance=False, tokens="all"),
        Moments(name="other", layers=[1], tokens="last_prompt", by="last"),
    ]
    asked = asked_of(llm, PROMPTS, [some] * 4)
    same(vllm_scope.moments(llm), expected(pair for pair in asked if pair[0].name == "moments"))
    same(
        vllm_scope.moments(llm, "other"),
        expected(pair for pair in asked if pair[0].name == "other"),
    )


def test_tokens_of_several_layouts_in_one_step_are_all_added(llm):
    """Some tokens also deliver a score, so that they have another layout than those around them."""
    probe = Probe(np.ones(WIDTH), layer=1, name="p", tokens=[2, 50])
    asked = asked_of(llm, PROMPTS[:1], [[Moments(), probe]])
    same(vllm_scope.moments(llm), expected(asked))


def test_without_a_read_the_sums_are_the_same_and_nothing_is_delivered(llm):
    both = expected(asked_of(llm, PROMPTS, [[Moments()]] * 4))
    vllm_scope.drop_moments(llm)
    probe = Probe(np.ones(WIDTH), layer=0, name="p")
    outputs = run(llm, PROMPTS, [*[params(Moments())] * 3, params(Moments(), probe)])
    for output in outputs[:3]:
        assert output.scope.status == "complete"
        assert output.scope.keys() == []
        assert output.scope.expected == output.scope.delivered == 0
    assert len(outputs[3].scope.scores["p"]) == 45
    same(vllm_scope.moments(llm), both)


def test_rows_are_those_after_the_requests_edits(llm):
    edits = [Add(np.ones(WIDTH) * (i + 1), layer=0) for i in range(4)]
    asked = asked_of(
        llm, PROMPTS, [[edit, Moments(by="ab"[i % 2])] for i, edit in enumerate(edits)]
    )
    same(vllm_scope.moments(llm), expected(asked))


def test_a_prompt_in_the_prefix_cache_is_computed_anew(llama):
    with local_engine(llama, dtype="float32", block_size=32, additional_config=CONFIG) as llm:
        run(llm, [prompt(2)], params())
        (output,) = run(llm, [prompt(2)], params())
        assert output.num_cached_tokens == 128
        with pytest.raises(SpecError, match="no sums called 'moments'; this engine has: none"):
            vllm_scope.moments(llm)
        asked = [pair for _ in range(2) for pair in asked_of(llm, [prompt(2)], [[Moments()]])]
        run(llm, [prompt(2)], params(Moments(tokens="generated")))
        found = vllm_scope.moments(llm)
    assert found["resid_post", 0, "all"].count == 2 * 155 + 5
    more = expected([(Moments(tokens="generated"), asked[0][1])])
    same(found, {key: one + more[key] for key, one in expected(asked).items()})


@pytest.mark.long
def test_after_a_preemption_each_position_counts_once(llama):
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3, additional_config=CONFIG,
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        ids = [list(range(i, i + 30)) for i in (10, 50, 90)]
        asked = asked_of(llm, ids, [[Moments(by=by)] for by in "aba"], max_tokens=60)
        found = vllm_scope.moments(llm)
    assert preempted, "the cache was large enough; the test shows nothing"
    same(found, expected(asked))


@pytest.mark.long
def test_steps_that_are_drained_tap_by_tap(llama):
    """The arena holds the rows of one tap of the largest step, and not of two; what is computed
    again after a preemption comes in other parts."""
    config = {"scope": {"moments_mib": 64, "arena_mib": 1.5 * 64 * 512 / 2**20}}
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3, max_num_batched_tokens=64, additional_config=config,
    ) as llm:  # fmt: skip
        assert llm.collective_rpc("scope_describe")[0]["arena_mib"] < 0.05
        preempted = preempted_in(llm)
        ids = [list(range(i, i + 30)) for i in (10, 50, 90)]
        asked = asked_of(llm, ids, [[Moments(by=by, target=1.5)] for by in "aba"], max_tokens=60)
        found = vllm_scope.moments(llm)
    assert preempted, "the cache was large enough; the test shows nothing"
    same(found, expected(asked))


@pytest.mark.long
@rejects_drafts
@pytest.mark.parametrize("eager", [True, False])
def test_rejected_drafts_are_not_added(llama, eager):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with process_engine(
        llama, dtype="float32", speculative_config=drafts, enforce_eager=eager,
        skip_tokenizer_init=True, additional_config=CONFIG,
    ) as llm:  # fmt: skip
        ids = [[5, 6, 7, 8] * 8, [9, 10] * 12]
        asked = asked_of(llm, ids, [[Moments(by=by)] for by in "ab"], max_tokens=40)
        same(vllm_scope.moments(llm), expected(asked))


@pytest.mark.long
def test_async_scheduling_adds_no_row_past_the_end():
    """Requests stop at a token while the next step is computed already."""

    async def go():
        from vllm import SamplingParams

        engine = async_engine(TOYWORLD, dtype="float32", additional_config=CONFIG)
        read = Read("resid_post", layers=[1, 4])

        async def one(i, stops, by, tokens="all"):
            action = Moments(layers=[1, 4], by=by, tokens=tokens)
            some = SamplingParams(
                temperature=0, max_tokens=24, stop_token_ids=stops, extra_args=scope(action, read)
            )
            async for output in engine.generate(f"The capital of Kimar {i}", some, f"{by}{i}"):
                last = output
            return action, last

        async def aborted(i):
            some = SamplingParams(
                temperature=0, max_tokens=64, ignore_eos=True,
                extra_args=scope(Moments(layers=[1], name="aborted"), read),
            )  # fmt: skip
            count = 0
            async for output in engine.generate("The capital of Kimar", some, f"abort{i}"):
                count = len(output.outputs[0].token_ids)
                if count > 6:
                    break
            await engine.abort(f"abort{i}")
            return len(output.prompt_token_ids), count

        try:
            plain = [await one(i, [], "plain") for i in range(2)]
            third = [list(out.outputs[0].token_ids)[5] for _, out in plain]
            stopped = await asyncio.gather(
                *(one(i, [third[i % 2]], f"l{i % 2}", "generated" if i % 3 else "all")
                  for i in range(6))
            )  # fmt: skip
            found = await moments_of_async(engine, "moments")
            seen = await asyncio.gather(*(aborted(i) for i in range(3)))
            # The next request's steps carry what the aborted ones have accepted.
            await one(0, [], "plain")
            of_aborted = await moments_of_async(engine, "aborted")
            dropped = await drop_moments_of_async(engine, "moments")
            return plain, stopped, found, seen, of_aborted, dropped
        finally:
            engine.shutdown()

    plain, stopped, found, seen, of_aborted, dropped = asyncio.run(go())
    assert {out.outputs[0].finish_reason for _, out in stopped} == {"stop"}
    same(found, expected([*plain, *stopped]))
    # Tokens of an aborted request count as far as the scheduler had accepted them.
    (count,) = {one.count for one in of_aborted.values()}
    assert sum(p + n - 1 for p, n in seen) <= count <= sum(p + 63 for p, _ in seen)
    assert dropped


def test_what_does_not_fit_is_refused_and_dropping_makes_room(llama):
    # One place with covariance: 128 * (8 * 128 + 256 * 4) + 8 * 128 bytes, 0.251 MiB.
    config = {"scope": {"moments_mib": 0.8}}
    with local_engine(llama, dtype="float32", additional_config=config) as llm:
        run(llm, PROMPTS[:1], params(Moments()))
        with pytest.raises(CapacityError, match=r"0\.3 MiB .* sums of 'moments' take 0\.8 of 0\.8"):
            run(llm, PROMPTS[:1], params(Moments(layers=[0], by="other")))
        with pytest.raises(SpecError, match=r"moments\[0\] is called 'moments', and the sums of"):
            run(llm, PROMPTS[:1], params(Moments(covariance=False)))
        four = [Moments(), Moments(layers=[0], by="b")]
        with pytest.raises(SpecError, match=r"take 1\.0 MiB of the device; this engine has 0\.8"):
            run(llm, PROMPTS[:1], params(*four))
        # Those that were refused have left nothing behind.
        run(llm, PROMPTS[:1], params(Moments()))
        found = vllm_scope.moments(llm)
        assert {one.count for one in found.values()} == {2 * 75}
        assert vllm_scope.drop_moments(llm)
        assert not vllm_scope.drop_moments(llm)
        run(llm, PROMPTS[:1], params(Moments(layers=[0], by="other", covariance=False)))
        with pytest.raises(SpecError, match="no sums called 'misspelt'; this engine has: 'mom"):
            vllm_scope.moments(llm, "misspelt")
        (one,) = vllm_scope.moments(llm).values()
        assert (one.count, one.xx) == (75, None)
    none = pytest.raises(SpecError, match=r"this engine has 0\.0 \(additional_config")
    with local_engine(llama, dtype="float32") as llm, none:
        run(llm, PROMPTS[:1], params(Moments()))
