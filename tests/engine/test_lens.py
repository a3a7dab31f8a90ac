"""A lens at the last layer is the model's own log-probabilities, and at other layers Hugging Face's
norm and unembedding of the row; also under chunked prefill, preemption and speculation."""

from __future__ import annotations

import asyncio
import pickle

import pytest
import torch

from tests.asking import params, rejects_drafts, run
from tests.checkpoints import NUM_LAYERS, reference
from tests.conftest import (
    TOYWORLD,
    async_engine,
    local_engine,
    long_except,
    preempted_in,
    process_engine,
)
from tests.lens import agree, check_last_layer, check_layers, log_probs
from tests.lenses import identity, random_lens
from vllm_scope import Add, ConfigError, LensTopK, Probe, Read, SpecError, scope
from vllm_scope.engine.core.scheduler import admission_of

FAMILIES = ["llama", "gemma2", "gemma3", "cohere2", "gpt2", "granite", "olmo2"]
LAST = NUM_LAYERS - 1
PROMPTS = [list(range(5, 75)), list(range(90, 100)), [7], list(range(200, 240))]
LOGPROBS = {"logprobs": 10, "prompt_logprobs": 10}
#: Of a log-probability.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def asked(*actions, **options):
    return params(scope(*actions), **options)


@pytest.mark.parametrize("family", long_except(FAMILIES, "llama", "gemma2"))
def test_the_last_layer_is_the_model_and_others_are_hugging_faces(family, checkpoints):
    path = checkpoints(family)
    with local_engine(path, dtype="float32", max_num_batched_tokens=32, max_num_seqs=8) as llm:
        outputs = run(llm, PROMPTS, asked(LensTopK(), **LOGPROBS))
    for output in outputs:
        found = output.scope.lens["lens"]
        assert list(found) == list(range(NUM_LAYERS))
        check_last_layer(output, found[LAST], TOLERANCE[torch.float32])
        check_layers(output.scope, found, reference(path, torch.float32), 2e-3)


#: Of three requests with a lens at each layer.
ROWS_RUNNING = 3 * 81 * NUM_LAYERS
#: `tuned` has no map of the last layer; it is of what enters a layer, which the one before leaves.
MAPPED = {
    "named": random_lens("named", range(NUM_LAYERS), 128),
    "tuned": random_lens("tuned", [1, 2], 128, residual=True, site="resid_pre"),
    "identity": identity(range(NUM_LAYERS), 128),
}


@pytest.fixture(scope="module")
def lenses(tmp_path_factory):
    """The operator's entries."""
    folder = tmp_path_factory.mktemp("lenses")
    digests = {name: one.save(folder / name) for name, one in MAPPED.items()}
    entries = {name: str(folder / name) for name in MAPPED}
    return entries | {"named": {"path": str(folder / "named"), "sha256": digests["named"]}}


@pytest.fixture(scope="module", params=long_except(["float32", "bfloat16"], "float32"))
def llm(request, llama, lenses):
    """Compiled, in chunks of 32 tokens."""
    with local_engine(
        llama, dtype=request.param, max_num_batched_tokens=32, max_num_seqs=8,
        enforce_eager=False, enable_prefix_caching=True,
        additional_config={"scope": {"lenses": lenses, "lens_rows_running": ROWS_RUNNING}},
    ) as llm:  # fmt: skip
        yield llm


def dtype_of(llm) -> torch.dtype:
    return llm.llm_engine.vllm_config.model_config.dtype


def test_in_a_mixed_batch_beside_reads_and_probes(llm):
    probe = Probe(torch.ones(128), layer=0, name="p")
    some = LensTopK(layers=[2, 0], top_k=3, tokens=[0, -1, 71], name="some")
    before = LensTopK(layers=[1], site="resid_pre", name="before")
    outputs = run(llm, PROMPTS, [
        asked(LensTopK(), some, before, probe, Read("resid_post"), **LOGPROBS), params(),
        asked(LensTopK(layers=[LAST]), **LOGPROBS), asked(Read("resid_post")),
    ])  # fmt: skip
    result = outputs[0].scope
    assert result.expected == result.delivered == 81 * (3 + 1 + 1 + 3) + 3 * 2
    assert "3 lenses" in repr(result)
    assert list(result.scores) == ["p"]
    assert len(result.features) == 0
    for output in (outputs[0], outputs[2]):
        check_last_layer(output, output.scope.lens["lens"][LAST], TOLERANCE[dtype_of(llm)])
    whole = result.lens["lens"]
    for layer in (0, 2):
        few = result.lens["some"][layer]
        assert few.positions.tolist() == [0, 69, 71]
        assert few.token_ids.shape == (3, 3)
        torch.testing.assert_close(
            few.log_probs, whole[layer].log_probs[few.positions, :3], rtol=0, atol=1e-5
        )
    torch.testing.assert_close(result.lens["before"][1].log_probs, whole[0].log_probs)
    again = pickle.loads(pickle.dumps(result)).lens["some"][2]
    assert torch.equal(again.log_probs, result.lens["some"][2].log_probs)
    assert outputs[1].scope is None
    assert len(outputs[3].scope.lens) == 0


def test_a_named_lens_maps_the_rows_of_each_layer_first(llm, llama):
    named, tuned = LensTopK(lens="named", name="a"), LensTopK(lens="tuned", name="b")
    outputs = run(llm, PROMPTS, [asked(named, tuned, Read("resid_post")), params(), asked(tuned),
                                 asked(LensTopK(), named)])  # fmt: skip
    result, dtype = outputs[0].scope, dtype_of(llm)
    assert result.status == "complete"
    assert list(result.lens["a"]) == [0, 1, 2]
    assert list(result.lens["b"]) == [0, 1]
    ref = reference(llama, dtype)
    for name, layer in (("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)):
        place = ("resid_post", layer) if name == "a" else ("resid_pre", layer + 1)
        rows = MAPPED["named" if name == "a" else "tuned"].map(result["resid_post", layer], place)
        exact, found = log_probs(ref, rows), result.lens[name][layer]
        assert len(found) == len(exact)
        for position in found.positions.tolist():
            wanted = dict(enumerate(exact[position].tolist()))
            agree(found.top(position), wanted, TOLERANCE[dtype])
    assert sorted(outputs[3].scope.lens) == ["a", "lens"]


def test_a_map_that_changes_nothing_is_the_plain_lens_bit_for_bit(llm):
    same = LensTopK(layer=1, lens="identity", name="same")
    result = run(llm, PROMPTS[:1], asked(LensTopK(layer=1), same))[0].scope
    plain, mapped = (result.lens[name][1] for name in ("lens", "same"))
    for field in ("positions", "token_ids", "log_probs"):
        assert torch.equal(getattr(plain, field), getattr(mapped, field))


def test_requests_wait_while_the_lenses_of_others_have_all_rows(llm):
    admission = admission_of(llm.llm_engine.engine_core.engine_core.scheduler)
    waited = admission.num_waited
    outputs = run(llm, [PROMPTS[0]] * 6, asked(LensTopK()))
    assert admission.num_waited == waited + 3
    assert admission.held.lens_rows == 0
    assert {output.scope.status for output in outputs} == {"complete"}


def test_the_row_is_that_after_edits(llm):
    push = Add(torch.linspace(-3, 3, 128), layer=LAST)
    outputs = run(llm, PROMPTS[:1], asked(push, LensTopK(layers=[LAST]), **LOGPROBS))
    check_last_layer(outputs[0], outputs[0].scope.lens["lens"][LAST], TOLERANCE[dtype_of(llm)])


def test_neighbours_are_bit_identical(llm):
    plain = params(logprobs=5)
    before = run(llm, PROMPTS, [params(), plain, params(), plain])
    beside = run(llm, PROMPTS, [asked(LensTopK()), plain, asked(LensTopK(top_k=40)), plain])
    for i in (1, 3):
        ours, theirs = (outputs[i].outputs[0] for outputs in (before, beside))
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs


def test_cached_tokens_keep_their_lens(llm):
    ids = [list(range(300, 450))]
    first, second = (run(llm, ids, asked(LensTopK()))[0] for _ in range(2))
    assert first.num_cached_tokens < 16 <= second.num_cached_tokens
    for layer, one in first.scope.lens["lens"].items():
        other = second.scope.lens["lens"][layer]
        cached = other.positions < second.num_cached_tokens
        assert torch.equal(one.positions, other.positions)
        assert torch.equal(one.log_probs[cached], other.log_probs[cached])
        torch.testing.assert_close(
            one.log_probs, other.log_probs, rtol=0, atol=TOLERANCE[dtype_of(llm)]
        )


def test_bad_input_is_refused_in_one_sentence(llm):
    for bad, sentence in (
        (LensTopK(layers=[3]), r"lens\[0\]\.layers has 3; this model has layers 0 to 2"),
        (LensTopK(site="resid_mid"), r"lens\[0\]\.site is 'resid_mid', which this engine does not"),
        (LensTopK(tokens=[500]), r"lens\[0\]\.tokens"),
        (LensTopK(to="disk"), r"lens\[0\]\.to is 'disk'; this engine has memory"),
        (LensTopK(lens="no"), r"lens\[0\]\.lens is 'no', .* it holds: identity, named, tuned"),
        (LensTopK(layers=[2], lens="tuned"), r"layers has 2; the lens 'tuned' .* at layers 0, 1"),
        (LensTopK(top_k=1024), r"delivers too much at once .* fewer layers or features"),
    ):
        with pytest.raises(SpecError, match=sentence):
            run(llm, PROMPTS[:1], asked(bad))


@pytest.mark.long
def test_an_engine_with_a_wrong_lens_does_not_start(llama, lenses, tmp_path):
    random_lens("small", [0], 64).save(tmp_path / "small")
    for entry, sentence in (
        ({"lenses": {"small": str(tmp_path / "small")}}, "small is of rows of 64 .* have 128"),
        (
            {"lenses": {"a": {"path": lenses["tuned"], "sha256": "0" * 64}}},
            "is another file: its SHA-256 is",
        ),
        (
            {"lenses": lenses, "lenses_mib": 0.1},
            r"lenses_mib is 0\.1; the maps of 'named', 'tuned'",
        ),
    ):
        engine = local_engine(llama, dtype="float32", additional_config={"scope": entry})
        with pytest.raises((ConfigError, SpecError), match=sentence), engine:
            pass


@pytest.mark.long
def test_after_a_preemption(llama):
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3,
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        ids = [list(range(i, i + 30)) for i in (10, 50, 90)]
        outputs = run(llm, ids, asked(LensTopK(), max_tokens=60, **LOGPROBS))
    assert preempted, "the cache was large enough; the test shows nothing"
    for output in outputs:
        check_last_layer(output, output.scope.lens["lens"][LAST], TOLERANCE[torch.float32])


@pytest.mark.long
@rejects_drafts
def test_under_ngram_speculation(llama, ref):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with process_engine(
        llama, dtype="float32", speculative_config=drafts, enforce_eager=True,
        skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        ids = [[5, 6, 7, 8] * 8, [9, 10] * 12]
        outputs = run(llm, ids, asked(LensTopK(), max_tokens=40, logprobs=10))
    for output in outputs:
        found = output.scope.lens["lens"]
        check_layers(output.scope, found, ref, 2e-3)
        assert len(found[0]) == len(output.prompt_token_ids) + 39


def test_two_pipeline_stages_apply_it_on_the_last(llama, ref, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with process_engine(
        llama, dtype="float32", pipeline_parallel_size=2, skip_tokenizer_init=True,
        enforce_eager=True,
    ) as llm:  # fmt: skip
        with pytest.raises(SpecError, match=r"layers has 0, .* only the last pipeline stage has"):
            run(llm, PROMPTS[:1], asked(LensTopK()))
        (output,) = run(llm, PROMPTS[:1], asked(LensTopK(layers=[LAST])))
    check_layers(output.scope, output.scope.lens["lens"], ref, 2e-3)


def test_the_toy_worlds_answer_rises_through_the_layers_of_a_stream():
    async def collect():
        from vllm import SamplingParams

        engine = async_engine(TOYWORLD)
        try:
            some = SamplingParams(temperature=0, max_tokens=8, extra_args=scope(LensTopK(top_k=5)))
            outputs = [o async for o in engine.generate("The capital of Ritova is", some, "one")]
            return outputs, engine.get_tokenizer()
        finally:
            engine.shutdown()

    outputs, tokenizer = asyncio.run(collect())
    counts = [len(output.scope.lens["lens"][5]) for output in outputs]
    assert counts == sorted(counts)
    assert len(set(counts)) > 1
    found = outputs[-1].scope.lens["lens"].decoded(tokenizer)
    last = len(outputs[-1].prompt_token_ids) - 1
    (answer, share), *_ = found[5].top(last)
    assert answer == outputs[-1].outputs[0].token_ids[0]
    assert found[0].top(last)[0][1] < share
    assert repr(tokenizer.decode([answer])).replace("'", "&#x27;") in found._repr_html_()
