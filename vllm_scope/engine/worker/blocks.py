"""Finds the attention and MLP blocks, whose inputs are the sites `attn_in` and `mlp_in`.

Owns:  `blocks_of`.
Runs:  in every worker, after load.

Promise: each tapped layer has exactly one such block, and the block's forward has a parameter that
`parts.INPUTS` names. Otherwise, the engine does not start. Every tensor-parallel rank has the whole
row of both sites. The norm before the attention is not a part of the block.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from torch import nn

from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.parts import INPUTS, input_of
from vllm_scope.graph.anatomy.source import forward_of, is_norm
from vllm_scope.graph.anatomy.tapped import refused_layer
from vllm_scope.request.sites import BLOCK_SITES, Place, Sites


def blocks_of(anatomy: Anatomy, sites: Sites) -> dict[Place, nn.Module]:
    """Maps each place of `attn_in` or `mlp_in` with a tap to the module whose input the tap reads.

    Raises:
        ConfigError: a layer has no such module or several, or the module's forward has no parameter
            that `INPUTS` names.
    """
    return {
        place: _block_in(layer, place)
        for number, layer in anatomy.layers.items()
        for place in (Place(site, number) for site in BLOCK_SITES)
        if place.boundary in sites.boundaries
    }


def _block_in(layer: nn.Module, place: Place) -> nn.Module:
    if place.site == "attn_in":
        here = list(_attentions(layer))
    else:
        here = [child for child in layer.children() if _is_mlp(child)]
    refused = partial(refused_layer, place.site, place.layer, layer)
    what = "attention" if place.site == "attn_in" else "MLP"
    if len(here) != 1:
        raise refused(f"has {len(here)} modules that are its {what}")
    if input_of(type(here[0])) is None:
        raise refused(
            f"has an {what} ({type(here[0]).__name__}) whose forward has no parameter "
            f"{' or '.join(INPUTS)}"
        )
    return here[0]


def _attentions(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module that are attention. If a child also contains the norm before the
    attention (DBRX), the result has the attention inside this child instead."""
    for child in module.children():
        if _is_attention(child):
            yield from _attentions(child) if _normalizes_input(child) else (child,)


def _normalizes_input(block: nn.Module) -> bool:
    """True if a module gives its own input to one of its norms."""
    name = input_of(type(block))
    try:
        forward = forward_of(block)
    except CompatError:  # the source cannot be read, so that no norm is found in it
        return False
    return name is not None and any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and is_norm(node.func.attr) and ast.unparse(node.func.value) == "self"
        and any(isinstance(one, ast.Name) and one.id == name for one in node.args)
        for node in ast.walk(forward)
    )  # fmt: skip


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
