"""May this model, in this engine, be tapped, and its KV be edited; and its decoder layers.

Owns:  what vLLM's configuration and module classes say about taps.
Runs:  in every worker, after load; in EngineCore, what its configuration says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_scope.config import ScopeConfig
from vllm_scope.engine.worker.attention import heads_of
from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.convention import treats_half_apart
from vllm_scope.graph.anatomy.layers import Anatomy, find_anatomy
from vllm_scope.request.sites import STREAM, Sites, boundary_of, kind_of

#: KV connectors of vLLM's own that find KV by its block hashes, which edits are part of.
#: vllm 0.32, kv_connector/v1/offloading/scheduler.py; v1/simple_kv_offload/manager.py
CONNECTORS_BY_HASH = ("OffloadingConnector", "SimpleCPUOffloadConnector")


def num_layers_of(vllm_config: Any) -> int:
    return int(vllm_config.model_config.get_total_num_hidden_layers())


def hidden_size_of(vllm_config: Any) -> int:
    return int(vllm_config.model_config.get_hidden_size())


def sites_of(vllm_config: Any, config: ScopeConfig) -> Sites:
    """What this engine taps, if the model lets it.

    Raises:
        ConfigError: a layer that the model does not have, or a site that this engine
            cannot tap.
    """
    num_layers = num_layers_of(vllm_config)
    boundaries = set(config.boundaries(num_layers))
    # Edited requests are checked where all of their layers are behind them.
    last = boundary_of(("resid_post", num_layers - 1))
    edits = any(kind_of(boundary) == STREAM for boundary in boundaries)
    guard = last if edits and last not in boundaries else None
    return Sites(
        num_layers,
        hidden_size_of(vllm_config),
        str(vllm_config.model_config.dtype).removeprefix("torch."),
        tuple(sorted(boundaries | ({last} if edits else set()))),
        heads_of(vllm_config, config.attention_sites) if config.attention_sites else None,
        guard=guard,
    )


def check_engine(vllm_config: Any) -> None:
    """Raises CompatError where rows would not be what they seem."""
    parallel = vllm_config.parallel_config
    reasons = {
        "dual batch overlap (each half reads the plan from row 0)": getattr(
            parallel, "use_ubatching", False
        ),
        "prefill context parallelism (a rank holds part of the tokens)": getattr(
            parallel, "prefill_context_parallel_size", 1
        )
        > 1,
        "sequence-parallel MoE (the residual is sharded by rows)": getattr(
            parallel, "use_sequence_parallel_moe", False
        ),
        "KV-sharing fast prefill (late layers skip prompt tokens)": getattr(
            vllm_config.cache_config, "kv_sharing_fast_prefill", False
        ),
        "adaptive verification of drafts (rows are not in the order of the plan)": getattr(
            vllm_config.speculative_config, "enable_adaptive_verification", False
        ),
        "one kernel for a whole decode step (--monokernel: the layers are passed by)": getattr(
            getattr(vllm_config, "kernel_config", None), "monokernel", False
        ),
    }
    for reason, present in reasons.items():
        if present:
            raise CompatError(f"this engine runs with {reason}")
    if vllm_config.model_config.runner_type != "generate":
        raise CompatError("this is a pooling model; taps read generating models")


def foreign_connector(vllm_config: Any) -> str | None:
    """The KV connector that may take edited KV for plain KV of the same tokens, or None."""
    transfer: Any = vllm_config.kv_transfer_config
    name = None if transfer is None else transfer.kv_connector
    if name is None or (name in CONNECTORS_BY_HASH and transfer.kv_connector_module_path is None):
        return None
    return str(name)


def anatomy_of(model: nn.Module, vllm_config: Any) -> Anatomy:
    """The model's decoder layers.

    Raises:
        CompatError: this engine or this model is not of a shape that taps know.
    """
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.model_executor.models.utils import PPMissingLayer

    check_engine(vllm_config)
    anatomy = find_anatomy(
        model, num_layers_of(vllm_config), lambda layer: isinstance(layer, PPMissingLayer)
    )
    for layer in anatomy.layers.values():
        if isinstance(layer, TorchCompileWithNoGuardsWrapper):
            raise CompatError(
                f"{type(layer).__name__} is compiled by itself, a tap there would not be traced"
            )
    half = vllm_config.model_config.dtype == torch.float16
    for layer in anatomy.layers.values() if half else ():
        if treats_half_apart(layer):
            raise CompatError(
                f"{type(layer).__name__} scales the stream in float16; start with dtype bfloat16"
            )
    return anatomy
