"""The lens at the last layer equals Hugging Face's models, with caps, scales and biases."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.toy_model import TensorResult
from vllm_scope.analysis.lens import Lens, top_tokens
from vllm_scope.errors import SpecError

LAST = ("resid_post", 1)
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT_J = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "vocab_size": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MINICPM = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "dim_model_base": 8, "num_key_value_heads": 4,
}  # fmt: skip
MAMBA_2 = {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 1}
#: case -> (class, configuration, path of the final norm, what the norm's weight is counted from)
MODELS = {
    "plain": ("LlamaForCausalLM", SMALL, "model.norm", 0.0),
    "cap": ("Gemma2ForCausalLM", SMALL | {"final_logit_softcapping": 5.0}, "model.norm", 1.0),
    "factor": ("CohereForCausalLM", SMALL | {"logit_scale": 0.3}, "model.norm", 0.0),
    "divisor": ("GraniteForCausalLM", SMALL | {"logits_scaling": 4.0}, "model.norm", 0.0),
    "a-factor-named-as-a-divisor": (
        "HyperCLOVAXForCausalLM", SMALL | {"logits_scaling": 0.25}, "model.norm", 0.0
    ),
    "ratio-of-widths": ("MiniCPM3ForCausalLM", SMALL | MINICPM, "model.norm", 0.0),
    "bias": ("PhiForCausalLM", SMALL, "model.final_layernorm", 0.0),
    "bias-of-gpt-j": ("GPTJForCausalLM", GPT_J, "transformer.ln_f", 0.0),
    # The eps of these norms has the name of the other kind of norm.
    "rms-of-mamba": ("MambaForCausalLM", SMALL | {"state_size": 4}, "backbone.norm_f", 0.0),
    "rms-of-mamba-2": ("Mamba2ForCausalLM", SMALL | MAMBA_2, "backbone.norm_f", 0.0),
    "layer-of-phimoe": ("PhimoeForCausalLM", SMALL, "model.norm", 0.0),
}  # fmt: skip
#: Cases without a cap, a scale or a bias of the unembedding.
PLAIN = ("plain", "rms-of-mamba", "rms-of-mamba-2", "layer-of-phimoe")


@torch.inference_mode()
def run(case: str):
    """A random model's configuration, its lens's tensors, the last row, and its log-probs."""
    import transformers

    name, body, path, base = MODELS[case]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**body)).eval()
    for parameter in model.parameters():
        # Also the biases, which start as zeros, and wide enough that a cap of 5 matters.
        parameter.normal_(0, 0.6)
    norm, head = model.get_submodule(path), model.get_output_embeddings()
    seen = []
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    logits = model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0]
    tensors = {
        "norm_weight": base + norm.weight, "norm_bias": getattr(norm, "bias", None),
        "unembedding": head.weight, "unembedding_bias": getattr(head, "bias", None),
    }  # fmt: skip
    return model.config, tensors, seen[0], logits.float().log_softmax(-1)


@pytest.mark.parametrize("case", MODELS)
def test_log_probs_of_the_last_layer_are_the_models_own(case):
    config, tensors, rows, expected = run(case)
    result = TensorResult({LAST: rows})
    for known in (config, config.to_dict(), {"text_config": config.to_dict()}):
        top = top_tokens(Lens.from_config(known, **tensors), result, k=64)[1]
        found = torch.empty_like(expected).scatter(1, top.token_ids, top.log_probs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    lens = Lens.from_config(config, **tensors)
    plain = dataclasses.replace(lens, soft_cap=None, logit_scale=1.0, unembedding_bias=None)
    error = (plain.logits(rows).log_softmax(-1) - expected).abs().max()
    assert (error < 1e-2) == (case in PLAIN), error


def test_a_cap_comes_before_the_scale():
    """As vLLM's LogitsProcessor has it."""
    rows = torch.tensor([[3.0, -4.0]])
    lens = Lens(torch.ones(2), 0.0, torch.eye(2), soft_cap=2.0, logit_scale=0.5)
    normed = rows / math.sqrt(12.5)
    torch.testing.assert_close(lens.logits(rows), 0.5 * 2.0 * (normed / 2.0).tanh())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"soft_cap": 0.0}, "soft_cap is 0.0; it must be a number above 0"),
        ({"soft_cap": math.inf}, "soft_cap is inf"),
        ({"logit_scale": 0.0}, "logit_scale is 0.0; it must be a number above 0"),
        ({"logit_scale": math.nan}, "logit_scale is nan"),
        ({"unembedding_bias": torch.ones(3)}, r"unembedding_bias has shape \[3\]"),
    ],
)
def test_wrong_caps_scales_and_shapes_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        Lens(torch.ones(2), 0.0, torch.eye(2), **options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 2}, "names no rms_norm_eps, layer_norm_eps or layer_norm_epsilon"),
        ({"rms_norm_eps": "much"}, "rms_norm_eps is 'much'; it must be a number"),
        (
            {"rms_norm_eps": 1e-6, "logits_scaling": 0},
            "logits_scaling is 0; it must be a number above",
        ),
        (
            {"rms_norm_eps": 1e-6, "logit_scale": True},
            "logit_scale is True; it must be a number above",
        ),
        ([], "is no configuration"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused(config, message):
    with pytest.raises(SpecError, match=message):
        Lens.from_config(config, torch.ones(2), torch.eye(2))
