"""Finds the attention and MLP blocks, whose inputs are the sites `attn_in` and `mlp_in`.

Owns:  `blocks_of`.
Runs:  in every worker, after load.

Promise: the engine does not start if a tapped layer does not have exactly one such block, or if the
block's forward has no parameter that `parts.INPUTS` names. Every tensor-parallel rank has
the whole row of both sites.
"""

from __future__ import annotations

from torch import nn

from vllm_scope.errors import ConfigError
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.parts import INPUTS, input_of
from vllm_scope.request.sites import BLOCK_SITES, Place, Sites


def blocks_of(anatomy: Anatomy, sites: Sites) -> dict[Place, nn.Module]:
    """Maps each place of `attn_in` or `mlp_in` with a tap to the module whose input the tap reads.

    Raises:
        ConfigError: a layer does not have exactly one such module, or the module's forward has no
            parameter that `INPUTS` names.
    """
    return {
        place: _block_in(layer, place)
        for number, layer in anatomy.layers.items()
        for place in (Place(site, number) for site in BLOCK_SITES)
        if place.boundary in sites.boundaries
    }


def _block_in(layer: nn.Module, place: Place) -> nn.Module:
    here = [
        child for child in layer.children()
        if (_is_attention(child) if place.site == "attn_in" else _is_mlp(child))
    ]  # fmt: skip
    words = (
        f"additional_config['scope'].sites has {place.site!r}, and layer {place.layer} "
        f"({type(layer).__name__})"
    )
    leave = "Leave the site out, or the layer out of additional_config['scope'].layers."
    what = "attention" if place.site == "attn_in" else "MLP"
    if len(here) != 1:
        raise ConfigError(f"{words} has {len(here)} modules that are its {what}. {leave}")
    if input_of(type(here[0])) is None:
        raise ConfigError(
            f"{words} has an {what} ({type(here[0]).__name__}) whose forward has no parameter "
            f"{' or '.join(INPUTS)}. {leave}"
        )
    return here[0]


def _is_attention(child: nn.Module) -> bool:
    """True if `child` contains exactly one attention module, and this module has the decoder's
    type."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    every = [m for m in child.modules() if isinstance(m, Attention | MLAAttention)]
    # Latent attention (MLA) has no `attn_type`, because it is always a decoder's attention.
    types = [getattr(module, "attn_type", "decoder") for module in every]
    return child not in every and types == ["decoder"]


def _is_mlp(child: nn.Module) -> bool:
    """True if `child` contains a down projection or experts, and no module that mixes tokens."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.linear import RowParallelLinear

    modules = dict(child.named_modules())
    if any(isinstance(module, AttentionLayerBase) for module in modules.values()):
        return False
    return any(
        name and (isinstance(module, RowParallelLinear) or name.endswith("experts"))
        for name, module in modules.items()
    )
