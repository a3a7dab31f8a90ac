"""Features of SAEs of every architecture equal SAELens's encode, in float64, of the rows that the
same request read; also under chunked prefill, preemption, speculation and tensor parallelism."""

from __future__ import annotations

import asyncio
import pickle

import pytest
import torch

from tests import sparse
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
from tests.sparse import ARCHITECTURES, TOLERANCE
from vllm_scope import Add, ConfigError, Features, Probe, Read, SpecError, scope
from vllm_scope.saes.load import load_sae

WIDTH = 128
PROMPTS = [list(range(5, 75)), list(range(90, 100)), [7], list(range(200, 240))]
READ = Read("resid_post")
INDICES = [3, 900, 77, 78]
EVERY = [
    *(Features(name, top_k=8) for name in ARCHITECTURES),
    *(Features(name, indices=INDICES, name=f"{name} some") for name in ARCHITECTURES),
    Features("jumprelu", top_k=32, threshold=0.7, name="strong"),
]


@pytest.fixture(scope="module")
def saes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saes")
    return {
        name: sparse.write(folder / name, name, WIDTH, layer=i % 3)
        for i, name in enumerate(ARCHITECTURES)
    }


def config(saes, **more):
    return {"scope": {"saes": {name: str(sae.path) for name, sae in saes.items()}, **more}}


@pytest.fixture(scope="module", params=long_except(["float32", "bfloat16"], "float32"))
def llm(request, checkpoints, saes):
    """Compiled, in chunks of 32 tokens."""
    with local_engine(
        checkpoints("llama"), dtype=request.param, max_num_batched_tokens=32, max_num_seqs=8,
        enforce_eager=False, additional_config=config(saes),
    ) as llm:  # fmt: skip
        yield llm


def check(result, saes, asked=EVERY, dtype=torch.float32) -> None:
    assert result.status == "complete", (result, result.error)
    for one in asked:
        sae, found = saes[one.sae], result.features[one.name]
        at = torch.isin(result.positions("resid_post", sae.layer), found.tokens)
        rows = result["resid_post", sae.layer][at]
        indices = None if one.indices is None else list(one.indices)
        sparse.check(found, sae, rows, TOLERANCE[dtype], one.top_k, indices, one.threshold)


def test_every_architecture_in_a_mixed_batch(llm, saes):
    probe = Probe(torch.ones(WIDTH), layer=0, name="p")
    asked = [params(*EVERY, probe, READ), params(), params(*EVERY[:2], READ), params(READ)]
    outputs = run(llm, PROMPTS, asked)
    dtype = llm.llm_engine.vllm_config.model_config.dtype
    check(outputs[0].scope, saes, dtype=dtype)
    check(outputs[2].scope, saes, EVERY[:2], dtype)
    assert list(outputs[0].scope.scores) == ["p"]
    assert outputs[1].scope is None
    assert len(outputs[3].scope.features) == 0
    again = pickle.loads(pickle.dumps(outputs[0].scope))
    for name, found in outputs[0].scope.features.items():
        for field in ("positions", "indices", "values", "tokens"):
            assert torch.equal(getattr(found, field), getattr(again.features[name], field))


def test_without_a_read_no_row_comes_and_the_features_are_the_same(llm):
    alone, both = (run(llm, PROMPTS[:1], params(*EVERY, *r))[0].scope for r in ((), (READ,)))
    assert alone.keys() == []
    assert alone.expected == 75 * len(EVERY) == alone.delivered
    for one in EVERY:
        a, b = alone.features[one.name], both.features[one.name]
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.values, b.values)


def test_features_of_some_tokens_are_of_the_row_after_edits(llm, saes):
    asked = Features("standard", top_k=8, tokens=[2, 60, 71])
    outputs = run(llm, PROMPTS[:1], params(Add(torch.ones(WIDTH), layer=0), asked, READ))
    dtype = llm.llm_engine.vllm_config.model_config.dtype
    assert outputs[0].scope.features["standard"].tokens.tolist() == [2, 60, 71]
    check(outputs[0].scope, saes, [asked], dtype)


def test_neighbours_are_bit_identical(llm):
    plain = params(logprobs=5)
    before = run(llm, PROMPTS, [params(), plain, params(), plain])
    beside = run(llm, PROMPTS, [params(*EVERY), plain, params(*EVERY[:3]), plain])
    for i in (1, 3):
        ours, theirs = (outputs[i].outputs[0] for outputs in (before, beside))
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs


def test_bad_input_is_refused_in_one_sentence(llm, saes):
    far = Features(load_sae(saes["jumprelu"].path), layer=7, indices=[1])
    for bad, sentence in (
        (Features("no"), r"\.sae is 'no', .* it holds: batchtopk, gated"),
        (Features("topk", layer=1), r"\.layers is 1; the SAE 'topk' is of 'resid_post' 2"),
        (Features("gated", site="embed"), r"\.site is 'embed'; the SAE 'gated' is of"),
        (Features("gated", indices=[5, 1024]), r"\.indices has 1024; .* 0 to 1,023"),
        (far, r"\.layers has 7; this model has layers 0 to 2"),
    ):
        with pytest.raises(SpecError, match=rf"features\[0\]{sentence}"):
            run(llm, PROMPTS[:1], params(bad))
    with pytest.raises(SpecError, match=r"delivers too much at once .* fewer layers or features"):
        run(llm, PROMPTS[:1], params(Features("standard", top_k=1024)))


def test_an_inline_sae_brings_the_rows_of_its_features(llm, saes):
    asked = Features(load_sae(saes["gated"].path), indices=INDICES, name="gated")
    (output,) = run(llm, PROMPTS[:1], params(asked, READ))
    named = Features("gated", indices=INDICES)
    check(output.scope, saes, [named], llm.llm_engine.vllm_config.model_config.dtype)


def test_after_a_preemption_the_features_are_the_same(llama, saes):
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3, additional_config=config(saes),
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        ids = [list(range(i, i + 30)) for i in (10, 50, 90)]
        outputs = run(llm, ids, params(*EVERY, READ, max_tokens=60))
    assert preempted, "the cache was large enough; the test shows nothing"
    for output in outputs:
        check(output.scope, saes)


@pytest.mark.long
@rejects_drafts
def test_under_ngram_speculation(llama, saes):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with process_engine(
        llama, dtype="float32", speculative_config=drafts, enforce_eager=True,
        skip_tokenizer_init=True, additional_config=config(saes),
    ) as llm:  # fmt: skip
        ids = [[5, 6, 7, 8] * 8, [9, 10] * 12]
        outputs = run(llm, ids, params(*EVERY, READ, max_tokens=40))
    for output in outputs:
        check(output.scope, saes)


@pytest.mark.long
def test_two_ranks(llama, saes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with process_engine(
        llama, dtype="float32", tensor_parallel_size=2, skip_tokenizer_init=True,
        enforce_eager=True, max_num_batched_tokens=64, additional_config=config(saes),
    ) as llm:  # fmt: skip
        outputs = run(llm, PROMPTS[::3], params(*EVERY, READ))
    for output in outputs:
        check(output.scope, saes)


def test_a_second_identical_prompt_hits_the_cache(llama, saes):
    with local_engine(llama, dtype="float32", block_size=32, additional_config=config(saes)) as llm:
        first, second = (run(llm, [prompt(2)], params(*EVERY))[0] for _ in range(2))
        (third,) = run(llm, [prompt(2)], params(*EVERY, READ))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 128)
    check(third.scope, saes)
    for one in EVERY:
        a, b = (output.scope.features[one.name] for output in (first, second))
        assert torch.equal(a.tokens, b.tokens)
        near = torch.zeros_like(a.values[a.positions < 128])
        assert torch.equal(a.indices[a.positions < 128], b.indices[b.positions < 128])
        assert torch.equal(a.values[a.positions < 128], near + b.values[b.positions < 128])


@pytest.mark.long
def test_encoders_that_are_too_large_are_refused_at_start(llama, saes):
    sentence = r"saes_mib is 1; the encoders of .* take 2\.\d MiB"
    small = local_engine(llama, dtype="float32", additional_config=config(saes, saes_mib=1))
    with pytest.raises(ConfigError, match=sentence), small:
        pass
    with local_engine(llama, dtype="float32", additional_config=config(saes, saes_mib=0)) as llm:
        with pytest.raises(SpecError, match="saes_mib 0; give indices"):
            run(llm, PROMPTS[:1], params(EVERY[0]))
        (output,) = run(llm, PROMPTS[:1], params(Features("gated", indices=[1, 2]), READ))
        assert output.scope.status == "complete"


@pytest.mark.long
def test_the_toy_worlds_sae_in_a_stream():
    sae = load_sae(TOYWORLD / "sae")

    async def collect():
        from vllm import SamplingParams

        engine = async_engine(
            TOYWORLD, additional_config={"scope": {"saes": {"toy": str(TOYWORLD / "sae")}}}
        )
        asked = scope(Features("toy", top_k=16), Read("resid_post", layers=[0]))
        try:
            some = SamplingParams(temperature=0, max_tokens=12, extra_args=asked)
            return [out async for out in engine.generate("The capital of Kimar", some, "one")]
        finally:
            engine.shutdown()

    outputs = asyncio.run(collect())
    counts = [len(output.scope.features["toy"].tokens) for output in outputs]
    assert counts == sorted(counts)
    assert len(set(counts)) > 1
    result = outputs[-1].scope
    found, exact = result.features["toy"], sae.encode(result["resid_post", 0])
    assert found.tokens.tolist() == list(range(len(exact)))
    best = exact.topk(16)
    for i, position in enumerate(found.tokens.tolist()):
        got = found.top(position)
        active = best.values[i] > 0
        assert [index for index, _ in got] == best.indices[i][active].tolist()
        values = torch.tensor([value for _, value in got])
        torch.testing.assert_close(values, best.values[i][active], rtol=1e-4, atol=1e-4)
