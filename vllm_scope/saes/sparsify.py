"""Loads SAEs of EleutherAI's sparsify, from cfg.json and sae.safetensors.

Owns:  `load`.

The tensors are `encoder.weight` [d_sae, d_in], `encoder.bias`, `W_dec` [d_sae, d_in] and `b_dec`.
The SAE is a TopK SAE, which subtracts `b_dec` from the row before the encoder. The folder's name is
the name of a module: the folder `layers.5` has the SAE of the output of layer 5.

Source: eai-sparsify 1.3.3, sparse_coder.py, fused_encoder.py
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from vllm_scope.errors import SpecError, shown
from vllm_scope.saes.arrays import Given, map_safetensors, only, read_config
from vllm_scope.saes.places import place_of
from vllm_scope.saes.sae import Sae

CONFIG, WEIGHTS = "cfg.json", "sae.safetensors"
_NAMES = ("encoder.weight", "encoder.bias", "W_dec", "b_dec")


class _Config(msgspec.Struct):
    k: int
    d_in: int
    activation: str = "topk"
    signed: bool = False
    skip_connection: bool = False
    transcode: bool = False


def load(folder: Path, given: Given) -> Sae:
    """Load the SAE of a folder. Raises the same errors as `load_sae`."""
    path = folder / CONFIG
    config = read_config(path, _Config)
    if config.activation != "topk" or config.signed:
        raise SpecError(
            f"{path} is signed or has activation {shown(config.activation)}; only topk is read."
        )
    if config.transcode or config.skip_connection:
        raise SpecError(f"{path} belongs to a transcoder; of sparsify, only SAEs are read.")
    tensors = only(map_safetensors(folder / WEIGHTS), _NAMES, folder / WEIGHTS)
    if (shape := list(tensors["b_dec"].shape)) != [config.d_in]:
        raise SpecError(
            f"{path} has d_in {config.d_in}; {WEIGHTS} has b_dec {shape}: are both of one SAE?"
        )
    return Sae(
        name=given.name,
        architecture="topk",
        place=given.place or place_of(folder.absolute().name, f"{folder}: the name"),
        encoder=tensors["encoder.weight"],
        decoder=tensors["W_dec"],
        encoder_bias=tensors["encoder.bias"],
        decoder_bias=tensors["b_dec"],
        k=config.k,
    )
