"""Loads SAEs of Qwen-Scope, from files layer{n}.sae.pt.

Owns:  `load`.

The file has `W_enc` [d_sae, d_model], `W_dec` [d_model, d_sae], `b_enc` and `b_dec`. The file has a
TopK SAE of the site `resid_post` at layer n. The encoder does not subtract `b_dec` from the row.
The name of the folder ends in the k of the TopK SAE, as in `SAE-Res-Qwen3-8B-Base-W64K-L0_50`.

Source: sae_lens 6.54, loading/pretrained_sae_loaders.py; the model cards of Qwen/SAE-Res-*
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import Place
from vllm_scope.saes.arrays import Given, Tensors, only
from vllm_scope.saes.places import number_in
from vllm_scope.saes.sae import Sae

SUFFIX = ".sae.pt"
_NAMES = ("W_enc", "W_dec", "b_enc", "b_dec")


def load(path: Path, given: Given) -> Sae:
    """Load the SAE of a file `layer{n}.sae.pt`. Raises the same errors as `load_sae`."""
    layer = number_in(Path(path.name), r"layer([0-9]{1,5})\.sae\.pt")
    k = given.k or number_in(path, r"L0_([0-9]{1,6})$")
    if given.place is None and layer is None:
        raise SpecError(
            f"{path}: the name is not layer{{n}}.sae.pt; give place=('resid_post', 12), or another "
            "place of the SAE."
        )
    if k is None:
        raise SpecError(
            f"{path}: no folder in this path has a name that ends in L0_NUMBER, such as L0_50; "
            "give k=..., the number of active features of a row."
        )
    tensors = only(_map_pt(path), _NAMES, path)
    return Sae(
        name=given.name,
        architecture="topk",
        place=given.place or Place("resid_post", layer or 0),
        encoder=tensors["W_enc"],
        decoder=tensors["W_dec"].T,
        encoder_bias=tensors["b_enc"],
        decoder_bias=tensors["b_dec"],
        apply_b_dec_to_input=False,
        k=k,
    )


def _map_pt(path: Path) -> Tensors:
    """Map the tensors of a file that torch.save wrote. Returns the tensors by name.

    Raises:
        SpecError: the file is malformed, or has objects that are not plain tensors.
        OSError: the file cannot be read.
    """
    try:
        # With weights_only, torch builds only tensors.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # torch and the zip reader raise many types of errors.
        # The message of torch is left out, because it says how to run the code in a file.
        raise SpecError(
            f"{path} is not a .pt file of tensors alone, in the zip form that torch.save writes "
            f"({type(error).__name__})."
        ) from None
    if not isinstance(found, dict):
        raise SpecError(f"{path} has a {type(found).__name__}; it must have a dict of tensors.")
    for name, tensor in found.items():
        if (
            not isinstance(name, str)
            or type(tensor) is not Tensor
            or tensor.layout != torch.strided
            or tensor.device.type != "cpu"
            # Without this check, a few bytes with overlapping strides could become a very large
            # tensor.
            or tensor.nbytes > tensor.untyped_storage().nbytes()
        ):
            raise SpecError(f"{path}: {shown(name)} is not a plain tensor.")
    return found
