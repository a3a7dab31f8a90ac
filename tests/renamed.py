"""Checkpoints of families that transformers has no class for, and whose computation is another's.

Exaone 3 is a Llama with other names: its checkpoint is one of Llama's, renamed. That Llama is the
reference.
"""

from __future__ import annotations

import json
from pathlib import Path

_CONFIGURATION = """from transformers import PretrainedConfig


class ExaoneConfig(PretrainedConfig):
    model_type = "exaone"
"""
#: Llama's names -> Exaone's.
_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}


def rename_to_exaone(llama: Path, folder: Path) -> None:
    """Write the Llama checkpoint as one of Exaone 3, with its configuration class beside it."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    renamed = {}
    for key, weight in load_file(llama / "model.safetensors").items():
        for old, new in _NAMES.items():
            key = key.replace(old, new)
        renamed[key] = weight
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    body = json.loads((llama / "config.json").read_text())
    body |= {
        "architectures": ["ExaoneForCausalLM"], "model_type": "exaone",
        "auto_map": {"AutoConfig": "configuration_exaone.ExaoneConfig"},
        "activation_function": body["hidden_act"], "layer_norm_epsilon": body["rms_norm_eps"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(body))
    (folder / "configuration_exaone.py").write_text(_CONFIGURATION)
