"""SAEs of random numbers, written as each publisher writes them, and what they should compute.

The expected numbers are computed here, in float64 numpy and in the publishers' notation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

D_IN, D_SAE, K = 6, 11, 3
HOOK = "blocks.12.hook_resid_post"

Weights = dict[str, np.ndarray]


@dataclass
class Published:
    """An SAE on disk, and the two functions that it should be."""

    path: Path
    architecture: str
    place: tuple[str, int]
    features: Callable[[np.ndarray], np.ndarray]
    rows: Callable[[np.ndarray], np.ndarray]
    options: dict[str, Any] = field(default_factory=dict)


def random_weights(*vectors: str, seed: int = 0) -> Weights:
    """W_enc [D_IN, D_SAE], W_dec [D_SAE, D_IN], b_dec, and vectors [D_SAE]; float32 numbers."""
    rng = np.random.default_rng(seed)
    shapes = {"W_enc": (D_IN, D_SAE), "W_dec": (D_SAE, D_IN), "b_dec": (D_IN,)}
    shapes |= dict.fromkeys(vectors, (D_SAE,))
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name in set(vectors) & {"threshold"}:
        found[name] = np.abs(found[name])
    return found


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.tensor(np.array(t, order="C")) for name, t in tensors.items()}, path)


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def top(pre: np.ndarray, k: int) -> np.ndarray:
    out = np.zeros_like(pre)
    for row in np.ndindex(pre.shape[:-1]):
        best = sorted(range(pre.shape[-1]), key=lambda j, row=row: -pre[row][j])[:k]
        out[row][best] = relu(pre[row][best])
    return out


def jump(pre: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    return np.where(pre > threshold, relu(pre), 0)


# --- SAELens -----------------------------------------------------------------

V6 = {"d_in": D_IN, "d_sae": D_SAE, "dtype": "float32", "device": "cpu",
      "normalize_activations": "none", "reshape_activations": "none",
      "metadata": {"sae_lens_version": "6.54.12", "hook_name": HOOK}}  # fmt: skip
V5 = {"d_in": D_IN, "d_sae": D_SAE, "dtype": "float32", "model_name": "gpt2", "hook_layer": 12,
      "hook_name": HOOK, "hook_head_index": None, "activation_fn_str": "relu",
      "activation_fn_kwargs": {}, "normalize_activations": "none", "prepend_bos": True}  # fmt: skip


def write_saelens(path: Path, config: dict[str, Any], weights: Weights) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cfg.json").write_text(json.dumps(config))
    save(path / "sae_weights.safetensors", weights)
    return path


def _saelens(
    path: Path,
    config: dict[str, Any],
    w: Weights,
    architecture: str,
    act: Callable[[np.ndarray], np.ndarray],
    centred: bool = True,
) -> Published:
    write_saelens(path, config, w)

    def features(x: np.ndarray) -> np.ndarray:
        return act((x - w["b_dec"] * centred) @ w["W_enc"])

    return Published(
        path, architecture, ("resid_post", 12), features, lambda f: f @ w["W_dec"] + w["b_dec"]
    )


def standard(path: Path) -> Published:
    w = random_weights("b_enc")
    config = V6 | {"architecture": "standard", "apply_b_dec_to_input": True}
    return _saelens(path, config, w, "standard", lambda s: relu(s + w["b_enc"]))


def not_centred(path: Path) -> Published:
    w = random_weights("b_enc")
    config = V6 | {"architecture": "standard", "apply_b_dec_to_input": False}
    return _saelens(path, config, w, "standard", lambda s: relu(s + w["b_enc"]), centred=False)


def without_architecture(path: Path) -> Published:
    w = random_weights("b_enc")
    ones = {"scaling_factor": np.ones(D_SAE, np.float32)}
    found = _saelens(path, V5, w, "standard", lambda s: relu(s + w["b_enc"]))
    write_saelens(path, V5, w | ones)
    return found


def hook_point(path: Path) -> Published:
    w = random_weights("b_enc")
    config = {name: value for name, value in V5.items() if name != "hook_name"}
    config |= {"hook_point": HOOK, "normalize_activations": False}
    return _saelens(path, config, w, "standard", lambda s: relu(s + w["b_enc"]))


def jumprelu(path: Path) -> Published:
    w = random_weights("b_enc", "threshold")
    config = V6 | {"architecture": "jumprelu", "apply_b_dec_to_input": False}
    act = lambda s: jump(s + w["b_enc"], w["threshold"])  # noqa: E731
    return _saelens(path, config, w, "jumprelu", act, centred=False)


def negative_threshold(path: Path) -> Published:
    w = random_weights("b_enc", "threshold")
    w["threshold"] = -w["threshold"]
    config = V6 | {"architecture": "jumprelu", "apply_b_dec_to_input": True}
    return _saelens(path, config, w, "jumprelu", lambda s: jump(s + w["b_enc"], w["threshold"]))


def batchtopk(path: Path) -> Published:
    w = random_weights("b_enc")
    config = V6 | {"architecture": "batchtopk", "k": 2.5, "rescale_acts_by_decoder_norm": True}
    norms = np.linalg.norm(w["W_dec"], axis=1)
    act = lambda s: jump((s + w["b_enc"]) * norms, np.full(D_SAE, 0.75))  # noqa: E731
    found = _saelens(path, config, w, "batchtopk", act)
    write_saelens(path, config, w | {"topk_threshold": np.array(0.75)})
    found.rows = lambda f: (f / norms) @ w["W_dec"] + w["b_dec"]
    return found


def topk(path: Path) -> Published:
    w = random_weights("b_enc")
    config = V6 | {"architecture": "topk", "k": K}
    return _saelens(path, config, w, "topk", lambda s: top(s + w["b_enc"], K))


def topk_rescaled(path: Path) -> Published:
    w = random_weights("b_enc")
    config = V6 | {"architecture": "topk", "k": K, "rescale_acts_by_decoder_norm": True}
    norms = np.linalg.norm(w["W_dec"], axis=1)
    found = _saelens(path, config, w, "topk", lambda s: top((s + w["b_enc"]) * norms, K))
    found.rows = lambda f: (f / norms) @ w["W_dec"] + w["b_dec"]
    return found


def topk_before_version_6(path: Path) -> Published:
    w = random_weights("b_enc")
    config = V5 | {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}}
    config |= {"architecture": "standard"}
    return _saelens(path, config, w, "topk", lambda s: top(s + w["b_enc"], K))


def gated(path: Path) -> Published:
    w = random_weights("b_gate", "b_mag", "r_mag")

    def act(s: np.ndarray) -> np.ndarray:
        return (s + w["b_gate"] > 0) * relu(s * np.exp(w["r_mag"]) + w["b_mag"])

    return _saelens(path, V6 | {"architecture": "gated"}, w, "gated", act)


def normalised(path: Path) -> Published:
    w = random_weights("b_enc", "threshold")
    config = V6 | {"architecture": "jumprelu", "normalize_activations": "expected_average_only_in"}
    found = _saelens(path, config, w, "jumprelu", lambda s: jump(s + w["b_enc"], w["threshold"]))
    features, rows = found.features, found.rows
    found.features, found.rows = lambda x: features(x * 2.5), lambda f: rows(f) / 2.5
    found.options = {"norm_scaling_factor": 2.5}
    return found


def bfloat16(path: Path) -> Published:
    w = random_weights("b_enc")
    w = {name: torch.tensor(each).bfloat16() for name, each in w.items()}
    path.mkdir(parents=True)
    (path / "cfg.json").write_text(json.dumps(V6 | {"architecture": "standard"}))
    save_file(w, path / "sae_weights.safetensors")
    n = {name: each.float().numpy() for name, each in w.items()}
    return Published(
        path,
        "standard",
        ("resid_post", 12),
        lambda x: relu((x - n["b_dec"]) @ n["W_enc"] + n["b_enc"]),
        lambda f: f @ n["W_dec"] + n["b_dec"],
    )


# --- Others ------------------------------------------------------------------


def _gemma(path: Path, place: tuple[str, int], w: Weights) -> Published:
    return Published(
        path,
        "jumprelu",
        place,
        lambda x: jump(x @ w["W_enc"] + w["b_enc"], w["threshold"]),
        lambda f: f @ w["W_dec"] + w["b_dec"],
    )


def gemma_scope_1(path: Path) -> Published:
    w = random_weights("b_enc", "threshold")
    path = path / "gemma-scope-2b-pt-mlp" / "layer_20" / "width_16k" / "average_l0_71"
    path.mkdir(parents=True)
    np.savez(path / "params.npz", **w)
    return _gemma(path / "params.npz", ("mlp_out", 20), w)


def _gemma_2(path: Path, w: Weights) -> None:
    lower = {name.replace("W_", "w_"): each for name, each in w.items()}
    save(path / "params.safetensors", lower)


def gemma_scope_2(path: Path) -> Published:
    w = random_weights("b_enc", "threshold")
    _gemma_2(path, w)
    config = {"architecture": "jump_relu", "hf_hook_point_in": "model.layers.9.output", "l0": 60}
    (path / "config.json").write_text(json.dumps(config))
    return _gemma(path, ("resid_post", 9), w)


def gemma_scope_2_by_folder(path: Path) -> Published:
    w = random_weights("b_enc", "threshold")
    path = path / "gemma-scope-2-4b-pt" / "attn_out_all" / "layer_12_width_16k_l0_small"
    _gemma_2(path, w)
    return _gemma(path, ("z", 12), w)


def qwen_scope(path: Path) -> Published:
    w = random_weights("b_enc")
    path = path / "SAE-Res-Qwen3-8B-Base-W64K-L0_3"
    path.mkdir(parents=True)
    tensors = {"W_enc": w["W_enc"].T, "W_dec": w["W_dec"].T} | {
        name: w[name] for name in ("b_enc", "b_dec")
    }
    torch.save(
        {name: torch.tensor(each.copy()) for name, each in tensors.items()}, path / "layer7.sae.pt"
    )
    return Published(
        path / "layer7.sae.pt",
        "topk",
        ("resid_post", 7),
        lambda x: top(x @ w["W_enc"] + w["b_enc"], 3),
        lambda f: f @ w["W_dec"] + w["b_dec"],
    )


LLAMA = {"hook_point_in": HOOK, "hook_point_out": HOOK, "d_model": D_IN, "d_sae": D_SAE,
         "act_fn": "jumprelu", "jump_relu_threshold": 0.25, "top_k": 50,
         "norm_activation": "dataset-wise", "sparsity_include_decoder_norm": True,
         "dataset_average_activation_norm": {"in": 6.3125, "out": 6.3125},
         "use_decoder_bias": True, "apply_decoder_bias_to_pre_encoder": False}  # fmt: skip


def llama_scope(path: Path) -> Published:
    """The publisher's steps in their order: take the norm out, give decoder rows norm 1."""
    w = random_weights("b_enc")
    path.mkdir(parents=True)
    (path / "hyperparams.json").write_text(json.dumps(LLAMA))
    tensors = {"encoder.weight": w["W_enc"].T, "encoder.bias": w["b_enc"],
               "decoder.weight": w["W_dec"].T, "decoder.bias": w["b_dec"]}  # fmt: skip
    save(path / "checkpoints" / "final.safetensors", tensors)
    factor = np.sqrt(D_IN) / 6.3125
    encoder_bias, decoder_bias = w["b_enc"] / factor, w["b_dec"] / factor
    norms = np.linalg.norm(w["W_dec"], axis=1)
    decoder, encoder = w["W_dec"] / norms[:, None], w["W_enc"] * norms
    return Published(
        path,
        "jumprelu",
        ("resid_post", 12),
        lambda x: jump(x @ encoder + encoder_bias * norms, np.full(D_SAE, 0.25)),
        lambda f: f @ decoder + decoder_bias,
    )


def sparsify(path: Path) -> Published:
    w = random_weights("b_enc")
    path = path / "layers.5"
    path.mkdir(parents=True)
    config = {"activation": "topk", "k": K, "d_in": D_IN, "num_latents": D_SAE, "multi_topk": False}
    (path / "cfg.json").write_text(json.dumps(config))
    tensors = {"encoder.weight": w["W_enc"].T, "encoder.bias": w["b_enc"]}
    save(path / "sae.safetensors", tensors | {name: w[name] for name in ("W_dec", "b_dec")})
    return Published(
        path,
        "topk",
        ("resid_post", 5),
        lambda x: top(relu((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]), K),
        lambda f: f @ w["W_dec"] + w["b_dec"],
    )


FORMATS = [
    standard, not_centred, without_architecture, hook_point, jumprelu, negative_threshold,
    batchtopk, topk, topk_rescaled, topk_before_version_6, gated, normalised, bfloat16,
    gemma_scope_1, gemma_scope_2, gemma_scope_2_by_folder, qwen_scope, llama_scope, sparsify,
]  # fmt: skip
