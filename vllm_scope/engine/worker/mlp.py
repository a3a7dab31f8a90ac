"""vLLM's MLPs: the module whose input is `mlp_post`, and how wide its rows are.

Owns:  `mlp_size_of`, `projections_of`.
Runs:  `mlp_size_of` wherever the configuration is; `projections_of` in every worker, after load.

Promise: if a layer that carries a tap has no such module, several, or one of another width, the
engine does not start.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.errors import ConfigError
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.request.sites import MLP_SITE, Place, Sites

#: Names of the MLP's width in configurations. GPT-2 and Falcon leave it None for four times the
#: hidden size, and Bloom always has that.
_NAMES = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_NAMED = f"additional_config['scope'].sites has {MLP_SITE!r}"


def mlp_size_of(vllm_config: VllmConfig) -> int:
    """Numbers of a row of `mlp_post` by the configuration; `projections_of` compares it.

    Raises:
        ConfigError: tensor parallelism splits the rows, or the layers have several widths.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.tensor_parallel_size > 1:
        raise ConfigError(
            f"{_NAMED}, and with tensor_parallel_size {parallel.tensor_parallel_size} each rank "
            "has a part of the row, which are not put together here. Leave the site out, or "
            "start with tensor_parallel_size 1; other sites are not touched by it."
        )
    given = (getattr(model.hf_text_config, name, None) for name in _NAMES)
    size = next((one for one in given if one is not None), 4 * model.get_hidden_size())
    if not isinstance(size, int):
        raise ConfigError(
            f"{_NAMED}, and this model's layers have MLPs of several widths ({size}): rows of a "
            "site are of one width here. Leave the site out."
        )
    return size


def projections_of(anatomy: Anatomy, sites: Sites) -> dict[int, nn.Module]:
    """Layer -> the down projection of its MLP, of the layers with a tap there.

    Raises:
        ConfigError: a layer has none or several, or one of another width.
    """
    found: dict[int, nn.Module] = {}
    for number, layer in anatomy.layers.items():
        if Place(MLP_SITE, number).boundary in sites.boundaries:
            found[number] = _projection_in(layer, number, sites.mlp_size)
    return found


def _projection_in(layer: nn.Module, number: int, size: int | None) -> nn.Module:
    here = list(_projections(layer))
    words = f"{_NAMED}, and layer {number} ({type(layer).__name__})"
    leave = "Leave the site out, or the layer out of additional_config['scope'].layers."
    if any("experts" in name for name, _ in layer.named_modules()):
        raise ConfigError(f"{words} has experts, each with an MLP of its own. {leave}")
    if len(here) != 1:
        raise ConfigError(f"{words} has {len(here)} down projections outside attention. {leave}")
    module, width = here[0]
    if width != size:
        raise ConfigError(
            f"{words} has an MLP of width {width}, and the model's configuration says {size}: "
            f"rows of a site are of one width here. {leave}"
        )
    return module


def _projections(layer: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """(module that is called, width of its input) of each row-parallel layer beside the mixer."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.linear import RowParallelLinear

    for part in layer.children():
        modules = dict(part.named_modules())
        if any(isinstance(module, AttentionLayerBase) for module in modules.values()):
            continue  # attention, or a state space
        for name, module in modules.items():
            if isinstance(module, RowParallelLinear):
                # LoRA wraps it, and calls parts of it.
                wrapped = name.rpartition(".")[2] == "base_layer"
                outer = modules[name.rpartition(".")[0]] if wrapped else module
                yield outer, int(module.input_size)
