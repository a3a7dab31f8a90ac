"""vLLM's attention modules: which are tapped, how wide their rows are, what their kernel does.

Owns:  `heads_of`, `attention_of`, `kernel_of`.
Runs:  `heads_of` wherever the configuration is; the others in every worker, after load.

Promise: if a layer that carries a tap does not have the configured site as described, the
engine does not start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.errors import ConfigError
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.request.sites import ATTENTION_SITES, Heads, Place, Sites


def heads_of(vllm_config: VllmConfig, sites: Sequence[str]) -> Heads:
    """The model's heads, by its configuration; `attention_of` compares them with the modules.

    Args:
        sites: the configured sites inside the attention.

    Raises:
        ConfigError: tensor parallelism splits the heads, or the attention has no such heads.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    named = f"additional_config['scope'].sites has {sites[0]!r}"
    if parallel.tensor_parallel_size > 1:
        raise ConfigError(
            f"{named}, and with tensor_parallel_size {parallel.tensor_parallel_size} each rank "
            "has some of the heads, which are not put together here. Leave the site out, or "
            "start with tensor_parallel_size 1; other sites are not touched by it."
        )
    if model.use_mla:
        raise ConfigError(
            f"{named}, and this model's attention is latent (MLA): its heads' keys and values "
            "are never there as such. Leave the site out."
        )
    size = int(model.get_head_size())
    return Heads(
        int(model.get_num_attention_heads(parallel)), int(model.get_num_kv_heads(parallel)),
        size, size,
    )  # fmt: skip


def attention_of(anatomy: Anatomy, sites: Sites) -> dict[int, nn.Module]:
    """Layer -> its one module that is called with q, k and v, of the layers with a tap there.

    Raises:
        ConfigError: a layer has none or several, its heads are not the model's, or it uses
            another layer's keys and values.
    """
    found: dict[int, nn.Module] = {}
    for number, layer in anatomy.layers.items():
        tapped = [s for s in ATTENTION_SITES if Place(s, number).boundary in sites.boundaries]
        if tapped:
            found[number] = _attention_in(layer, number)
            _check(found[number], number, tapped, sites)
    return found


def _attention_in(layer: nn.Module, number: int) -> nn.Module:
    from vllm.model_executor.layers.attention import Attention

    # vLLM's AttentionType is a string; cross-attention and encoders have other ones.
    here = [
        module for module in layer.modules()
        if isinstance(module, Attention) and module.attn_type == "decoder"
    ]  # fmt: skip
    if len(here) != 1:
        raise ConfigError(
            f"layer {number} ({type(layer).__name__}) has {len(here)} attention modules of the "
            "kind whose q, k, v and z can be read, not 1. Leave these sites out of "
            "additional_config['scope'].sites, or the layer out of its layers."
        )
    found: nn.Module = here[0]
    return found


def _check(module: Any, number: int, tapped: list[str], sites: Sites) -> None:
    # Values are as wide as keys where the module does not say.
    size_v = getattr(module, "head_size_v", module.head_size)
    heads = Heads(module.num_heads, module.num_kv_heads, module.head_size, size_v)
    if heads != sites.heads:
        raise ConfigError(
            f"layer {number} has {heads}, and the model's configuration says {sites.heads}: rows "
            "of a site are of one width here. Leave q, k, v and z out of "
            "additional_config['scope'].sites, or the layer out of its layers."
        )
    shared = getattr(module, "kv_sharing_target_layer_name", None)
    if shared is not None and {"k", "v"} & set(tapped):
        raise ConfigError(
            f"layer {number} attends to the keys and values of {shared}, and has none of its own. "
            "Leave k and v out of additional_config['scope'].sites, or the layer out of its layers."
        )


def kernel_of(module: Any) -> dict[str, object]:
    """The parameters of an attention module's kernel beside q, k and v, as plain numbers.

    Returns:
        layer_name: vLLM's. scale: of q.k. sliding_window: how many positions a query sees, its
        own included; None for all. logits_soft_cap: None for none. alibi_slopes, sinks: by
        head; None for none. exact: True if the kernel does nothing else; False for example for
        chunked attention (Llama 4, Rnj-1), or for image tokens that see later ones.
    """
    impl = module.impl
    # Subclasses mask by rules of their own. vllm 0.32, model_executor/layers/attention/
    plain = type(module).__name__ == "Attention" and not (
        getattr(module, "use_alibi_sqrt", False)
        or getattr(module, "use_mm_prefix", False)
        or getattr(impl, "chunk_lookback", -1) > -1
    )
    return {
        "layer_name": str(module.layer_name),
        "scale": float(impl.scale),
        "sliding_window": None if module.sliding_window is None else int(module.sliding_window),
        "logits_soft_cap": max(float(getattr(impl, "logits_soft_cap", None) or 0.0), 0.0) or None,
        "alibi_slopes": _numbers(getattr(impl, "alibi_slopes", None)),
        "sinks": _numbers(getattr(impl, "sinks", None)),
        "exact": plain,
    }


def _numbers(values: object) -> list[float] | None:
    if values is None:
        return None
    found: list[float] = torch.as_tensor(values).detach().float().flatten().tolist()
    return found
