"""Models by their shape: a configuration without weights. vLLM makes random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_COMMON = {"torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}

SHAPES: dict[str, dict[str, Any]] = {
    # Llama-3.1-8B
    "8b": _LLAMA | _COMMON | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    # Qwen2.5-0.5B: a small model, for which the host's time is a large share of a step
    "0.5b": _COMMON | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6,
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
        "max_position_embeddings": 8192, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    # Qwen3-30B-A3B, fewer layers
    "moe": _COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "rms_norm_eps": 1e-6,
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
        "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 8192,
        "rope_theta": 1000000.0, "tie_word_embeddings": False,
    },
    # Llama-3.1-70B
    "70b": _LLAMA | _COMMON | {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    # Rows as wide as 8B's, and nearly no computation: for a server on a CPU
    "thin": _LLAMA | _COMMON | {
        "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 1, "head_dim": 64,
        "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 1024,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip


def make_shape(name: str, folder: Path, num_layers: int | None = None) -> Path:
    """A folder for vLLM's `load_format="dummy"`. `num_layers` replaces the shape's own."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    fewer = {} if num_layers is None else {"num_hidden_layers": num_layers}
    (path / "config.json").write_text(json.dumps(SHAPES[name] | fewer))
    return path


def make_saes(folder: Path, layers: list[int], hidden_size: int, width: int) -> dict[str, str]:
    """Make JumpReLU SAEs of `resid_post` in SAELens's format. Returns sae-LAYER -> folder. All SAEs
    have the same random weights, in one file."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    encoder = torch.randn(hidden_size, width, dtype=torch.bfloat16) / hidden_size**0.5
    zeros = {name: torch.zeros(size) for name, size in (("b_enc", width), ("b_dec", hidden_size))}
    decoder = torch.zeros(width, hidden_size, dtype=torch.bfloat16)
    tensors = {"W_enc": encoder, "W_dec": decoder, "threshold": torch.full((width,), 1e-3), **zeros}
    save_file(tensors, folder / "sae_weights.safetensors")
    found = {}
    for layer in layers:
        path = folder / f"layer-{layer}"
        path.mkdir()
        (path / "sae_weights.safetensors").symlink_to(folder / "sae_weights.safetensors")
        hook = {"hook_name": f"blocks.{layer}.hook_resid_post"}
        (path / "cfg.json").write_text(json.dumps({"architecture": "jumprelu", "metadata": hook}))
        found[f"sae-{layer}"] = str(path)
    return found


def make_tokenizer(folder: Path) -> None:
    """Make a tokenizer whose tokens are words, so that a server can answer with text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = {f"w{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", unk_token="w0"
    ).save_pretrained(folder)
