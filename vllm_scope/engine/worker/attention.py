"""Finds the tapped attention modules, their heads, and the parameters of their kernels.

Owns:  `heads_of`, `attention_of`, `kernel_of`.
Runs:  `heads_of` in every process that has the configuration; the other functions in every worker
       after load.

Promise: each layer with a tap at q, k, v or z has exactly one attention module of a decoder, whose
heads are as configured. A layer with a tap at k or v computes its own keys and values. Otherwise,
the engine does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vllm_scope.engine.vllm_types import VllmConfig
from vllm_scope.errors import ConfigError
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.request.sites import ATTENTION_SITES, Heads, Place, Sites


def heads_of(vllm_config: VllmConfig, sites: Sequence[str]) -> Heads:
    """The numbers and sizes of the model's heads, according to its configuration. `attention_of`
    checks these values later.

    Args:
        sites: the configured sites inside the attention.

    Raises:
        ConfigError: the attention is latent (MLA), which has no heads with keys and values.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    named = f"additional_config['scope'].sites has {sites[0]!r}"
    if model.use_mla:
        raise ConfigError(
            f"{named}, and this model's attention is latent (MLA): it never computes keys and "
            "values of single heads. Leave the site out."
        )
    size = int(model.get_head_size())
    # vLLM gives each rank an equal number of query heads.
    num_heads = int(model.get_num_attention_heads(parallel)) * parallel.tensor_parallel_size
    return Heads(num_heads, int(model.get_total_num_kv_heads()), size, size)


def heads_here(heads: Heads, num_ranks: int) -> Heads:
    """The heads of one of `num_ranks` tensor-parallel ranks. If there are fewer key and value heads
    than ranks, several ranks share one key and value head."""
    num_kv_heads = max(1, heads.num_kv_heads // num_ranks)
    return replace(heads, num_heads=heads.num_heads // num_ranks, num_kv_heads=num_kv_heads)


def attention_of(anatomy: Anatomy, sites: Sites, num_ranks: int = 1) -> dict[int, nn.Module]:
    """Maps each layer with a tap inside the attention to the only module that gets q, k and v.

    Args:
        num_ranks: the number of ranks among which tensor parallelism splits the heads.

    Raises:
        ConfigError: a layer has no such module or several; or the heads of the module differ from
            the configuration; or k or v is tapped in a layer that uses another layer's keys and
            values.
    """
    found: dict[int, nn.Module] = {}
    for number, layer in anatomy.layers.items():
        tapped = [s for s in ATTENTION_SITES if Place(s, number).boundary in sites.boundaries]
        if tapped:
            found[number] = _attention_in(layer, number)
            assert sites.heads is not None
            _check(found[number], number, tapped, heads_here(sites.heads, num_ranks))
    return found


def _attention_in(layer: nn.Module, number: int) -> nn.Module:
    from vllm.model_executor.layers.attention import Attention

    # The value of vLLM's AttentionType is a string. Cross-attention and encoders do not have the
    # value "decoder".
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


def _check(module: Any, number: int, tapped: list[str], expected: Heads) -> None:
    # If the module has no attribute for the width of values, values have the width of keys.
    size_v = getattr(module, "head_size_v", module.head_size)
    heads = Heads(module.num_heads, module.num_kv_heads, module.head_size, size_v)
    if heads != expected:
        raise ConfigError(
            f"layer {number} has {heads}, and the model's configuration says {expected}: rows "
            "of a site are of one width here. Leave q, k, v and z out of "
            "additional_config['scope'].sites, or the layer out of its layers."
        )
    shared = getattr(module, "kv_sharing_target_layer_name", None)
    if shared is not None and {"k", "v"} & set(tapped):
        raise ConfigError(
            f"layer {number} attends to the keys and values of {shared}, and has none of its own. "
            "Leave k and v out of additional_config['scope'].sites, or the layer out of its layers."
        )


def kernel_of(module: Any, gather: Callable[[Tensor], Tensor] | None = None) -> dict[str, object]:
    """The parameters of an attention module's kernel except q, k and v, as plain numbers.

    Args:
        gather: the function Split.gather, if ranks split the heads. In this case every rank must
            call `kernel_of`.

    Returns:
        layer_name: vLLM's name of the attention layer.
        scale: the factor by which q.k is multiplied.
        sliding_window: the number of positions that a query sees, including the query's own
            position; None if there is no such limit.
        logits_soft_cap: the cap of the logits; None if there is no cap.
        alibi_slopes, sinks: one number for each head, or None.
        exact: False if the kernel has rules that these parameters do not describe. Examples are
            chunked attention (Llama 4, Rnj-1), and image tokens that see later tokens.
    """
    impl = module.impl
    # Subclasses of Attention have additional mask rules. vllm 0.32,
    # model_executor/layers/attention/
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
        "alibi_slopes": _numbers(getattr(impl, "alibi_slopes", None), gather),
        "sinks": _numbers(getattr(impl, "sinks", None), gather),
        "exact": plain,
    }


def _numbers(values: object, gather: Callable[[Tensor], Tensor] | None) -> list[float] | None:
    if values is None:
        return None
    here = torch.as_tensor(values).detach().float().view(1, -1)
    found: list[float] = (here if gather is None else gather(here)).flatten().tolist()
    return found
