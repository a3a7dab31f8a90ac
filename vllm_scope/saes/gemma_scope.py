"""Loads SAEs of Gemma Scope 1 (params.npz) and 2 (params.safetensors and maybe config.json).

Owns:  load_npz, load_safetensors.

Both versions have `W_enc` [d_model, d_sae], `W_dec` [d_sae, d_model], `b_enc`, `b_dec` and
`threshold`. In version 2 the matrices are called `w_enc` and `w_dec`. The encoder does not subtract
`b_dec` from the row. The names of the folders contain the site and the layer, as in
`gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71` and
`gemma-scope-2-4b-pt/resid_post/layer_12_width_16k_l0_medium`.

Source: sae_lens 6.54, loading/pretrained_sae_loaders.py
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import Place
from vllm_scope.saes.arrays import Given, Tensors, map_npz, map_safetensors, only, read_config
from vllm_scope.saes.places import number_in, place_of
from vllm_scope.saes.sae import Sae

NPZ, SAFETENSORS, CONFIG = "params.npz", "params.safetensors", "config.json"
_NAMES = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold")
#: Maps a pattern of folder names to a site. An SAE of attention outputs reads the input of the
#: output projection, which is the site `z`.
_SITES = {
    r".*-res|resid_post.*": "resid_post",
    r".*-mlp|mlp_out.*": "mlp_out",
    r".*-att|attn_out.*": "z",
}
_TRANSCODER = r".*-transcoders|(?:transcoder|clt).*"


class _Config(msgspec.Struct):
    architecture: str = "jump_relu"
    hf_hook_point_in: str | None = None
    hf_hook_point_out: str | None = None


def load_npz(folder: Path, given: Given) -> Sae:
    """Load the SAE of a folder with `params.npz`. Raises the same errors as `load_sae`."""
    path = folder / NPZ
    return _sae(map_npz(path), path, given.place or _place_in(path), given)


def load_safetensors(folder: Path, given: Given) -> Sae:
    """Load the SAE of a folder with `params.safetensors`. Raises the same errors as `load_sae`."""
    path, place = folder / SAFETENSORS, given.place
    if (folder / CONFIG).exists():
        config = read_config(folder / CONFIG, _Config)
        if config.architecture != "jump_relu":
            raise SpecError(
                f"{folder / CONFIG} has the architecture {shown(config.architecture)}; Gemma "
                "Scope's is 'jump_relu'."
            )
        if config.hf_hook_point_out not in (None, config.hf_hook_point_in):
            raise SpecError(f"{folder} has a transcoder; of Gemma Scope, only SAEs are read.")
        if config.hf_hook_point_in is not None:
            place = place or place_of(config.hf_hook_point_in, f"{folder / CONFIG}")
    return _sae(map_safetensors(path), path, place or _place_in(path), given)


def _sae(tensors: Tensors, path: Path, place: Place, given: Given) -> Sae:
    named = {name.replace("w_", "W_", 1): tensor for name, tensor in tensors.items()}
    only(named, _NAMES, path)
    return Sae(
        name=given.name,
        architecture="jumprelu",
        place=place,
        encoder=named["W_enc"].T,
        decoder=named["W_dec"],
        encoder_bias=named["b_enc"],
        decoder_bias=named["b_dec"],
        threshold=named["threshold"],
        apply_b_dec_to_input=False,
    )


def _place_in(path: Path) -> Place:
    folders = path.absolute().parent.parts
    if any(re.fullmatch(_TRANSCODER, folder) for folder in folders):
        raise SpecError(f"{path} belongs to a transcoder; of Gemma Scope, only SAEs are read.")
    sites = {
        site for name, site in _SITES.items() if any(re.fullmatch(name, each) for each in folders)
    }
    layer = number_in(path, r"layer_([0-9]{1,5})(?![0-9])")
    if layer is None or len(sites) != 1:
        raise SpecError(
            f"{path}: the folders do not name one site and layer as Gemma Scope's do; give "
            "place=('resid_post', 20), or another place of the SAE."
        )
    return Place(sites.pop(), layer)
