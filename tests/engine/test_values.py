"""Every stream equals Hugging Face's, for every family, in both dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.checkpoints import FAMILIES, NUM_LAYERS, check_completion, reference, row_error
from tests.conftest import local_engine
from vllm_scope import Read, scope

PROMPTS = [list(range(3, 40)), [7] * 5, list(range(400, 380, -1))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_streams_equal_hugging_face(family, dtype, checkpoints):
    from vllm import SamplingParams

    path = checkpoints(family)
    spec = scope(Read("resid_post"), Read("resid_pre"), Read("embed"))
    name = str(dtype).removeprefix("torch.")
    with local_engine(path, dtype=name) as llm:
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, extra_args=spec
        )
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    ref = reference(path, dtype)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = list(output.outputs[0].token_ids)
        assert len(ids) == 12
        assert len(output.scope.keys()) == 2 * NUM_LAYERS + 1
        check_completion(output.scope, prompt, ids, ref)
    # The layers differ, so that the wrong one could not have passed.
    streams = ref.streams(PROMPTS[0])
    for a, b in itertools.pairwise(streams):
        assert row_error(a, b) > 0.1
