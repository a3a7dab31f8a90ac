"""Finds the routers of experts, and the size of a row of their output, `router_logits`.

Owns:  `num_experts_of`, `routers_of`.
Runs:  `num_experts_of` in every process that has the configuration; `routers_of` in every worker
       after load.

Promise: the engine does not start if a tapped layer has no router, several routers, or a router of
another width. Every rank has the whole row. Therefore tensor parallelism needs no extra code.
"""

from __future__ import annotations

from torch import nn

from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.errors import ConfigError
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.request.sites import ROUTER_SITE, SITES, Place, Sites

#: Names of the router in a model's layers.
_NAMES = ("gate", "router", "router_gate")
_NAMED = f"additional_config['scope'].sites has {ROUTER_SITE!r}"


def num_experts_of(vllm_config: VllmConfig) -> int:
    """The size of a row of `router_logits` by the configuration. `routers_of` checks it later.

    Raises:
        ConfigError: the model has no experts.
    """
    found = int(vllm_config.model_config.get_num_experts())
    if found < 1:
        others = ", ".join(site for site in SITES if site != ROUTER_SITE)
        raise ConfigError(
            f"{_NAMED}, and this model has no experts. Leave the site out; others are {others}. "
            "'vllm-scope doctor MODEL' says which of them this model has."
        )
    return found


def routers_of(anatomy: Anatomy, sites: Sites) -> dict[int, nn.Module]:
    """Layer -> the router of its experts, for layers whose `router_logits` are tapped.

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

    # The module of the experts can also contain the router. named_modules lists the router once.
    here = [
        module for name, module in layer.named_modules()
        if name.rpartition(".")[2] in _NAMES and isinstance(module, ReplicatedLinear)
    ]  # fmt: skip
    words = f"{_NAMED}, and layer {number} ({type(layer).__name__})"
    leave = "Leave the site out, or the layer out of additional_config['scope'].layers."
    if len(here) != 1:
        raise ConfigError(
            f"{words} has {len(here)} routers of experts that are known here. {leave}"
        )
    router: ReplicatedLinear = here[0]
    if router.output_size != num_experts:
        raise ConfigError(
            f"{words} has a router for {router.output_size} experts, and the model's "
            f"configuration says {num_experts}: rows of a site are of one width here. {leave}"
        )
    return router  # type: ignore[no-any-return]
