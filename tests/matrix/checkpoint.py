"""A tiny random checkpoint from a configuration class of transformers.

Owns:  `config_of`, `make_checkpoint`, `rename_weights`, `name_architecture`, SMALL, TOWER.

Fields that a configuration class has get the small values below; all others keep their defaults,
so that each family has what makes it differ.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

NUM_LAYERS = 4
TOWER_LAYERS = 2
VOCAB = 512
#: Field -> value, in every configuration class that has the field.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 1024, "n_positions": 1024, "max_seq_len": 1024,
    "hidden_size": 128, "n_embd": 128, "d_model": 128, "word_embed_proj_dim": 128,
    "num_hidden_layers": NUM_LAYERS, "n_layer": NUM_LAYERS, "n_layers": NUM_LAYERS,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "rotary_dim": 16, "query_pre_attn_scalar": 32, "global_head_dim": 64,
    "swa_head_dim": 32, "swa_v_head_dim": 32, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "intermediate_size": 256, "ffn_dim": 256, "ffn_hidden_size": 256, "n_inner": 256,
    "intermediate_size_mlp": 256, "shared_intermediate_size": 128, "block_ff_dim": 256,
    # Experts.
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "top_k_experts": 2,
    "moe_topk": 2, "moe_intermediate_size": 64, "expert_ffn_hidden_size": 64,
    "shared_expert_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "zero_expert_num": 0,
    # Latent attention.
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 64,
    # State spaces and linear attention.
    "state_size": 16, "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 32,
    "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "time_step_rank": 8,
    # Inputs of each layer.
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
}  # fmt: skip
#: The same for the parts of a model that see or hear. Prompts of text do not reach them; their
#: lists of layers are shorter, so that they are not taken for the decoder's.
TOWER: dict[str, Any] = {
    "hidden_size": 64, "embed_dim": 64, "d_model": 64, "hidden_dim": 64, "dim": 64,
    "intermediate_size": 128, "encoder_ffn_dim": 128, "encoder_hidden_size": 64,
    "num_hidden_layers": TOWER_LAYERS, "num_layers": TOWER_LAYERS, "depth": TOWER_LAYERS,
    "encoder_layers": TOWER_LAYERS, "conf_num_hidden_layers": TOWER_LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_heads": 2,
    "encoder_attention_heads": 2, "conf_num_attention_heads": 2, "head_dim": 32,
    "out_hidden_size": 128, "output_dim": 128, "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1], "cross_attention_frequency": 1,
}  # fmt: skip
#: Names of weights as transformers writes them, and as it reads them from published checkpoints.
WRITTEN, PUBLISHED = "language_model.model.model.", "language_model.model."
#: The parts of a configuration that describe the decoder; all others describe towers.
TEXT = ("text_config", "thinker_config")


def _mrope(*sections: int, partial: float = 1.0) -> dict[str, Any]:
    """Rotary embeddings whose frequencies are shared by three kinds of position."""
    return {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections),
        "partial_rotary_factor": partial,
    }}  # fmt: skip


#: Architecture -> fields that the rules above do not give. Those of a decoder hold for each
#: multimodal architecture that has its configuration class.
OTHER: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {
        "score_func": "sigmoid",
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
    },
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc"},
    "Cohere2ForCausalLM": {"sliding_window": 1024},
    "Cohere2MoeForCausalLM": {"sliding_window": 1024},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 32, "n_groups": 2},
    "PhiForCausalLM": {"intermediate_size": 512, "num_key_value_heads": 4},  # all that 0.31 runs
    "FalconForCausalLM": {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "ffn_hidden_size": 512,
    },
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": None},
    "Gemma4ForCausalLM": {
        "num_experts": None,
        "num_kv_shared_layers": 1,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Glm4MoeForCausalLM": {"head_dim": 32},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 256},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M*-M"},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True},
    "Lfm2ForCausalLM": {"block_dim": 128},
    "Llama4ForCausalLM": {"num_experts_per_tok": 1},
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "MiniCPM3ForCausalLM": {"dim_model_base": 128},
    # Rotations by time, height and width: the parts of half a head.
    "Cosmos3EdgeForConditionalGeneration": {"text_config": _mrope(4, 6, 6)},
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {"moe_intermediate_size": [64, 64]} | _mrope(6, 6, 4),
    },
    "Glm4vForConditionalGeneration": {"text_config": _mrope(2, 3, 3, partial=0.5)},
    "Glm4vMoeForConditionalGeneration": {"text_config": _mrope(2, 3, 3, partial=0.5)},
    "GlmOcrForConditionalGeneration": {"text_config": _mrope(4, 6, 6)},
    "PaddleOCRVLForConditionalGeneration": {"text_config": _mrope(4, 6, 6)},
    "Qwen2VLForConditionalGeneration": {"text_config": _mrope(4, 6, 6)},
    "Qwen2_5_VLForConditionalGeneration": {"text_config": _mrope(4, 6, 6)},
    "Qwen3VLForConditionalGeneration": {"text_config": _mrope(6, 5, 5)},
    "Qwen3VLMoeForConditionalGeneration": {
        # transformers tells by their shapes whether experts' weights are transposed.
        "text_config": {"norm_topk_prob": True, "moe_intermediate_size": 96} | _mrope(6, 5, 5),
    },
    "Granite4VisionForConditionalGeneration": {"text_config": {"model_type": "granite"}},
    "DiffusionGemmaForBlockDiffusion": {"vision_config": {"model_type": "gemma4_vision"}},
    # vLLM reads it of published configurations.
    "VoxtralForConditionalGeneration": {"audio_config": {"downsample_factor": 4}},
}


def config_of(architecture: str) -> Any:
    """A small configuration; raises ValueError without a class of this name in transformers."""
    import transformers

    model_class = getattr(transformers, architecture, None)
    if model_class is None or getattr(model_class, "config_class", None) is None:
        raise ValueError(f"transformers {transformers.__version__} has no {architecture}")
    return _small(model_class.config_class, SMALL, OTHER.get(architecture, {}))


def _small(config_class: Any, values: dict[str, Any], more: dict[str, Any]) -> Any:
    """A configuration with those values that its class has, and with `more`."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if dataclasses.is_dataclass(config_class):
        known = {field.name for field in dataclasses.fields(config_class)}
    else:
        known = set(inspect.signature(config_class.__init__).parameters)
    known |= {"global_head_dim", "first_k_dense_replace"} & set(dir(config_class))
    given = {name: value for name, value in values.items() if name in known}
    if "qk_rope_head_dim" in given:  # latent attention: the rotated part, and no groups
        given |= {"head_dim": 16, "num_key_value_heads": 4}
    given |= more
    for name, part in config_class.sub_configs.items():
        default, own = getattr(config_class(), name, None), dict(more.get(name, {}))
        part = part if default is None else type(default)
        part = CONFIG_MAPPING[own.pop("model_type")] if "model_type" in own else part
        if part is not AutoConfig:
            inner = SMALL if name in TEXT else TOWER
            given[name] = _small(part, inner, _of_decoder(part) | own)
    return config_class(**given)


def _of_decoder(config_class: type) -> dict[str, Any]:
    """The fields that OTHER gives the decoder with this configuration class."""
    import transformers

    for architecture, fields in OTHER.items():
        model_class = getattr(transformers, architecture, None)
        if getattr(model_class, "config_class", None) is config_class:
            return fields
    return {}


def make_checkpoint(architecture: str, folder: Path, seed: int = 0, config: Any = None) -> None:
    """Write a random model whose layers all matter to `folder`, in float32.

    Args:
        config: the model's; None for `config_of` the architecture.
    """
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config or config_of(architecture)).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _draw(name, weight)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    model.save_pretrained(folder)
    rename_weights(folder)


def rename_weights(folder: Path) -> None:
    """Give weights the names of published checkpoints.

    transformers 5.19 writes one "model." too many before the decoders of models that hear.
    """
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    if any(WRITTEN in name for name in weights):
        named = {name.replace(WRITTEN, PUBLISHED): weight for name, weight in weights.items()}
        save_file(named, path, metadata={"format": "pt"})


def name_architecture(folder: Path, architecture: str) -> None:
    """What vLLM is to run the checkpoint as."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture]}))


def _draw(name: str, weight: nn.Parameter) -> None:
    if weight.dim() == 2 or (weight.dim() == 3 and "expert" in name):
        fan_in = 1.0 if "embed" in name or "wte" in name or "A_log" in name else weight.shape[-1]
        if "A_log" not in name:
            weight.normal_(0, (1.0 if fan_in == 1.0 else 0.7) / fan_in**0.5)
    elif weight.dim() == 1 and "norm" in name and name.endswith("weight"):
        # A norm's own weight shows which norm it is.
        weight.add_(torch.randn_like(weight) * 0.1)
