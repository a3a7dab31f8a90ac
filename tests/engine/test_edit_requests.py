"""Edits and scores as callers use them: names, server-wide edits, n, streams, bad input."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from tests.asking import run
from tests.checkpoints import row_error
from tests.conftest import async_engine, local_engine, process_engine
from tests.engine.test_edits import (
    EDITS,
    READ_ALL,
    D,
    V,
    check,
    check_logprobs,
    direction,
    params,
)  # fmt: skip
from vllm_scope import Ablate, Add, CapacityError, Clamp, Probe, Read, Replace, SpecError, scope
from vllm_scope.vectors import SteeringModule, save_vectors, to_bytes

PROMPT = list(range(30, 70))
SITES = {"sites": ["embed", "resid_pre", "resid_mid", "resid_post"]}


def module(**vectors):
    """layer_1=tensor -> a module with that vector at resid_post 1."""
    return SteeringModule({("resid_post", int(k[6:])): v for k, v in vectors.items()})


@pytest.fixture(scope="module")
def llm(llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("modules") / "at-start.safetensors"
    save_vectors(path, module(layer_0=V, layer_2=D))
    config = {"scope": {**SITES, "modules": {"at-start": str(path)}}}
    with local_engine(
        llama, dtype="float32", block_size=32, max_num_seqs=16, additional_config=config
    ) as llm:
        yield llm


def register(llm, name, found):
    (digest,) = llm.collective_rpc("scope_register", args=(name, to_bytes(found)))
    return digest


# Steering modules by name


def test_a_module_loaded_at_start_applies_wherever_it_has_vectors(llm, ref):
    (output,) = run(llm, [PROMPT], params(Add("at-start", scale=0.5), *READ_ALL))
    mean = [("resid_post", 0, lambda x: x + 0.5 * V), ("resid_post", 2, lambda x: x + 0.5 * D)]
    check(output, ref, mean)


def test_a_module_at_one_of_its_layers_and_as_a_direction(llm, ref):
    (output,) = run(llm, [PROMPT], params(Ablate("at-start", layer=2), *READ_ALL))
    check(output, ref, [("resid_post", 2, EDITS["ablate"][1])])


def test_a_probe_by_name_scores_as_its_numbers_do(llm):
    weights = torch.randn(3, 128, generator=torch.Generator().manual_seed(9))
    for i, weight in enumerate(weights):
        register(llm, f"probe-{i}", module(layer_1=weight))
    named = [Probe(f"probe-{i}", bias=0.5, layer=1, name=f"n{i}") for i in range(3)]
    sent = [Probe(weight, bias=0.5, layer=1, name=f"s{i}") for i, weight in enumerate(weights)]
    # One after the other: the second finds what the first left remembered.
    for _ in range(2):
        (output,) = run(
            llm, [PROMPT], params(Read("resid_post", layers=[1]), *named, *sent, max_tokens=4)
        )
        result = output.scope
        exact = result["resid_post", 1].double() @ weights.double().T + 0.5
        for i in range(3):
            torch.testing.assert_close(result.scores[f"n{i}"], exact[:, i].float())
            torch.testing.assert_close(result.scores[f"n{i}"], result.scores[f"s{i}"])


def test_a_probes_name_registered_anew_scores_with_the_new_numbers(llm):
    asked = params(Read("resid_post", layers=[1]), Probe("changing-probe", layer=1, name="p"))
    for seed in (1, 2, 1):
        weight = torch.randn(128, generator=torch.Generator().manual_seed(seed))
        register(llm, "changing-probe", module(layer_1=weight))
        (output,) = run(llm, [PROMPT], asked)
        exact = output.scope["resid_post", 1].double() @ weight.double()
        torch.testing.assert_close(output.scope.scores["p"], exact.float())


def test_a_name_registered_anew_never_meets_old_kv(llm, ref):
    prompt = list(range(100, 180))
    hits = []
    for vector in (V, D, V):
        register(llm, "changing", module(layer_0=vector))
        (output,) = run(llm, [prompt], params(Add("changing"), max_tokens=4))
        hits.append(output.num_cached_tokens)
        ids = [*prompt, *output.outputs[0].token_ids][:-1]
        _, logits = ref.edited(ids, [("resid_post", 0, lambda x, v=vector: x + v)])
        check_logprobs(output.outputs[0], logits[79:])
    # The third run has the first one's content, so its KV too.
    assert hits == [0, 0, 64]


def test_a_removed_name_is_unknown(llm):
    register(llm, "short-lived", module(layer_0=V))
    assert run(llm, [PROMPT], params(Add("short-lived")))[0].scope.status == "complete"
    assert llm.collective_rpc("scope_unregister", args=("short-lived",)) == [True]
    assert "short-lived" not in llm.collective_rpc("scope_modules")[0]
    # This front-end still takes the name; EngineCore, which resolves it, does not.
    with pytest.raises(SpecError, match="which this engine does not hold"):
        run(llm, [PROMPT], params(Add("short-lived")))
    assert not llm.llm_engine.has_unfinished_requests()


def test_bad_modules_are_refused(llm):
    with pytest.raises(Exception, match="this model's rows have 128"):
        register(llm, "small", module(layer_0=torch.ones(64)))
    with pytest.raises(Exception, match="is zero"):
        register(llm, "zero", module(layer_0=torch.zeros(128)))
    with pytest.raises(Exception, match="layers 0 to 2"):
        register(llm, "deep", module(layer_9=V))
    with pytest.raises(Exception, match="is not safetensors"):
        llm.collective_rpc("scope_register", args=("bytes", b"\x80\x04pickle"))
    assert not {"small", "zero", "deep", "bytes"} & set(llm.collective_rpc("scope_modules")[0])


# Server-wide edits


def server(llm, *edits):
    text = scope(*edits)["scope"] if edits else None
    return llm.collective_rpc("scope_set_edits", args=(text,))


def test_server_wide_edits_hold_for_every_request_and_add_to_its_own(llm, ref):
    prompt = list(range(200, 280))
    (plain,) = run(llm, [prompt], params(max_tokens=4))
    server(llm, Add(V, layer=0, scale=0.3), Add(D, layer=1, tokens="generated"))
    try:
        first, second = (run(llm, [prompt], params(max_tokens=4))[0] for _ in range(2))
        own = params(Add(V, layer=2, tokens="prompt"), *READ_ALL)
        (added,) = run(llm, [prompt], own)
    finally:
        server(llm)
    (after,) = run(llm, [prompt], params(max_tokens=4))
    mean = [
        ("resid_post", 0, lambda x: x + 0.3 * V),
        ("resid_post", 1, lambda x: torch.cat([x[:80], x[80:] + D])),
    ]
    for output in (first, second):
        ids = [*prompt, *output.outputs[0].token_ids][:-1]
        check_logprobs(output.outputs[0], ref.edited(ids, mean)[1][79:])
    check(added, ref, [*mean, ("resid_post", 2, lambda x: torch.cat([x[:80] + V, x[80:]]))])
    # Keyed: edited runs share among themselves, plain ones get the plain KV again.
    assert (plain.num_cached_tokens, first.num_cached_tokens) == (0, 0)
    assert (second.num_cached_tokens, after.num_cached_tokens) == (64, 64)
    assert after.outputs[0].token_ids == plain.outputs[0].token_ids
    assert first.outputs[0].scope is None


def test_server_wide_edits_that_cannot_be_are_refused(llm):
    for edit, words in [
        (Add(V, layer=7), "layers 0 to 2"),
        (Add(V, layer=0, tokens=[3]), "server-wide edits take all, prompt, generated"),
        (Read("resid_post"), "policies belong to requests"),
    ]:
        with pytest.raises(Exception, match=words):
            server(llm, edit)
    assert llm.collective_rpc("scope_get_edits") == [None]


# Requests


def test_every_completion_of_n_is_edited_and_scored(llm, ref):
    spec = [Add(V, layer=0, scale=0.3), Probe(D, layer=1, name="p"), Read("resid_post")]
    (output,) = run(llm, [PROMPT], params(*spec, n=3, temperature=1.0, logprobs=None))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    for completion in output.outputs:
        ids = [*PROMPT, *completion.token_ids][:-1]
        streams, _ = ref.edited(ids, [("resid_post", 0, lambda x: x + 0.3 * V)])
        for layer in range(3):
            rows = completion.scope["resid_post", layer]
            assert row_error(rows, streams["resid_post", layer]) < 1e-4
        assert len(completion.scope.scores["p"]) == len(ids)


def test_one_sampling_params_object_serves_many_requests(llm, ref):
    parameters = params(Add(V, layer=0), *READ_ALL)
    before = repr(parameters)
    for _ in range(2):
        for output in run(llm, [PROMPT, PROMPT[:7]], parameters):
            check(output, ref, [("resid_post", 0, lambda x: x + V)])
    assert repr(parameters) == before


def test_requests_whose_ids_are_prefixes_of_each_other(llm, ref):
    engine = llm.llm_engine
    vectors = {"req": V, "req-1": D, "req-1-1": None}
    for name, vector in vectors.items():
        spec = [Add(vector, layer=0)] if vector is not None else []
        engine.add_request(name, {"prompt_token_ids": PROMPT}, params(*spec))
    done = {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
    for name, vector in vectors.items():
        (completion,) = done[name].outputs
        edits = [] if vector is None else [("resid_post", 0, lambda x, v=vector: x + v)]
        _, logits = ref.edited([*PROMPT, *completion.token_ids][:-1], edits)
        check_logprobs(completion, logits[39:])


def test_vectors_as_lists_arrays_and_tensors_of_any_float(llm):
    kinds = [V.tolist(), V.numpy(), V, V.double(), V.numpy().astype(np.float64)]
    found = [run(llm, [PROMPT], params(Add(v, layer=0)))[0].outputs[0] for v in kinds]
    assert all(c.logprobs == found[0].logprobs for c in found)
    half = run(llm, [PROMPT], params(Add(V.bfloat16(), layer=0)))[0]
    wide = run(llm, [PROMPT], params(Add(V.bfloat16().float(), layer=0)))[0]
    assert half.outputs[0].logprobs == wide.outputs[0].logprobs


BAD = {
    "wrong-size": (lambda: [Add(torch.ones(64), layer=0)], "'resid_post' have 128"),
    "probe-of-wrong-size": (lambda: [Probe(torch.ones(9), layer=0, name="p")], "9 numbers"),
    "layer-out-of-range": (lambda: [Add(V, layer=3)], "this model has layers 0 to 2"),
    "unknown-name": (lambda: [Add("nobody")], "does not hold. It holds: at-start"),
    "layer-without-a-vector": (lambda: [Add("at-start", layer=1)], "has no vector"),
    "last-is-not-known-in-time": (lambda: [Add(V, layer=0, tokens="last")], "not known yet"),
    "position-after-the-end": (
        lambda: [Replace(V, positions=[999], layer=0)],
        "last position that can be",
    ),
    "one-position-twice": (
        lambda: [Replace(torch.ones(2, 128), positions=[39, -1], layer=0)],
        "twice",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_fails_that_request_alone(case, llm, ref):
    make, words = BAD[case]
    with pytest.raises(SpecError, match=words):
        run(llm, [PROMPT], params(*make()))
    (output,) = run(llm, [PROMPT], params(Clamp(D, lo=-0.2, hi=0.3, layer=0), *READ_ALL))
    check(output, ref, [("resid_post", 0, EDITS["clamp"][1])])


def test_a_hundred_megabytes_of_vectors_are_refused_before_they_are_sent(llm):
    with pytest.raises(SpecError, match=r"has 26,214,400 numbers; at most 16,777,216"):
        Add(torch.zeros(204_800 * 128), layer=0)
    text = scope(Add(V, layer=0))["scope"]
    with pytest.raises(SpecError, match="Register large vectors"):
        run(llm, [PROMPT], _raw(text + " " * (64 << 20)))


def _raw(text):
    from vllm import SamplingParams

    return SamplingParams(max_tokens=2, extra_args={"scope": text})


# Engines of their own


@pytest.fixture(scope="module")
def compiled(llama):
    """As users start it, with room for 102 vectors."""
    config = {"scope": {**SITES, "vectors_mib": 0.05}}
    with process_engine(
        llama, dtype="float32", skip_tokenizer_init=True, additional_config=config
    ) as llm:
        yield llm


def test_a_compiled_engine_edits_as_an_eager_one(compiled, ref):
    """The traced taps change the stream in place; the compiler must see it."""
    llm = compiled
    for site in ("resid_pre", "resid_mid", "resid_post"):
        for kind in ("add", "replace"):
            ask, mean = EDITS[kind]
            (output,) = run(llm, [PROMPT], params(ask(site=site, layer=1), *READ_ALL))
            check(output, ref, [(site, 1, mean)])
    (plain,) = run(llm, [PROMPT], params())
    _, logits = ref.edited([*PROMPT, *plain.outputs[0].token_ids][:-1], [])
    check_logprobs(plain.outputs[0], logits[39:])
    register(llm, "over-rpc", module(layer_0=V))
    (output,) = run(llm, [PROMPT], params(Add("over-rpc"), *READ_ALL))
    check(output, ref, [("resid_post", 0, lambda x: x + V)])


def test_what_has_no_room_beside_the_servers_edits_raises_and_the_engine_goes_on(compiled):
    """In this process; tests/engine/test_serving.py has the engine in one of its own."""
    small = [Add(direction(i), layer=0, scale=0.1) for i in range(80)]
    own = params(*(Add(direction(100 + i), layer=0) for i in range(40)))
    server(compiled, *small)
    try:
        with pytest.raises(CapacityError, match="the server's edits the request takes 120 vectors"):
            run(compiled, [PROMPT], own)
    finally:
        server(compiled)
    (after,) = run(compiled, [PROMPT], own)
    assert after.outputs[0].finish_reason == "length"


def test_edits_of_the_server_that_no_request_could_hold_are_refused(compiled):
    with pytest.raises(Exception, match=r"for all requests\. Edit fewer places"):
        server(compiled, *(Add(direction(i), layer=0) for i in range(103)))
    assert compiled.collective_rpc("scope_get_edits") == [None]


def test_scores_in_bfloat16(checkpoints):
    """Against the rows that the same request read, as they are."""
    with local_engine(checkpoints("qwen3"), dtype="bfloat16", max_num_batched_tokens=32) as llm:
        probes = [Probe(direction(i), layer=i, name=f"p{i}") for i in range(3)]
        (output,) = run(
            llm, [list(range(90))], params(Add(V, layer=0), *probes, Read("resid_post"))
        )
    for i in range(3):
        rows = output.scope["resid_post", i].double()
        expected = rows @ direction(i).double()
        error = (output.scope.scores[f"p{i}"] - expected).abs()
        assert float((error / expected.abs().clamp(min=1)).max()) < 1e-3


def test_scores_stream_and_an_aborted_request_leaves_nothing(llama):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def sampling(n):
        return SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            extra_args=scope(Probe(D, layer=1, name="p"), Add(V, layer=0, tokens="generated")),
        )  # fmt: skip

    async def main():
        engine = async_engine(llama, skip_tokenizer_init=True)
        try:
            prompt = {"prompt_token_ids": PROMPT}
            sizes = [
                (len(out.scope.scores["p"]), len(out.outputs[0].token_ids))
                async for out in engine.generate(prompt, sampling(20), "whole")
            ]
            async for _ in engine.generate(prompt, sampling(400), "left"):
                break
            for _ in range(100):
                (counters,) = await engine.collective_rpc("scope_counters")
                if counters["requests"] == 0:
                    break
                await asyncio.sleep(0.05)
            return sizes, counters
        finally:
            engine.shutdown()

    sizes, counters = asyncio.run(main())
    assert sizes[-1] == (59, 20)
    scores = [score for score, _ in sizes]
    assert scores == sorted(scores)
    # Token by token: most outputs bring scores that the one before did not have. How far
    # they may be behind is a promise of the server's alone (tests/server/test_answers.py).
    assert len(set(scores)) >= len(sizes) // 2, sizes
    assert all(score <= len(PROMPT) + tokens - 1 for score, tokens in sizes), sizes
    assert counters["requests"] == 0
