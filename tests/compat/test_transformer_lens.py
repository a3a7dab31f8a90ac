"""`out.scope.as_cache()`: TransformerLens's names, on rows of a real engine."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import reference, row_error
from tests.conftest import local_engine
from vllm_scope import Read, SpecError, scope

PROMPT = list(range(30, 50))


@pytest.fixture(scope="module")
def llm(checkpoints):
    with local_engine(checkpoints("llama"), dtype="float32") as llm:
        yield llm


def run(llm, *actions):
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, extra_args=scope(*actions)
    )
    return llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]


def test_keys_and_shapes_are_those_of_an_activation_cache(llm, checkpoints):
    output = run(llm, Read("embed"), Read("resid_post"))
    cache = output.scope.as_cache()
    assert {f"blocks.{i}.hook_resid_pre" for i in range(3)} <= set(cache)
    assert {f"blocks.{i}.hook_resid_post" for i in range(3)} <= set(cache)
    assert {value.shape for value in cache.values()} == {(1, len(PROMPT) + 3, 128)}
    ids = [*PROMPT, *output.outputs[0].token_ids][:-1]
    streams = reference(checkpoints("llama"), torch.float32).streams(ids)
    for i in range(3):
        assert row_error(cache[f"blocks.{i}.hook_resid_pre"][0], streams[i]) <= 1e-4
        assert torch.equal(cache["resid_post", i][0], output.scope["resid_post", i])
    assert torch.equal(cache["resid_post", -1], cache["resid_post", 2])
    assert cache.accumulated_resid().shape == (4, 1, len(PROMPT) + 3, 128)


def test_a_cache_of_some_positions_is_refused(llm):
    with pytest.raises(SpecError, match="tokens='all'"):
        run(llm, Read("resid_post", tokens="generated")).scope.as_cache()
