"""q, k, v and z are what Hugging Face's attention gets and gives, whatever the batch is, and the
patterns that follow from q and k are its `output_attentions`."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import vllm_scope
from tests import asking
from tests.asking import run
from tests.checkpoints import (
    NUM_LAYERS,
    check_completion,
    check_inside,
    reference,
    row_error,
)
from tests.conftest import local_engine, long_except, preempted_in
from vllm_scope import Add, Read, SpecError, scope
from vllm_scope.analysis.attention import attention_pattern
from vllm_scope.errors import ConfigError
from vllm_scope.graph.anatomy.convention import Convention
from vllm_scope.graph.anatomy.layers import Anatomy

SITES = ("q", "k", "v", "z")
#: The stream is read beside them.
CONFIG = {"sites": ["embed", "resid_post", *SITES]}
PROMPTS = [list(range(3, 60)), [7] * 5, list(range(400, 380, -1))]
READS = tuple(Read(site) for site in SITES)
EVERYTHING = (*READS, Read("resid_post"), Read("embed"))
STREAM = (Read("resid_post"), Read("embed"))


def params(*actions, **options):
    defaults = {"max_tokens": 8}
    return asking.params(scope(*actions) if actions else None, **(defaults | options))


def check(result, prompt, output_ids, ref, sites=SITES, layers=range(NUM_LAYERS)):
    """In the shape of heads."""
    token_ids = [*prompt, *output_ids][:-1]
    check_inside(result, token_ids, ref.attention(token_ids), sites, layers, ref.dtype)


def check_patterns(result, prompt, output_ids, ref, layers=range(NUM_LAYERS)):
    """Of all heads, at the positions whose queries the result has."""
    expected = ref.patterns([*prompt, *output_ids][:-1])
    for layer in layers:
        at = result.positions("q", layer)
        right = expected[layer][:, at, : at[-1] + 1]
        torch.testing.assert_close(attention_pattern(result, layer), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", long_except(["qwen3", "gemma2", "gpt2"], "qwen3"))
def test_rows_equal_hugging_face(family, checkpoints):
    path = checkpoints(family)
    ref = reference(path, torch.float32)
    with local_engine(path, dtype="float32", additional_config={"scope": CONFIG}) as llm:
        outputs = run(llm, PROMPTS, params(*EVERYTHING))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check(output.scope, prompt, output.outputs[0].token_ids, ref)
        check_patterns(output.scope, prompt, output.outputs[0].token_ids, ref)
    # Neither the layers nor the sites are alike, so that the wrong one could not pass.
    first, second = ref.attention(PROMPTS[0])[:2]
    for site in SITES:
        assert row_error(first[site].flatten(1), second[site].flatten(1)) > 0.1
    assert row_error(first["k"].flatten(1), first["v"].flatten(1)) > 0.1


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def llm(llama, root):
    """Compiled, in chunks of 32 tokens."""
    files = {"sinks": {"filesystem": {"root": str(root), "layout": "per_request"}}}
    with local_engine(
        llama, dtype="float32", additional_config={"scope": CONFIG | files},
        max_num_batched_tokens=32, enforce_eager=False,
    ) as llm:  # fmt: skip
        yield llm


def test_a_mixed_batch_in_chunks_with_several_completions(llm, ref):
    """Attention beside the stream, the stream alone, nothing, and n=2."""
    asked = [
        params(*EVERYTHING), params(*STREAM), params(),
        params(Read("q", layers=[0, 2]), Read("z", layer=1), n=2, temperature=1),
    ]  # fmt: skip
    prompts = [*PROMPTS, PROMPTS[0]]
    outputs = run(llm, prompts, asked)
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    check(outputs[0].scope, prompts[0], ids[0], ref)
    check_patterns(outputs[0].scope, prompts[0], ids[0], ref)
    check_completion(outputs[1].scope, prompts[1], ids[1], ref)
    assert outputs[2].scope is None
    first, second = outputs[3].outputs
    assert first.token_ids != second.token_ids
    for one in (first, second):
        check(one.scope, prompts[3], one.token_ids, ref, ["q"], [0, 2])
        check(one.scope, prompts[3], one.token_ids, ref, ["z"], [1])


def test_the_prefix_cache_is_read_again_only_where_it_must_be(llm, ref):
    outputs = [run(llm, PROMPTS[:1], params(Read("k", tokens=tokens)))[0]
               for tokens in ("all", "all", "generated")]  # fmt: skip
    for output in outputs[:2]:
        check(output.scope, PROMPTS[0], output.outputs[0].token_ids, ref, ["k"])
    expected = outputs[0].scope["k", 1][len(PROMPTS[0]) :]
    assert row_error(outputs[2].scope["k", 1].flatten(1), expected.flatten(1)) <= 1e-4


def test_keys_of_cached_positions_are_read_again_and_queries_are_those_asked_for(llm, ref):
    first, again = (
        run(llm, PROMPTS[:1], params(Read("q", tokens=tokens), Read("k")))[0]
        for tokens in ("all", "generated")
    )
    for output in (first, again):
        check_patterns(output.scope, PROMPTS[0], output.outputs[0].token_ids, ref)
    asked = attention_pattern(again.scope, 1, [3, 0])
    assert asked.shape == (2, 7, len(PROMPTS[0]) + 7)
    whole = attention_pattern(first.scope, 1)[[3, 0], len(PROMPTS[0]) :]
    torch.testing.assert_close(asked, whole, rtol=0, atol=1e-6)


def test_a_kernel_with_another_rule_has_no_pattern(llm):
    from vllm_scope.engine.worker.attention import kernel_of

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    modules = worker.model_runner.get_model().modules()
    module = next(m for m in modules if type(m).__name__ == "TappedAttention")
    with as_if(module, "__class__", type("Attention", (type(module),), {})):
        assert kernel_of(module)["exact"]
        with as_if(module.impl, "chunk_lookback", 1):
            assert not kernel_of(module)["exact"]
        with as_if(module, "use_mm_prefix", True):
            assert not kernel_of(module)["exact"]
        # Of two ranks, each with two of four heads.
        with as_if(module.impl, "sinks", torch.tensor([0.5, -1.0])):
            told = kernel_of(module, lambda here: torch.cat([here, here + 1], 1))
        assert told["sinks"] == [0.5, -1.0, 1.5, 0.0]
    with as_if(module, "__class__", type("ChunkedLocalAttention", (type(module),), {})):
        assert not kernel_of(module)["exact"]


def test_what_edits_the_stream_reaches_the_attention_after_it(llm):
    edited, plain = run(
        llm, PROMPTS[:1] * 2,
        [params(Add([3.0] * 128, layer=0), *EVERYTHING), params(*EVERYTHING)],
    )  # fmt: skip
    for site in SITES:
        first = edited.scope[site, 0][:50].flatten(1), plain.scope[site, 0][:50].flatten(1)
        later = edited.scope[site, 1][:50].flatten(1), plain.scope[site, 1][:50].flatten(1)
        assert row_error(*first) <= 1e-5
        assert row_error(*later) > 0.05


@pytest.mark.parametrize("codec", ["int8", "fp16", {"name": "topk8", "k": 16}], ids=str)
def test_rows_with_a_codec_are_what_it_makes_of_them(codec, llm):
    reads = [Read(site, codec=codec) for site in SITES]
    encoded, plain = run(
        llm, PROMPTS[:1] * 2, [params(*reads, Read("resid_post")), params(*EVERYTHING)]
    )
    for site in SITES:
        rows = plain.scope[site, 1]
        own = encoded.scope.encoded(site, 1).codec
        expected = own.decode(own.encode(rows.flatten(1)), len(rows)).view_as(rows)
        assert encoded.scope[site, 1].shape == rows.shape
        # Batched apart: rounding moves a number to its codec's next step at most.
        assert row_error(encoded.scope[site, 1].flatten(1), expected.flatten(1)) < 0.01
        assert 1e-5 < row_error(expected.flatten(1), rows.flatten(1)) < 1


def test_files_have_the_rows_of_memory_with_the_heads_one_after_another(llm, root):
    both = [Read(site, to=to) for site in SITES for to in ("memory", "filesystem")]
    (output,) = run(llm, PROMPTS[:1], params(*both))
    result = output.scope
    assert result.status == "complete"
    (request,) = vllm_scope.open(root)
    assert request.keys() == sorted((site, k) for site in SITES for k in range(NUM_LAYERS))
    for stream in request.keys():
        assert torch.equal(request[stream], result[stream].flatten(1))


def test_the_cache_has_transformer_lens_names_and_shapes(llm):
    (output,) = run(llm, PROMPTS[1:2], params(*EVERYTHING))
    cache, n = output.scope.as_cache(), len(PROMPTS[1]) + 7
    names = {"q": "hook_rot_q", "k": "hook_rot_k", "v": "hook_v", "z": "hook_z"}
    for site, hook in names.items():
        rows = cache[f"blocks.1.attn.{hook}"]
        assert f"blocks.1.attn.{hook}" in list(cache)
        assert rows.shape == (1, n, 4 if site in "qz" else 2, 32)
        assert torch.equal(rows[0], output.scope[site, 1])
    assert torch.equal(cache["z", -1], cache["blocks.2.attn.hook_z"])
    assert torch.equal(cache["rot_q", 0], cache["blocks.0.attn.hook_rot_q"])
    pattern = cache["blocks.1.attn.hook_pattern"]
    assert torch.equal(pattern[0], attention_pattern(output.scope, 1))
    assert torch.equal(pattern, cache["pattern", -2])
    with pytest.raises(KeyError, match="names no stream"):
        cache["blocks.0.attn.hook_q"]  # before the rotary embedding


def test_a_result_that_travels_has_its_heads(llm):
    import pickle

    (output,) = run(llm, PROMPTS[1:2], params(Read("k"), Read("v", codec="int8")))
    again = pickle.loads(pickle.dumps(output.scope))
    for site in ("k", "v"):
        assert again[site, 2].shape == output.scope[site, 2].shape == (12, 2, 32)
        assert torch.equal(again[site, 2], output.scope[site, 2])


@pytest.mark.long
def test_preempted_requests_have_each_row_once(llama, ref):
    with local_engine(
        llama, dtype="float32", num_gpu_blocks_override=7, block_size=32, max_model_len=96,
        max_num_seqs=3, additional_config={"scope": CONFIG | {"layers": [0, 2]}},
    ) as llm:  # fmt: skip
        preempted = preempted_in(llm)
        prompts = [list(range(i, i + 30)) for i in (10, 50, 90)]
        reads = (*map(Read, "qkv"), Read("resid_post"))
        outputs = run(llm, prompts, params(*reads, max_tokens=60))
        with pytest.raises(SpecError, match=r"layers has 1; this engine does not tap 'q' there"):
            run(llm, prompts, params(Read("q", layer=1)))
    assert preempted, "the cache was large enough; the test shows nothing"
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output.outputs[0].token_ids
        check(output.scope, prompt, ids, ref, ["q", "k", "v"], [0, 2])
        check_patterns(output.scope, prompt, ids, ref, [0, 2])


def config_of(path, **options):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        str(path), skip_tokenizer_init=True, load_format="dummy", max_model_len=256, **options
    ).create_engine_config()


def test_latent_attention_has_no_keys(tmp_path):
    from transformers import DeepseekV2Config

    from vllm_scope.engine.worker.attention import heads_of

    DeepseekV2Config(
        architectures=["DeepseekV2ForCausalLM"], hidden_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, vocab_size=512,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        intermediate_size=256, max_position_embeddings=512, first_k_dense_replace=1,
    ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(ConfigError, match=r"sites has 'q', and this model's attention is latent"):
        heads_of(config_of(tmp_path), ["q"])


@contextmanager
def as_if(module, name, value):
    missing = object()
    original = getattr(module, name, missing)
    setattr(module, name, value)
    try:
        yield
    finally:
        if original is missing:
            delattr(module, name)
        else:
            setattr(module, name, original)


def test_layers_whose_attention_is_not_of_the_shape_stop_the_engine(llm):
    from vllm_scope.engine.worker.attention import attention_of
    from vllm_scope.request.sites import Heads, Place, Sites

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    layer = worker.model_runner.get_model().model.layers[1]
    boundaries = tuple(Place(s, 1).boundary for s in SITES)
    sites = Sites(3, 128, "float32", boundaries, Heads(4, 2, 32, 32))
    of = partial(Anatomy, num_layers=3, convention=Convention.SUM, path="layers")
    attention = attention_of(of({1: layer}), sites)[1]
    with pytest.raises(ConfigError, match=r"layer 1 \(Linear\) has 0 attention modules"):
        attention_of(of({1: nn.Linear(1, 1)}), sites)
    other = worker.model_runner.get_model().model.layers[2]
    with pytest.raises(ConfigError, match=r"layer 1 \(ModuleList\) has 2 attention modules"):
        attention_of(of({1: nn.ModuleList([layer, other])}), sites)
    with pytest.raises(ConfigError, match="rows of a site are of one width"):
        attention_of(of({1: layer}), replace(sites, heads=Heads(4, 4, 32, 32)))
    with as_if(attention, "kv_sharing_target_layer_name", "model.layers.0"):
        with pytest.raises(ConfigError, match="and has none of its own"):
            attention_of(of({1: layer}), sites)
        alone = tuple(Place(s, 1).boundary for s in ("q", "z"))
        assert attention_of(of({1: layer}), replace(sites, boundaries=alone))
