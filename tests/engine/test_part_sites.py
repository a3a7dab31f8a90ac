"""mlp_post and ln_final are what Hugging Face's modules get and give."""

from __future__ import annotations

import pytest
import torch

from tests.asking import run
from tests.checkpoints import NUM_LAYERS, check_inside, reference, row_error
from tests.conftest import local_engine
from tests.engine.test_attention_sites import PROMPTS, config_of, params
from vllm_scope import Add, ConfigError, Probe, Read, SpecError

SITES = ("mlp_post", "ln_final")
CONFIG = {"sites": ["embed", "resid_post", *SITES]}
READS = tuple(map(Read, SITES))


def check(result, prompt, output_ids, expected, dtype=torch.float32):
    token_ids = [*prompt, *output_ids][:-1]
    check_inside(result, token_ids, expected, ["mlp_post"], range(NUM_LAYERS), dtype)
    check_inside(result, token_ids, expected, ["ln_final"], [0], dtype)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "opt", "cohere"])
def test_rows_equal_hugging_face(family, checkpoints):
    path = checkpoints(family)
    ref = reference(path, torch.float32)
    with local_engine(
        path, dtype="float32", additional_config={"scope": CONFIG}, block_size=32,
        max_num_batched_tokens=32,
    ) as llm:  # fmt: skip
        outputs = run(llm, PROMPTS, params(*READS))
        (cached,) = run(llm, PROMPTS[:1], params(*(Read(s, tokens="generated") for s in SITES)))
    assert cached.num_cached_tokens >= 32
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = output.outputs[0].token_ids
        expected = ref.parts([*prompt, *ids][:-1])
        check(output.scope, prompt, ids, expected)
        if prompt == PROMPTS[0]:
            late = expected[2]["mlp_post"][len(prompt) :], expected[0]["ln_final"][len(prompt) :]
            assert row_error(cached.scope["mlp_post", 2], late[0]) <= 1e-4
            assert row_error(cached.scope["ln_final", 0], late[1]) <= 1e-4
    # Neither the layers nor the norm's input and output are alike.
    first = ref.parts(PROMPTS[0])
    assert row_error(first[0]["mlp_post"], first[1]["mlp_post"]) > 0.1
    assert row_error(first[0]["ln_final"], ref.streams(PROMPTS[0])[-1]) > 0.1


def test_experts_have_no_row_of_one_mlp(checkpoints):
    # Before the next fixture: vLLM makes the experts' group once for a process.
    path, options = checkpoints("qwen3_moe"), {"scope": {"sites": ["mlp_post"]}}
    words = r"sites has 'mlp_post', and layer 0 \(Qwen3MoeDecoderLayer\) has experts"
    with (
        pytest.raises(ConfigError, match=words),
        local_engine(path, dtype="float32", additional_config=options),
    ):
        pass


@pytest.fixture(scope="module")
def llm(llama):
    """Compiled, in chunks of 32 tokens."""
    with local_engine(
        llama, dtype="float32", additional_config={"scope": CONFIG},
        max_num_batched_tokens=32, enforce_eager=False,
    ) as llm:  # fmt: skip
        yield llm


def test_in_a_compiled_graph_with_edits_and_probes(llm, ref):
    vector = torch.randn(128, generator=torch.Generator().manual_seed(1))
    wide = torch.randn(256, generator=torch.Generator().manual_seed(2))
    last = NUM_LAYERS - 1
    asked = [
        params(*READS, Probe(vector, site="ln_final", name="p")),
        params(*READS, Add(vector, layer=last)),
        params(*READS, Add(wide, site="mlp_post", layer=1)),
        params(Read("resid_post")),
    ]
    outputs = run(llm, [PROMPTS[0]] * 4, asked)
    edits = [], [("resid_post", last, vector)], [("mlp_post", 1, wide)]
    for output, some in zip(outputs, edits, strict=False):
        ids = output.outputs[0].token_ids
        token_ids = [*PROMPTS[0], *ids][:-1]
        made = [(site, layer, lambda x, v=v: x + v) for site, layer, v in some]
        streams, _ = ref.edited(token_ids, made)
        expected = [{"mlp_post": streams["mlp_post", k]} for k in range(NUM_LAYERS)]
        expected[0]["ln_final"] = streams["ln_final", 0]
        check(output.scope, PROMPTS[0], ids, expected)
    plain = outputs[0].scope
    scores = plain["ln_final", 0].double() @ vector.double()
    torch.testing.assert_close(plain.scores["p"].double(), scores, rtol=1e-4, atol=1e-4)
    assert not torch.equal(outputs[1].scope["ln_final", 0], plain["ln_final", 0])


def test_the_cache_has_transformer_lens_names(llm):
    (output,) = run(llm, PROMPTS[1:2], params(*READS))
    cache = output.scope.as_cache()
    assert torch.equal(cache["blocks.1.mlp.hook_post"][0], output.scope["mlp_post", 1])
    assert torch.equal(cache["mlp_post", -1][0], output.scope["mlp_post", NUM_LAYERS - 1])
    assert torch.equal(cache["ln_final"][0], output.scope["ln_final", 0])


def test_the_final_norm_is_not_edited_and_has_no_layers():
    with pytest.raises(SpecError, match="'ln_final', which can be read and probed, not edited"):
        Add([1.0] * 128, site="ln_final")
    with pytest.raises(SpecError, match="'ln_final' has no layers"):
        Read("ln_final", layer=2)


def test_several_ranks_do_not_put_the_row_together(llama):
    from vllm_scope.config import ScopeConfig
    from vllm_scope.engine.model import sites_of

    config = config_of(llama, tensor_parallel_size=2)
    words = "sites has 'mlp_post', and with tensor_parallel_size 2 each rank has a part of the row"
    with pytest.raises(ConfigError, match=words):
        sites_of(config, ScopeConfig(sites=("resid_post", "mlp_post")))
    assert sites_of(config, ScopeConfig(sites=("ln_final",))).mlp_size is None
