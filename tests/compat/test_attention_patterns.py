"""vllm-lens's queries and keys, and the patterns that follow from them, against Hugging Face."""

from __future__ import annotations

import json

import pytest
import torch

from tests import asking
from tests.asking import run
from tests.checkpoints import Reference, make_checkpoint
from tests.conftest import local_engine
from vllm_scope import Read, ScopeError, SpecError, scope
from vllm_scope.analysis.attention import attention_pattern
from vllm_scope.compat.vllm_lens import (
    attention_patterns,
    compute_attention_weights,
    decode_activations,
    serialize_activations,
)
from vllm_scope.views import attention_map

PROMPT = list(range(30, 70))
SITES = {"scope": {"sites": ["embed", "resid_post", "q", "k"]}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Gemma 2 with windows and caps that these prompts reach: layers 0 and 2 see 16 positions."""
    return make_checkpoint(
        "gemma2", tmp_path_factory.mktemp("windows"), sliding_window=16,
        attn_logit_softcapping=1.5, query_pre_attn_scalar=20,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ref(path):
    return Reference(path, torch.float32)


@pytest.fixture(scope="module")
def llm(path, ref):
    with local_engine(
        path, dtype="float32", max_num_batched_tokens=32, additional_config=SITES
    ) as llm:
        yield llm


def ask(llm, extra, **options):
    (output,) = run(llm, [PROMPT], asking.params(extra, max_tokens=6, **options))
    return output


@pytest.mark.parametrize("asked", [True, [2, 0], "[0, 1, 2]"], ids=str)
def test_queries_and_keys_are_stacked_by_ascending_layer(asked, llm, ref):
    output = ask(llm, {"output_qk": asked, "output_residual_stream": [1]})
    expected = ref.attention([*PROMPT, *output.outputs[0].token_ids][:-1])
    found, layers = output.activations, [0, 2] if isinstance(asked, list) else [0, 1, 2]
    assert set(found) == {"residual_stream", "attn_q", "attn_k", "qk_layers", "qk_meta"}
    assert found["qk_layers"] == layers
    assert found["attn_q"].shape == (len(layers), len(PROMPT) + 5, 4, 32)
    assert found["attn_k"].shape == (len(layers), len(PROMPT) + 5, 2, 32)
    for at, layer in enumerate(layers):
        for name in "qk":
            rows = found[f"attn_{name}"][at]
            torch.testing.assert_close(rows, expected[layer][name], rtol=1e-4, atol=1e-4)
    assert found["residual_stream"].shape == (1, len(PROMPT) + 5, 128)
    window = [meta["sliding_window"] for meta in found["qk_meta"]]
    assert window == [[-1, -1] if layer == 1 else [15, 0] for layer in layers]
    assert {meta["logits_soft_cap"] for meta in found["qk_meta"]} == {1.5}
    assert found["qk_meta"][0]["scale"] == pytest.approx(20**-0.5)


def test_patterns_are_what_the_eager_model_computes(llm, ref):
    """GQA, a scale of the model's own, a soft cap, and windows in some layers."""
    output = ask(llm, {"output_qk": True})
    expected = ref.attention([*PROMPT, *output.outputs[0].token_ids][:-1])
    for layer in range(3):
        found = attention_patterns(output.activations, layer)
        torch.testing.assert_close(found, expected[layer]["weights"], rtol=1e-4, atol=1e-5)
    (native,) = run(llm, [PROMPT], asking.params(scope(Read("q"), Read("k")), max_tokens=6))
    reported = ref.patterns([*PROMPT, *native.outputs[0].token_ids][:-1])
    for layer in range(3):
        found = attention_pattern(native.scope, layer)
        torch.testing.assert_close(found, reported[layer], rtol=0, atol=1e-5)
    # The window is there, and it matters.
    assert (attention_patterns(output.activations, 0)[:, 40, :25] == 0).all()
    assert (attention_patterns(output.activations, 1)[:, 40, :25] > 0).all()


def test_they_survive_the_wire(llm):
    output = ask(llm, {"output_qk": [1]})
    body = json.loads(json.dumps({"activations": serialize_activations(output.activations)}))
    again = decode_activations(body)
    assert again["qk_layers"] == [1]
    assert torch.equal(attention_patterns(again, 1), attention_patterns(output.activations, 1))


def test_each_of_several_completions_has_its_own(llm):
    output = ask(llm, {"output_qk": [1]}, n=2, temperature=1.0)
    for completion in output.outputs:
        assert torch.equal(completion.activations["attn_q"][0], completion.scope["q", 1])
        assert attention_patterns(completion.activations, 1).shape == (4, 45, 45)


def test_the_map_of_a_result_is_the_pattern_of_its_heads(llm):
    (asked,) = run(llm, [PROMPT], asking.params(scope(Read("q"), Read("k")), max_tokens=6))
    wanted = attention_patterns(ask(llm, {"output_qk": True}).activations, 0)
    choice = attention_map(asked.outputs[0].scope, 0, heads=[3, 1]).parts()[-1]
    assert [option["name"] for option in choice["options"]] == ["3", "1"]
    for option, head in zip(choice["options"], (3, 1), strict=True):
        (grid,) = option["parts"]
        found = torch.tensor(
            [[0.0 if cell is None else cell["part"] for cell in row] for row in grid["cells"]]
        )
        torch.testing.assert_close(found, wanted[head], rtol=0, atol=6e-4)
    some = scope(Read("q"), Read("k", tokens="generated"))
    (asked,) = run(llm, [PROMPT], asking.params(some, max_tokens=6))
    with pytest.raises(
        ScopeError,
        match="rows of k are missing at layer 1; the last query needs k at all positions",
    ):
        attention_map(asked.outputs[0].scope, 1)


@pytest.mark.parametrize("value", [False, None])
def test_false_and_none_capture_nothing(value, llm):
    assert not hasattr(ask(llm, {"output_qk": value}), "activations")


def test_what_was_not_captured_has_no_pattern(llm):
    output = ask(llm, {"output_qk": [1], **scope(Read("embed"))})
    with pytest.raises(SpecError, match=r"layer 0 was not captured; output_qk had layers \[1\]"):
        attention_patterns(output.activations, 0)
    with pytest.raises(KeyError, match="have no queries and keys"):
        attention_patterns(ask(llm, {"output_residual_stream": [1]}).activations, 1)
    with pytest.raises(SpecError, match="has layers 0 to 2"):
        ask(llm, {"output_qk": [3]})
    chunked = dict(output.activations)
    chunked["qk_meta"] = [chunked["qk_meta"][0] | {"exact": False}]
    with pytest.raises(ScopeError, match="does more than scale, cap, mask and bias"):
        attention_patterns(chunked, 1)


def plain_weights(q, k, scale, bias=None, sinks=None):
    """Query by query, head by head."""
    heads, each = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.zeros(heads, len(q), len(k))
    for head in range(heads):
        for i in range(len(q)):
            last = len(k) - len(q) + i
            scores = (k[: last + 1, head // each] @ q[i, head]) * scale
            if bias is not None:
                scores = scores + bias[head] * (torch.arange(last + 1) - last)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head][None]])
            out[head, i, : last + 1] = scores.softmax(0)[: last + 1]
    return out


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sunk", [False, True])
def test_weights_of_the_last_queries(biased, sunk):
    torch.manual_seed(0)
    q, k = torch.randn(3, 6, 8), torch.randn(7, 2, 8)
    bias = torch.rand(6) if biased else None
    sinks = torch.randn(6) if sunk else None
    found = compute_attention_weights(q, k, scale=0.3, alibi_slopes=bias, sinks=sinks)
    torch.testing.assert_close(found, plain_weights(q, k, 0.3, bias, sinks))


def test_weights_without_a_mask_and_of_no_key():
    q, k = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    every = compute_attention_weights(q, k, scale=1.0, causal=False)
    torch.testing.assert_close(every.sum(-1), torch.ones(2, 4))
    assert (every > 0).all()
    # Queries far behind the window of all keys.
    assert (
        compute_attention_weights(q, k, scale=1.0, q_start=20, sliding_window=(3, 0)) == 0
    ).all()


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (((3, 4), (3, 4)), {}, r"q has shape \[3, 4\]"),
        (((3, 4, 8), (3, 3, 8)), {}, "q's number of heads must be a multiple"),
        (((3, 4, 8), (3, 2, 6)), {}, "with equal head_dim"),
        (((3, 4, 8), (2, 2, 8)), {}, "3 queries for 2 keys"),
        (((3, 4, 8), (3, 2, 8)), {"sinks": [1.0]}, "sinks has 1 numbers; q has 4 heads"),
    ],
)
def test_shapes_that_disagree_are_errors(shapes, options, words):
    q, k = (torch.ones(shape) for shape in shapes)
    with pytest.raises(SpecError, match=words):
        compute_attention_weights(q, k, scale=1.0, **options)
