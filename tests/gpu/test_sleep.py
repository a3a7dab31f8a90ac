"""vLLM's sleep mode frees the device memory of weights and KV blocks while no request runs.

The taps' memory is not in vLLM's pools. Reads, edits, probes and the lens are therefore the same
after the engine wakes up."""

from __future__ import annotations

import pytest
import torch

from tests.asking import params, run
from tests.conftest import process_engine
from tests.gpu.test_rows import OPTIONS
from vllm_scope import Add, LensTopK, Probe, Read, scope

pytestmark = pytest.mark.gpu

PROMPTS = [range(3, 40), range(100, 180)]
SPECS = [
    scope(Read("resid_post"), LensTopK(), Probe(torch.ones(128), layer=1, name="p")),
    scope(Add(torch.full((128,), 0.5), layer=1), Read("resid_post")),
]


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_everything_is_as_before(level, llama):
    """A process for each engine: vLLM's allocator serves one engine of a process."""
    with process_engine(llama, enable_sleep_mode=True, skip_tokenizer_init=True, **OPTIONS) as llm:
        before = run(llm, PROMPTS, [params(spec) for spec in SPECS])
        llm.sleep(level=level)
        llm.wake_up()
        if level == 2:  # the weights are gone
            llm.collective_rpc("reload_weights")
            llm.reset_prefix_cache()
        after = run(llm, PROMPTS, [params(spec) for spec in SPECS])
    for one, other in zip(before, after, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for layer in range(3):
            assert torch.equal(one.scope["resid_post", layer], other.scope["resid_post", layer])
    assert torch.equal(before[0].scope.scores["p"], after[0].scope.scores["p"])
