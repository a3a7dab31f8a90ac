"""Scores of every kind of probe, at every site, equal float64 on the rows that a request read."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from tests.asking import rejects_drafts, run
from tests.conftest import async_engine, local_engine, long_except, preempted_in, process_engine
from tests.engine import probing
from tests.engine.probing import AGGREGATES, READS, SITES, TOLERANCE, every_kind, numbers
from tests.engine.test_edits import params
from vllm_scope import Add, Mlp, Probe, Read, scope

CONFIG = {"scope": {"sites": ["embed", *SITES]}}
PROMPTS = [list(range(5, 75)), list(range(90, 100)), [7], list(range(200, 240))]


def widths(llm) -> dict[str, int]:
    sites = llm.collective_rpc("scope_describe")[0]["sites"]
    heads = sites["heads"]
    inner = {
        site: heads["num_heads" if site in "qz" else "num_kv_heads"]
        * heads["head_size" if site in "qk" else "head_size_v"]
        for site in ("q", "k", "v", "z")
    }
    return {site: inner.get(site, sites["hidden_size"]) for site in SITES}


@pytest.fixture(scope="module", params=long_except(["float32", "bfloat16"], "float32"))
def llm(request, checkpoints):
    """Compiled, in chunks of 32 tokens."""
    with local_engine(
        checkpoints("qwen3"), dtype=request.param, max_num_batched_tokens=32, max_num_seqs=8,
        enforce_eager=False, additional_config=CONFIG,
    ) as llm:  # fmt: skip
        yield llm


def tolerance(llm) -> float:
    return TOLERANCE[llm.llm_engine.vllm_config.model_config.dtype]


def test_every_kind_at_every_site_in_a_mixed_batch(llm):
    probes = every_kind(widths(llm))
    asked = [params(*probes, *READS), params(), params(*probes[:3], *READS), params(*READS)]
    outputs = run(llm, PROMPTS, asked)
    probing.check(outputs[0].scope, probes, tolerance(llm))
    probing.check(outputs[2].scope, probes[:3], tolerance(llm))
    assert len(outputs[0].scope.scores) == len(probes)
    assert outputs[1].scope is None
    assert len(outputs[3].scope.scores) == 0


def test_without_a_read_no_row_comes_and_the_scores_are_the_same(llm):
    probes = every_kind(widths(llm))
    alone, both = (run(llm, PROMPTS[:1], params(*probes, *reads))[0].scope for reads in ((), READS))
    assert alone.keys() == []
    for probe in probes:
        assert torch.equal(alone.scores[probe.name], both.scores[probe.name]), probe.name


def test_probes_of_some_tokens(llm):
    asked = {"generated": range(70, 75), "last": [74], (0, 3, 41): [0, 3, 41]}
    for tokens, wanted in asked.items():
        probes = every_kind(widths(llm), tokens if isinstance(tokens, str) else list(tokens))
        (output,) = run(llm, PROMPTS[:1], params(*probes, *READS))
        probing.check(output.scope, probes, tolerance(llm))
        assert output.scope.scores.positions("deep").tolist() == list(wanted)


def test_a_score_is_of_the_row_after_the_edits_of_its_site(llm):
    width = widths(llm)["resid_post"]
    probe = Probe(numbers(1, width), layer=1, name="p")
    edit = Add(numbers(2, width), layer=1)
    reads = [Read("resid_post", layers=[1], when=when) for when in ("before", "after")]
    (output,) = run(llm, PROMPTS[:1], params(edit, probe, *reads))
    probing.check(output.scope, [probe], tolerance(llm))


def test_a_probe_at_a_site_without_a_tap_or_of_another_width_is_refused(llm):
    width = widths(llm)["q"]
    for weight, layer, sentence in (
        (width + 1, 0, rf"weight has {width + 1} numbers; rows of 'q' have {width}"),
        (width, 9, "this model has layers 0 to 2"),
    ):
        probe = Probe(numbers(1, weight), site="q", layer=layer, name="p")
        with pytest.raises(Exception, match=sentence):
            run(llm, PROMPTS[:1], params(probe))


@pytest.mark.long
@pytest.mark.parametrize("chunk", [16, 64])
def test_aggregates_do_not_depend_on_chunks(chunk, llama):
    prompt = list(range(5, 205))
    probes = [
        Probe(numbers(i, 128), layer=1, name=str(i), aggregate=kind)
        for i, kind in enumerate(AGGREGATES)
    ]
    found = {}
    for size in (512, chunk):
        with local_engine(
            llama, dtype="float32", max_num_batched_tokens=size, additional_config=CONFIG
        ) as llm:
            (output,) = run(llm, [prompt], params(*probes))
        found[size] = output.scope
    for probe in probes:
        whole, parts = (found[size].aggregates[probe.name] for size in (512, chunk))
        assert len(whole) == 205
        assert torch.allclose(whole, parts, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_after_a_preemption_scores_and_aggregates_are_the_same(llama):
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3, additional_config=CONFIG,
    ) as llm:  # fmt: skip
        probes = every_kind(widths(llm))
        preempted = preempted_in(llm)
        ids = [list(range(i, i + 30)) for i in (10, 50, 90)]
        outputs = run(llm, ids, params(*probes, *READS, max_tokens=60))
    assert preempted, "the cache was large enough; the test shows nothing"
    for output in outputs:
        probing.check(output.scope, probes, TOLERANCE[torch.float32])


@pytest.mark.long
@rejects_drafts
def test_ngram_speculation(llama):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with process_engine(
        llama, dtype="float32", speculative_config=config, enforce_eager=True,
        skip_tokenizer_init=True, additional_config=CONFIG,
    ) as llm:  # fmt: skip
        probes = every_kind(widths(llm))
        outputs = llm.generate(
            [{"prompt_token_ids": [3, 4, 5] * 8}, {"prompt_token_ids": list(range(40))}],
            params(*probes, *READS, max_tokens=40), use_tqdm=False,
        )  # fmt: skip
    for output in outputs:
        probing.check(output.scope, probes, TOLERANCE[torch.float32])
        count = len(output.prompt_token_ids) + 39
        assert output.scope.scores.positions("deep").tolist() == list(range(count))


def test_what_streams_is_what_comes_as_a_whole(llama):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from vllm_scope.results.cursor import Cursor

    async def main():
        engine = async_engine(
            llama, skip_tokenizer_init=True, additional_config=CONFIG, max_num_batched_tokens=32
        )
        try:
            sampling = SamplingParams(
                temperature=0, max_tokens=100, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.CUMULATIVE,
                extra_args=scope(*every_kind(dict.fromkeys(("resid_post", "attn_out"), 128))),
            )  # fmt: skip
            cursor, came, counts = Cursor(rows=False), {}, []
            async for out in engine.generate({"prompt_token_ids": PROMPTS[0]}, sampling, "one"):
                cursor.look(out.scope)
                columns = cursor.rest(out.scope) if out.finished else cursor.take()
                counts.append(sum(len(column.positions) for column in columns))
                for column in columns:
                    came.setdefault(column.label, []).append(column)
            return out.scope, came, counts
        finally:
            engine.shutdown()

    result, came, counts = asyncio.run(main())
    assert result.status == "complete"
    assert sum(count > 0 for count in counts) >= 5, counts
    assert set(came) == set(result.scores)
    for name, columns in came.items():
        positions = np.concatenate([column.positions for column in columns])
        assert positions.tolist() == result.scores.positions(name).tolist(), name
        values = torch.cat([column.values for column in columns])
        assert torch.equal(values, result.scores[name]), name
        if name in result.aggregates:
            running = torch.cat([column.aggregates for column in columns])
            assert torch.equal(running, result.aggregates[name]), name


def test_a_thousand_probes_of_one_layer(llm):
    width = widths(llm)["resid_post"]
    weights = numbers(3, 1000, width)
    probes = [Probe(weights[i], layer=1, name=f"p{i}") for i in range(1000)]
    (output,) = run(llm, PROMPTS[:1], params(*probes, Read("resid_post", layers=[1])))
    rows = output.scope["resid_post", 1].double().numpy()
    found = np.stack([output.scope.scores[probe.name].numpy() for probe in probes], axis=1)
    terms = np.abs(rows) @ np.abs(weights.T)
    assert (np.abs(found - rows @ weights.T.astype(np.float64)) / terms).max() <= tolerance(llm)


@pytest.mark.long
def test_memory_for_weights_is_bounded_and_requests_wait_for_it(llama):
    """A megabyte holds two requests of this kind; the third waits, and all are right."""
    with local_engine(
        llama, dtype="float32", additional_config={"scope": CONFIG["scope"] | {"vectors_mib": 1}}
    ) as llm:
        sent = []
        for seed in range(6):
            layers = [(numbers(seed, 800, 128) / 12, numbers(seed, 800)),
                      (numbers(seed + 9, 1, 800) / 30, numbers(seed, 1))]  # fmt: skip
            sent.append([Probe(Mlp(layers), layer=1, name="p")])
        outputs = run(llm, [PROMPTS[0]] * 6, [params(*some, *READS) for some in sent])
        for output, some in zip(outputs, sent, strict=True):
            probing.check(output.scope, some, TOLERANCE[torch.float32])
        huge = params(Probe(probing.pool(1, 128, 1100), layer=0, name="p"))
        with pytest.raises(Exception, match="vectors"):
            run(llm, PROMPTS[:1], huge)
