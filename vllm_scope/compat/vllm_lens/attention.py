"""Computes attention patterns from queries and keys, as the model's attention kernel does.

    out.activations["attn_q"]                       # (layers, positions, heads, head_dim)
    attention_patterns(out.activations, layer=3)    # (heads, positions, positions), float32

Owns:  `attention_patterns`, `compute_attention_weights`, and `qk_meta` of a layer.
Runs:  in any process, on the device of the tensors. vllm_scope.analysis.attention has the formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_scope.analysis.attention import attention_weights, check_kernel
from vllm_scope.errors import SpecError, shown
from vllm_scope.request.sites import Sites


def qk_meta(sites: Sites, layer: int) -> dict[str, object]:
    """The options of a layer's attention kernel under vllm-lens's names, as JSON."""
    kernel, heads = sites.kernels[layer], sites.heads
    assert heads is not None
    window = kernel["sliding_window"]
    return {
        **{
            name: kernel[name] for name in ("layer_name", "scale", "alibi_slopes", "sinks", "exact")
        },
        "logits_soft_cap": kernel["logits_soft_cap"] or 0.0,
        "sliding_window": [-1, -1] if window is None else [window - 1, 0],
        "num_heads_local": heads.num_heads,
        "num_kv_heads_local": heads.num_kv_heads,
        "num_kv_heads_total": heads.num_kv_heads,
        "head_size": heads.head_size,
    }


def attention_patterns(
    activations: Mapping[str, Any], layer: int, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The attention pattern of one layer over all positions that were captured.

    Args:
        activations: `output.activations` of a request with `output_qk`, or the result of
            `decode_activations`.
        layer: one of `activations["qk_layers"]`.
        dtype: the dtype of the computation.

    Returns:
        The weights, [heads, query positions, key positions].

    Raises:
        KeyError: no queries and keys were captured.
        SpecError: this layer was not captured.
        ScopeError: rows are missing, or q and k are not enough to compute the pattern.
    """
    if "qk_layers" not in activations:
        raise KeyError(
            "these activations have no queries and keys; ask for them with "
            "extra_args={'output_qk': True}, or a list of layers."
        )
    layers = list(activations["qk_layers"])
    if layer not in layers:
        raise SpecError(f"layer {shown(layer)} was not captured; output_qk had layers {layers}.")
    at = layers.index(layer)
    meta = activations["qk_meta"][at]
    exact = meta.get("exact", True) and not meta.get("use_alibi_sqrt")
    check_kernel({"exact": exact}, f"layer {layer}")
    left, right = meta.get("sliding_window") or (-1, -1)
    return compute_attention_weights(
        activations["attn_q"][at], activations["attn_k"][at],
        scale=float(meta["scale"]), q_start=0, sliding_window=(int(left), int(right)),
        logits_soft_cap=float(meta.get("logits_soft_cap") or 0.0),
        alibi_slopes=meta.get("alibi_slopes"), sinks=meta.get("sinks"), dtype=dtype,
    )  # fmt: skip


def compute_attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    causal: bool = True,
    q_start: int | None = None,
    sliding_window: tuple[int, int] = (-1, -1),
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | Sequence[float] | None = None,
    sinks: Tensor | Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weights with which queries attend to keys.

    Args:
        q: the queries, [num_queries, heads, head_dim].
        k: the keys, [num_keys, kv_heads, head_dim]. Each head of `k` is used by heads / kv_heads
            successive heads of `q`.
        scale: the factor of the dot product of a query and a key.
        causal: whether a query attends only to keys up to the query's own position.
        q_start: position of the first query among the keys, or None if the queries have the last
            positions.
        sliding_window: how many positions before and after the own position a query attends to. -1
            means all positions.
        logits_soft_cap: a score becomes cap * tanh(score / cap). With 0, scores are not capped.
        alibi_slopes: [heads]. slope * (key position - query position) is added to a score.
        sinks: [heads]. The softmax of each head has one more score, which belongs to no key.
        dtype: the dtype of the computation.

    Returns:
        The weights, [heads, num_queries, num_keys]. A weight is 0 if the query does not attend to
        the key.

    Raises:
        SpecError: the shapes do not fit together, or `q_start` is None and `q` is longer than `k`.
    """
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise SpecError(
            f"q has shape {list(q.shape)} and k {list(k.shape)}; each must be [positions, heads, "
            "head_dim], with equal head_dim, and q's number of heads must be a multiple of k's."
        )
    num_queries, heads, _ = q.shape
    num_keys, kv_heads, _ = k.shape
    first = num_keys - num_queries if q_start is None else q_start
    if first < 0:
        raise SpecError(f"there are {num_queries} queries for {num_keys} keys; give q_start.")
    keys = torch.arange(num_keys, device=q.device)
    ahead = keys - torch.arange(first, first + num_queries, device=q.device)[:, None]
    before, after = sliding_window
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if causal:
        seen &= ahead <= 0
    if after >= 0:
        seen &= ahead <= after
    if before >= 0:
        seen &= ahead >= -before
    return attention_weights(
        q.to(dtype), k.to(dtype).repeat_interleave(heads // kv_heads, dim=1), ahead, seen,
        scale=scale, logits_soft_cap=logits_soft_cap,
        alibi_slopes=_by_head(alibi_slopes, "alibi_slopes", heads),
        sinks=_by_head(sinks, "sinks", heads),
    )  # fmt: skip


def _by_head(values: Tensor | Sequence[float] | None, name: str, heads: int) -> Tensor | None:
    """`values` as a tensor [heads]. None if `values` is None."""
    if values is None:
        return None
    found = torch.as_tensor(values).flatten()
    if len(found) != heads:
        raise SpecError(f"{name} has {len(found)} numbers; q has {heads} heads.")
    return found
