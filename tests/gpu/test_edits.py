"""Edits and scores inside CUDA graphs equal a Hugging Face model edited by hooks."""

from __future__ import annotations

import pytest
import torch

from tests.asking import run
from tests.checkpoints import reference, row_error
from tests.conftest import local_engine
from tests.engine import probing
from tests.engine.test_edits import EDITS, PROMPT, READ_ALL, SITES, D, V, direction, params
from tests.gpu.test_rows import GRAPHS, OPTIONS
from vllm_scope import Add, Probe, Read

pytestmark = pytest.mark.gpu

#: Two bf16 models whose roundings differ, and an edit that is not small.
TOLERANCE = 2e-2


@pytest.fixture(scope="module")
def ref(llama):
    return reference(llama, torch.bfloat16)


@pytest.fixture(scope="module", params=["V2", "V1"])
def llm(request, llama):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if request.param == "V2" else "0")
        config = {"additional_config": {"scope": {"sites": ["embed", *SITES]}}}
        with local_engine(llama, **OPTIONS, **config) as llm:
            yield llm


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_in_a_graph_equals_a_hook(kind, site, llm, ref):
    ask, mean = EDITS[kind]
    spec = params(ask(site=site, layer=1), *READ_ALL, logprobs=None, max_tokens=12)
    for output in run(llm, [PROMPT] * 3, spec):
        ids = [*PROMPT, *output.outputs[0].token_ids][:-1]
        streams, _ = ref.edited(ids, [(site, 1, lambda x: mean(x.cpu()).to(x.device))])
        for stream in output.scope.keys():
            if stream[0] != "embed":
                error = row_error(output.scope[stream], streams[stream])
                assert error <= TOLERANCE, (stream, error)


def test_vectors_of_their_own_leave_plain_neighbours_alone(llm):
    ids = [[(3 * i + j) % 500 for j in range(5 + i % 7)] for i in range(32)]
    edits = [params(Add(direction(i, 2.0), layer=i % 3), logprobs=None) for i in range(24)]
    mixed = run(llm, ids, [*edits, *[params(logprobs=None)] * 8])
    again = run(llm, ids, [*edits, *[params(logprobs=None)] * 8])
    plain = run(llm, ids, params(logprobs=None))
    for i in range(32):
        assert mixed[i].outputs[0].token_ids == again[i].outputs[0].token_ids
        if i >= 24:
            assert mixed[i].outputs[0].token_ids == plain[i].outputs[0].token_ids


def test_an_edit_that_overflows_ends_its_request_alone(llm):
    huge = params(Add([3e38] * len(V), layer=1, scale=3e38), logprobs=None)
    plain = params(logprobs=None)
    before = run(llm, [PROMPT] * 3, plain)
    bad, *beside = run(llm, [PROMPT] * 4, [huge, *[plain] * 3])
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite in bfloat16" in bad.outputs[0].scope.error
    for output, alone in zip(beside, before, strict=True):
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    (again,) = run(llm, [PROMPT], huge)
    assert again.outputs[0].finish_reason == "error"


def test_scores_equal_a_dot_product_with_the_rows(llm):
    probes = [Probe(direction(i), layer=i % 3, name=f"p{i}") for i in range(64)]
    spec = params(Add(V, layer=0), *probes, Read("resid_post"), logprobs=None)
    for output in run(llm, [PROMPT, PROMPT[:9]], spec):
        for i in range(64):
            rows = output.scope["resid_post", i % 3].double()
            expected = rows @ direction(i).double()
            error = (output.scope.scores[f"p{i}"] - expected).abs()
            assert float((error / expected.abs().clamp(min=1)).max()) < 1e-3


def test_probes_of_every_kind_equal_float64_on_the_rows(llm):
    """Of one layer and of several: linear, Mlps, pools; with aggregates."""
    probes = probing.every_kind(dict.fromkeys(SITES, len(V)))
    spec = params(Add(V, layer=0), *probes, *READ_ALL, logprobs=None)
    for output in run(llm, [PROMPT, PROMPT[:9]], spec):
        probing.check(output.scope, probes, probing.TOLERANCE[torch.bfloat16])


def test_graphs_do_not_change_a_bit_of_an_edited_run(llama):
    found = []
    for mode in (GRAPHS["full-and-piecewise"], {"compilation_config": {"cudagraph_mode": "NONE"}}):
        with local_engine(llama, **(OPTIONS | mode)) as llm:
            spec = params(Add(V, layer=0), Probe(D, layer=2, name="p"), Read("resid_post"),
                          logprobs=None)  # fmt: skip
            found.append(run(llm, [range(8 * i, 8 * i + 8) for i in range(8)], spec))
    for a, b in zip(*found, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert torch.equal(a.scope.scores["p"], b.scope.scores["p"])
        for stream in a.scope.keys():
            assert torch.equal(a.scope[stream], b.scope[stream]), stream
