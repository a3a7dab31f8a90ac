"""Finds the down projections, whose inputs are the site `mlp_post`, and the size of their rows.

Owns:  `mlp_size_of`, `projections_of`.
Runs:  `mlp_size_of` in every process that has the configuration; `projections_of` in every worker
       after load.

Promise: each tapped layer has exactly one down projection, whose input has the configured width.
Otherwise, the engine does not start.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.errors import ConfigError
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.tapped import refused_layer
from vllm_scope.request.sites import MLP_SITE, Place, Sites

#: The names that configurations use for the width of the MLP. In GPT-2 and Falcon, the width None
#: means four times the hidden size. Bloom always has four times the hidden size, and has none of
#: these names.
_NAMES = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")


def mlp_size_of(vllm_config: VllmConfig) -> int:
    """The size of a row of `mlp_post` in the configuration. `projections_of` checks this size
    later.

    Raises:
        ConfigError: the layers have several widths.
    """
    model = vllm_config.model_config
    given = (getattr(model.hf_text_config, name, None) for name in _NAMES)
    size = next((one for one in given if one is not None), 4 * model.get_hidden_size())
    if not isinstance(size, int):
        raise ConfigError(
            f"additional_config['scope'].sites has {MLP_SITE!r}, and this model's layers have MLPs "
            f"of several widths ({size}): rows of a site are of one width here. Leave the site out."
        )
    return size


def projections_of(anatomy: Anatomy, sites: Sites, num_ranks: int) -> dict[int, nn.Module]:
    """Maps each layer whose `mlp_post` is tapped to the down projection of the layer's MLP.

    Args:
        num_ranks: the number of ranks among which tensor parallelism splits the rows.

    Raises:
        ConfigError: a layer has experts, no down projection, or several; or the down projection has
            another width, or the ranks do not split its input equally.
    """
    found: dict[int, nn.Module] = {}
    for number, layer in anatomy.layers.items():
        if Place(MLP_SITE, number).boundary in sites.boundaries:
            found[number] = _projection_in(layer, number, sites.mlp_size, num_ranks)
    return found


def _projection_in(layer: nn.Module, number: int, size: int | None, num_ranks: int) -> nn.Module:
    here = list(_projections(layer))
    refused = partial(refused_layer, MLP_SITE, number, layer)
    if any("experts" in name for name, _ in layer.named_modules()):
        raise refused("has experts, each with an MLP of its own")
    if len(here) != 1:
        raise refused(f"has {len(here)} down projections outside attention")
    module, linear = here[0]
    width = int(linear.input_size)
    if width != size:
        raise refused(
            f"has an MLP of width {width}, and the model's configuration says {size}: rows of a "
            "site are of one width here"
        )
    parted = linear.input_is_parallel and linear.input_size_per_partition * num_ranks == width
    if num_ranks > 1 and not parted:
        raise refused(
            f"has a down projection whose input the {num_ranks} tensor-parallel ranks do not share "
            "in equal parts"
        )
    return module


def _projections(layer: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yields a pair for each row-parallel linear layer outside the attention: the module that the
    model calls, and vLLM's linear layer. With LoRA, these are two modules."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.linear import RowParallelLinear

    for part in layer.children():
        modules = dict(part.named_modules())
        if any(isinstance(module, AttentionLayerBase) for module in modules.values()):
            continue  # attention, or a state-space block in place of attention
        for name, module in modules.items():
            if isinstance(module, RowParallelLinear):
                # The model calls LoRA's wrapper, which does not call the linear layer as a whole.
                wrapped = name.rpartition(".")[2] == "base_layer"
                outer = modules[name.rpartition(".")[0]] if wrapped else module
                yield outer, module
