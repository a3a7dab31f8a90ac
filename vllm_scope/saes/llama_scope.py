"""Loads SAEs of Llama Scope, from hyperparams.json and checkpoints/final.safetensors.

Owns:  `load`.

The tensors are `encoder.weight` [d_sae, d_model], `encoder.bias`, `decoder.weight` [d_model, d_sae]
and `decoder.bias`. In the training, the rows were multiplied by a factor that makes their mean
length sqrt(d_model). Like the publisher's code, `load` divides the biases by this factor. With the
divided biases, the encoder reads rows that are not scaled. All features have the same threshold. If
`sparsity_include_decoder_norm` is set, the pre-activation of a feature is multiplied by the length
of the feature's decoder row. The product is compared with the threshold.

Source: OpenMOSS/Language-Model-SAEs, src/lm_saes: standardize_parameters_of_dataset_norm,
transform_to_unit_decoder_norm, and the Initializer, which calls these two functions in this order
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import torch

from vllm_scope.errors import SpecError, shown
from vllm_scope.saes.arrays import Given, map_safetensors, only, read_config
from vllm_scope.saes.places import place_of
from vllm_scope.saes.sae import Sae

CONFIG, WEIGHTS = "hyperparams.json", "checkpoints/final.safetensors"
_NAMES = ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias")


class _Norm(msgspec.Struct, rename={"into": "in"}):
    into: float
    out: float


class _Config(msgspec.Struct):
    hook_point_in: str
    act_fn: str
    jump_relu_threshold: float
    hook_point_out: str | None = None
    norm_activation: str = "dataset-wise"
    dataset_average_activation_norm: _Norm | None = None
    sparsity_include_decoder_norm: bool = True
    apply_decoder_bias_to_pre_encoder: bool = False
    use_glu_encoder: bool = False


def load(folder: Path, given: Given) -> Sae:
    """Load the SAE of a folder. Raises the same errors as `load_sae`."""
    path = folder / CONFIG
    config = read_config(path, _Config)
    if config.hook_point_out not in (None, config.hook_point_in):
        raise SpecError(f"{path} belongs to a transcoder; of Llama Scope, only SAEs are read.")
    if config.act_fn.lower() != "jumprelu" or config.use_glu_encoder:
        raise SpecError(f"{path} has GLU or act_fn {shown(config.act_fn)}; only jumprelu is read.")
    tensors = only(map_safetensors(folder / WEIGHTS), _NAMES, folder / WEIGHTS)
    encoder = tensors["encoder.weight"]
    scale = _scale(config, encoder.shape[-1], path)
    return Sae(
        name=given.name,
        architecture="jumprelu",
        place=given.place or place_of(config.hook_point_in, f"{path}: hook_point_in"),
        encoder=encoder,
        decoder=tensors["decoder.weight"].T,
        encoder_bias=tensors["encoder.bias"].float() / scale,
        decoder_bias=tensors["decoder.bias"].float() / scale,
        threshold=torch.full(encoder.shape[:1], config.jump_relu_threshold),
        apply_b_dec_to_input=config.apply_decoder_bias_to_pre_encoder,
        unit_decoder=config.sparsity_include_decoder_norm,
    )


def _scale(config: _Config, d_model: int, path: Path) -> float:
    """The factor by which the file's biases must be divided. Raises SpecError."""
    if config.norm_activation == "inference":
        return 1.0
    norm = config.dataset_average_activation_norm
    if config.norm_activation != "dataset-wise" or norm is None or norm.into != norm.out:
        raise SpecError(
            f"{path} has norm_activation {shown(config.norm_activation)} and norms {shown(norm)}; "
            "only 'inference', and 'dataset-wise' with equal norms of input and output, are read."
        )
    if not 0 < norm.into < math.inf:
        raise SpecError(f"{path} has the norm {norm.into}; it must be a finite number above 0.")
    return math.sqrt(d_model) / norm.into
