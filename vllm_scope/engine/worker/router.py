"""Finds the routers of experts, and the size of a row of the site `router_logits` (their output).

Owns:  `num_experts_of`, `routers_of`.
Runs:  `num_experts_of` in every process that has the configuration; `routers_of` in every worker
       after load.

Promise: each tapped layer has exactly one router, whose width is the configured number of experts.
Otherwise, the engine does not start. Every rank has the whole row of `router_logits`. Therefore
tensor parallelism needs no extra code.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.errors import ConfigError
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.tapped import refused_layer
from vllm_scope.request.sites import ROUTER_SITE, SITES, Place, Sites

#: The names that models use for the router in a layer.
_NAMES = ("gate", "router", "router_gate")


def num_experts_of(vllm_config: VllmConfig) -> int:
    """The size of a row of `router_logits` in the configuration. `routers_of` checks this size
    later.

    Raises:
        ConfigError: the configuration, such as DBRX's, does not give the number of experts.
    """
    found = int(vllm_config.model_config.get_num_experts())
    if found < 1:
        others = ", ".join(site for site in SITES if site != ROUTER_SITE)
        raise ConfigError(
            f"additional_config['scope'].sites has {ROUTER_SITE!r}, and vLLM's configuration of "
            f"this model has no experts. Leave the site out; others are {others}. "
            "'vllm-scope doctor MODEL' says which of them this model has."
        )
    return found


def routers_of(anatomy: Anatomy, sites: Sites) -> dict[int, nn.Module]:
    """Maps each layer whose `router_logits` are tapped to the router of the layer's experts.

    Raises:
        ConfigError: a layer has no router, several routers, or a router of another width.
    """
    return {
        number: _router_in(layer, number, sites.num_experts)
        for number, layer in anatomy.layers.items()
        if Place(ROUTER_SITE, number).boundary in sites.boundaries
    }


def _router_in(layer: nn.Module, number: int, num_experts: int | None) -> nn.Module:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    # The module of the experts can also contain the router, but named_modules lists the router only
    # once.
    here = [
        module for name, module in layer.named_modules()
        if name.rpartition(".")[2] in _NAMES and isinstance(module, ReplicatedLinear)
    ]  # fmt: skip
    refused = partial(refused_layer, ROUTER_SITE, number, layer)
    if len(here) != 1:
        raise refused(f"has {len(here)} routers of experts that are known here")
    router: ReplicatedLinear = here[0]
    if router.output_size != num_experts:
        raise refused(
            f"has a router for {router.output_size} experts, and the model's configuration says "
            f"{num_experts}: rows of a site are of one width here"
        )
    return router  # type: ignore[no-any-return]
