"""Every stream equals Hugging Face's, for every family, in both dtypes: in chunks, and behind a
warm prefix cache."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.asking import run
from tests.checkpoints import (
    FAMILIES,
    NUM_LAYERS,
    TOLERANCE,
    check_completion,
    reference,
    row_error,
)
from tests.conftest import local_engine, long_except
from tests.engine.test_attention_sites import params
from vllm_scope import Read, scope

PROMPTS = [list(range(3, 90)), [7] * 5, list(range(400, 380, -1))]


@pytest.mark.long
def test_exaone_equals_the_llama_that_it_is(checkpoints, tmp_path):
    """transformers has no class for Exaone 3."""
    from tests.renamed import rename_to_exaone

    llama, path = checkpoints("llama"), tmp_path / "exaone"
    rename_to_exaone(llama, path)
    options = {"trust_remote_code": True, "block_size": 32, "max_num_batched_tokens": 32}
    sites = ("embed", "resid_post", "resid_mid", "attn_out", "mlp_out", "mlp_post", "ln_final")
    config = {"scope": {"sites": sites}}
    with local_engine(path, dtype="float32", additional_config=config, **options) as llm:
        outputs = run(llm, PROMPTS, params(*map(Read, sites)))
    ref = reference(llama, torch.float32)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        token_ids = [*prompt, *output.outputs[0].token_ids][:-1]
        streams, branches, parts = (f(token_ids) for f in (ref.streams, ref.branches, ref.parts))
        assert row_error(output.scope["embed", 0], streams[0]) <= 1e-4
        assert row_error(output.scope["ln_final", 0], parts[0]["ln_final"]) <= 1e-4
        for k in range(NUM_LAYERS):
            right = branches[k] | parts[k] | {
                "resid_post": streams[k + 1], "resid_mid": streams[k] + branches[k]["attn_out"]
            }  # fmt: skip
            for site in ("resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_post"):
                assert row_error(output.scope[site, k], right[site]) <= 1e-4, (site, k)


@pytest.mark.parametrize("family", long_except(FAMILIES, "llama", "gemma2", "gpt2"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_streams_equal_hugging_face(family, dtype, checkpoints):
    from vllm import SamplingParams

    path = checkpoints(family)
    name = str(dtype).removeprefix("torch.")

    def generate(llm, **tokens):
        spec = scope(*(Read(site, **tokens) for site in ("resid_post", "resid_pre", "embed")))
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, extra_args=spec
        )
        return llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)

    with local_engine(path, dtype=name, block_size=32, max_num_batched_tokens=32) as llm:
        outputs = generate(llm)
        cached = generate(llm, tokens="generated")
    assert cached[0].num_cached_tokens >= 32
    ref = reference(path, dtype)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = list(output.outputs[0].token_ids)
        assert len(ids) == 12
        assert len(output.scope.keys()) == 2 * NUM_LAYERS + 1
        check_completion(output.scope, prompt, ids, ref)
    # The blocks before these rows came from the prefix cache.
    for prompt, output in zip(PROMPTS, cached, strict=True):
        token_ids = [*prompt, *output.outputs[0].token_ids][:-1]
        for layer, right in enumerate(ref.streams(token_ids)[1:]):
            rows = output.scope["resid_post", layer]
            assert row_error(rows, right[len(prompt) :]) <= TOLERANCE[dtype], layer
    # The layers differ, so that the wrong one could not have passed.
    streams = ref.streams(PROMPTS[0])
    for a, b in itertools.pairwise(streams):
        assert row_error(a, b) > 0.1
