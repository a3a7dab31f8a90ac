"""Edits inside a layer equal a Hugging Face model that is edited at the same place."""

from __future__ import annotations

import pytest
import torch

from tests.asking import run
from tests.checkpoints import reference
from tests.conftest import local_engine, long_except, process_engine
from tests.engine.test_edits import check, params
from vllm_scope import Ablate, Add, Clamp, Gate, Probe, Read, Replace
from vllm_scope.request.sites import ATTENTION_SITES, BLOCK_SITES, BRANCH_SITES, MLP_SITE

PROMPT = list(range(30, 70))
#: Those of layers without experts.
INNER_SITES = (*ATTENTION_SITES, *BRANCH_SITES, MLP_SITE, *BLOCK_SITES)
SITES = ["embed", "resid_mid", "resid_post", *INNER_SITES]
ENGINE = {"dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 8, "block_size": 32}


def vector(seed: int, size: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def kinds(size: int):
    """name -> (how a caller asks, what it means)"""
    v, d = vector(1, size), vector(2, size)
    unit, row = d / d.norm(), vector(3, size)

    def along(x):
        return (x @ unit)[:, None]

    def replaced(x):
        x = x.clone()
        x[5] = row
        return x

    return {
        "add": (lambda **at: Add(v, **at), lambda x: x + v),
        "ablate": (lambda **at: Ablate(d, **at), lambda x: x - along(x) * unit),
        "clamp": (
            lambda **at: Clamp(d, lo=0.1, hi=0.2, **at),
            lambda x: x + (along(x).clamp(0.1, 0.2) - along(x)) * unit,
        ),
        "replace": (lambda **at: Replace(row, positions=[5], **at), replaced),
    }


@pytest.fixture(scope="module", params=long_except(["llama", "qwen3", "gemma2"], "llama"))
def family(request, checkpoints):
    path = checkpoints(request.param)
    config = {"scope": {"sites": SITES}}
    with local_engine(path, **ENGINE, additional_config=config) as llm:
        yield llm, reference(path, torch.float32)


def size_of(llm, site: str) -> int:
    (output,) = run(llm, [[1]], params(Read(site, layers=[0]), max_tokens=1))
    return output.scope[site, 0].flatten(1).shape[1]


@pytest.mark.parametrize("kind", kinds(1))
@pytest.mark.parametrize("site", INNER_SITES)
def test_an_edit_equals_a_hook_at_the_same_place(site, kind, family):
    llm, ref = family
    ask, mean = kinds(size_of(llm, site))[kind]
    reads = [Read(one) for one in ("resid_mid", "resid_post", *INNER_SITES)]
    edited, plain = run(
        llm, [PROMPT] * 2, [params(ask(site=site, layer=1), *reads), params(*reads)]
    )
    check(edited, ref, [(site, 1, mean)])
    check(plain, ref, [])
    assert not torch.equal(edited.scope["resid_post", 1], plain.scope["resid_post", 1])


@pytest.mark.parametrize("site", INNER_SITES)
def test_an_edit_that_overflows_ends_its_request_and_names_its_place(site, family):
    llm, _ = family
    huge = Add([3e38] * size_of(llm, site), site=site, layer=1, scale=2.0)
    edited, plain = run(llm, [PROMPT] * 2, [params(huge), params(Read("resid_post"))])
    assert edited.outputs[0].finish_reason == "error"
    assert f"an edit at {site!r} of layer 1 makes a row that is not finite" in edited.scope.error
    assert (plain.scope.status, plain.scope.dropped) == ("complete", 0)


def test_reads_and_probes_see_before_and_after(family):
    llm, _ = family
    for site in INNER_SITES:
        v = vector(1, size_of(llm, site))
        sides = [Read(site, layers=[1], when=when) for when in ("before", "after")]
        probe = Probe(v, site=site, layer=1, name="p")
        edit = Add(v, site=site, layer=1, scale=2.0, dose="d")
        (output,) = run(llm, [PROMPT], params(edit, *sides, probe))
        result = output.scope
        old, new = (result[site, 1, when].flatten(1) for when in ("before", "after"))
        torch.testing.assert_close(new, old + 2 * v, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result.scores["p"], new @ v, rtol=1e-4, atol=1e-4)
        dose = (new - old).norm(dim=1) / old.norm(dim=1)
        torch.testing.assert_close(result.scores["d"], dose, rtol=1e-4, atol=1e-4)


def test_all_sites_at_once_with_gates(family):
    llm, ref = family
    w, edits, wanted = vector(9, 128), [], []
    gate = Gate(w, site="embed", kind="sigmoid")
    seen = []
    for site in INNER_SITES:
        v = vector(4, size_of(llm, site))
        edits.append(Add(v, site=site, layer="all", gate=gate))
        wanted += [(site, layer, lambda x, v=v: x + seen[0][:, None] * v) for layer in range(3)]
    reads = [Read("embed"), Read("resid_post"), *map(Read, INNER_SITES)]
    (output,) = run(llm, [PROMPT], params(*edits, *reads))
    seen.append(torch.sigmoid(output.scope["embed", 0] @ w))
    check(output, ref, wanted)


@pytest.mark.long
def test_in_a_compiled_graph_beside_plain_requests(llama, ref):
    config = {"scope": {"sites": SITES}}
    with process_engine(
        llama, **ENGINE, skip_tokenizer_init=True, additional_config=config
    ) as llm:  # fmt: skip
        prompts = [PROMPT, PROMPT, list(range(100, 190))]
        reads = [Read("resid_post"), *map(Read, INNER_SITES)]
        v = {site: vector(1, size_of(llm, site)) for site in INNER_SITES}
        edits = [[Add(v[s], site=s, layer=1)] for s in ("mlp_out", "k")]
        outputs = run(llm, prompts, [params(*some, *reads) for some in ([], *edits)])
        for site in (*ATTENTION_SITES, *BRANCH_SITES):
            outputs += run(llm, [PROMPT], params(Add(v[site], site=site, layer=2), *reads))
    check(outputs[0], ref, [])
    for output, site in zip(outputs[1:3], ("mlp_out", "k"), strict=True):
        check(output, ref, [(site, 1, lambda x, site=site: x + v[site])])
    for output, site in zip(outputs[3:], (*ATTENTION_SITES, *BRANCH_SITES), strict=True):
        check(output, ref, [(site, 2, lambda x, site=site: x + v[site])])
