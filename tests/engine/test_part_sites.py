"""attn_in, mlp_in, mlp_post and ln_final are what Hugging Face's modules get and give."""

from __future__ import annotations

import pytest
import torch

from tests.asking import run
from tests.checkpoints import NUM_LAYERS, check_inside, reference, row_error
from tests.conftest import local_engine, long_except
from tests.engine.test_attention_sites import PROMPTS, params
from tests.engine.test_edits import check as check_edited
from vllm_scope import Add, ConfigError, Probe, Read, SpecError

INSIDE = ("attn_in", "mlp_in", "mlp_post")
SITES = (*INSIDE, "ln_final")
CONFIG = {"sites": ["embed", "resid_post", *SITES]}
READS = tuple(map(Read, SITES))


def check(result, prompt, output_ids, expected, inside=INSIDE, dtype=torch.float32):
    token_ids = [*prompt, *output_ids][:-1]
    check_inside(result, token_ids, expected, inside, range(NUM_LAYERS), dtype)
    check_inside(result, token_ids, expected, ["ln_final"], [0], dtype)


@pytest.mark.parametrize(
    "family", long_except(["qwen3", "gemma2", "gpt2", "opt", "cohere"], "gpt2")
)
def test_rows_equal_hugging_face(family, checkpoints):
    path = checkpoints(family)
    ref = reference(path, torch.float32)
    # OPT's layers have no module for their MLP.
    inside = [site for site in INSIDE if (family, site) != ("opt", "mlp_in")]
    reads = [*map(Read, inside), Read("ln_final")]
    config = {"sites": ["embed", "resid_post", *inside, "ln_final"]}
    vector = torch.randn(128, generator=torch.Generator().manual_seed(3))
    with local_engine(
        path, dtype="float32", additional_config={"scope": config}, block_size=32,
        max_num_batched_tokens=32,
    ) as llm:  # fmt: skip
        outputs = run(llm, PROMPTS, params(*reads))
        late = (Read(read.site, tokens="generated") for read in reads)
        (cached,) = run(llm, PROMPTS[:1], params(*late))
        edit = Add(vector, site="attn_in", layer=1)
        (edited,) = run(llm, PROMPTS[1:2], params(edit, *reads, Read("resid_post")))
    # Neither the stream nor, in Cohere, the MLP's input is the same tensor.
    check_edited(edited, ref, [("attn_in", 1, lambda x: x + vector)])
    assert cached.num_cached_tokens >= 32
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = output.outputs[0].token_ids
        expected = ref.parts([*prompt, *ids][:-1])
        check(output.scope, prompt, ids, expected, inside)
        if prompt == PROMPTS[0]:
            late = expected[2]["mlp_post"][len(prompt) :], expected[0]["ln_final"][len(prompt) :]
            assert row_error(cached.scope["mlp_post", 2], late[0]) <= 1e-4
            assert row_error(cached.scope["ln_final", 0], late[1]) <= 1e-4
    # Neither the layers nor the norm's input and output are alike.
    first = ref.parts(PROMPTS[0])
    for site in inside:
        assert row_error(first[0][site], first[1][site]) > 0.1
    if family not in ("opt", "cohere"):
        assert row_error(first[0]["attn_in"], first[0]["mlp_in"]) > 0.1
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
        max_num_batched_tokens=32, enforce_eager=False, max_logprobs=-1,
        logprobs_mode="raw_logits",
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
        params(*READS, Add(vector, site="mlp_in", layer=1)),
        params(Read("resid_post")),
    ]
    outputs = run(llm, [PROMPTS[0]] * 5, asked)
    edits = [], [("resid_post", last, vector)], [("mlp_post", 1, wide)], [("mlp_in", 1, vector)]
    for output, some in zip(outputs, edits, strict=False):
        ids = output.outputs[0].token_ids
        token_ids = [*PROMPTS[0], *ids][:-1]
        made = [(site, layer, lambda x, v=v: x + v) for site, layer, v in some]
        streams, _ = ref.edited(token_ids, made)
        expected = [{site: streams[site, k] for site in INSIDE} for k in range(NUM_LAYERS)]
        expected[0]["ln_final"] = streams["ln_final", 0]
        check(output.scope, PROMPTS[0], ids, expected)
    plain = outputs[0].scope
    scores = plain["ln_final", 0].double() @ vector.double()
    torch.testing.assert_close(plain.scores["p"].double(), scores, rtol=1e-4, atol=1e-4)
    assert not torch.equal(outputs[1].scope["ln_final", 0], plain["ln_final", 0])


def test_vllm_itself_returns_logits_of_the_whole_vocabulary(llm, ref):
    prompt = PROMPTS[1]
    (output,) = run(llm, [prompt], params(Read("ln_final"), logprobs=-1))
    (completion,) = output.outputs
    found = torch.tensor([
        [step[token].logprob for token in range(512)] for step in completion.logprobs
    ])  # fmt: skip
    _, logits = ref.edited([*prompt, *completion.token_ids][:-1], [])
    torch.testing.assert_close(found, logits[len(prompt) - 1 :], rtol=1e-4, atol=1e-4)
    head = ref.model.get_output_embeddings().weight.detach()
    made = output.scope["ln_final", 0] @ head.T
    torch.testing.assert_close(made[len(prompt) - 1 :], found, rtol=1e-4, atol=1e-4)


def test_the_cache_has_transformer_lens_names(llm):
    (output,) = run(llm, PROMPTS[1:2], params(*READS))
    cache = output.scope.as_cache()
    assert torch.equal(cache["blocks.1.mlp.hook_post"][0], output.scope["mlp_post", 1])
    assert torch.equal(cache["mlp_post", -1][0], output.scope["mlp_post", NUM_LAYERS - 1])
    assert torch.equal(cache["ln_final"][0], output.scope["ln_final", 0])
    assert torch.equal(cache["blocks.1.mlp.hook_in"][0], output.scope["mlp_in", 1])
    assert torch.equal(cache["blocks.1.attn.hook_in"][0], output.scope["attn_in", 1])


def test_the_final_norm_is_not_edited_and_has_no_layers():
    with pytest.raises(SpecError, match="'ln_final', which can be read and probed, not edited"):
        Add([1.0] * 128, site="ln_final")
    with pytest.raises(SpecError, match="'ln_final' has no layers"):
        Read("ln_final", layer=2)
