"""Tensor-parallel ranks and pipeline stages give the same rows as one worker, each exactly once,
in files too; and they edit and score alike."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import vllm_scope
from tests.checkpoints import check_completion, reference
from tests.conftest import process_engine
from tests.engine import probing
from tests.engine import test_branch_sites as branches
from tests.engine.test_edits import EDITS, check, direction, params
from tests.engine.test_gates import gated
from tests.engine.test_sinks import check_equal
from tests.warm_start import cold
from vllm_scope import Add, Gate, LensTopK, Probe, Read, SpecError
from vllm_scope.analysis.attention import attention_pattern
from vllm_scope.request.sites import Place

WEIGHT = direction(7)
#: Sites of whose rows each tensor-parallel rank has a part, and how wide the whole rows are.
INSIDE = {"q": 128, "k": 64, "v": 64, "z": 128, "mlp_post": 256}
WIDE = torch.randn(256, generator=torch.Generator().manual_seed(8))
PROBED = dict.fromkeys(("resid_post", *branches.SITES), 128) | INSIDE


def gate(layer: int) -> Gate:
    return Gate(WEIGHT, layer, kind="sigmoid", sharpness=0.2, name=f"g{layer}")


def value(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(0.2 * (x @ WEIGHT))


@pytest.mark.parametrize(
    ("tensor", "pipeline", "layout"),
    [
        pytest.param(2, 1, "per_request", id="tp2"),
        pytest.param(1, 2, "sharded", id="pp2", marks=pytest.mark.long),
        pytest.param(2, 2, "per_request", id="tp2-pp2", marks=pytest.mark.long),
    ],
)
def test_ranks_and_stages_are_put_together(
    tensor, pipeline, layout, checkpoints, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    path = checkpoints("llama")
    # Without it ranks ask for a NUMA node each.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    reads = [
        Read(site, to=to) for site in ("resid_post", "embed") for to in ("memory", "filesystem")
    ]
    add = EDITS["add"][0]
    # In the first stage, whose edit the second one gets, and in the last.
    places = [("resid_post", 0), ("resid_post", 2)]
    probes = probing.every_kind(PROBED)
    asked = [
        *(params(*reads, max_tokens=12) for _ in range(6)),
        *(
            params(*(add(site=s, layer=i) for s, i in some), reads[0])
            for some in (places, places[:1])
        ),
        params(*(Probe(WEIGHT, layer=i, name=f"layer-{i}") for i in range(3)), reads[0]),
        params(*map(Read, branches.SITES)),
        # Layers of both stages are added.
        params(*probes, *map(Read, PROBED)),
        # A gate in each stage.
        params(*(add(layer=i, gate=gate(i)) for i in (0, 2)), reads[0]),
        params(add(site="mlp_out", layer=1), *map(Read, branches.SITES)),
        params(*map(Read, INSIDE)),
        params(
            add(site="q", layer=0),
            add(site="z", layer=1),
            Add(WIDE, site="mlp_post", layer=2),
            *map(Read, INSIDE),
            reads[0],
        ),
    ]
    # Each process of a spawned engine has a hash seed of its own.
    with cold() if tensor > 1 else nullcontext(), process_engine(
        path, dtype="float32", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline,
        skip_tokenizer_init=True, enforce_eager=True, max_num_batched_tokens=64,
        additional_config={
            "scope": {
                "sites": ["embed", "resid_post", *branches.SITES, *INSIDE],
                "sinks": {"filesystem": {"root": str(tmp_path), "layout": layout}},
            }
        },
    ) as llm:  # fmt: skip
        ranks = llm.collective_rpc("scope_describe")
        prompts = [{"prompt_token_ids": list(range(i, i + 90))} for i in range(len(asked))]
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        across = params(add(layer=2, gate=gate(0)))
        if pipeline > 1:
            with pytest.raises(SpecError, match=r"edits\[0\]\.gate reads another place"):
                llm.generate(prompts[:1], across, use_tqdm=False)
        else:
            llm.generate(prompts[:1], across, use_tqdm=False)
            with pytest.raises(
                SpecError, match=r"lens: tensor_parallel_size is 2, .*'unembedding_mib': 1\}"
            ):
                llm.generate(prompts[:1], params(LensTopK()), use_tqdm=False)
    # One rank of each stage drains, and so writes; a boundary belongs to one stage.
    assert [rank["drains"] for rank in ranks] == [True, False][:tensor] * pipeline
    beside = [Place(site, k).boundary for site in (*branches.SITES, *INSIDE) for k in range(3)]
    taps = sorted(b for r in ranks if r["drains"] for b in r["taps_here"])
    assert taps == sorted([0, 2, 4, 6, *beside])
    ref = reference(path, torch.float32)
    stored = vllm_scope.open(tmp_path)
    assert len(stored) == 6
    for output in outputs[:6]:
        ids = list(output.outputs[0].token_ids)
        check_completion(output.scope, output.prompt_token_ids, ids, ref)
        request = stored[output.request_id]
        assert len(request.manifest.files) == pipeline
        check_equal(output.scope, request)
    mean = EDITS["add"][1]
    check(outputs[6], ref, [(*place, mean) for place in places])
    check(outputs[7], ref, [(*place, mean) for place in places[:1]])
    check_scores(outputs[8].scope)
    probing.check(outputs[10].scope, probes, probing.TOLERANCE[torch.float32])
    looks = [gated((s, i), (s, i), value, mean) for s, i in places]
    check(outputs[11], ref, [edit for edits, _ in looks for edit in edits])
    for i, (_, seen) in zip((0, 2), looks, strict=True):
        torch.testing.assert_close(outputs[11].scope.scores[f"g{i}"], seen[0], rtol=1e-3, atol=1e-3)
    check(outputs[12], ref, [("mlp_out", 1, mean)])
    check(outputs[13], ref, [])
    ids = [*outputs[13].prompt_token_ids, *outputs[13].outputs[0].token_ids][:-1]
    pattern = attention_pattern(outputs[13].scope, 1)
    torch.testing.assert_close(pattern, ref.patterns(ids)[1], rtol=0, atol=1e-5)
    wide = ("mlp_post", 2, lambda x: x + WIDE)
    check(outputs[14], ref, [("q", 0, mean), ("z", 1, mean), wide])
    last = outputs[9]
    branches.check(last.scope, last.prompt_token_ids, last.outputs[0].token_ids, ref)


@pytest.mark.long
def test_an_edit_of_the_first_stage_that_overflows_ends_its_request(
    checkpoints, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    huge = Add([3e38] * 128, layer=0, scale=3e38)
    options = [params(huge, max_tokens=6), *[params(max_tokens=6)] * 2]
    prompts = [{"prompt_token_ids": list(range(i, i + 40))} for i in (3, 3, 50)]
    with process_engine(
        checkpoints("gpt2"), dtype="float32", pipeline_parallel_size=2,
        skip_tokenizer_init=True, enforce_eager=True, max_model_len=128,
        num_gpu_blocks_override=12, additional_config={"scope": {"sites": ["resid_post"]}},
    ) as llm:  # fmt: skip
        before = [o.outputs[0].token_ids for o in llm.generate(prompts[1:], options[1:])]
        bad, *beside = llm.generate(prompts, options, use_tqdm=False)
        assert bad.outputs[0].finish_reason == "error"
        assert "after the request's edits 'resid_post' of layer" in bad.outputs[0].scope.error
        assert [o.outputs[0].token_ids for o in beside] == before
        for _ in range(4):
            after = llm.generate(prompts[1:], options[1:], use_tqdm=False)
            assert [o.outputs[0].token_ids for o in after] == before


def check_scores(result) -> None:
    for layer in range(3):
        exact = result["resid_post", layer].double() @ WEIGHT.double()
        found = torch.as_tensor(result.scores[f"layer-{layer}"]).double()
        assert found.shape == exact.shape
        assert float((found - exact).abs().max() / exact.abs().max()) <= 1e-3
