"""With two tensor-parallel ranks the first applies the lens with both ranks' parts of the
unembedding. A file of its own: vLLM remembers its environment once an engine has run in this
process."""

from __future__ import annotations

import pytest
import torch

from tests.asking import params, run
from tests.checkpoints import NUM_LAYERS, make_checkpoint, reference
from tests.conftest import process_engine
from tests.lens import agree, check_last_layer, check_layers, log_probs
from tests.lenses import random_lens
from vllm_scope import LensTopK, Probe, Read, scope

pytestmark = pytest.mark.long

LAST = NUM_LAYERS - 1
#: Divides by neither 2 nor 64: the second rank's part ends in 27 rows of padding.
VOCAB = 101
PROMPTS = [list(range(5, 75)), list(range(90, 100)), [7], list(range(60, 100))]


@pytest.mark.parametrize(
    ("family", "eager"),
    [
        pytest.param("llama", False, id="compiled"),
        # Tied to the embedding, with a soft cap.
        pytest.param("gemma2", True, id="eager-tied"),
    ],
)
def test_two_ranks_give_the_lens_of_one(family, eager, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    path = make_checkpoint(family, tmp_path, vocab_size=VOCAB)
    named = random_lens("named", range(NUM_LAYERS), 128)
    named.save(tmp_path / "named.safetensors")
    ours = params(
        scope(
            LensTopK(), LensTopK(lens="named", name="mapped"), Read("resid_post"),
            Probe(torch.ones(128), layer=0, name="p"),
        ),
        logprobs=10, prompt_logprobs=10,
    )  # fmt: skip
    whole = params(scope(LensTopK(layers=[LAST], top_k=VOCAB - 1)))
    lenses = {"lenses": {"named": str(tmp_path / "named.safetensors")}, "unembedding_mib": 1}
    with process_engine(
        path, dtype="float32", tensor_parallel_size=2, skip_tokenizer_init=True,
        enforce_eager=eager, max_num_batched_tokens=32, additional_config={"scope": lenses},
    ) as llm:  # fmt: skip
        outputs = run(llm, PROMPTS, [ours, params(), ours, whole])
    ref = reference(path, torch.float32)
    for output in (outputs[0], outputs[2]):
        found = output.scope.lens["lens"]
        assert list(found) == list(range(NUM_LAYERS))
        check_last_layer(output, found[LAST], 1e-4)
        check_layers(output.scope, found, ref, 2e-3)
        for layer, mapped in output.scope.lens["mapped"].items():
            rows = named.map(output.scope["resid_post", layer], ("resid_post", layer))
            exact = log_probs(ref, rows)
            for position in mapped.positions.tolist():
                wanted = dict(enumerate(exact[position].tolist()))
                agree(mapped.top(position), wanted, 1e-4)
    # No row of the padding, and no other of the vocabulary twice.
    every = outputs[3].scope.lens["lens"][LAST].token_ids
    assert every.max() < VOCAB
    assert all(len(set(ids)) == VOCAB - 1 for ids in every.tolist())
