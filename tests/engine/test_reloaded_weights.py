"""The weights may be changed while the engine runs, as in reinforcement learning. Reads, edits and
the lens then use the new ones. A file of its own: vLLM remembers its environment once an engine has
run in this process."""

from __future__ import annotations

import pytest
import torch

from tests.asking import params, run
from tests.checkpoints import NUM_LAYERS, make_checkpoint, reference
from tests.conftest import long_except, process_engine
from tests.lens import check_last_layer, check_layers
from vllm_scope import Add, LensTopK, Read, scope

VOCAB = 101
PROMPTS = [list(range(5, 75)), list(range(60, 100))]


@pytest.mark.parametrize("ranks", long_except([1, 2], 1))
def test_after_a_reload_everything_is_of_the_new_weights(
    ranks, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    paths = [make_checkpoint("llama", tmp_path / f"{i}", i, vocab_size=VOCAB) for i in range(2)]
    ours = params(scope(LensTopK(), Read("resid_post")), logprobs=10, prompt_logprobs=10)
    edited = params(scope(Add(torch.full((128,), 0.5), layer=1), Read("resid_post")))
    with process_engine(
        paths[0], dtype="float32", tensor_parallel_size=ranks, skip_tokenizer_init=True,
        max_num_batched_tokens=32, enable_prefix_caching=False,
        additional_config={"scope": {"unembedding_mib": 1}},
    ) as llm:  # fmt: skip
        before = run(llm, PROMPTS, [ours, edited])
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(paths[1])})
        after = run(llm, PROMPTS, [ours, edited])
        # If the weights cannot be read, the call ends: no rank waits for messages of another one.
        with pytest.raises(Exception, match="nowhere"):
            llm.collective_rpc("reload_weights", 60, kwargs={"weights_path": "/nowhere"})
    for path, (output, shifted) in zip(paths, (before, after), strict=True):
        ref = reference(path, torch.float32)
        found = output.scope.lens["lens"]
        assert list(found) == list(range(NUM_LAYERS))
        check_last_layer(output, found[NUM_LAYERS - 1], 1e-4)
        check_layers(output.scope, found, ref, 2e-3)
        exact = ref.streams(output.scope.token_ids[:-1])
        for layer in range(NUM_LAYERS):
            torch.testing.assert_close(
                output.scope["resid_post", layer], exact[layer + 1], rtol=1e-4, atol=1e-4
            )
        exact = ref.streams(shifted.scope.token_ids[:-1])
        torch.testing.assert_close(
            shifted.scope["resid_post", 1], exact[2] + 0.5, rtol=1e-4, atol=1e-4
        )
