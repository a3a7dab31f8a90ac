"""Finds a model's decoder layers, and checks whether taps support the model in this engine.

Owns:  the code that finds sites, layers and taps from vLLM's configuration and module classes.
Runs:  in every worker after load. The parts that need only the configuration also run in
       EngineCore, and in the process that makes the configuration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vllm_scope.config import ScopeConfig
from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.engine.worker.attention import heads_of
from vllm_scope.engine.worker.mlp import mlp_size_of
from vllm_scope.engine.worker.router import num_experts_of
from vllm_scope.errors import CompatError
from vllm_scope.graph.anatomy.convention import treats_half_apart
from vllm_scope.graph.anatomy.layers import Anatomy, find_anatomy, supposed_anatomies
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.sites import MLP_SITE, ROUTER_SITE, Place, Sites
from vllm_scope.request.spec import Spec
from vllm_scope.sinks.router import GLOBAL

#: vLLM's KV connectors that find KV by block hashes. These connectors do not mix edited KV with
#: other KV, because the block hashes include our keys of edits.
#: vllm 0.32, kv_connector/v1/offloading/scheduler.py; v1/simple_kv_offload/manager.py
CONNECTORS_BY_HASH = ("OffloadingConnector", "SimpleCPUOffloadConnector")


#: The features of vLLM with which rows would be wrong. Each item has three parts: an attribute of
#: VllmConfig, the attribute's value if the feature is off, and the feature's name with the reason.
#: Some versions of vLLM do not have all of these attributes.
_UNFIT: tuple[tuple[str, object, str], ...] = (
    ("parallel_config.use_ubatching", False,
     "dual batch overlap (each half reads the plan from row 0)"),
    ("parallel_config.prefill_context_parallel_size", 1,
     "prefill context parallelism (a rank holds part of the tokens)"),
    ("parallel_config.use_sequence_parallel_moe", False,
     "sequence-parallel MoE (the residual is sharded by rows)"),
    ("cache_config.kv_sharing_fast_prefill", False,
     "KV-sharing fast prefill (late layers skip prompt tokens)"),
    ("speculative_config.enable_adaptive_verification", False,
     "adaptive verification of drafts (rows are not in the order of the plan)"),
    ("kernel_config.monokernel", False,
     "one kernel for a whole decode step (--monokernel: this kernel does not call the layers)"),
)  # fmt: skip


def worker_is_here(vllm_config: VllmConfig) -> bool:
    """True if the only worker runs in EngineCore's process. In this case EngineCore passes objects
    to the worker without serialization."""
    return vllm_config.parallel_config.distributed_executor_backend == "uni"


def num_layers_of(vllm_config: VllmConfig) -> int:
    return int(vllm_config.model_config.get_total_num_hidden_layers())


def hidden_size_of(vllm_config: VllmConfig) -> int:
    return int(vllm_config.model_config.get_hidden_size())


def sites_of(vllm_config: VllmConfig, config: ScopeConfig) -> Sites:
    """The sites and layers that have taps in this engine. The configuration names all of them,
    except the guard (Sites.guard).

    Raises:
        ConfigError: the model does not have a configured layer, or this engine cannot tap a site.
    """
    num_layers = num_layers_of(vllm_config)
    boundaries = set(config.boundaries(num_layers))
    # The tap after the last layer checks that the rows of edited requests are finite. If the
    # configuration does not name this boundary, the tap is the guard.
    last = Place("resid_post", num_layers - 1).boundary
    guard = last if boundaries and last not in boundaries else None
    return Sites(
        num_layers,
        hidden_size_of(vllm_config),
        str(vllm_config.model_config.dtype).removeprefix("torch."),
        tuple(sorted(boundaries | ({last} if boundaries else set()))),
        heads_of(vllm_config, config.attention_sites) if config.attention_sites else None,
        mlp_size_of(vllm_config) if MLP_SITE in config.sites else None,
        guard=guard,
        step_tokens=1 + vllm_config.num_speculative_tokens,
        num_experts=num_experts_of(vllm_config) if ROUTER_SITE in config.sites else None,
    )


def global_reads(config: ScopeConfig, sites: Sites) -> Resolved:
    """The reads that global sinks add to every request.

    Raises:
        SpecError: this engine does not tap a site or a layer that these reads name.
    """
    reads = [
        replace(read, to=GLOBAL + name)
        for name, sink in config.global_sink_configs().items()
        if sink.reads is not None
        for read in Spec.from_json(sink.reads).resolve(sites).reads
    ]
    return Resolved(tuple(reads))


def check_engine(vllm_config: VllmConfig) -> None:
    """Raises CompatError if this engine uses a feature in `_UNFIT`, or if the model is a pooling
    model."""
    for path, off, reason in _UNFIT:
        found: object = vllm_config
        for name in path.split("."):
            found = getattr(found, name, off)
        if (found or off) != off:
            raise CompatError(f"this engine runs with {reason}")
    if vllm_config.model_config.runner_type != "generate":
        raise CompatError("this is a pooling model; taps read generating models")


def foreign_connector(vllm_config: VllmConfig) -> str | None:
    """The KV connector that can mix edited KV with unedited KV of the same tokens, or None."""
    transfer: Any = vllm_config.kv_transfer_config
    name = None if transfer is None else transfer.kv_connector
    if name is None or (name in CONNECTORS_BY_HASH and transfer.kv_connector_module_path is None):
        return None
    return str(name)


def anatomy_of(model: nn.Module, vllm_config: VllmConfig) -> Anatomy:
    """The model's decoder layers.

    Raises:
        UnreadError: the parser does not understand the source of the layers or of the model.
        CompatError: taps do not support this engine or this model.
    """
    check_engine(vllm_config)
    anatomy = find_anatomy(model, num_layers_of(vllm_config), _is_missing, _has_cache)
    _check_layers(anatomy, vllm_config)
    return anatomy


def supposed_anatomies_of(
    model: nn.Module, vllm_config: VllmConfig, unread: str
) -> tuple[Anatomy, ...]:
    """One possible anatomy for each convention, if the parser does not understand the model's
    source. Later, the numbers that one forward computes must prove exactly one of these anatomies.

    Args:
        unread: the reason why the parser does not understand the source.

    Raises:
        CompatError: taps do not support this model, or a later forward can take another branch of
            the code than the checked forward.
    """
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.config import CompilationMode

    found = supposed_anatomies(model, num_layers_of(vllm_config), _is_missing, _has_cache, unread)
    _check_layers(found[0], vllm_config)
    # In these modes, all forwards use one graph, because vLLM drops torch.compile's guards. A guard
    # is a condition under which torch.compile would trace the model again.
    # vllm 0.32, compilation/wrapper.py, TorchCompileWithNoGuardsWrapper
    once = (CompilationMode.VLLM_COMPILE, CompilationMode.DYNAMO_TRACE_ONCE)
    names = found[0].path.split(".")
    owners = (model.get_submodule(".".join(names[:n])) for n in range(len(names)))
    if vllm_config.compilation_config.mode not in once or not any(
        isinstance(owner, TorchCompileWithNoGuardsWrapper) and not owner.do_not_compile
        for owner in owners
    ):
        raise CompatError(
            f"{unread}, and the model is not compiled as one graph. A forward could take another "
            "branch than the forward whose numbers vllm-scope checks"
        )
    return found


def _is_missing(module: nn.Module) -> bool:
    from vllm.model_executor.models.utils import PPMissingLayer

    return isinstance(module, PPMissingLayer)


def _has_cache(module: nn.Module) -> bool:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return isinstance(module, AttentionLayerBase)


def _check_layers(anatomy: Anatomy, vllm_config: VllmConfig) -> None:
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    for layer in anatomy.layers.values():
        if isinstance(layer, TorchCompileWithNoGuardsWrapper):
            raise CompatError(
                f"{type(layer).__name__} is compiled by itself; a tap in it would not be traced"
            )
    half = vllm_config.model_config.dtype == torch.float16
    for layer in anatomy.layers.values() if half else ():
        if treats_half_apart(layer):
            raise CompatError(
                f"{type(layer).__name__} scales the stream in float16; start with dtype bfloat16"
            )
