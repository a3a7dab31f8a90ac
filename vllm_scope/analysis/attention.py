"""Attention patterns, computed from the rows of `q` and `k`.

    attention_pattern(out.scope, layer=3, heads=[0, 5])    # [2, queries, keys], float32

Owns:  `attention_pattern`, and `attention_weights`, the formula.
Runs:  anywhere, without an engine.
From:  results.   To: views, analysis.cache, compat.

An attention kernel never stores all weights, so a tap cannot read them. `q` and `k` are the inputs
of the kernel, after norms and rotary embedding. In each head, a query at position n - 1 has n
weights, and its row of `q` has head_size numbers. If n is above head_size, rows are the smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_scope.errors import ScopeError, SpecError
from vllm_scope.request.sites import SiteLayer
from vllm_scope.views.checks import numbers_of


class Rows(Protocol):
    """The rows of one completion: a ScopeResult, or a client's ScopeData."""

    def __getitem__(self, stream: SiteLayer, /) -> Any: ...
    def positions(self, site: str, layer: int | None = None) -> Any: ...


def attention_pattern(
    result: Rows,
    layer: int,
    heads: Iterable[int] | None = None,
    *,
    kernel: Mapping[str, Any] | None = None,
) -> Tensor:
    """The weights with which queries attend to keys: Hugging Face's `attentions[layer][0]`.

    The request must have read `k` at all positions up to the last query, and `q` at the positions
    of the wanted patterns: `Read("q", tokens="last"), Read("k")`. Rows from before the edits of `q`
    and `k` give the pattern without these edits. Rows of a read with a codec give the pattern of
    the decoded rows.

    Args:
        result: a ScopeResult, or the `scope` of a client's choice.
        layer: index of the layer, from 0.
        heads: the heads to return, in this order; None: all heads.
        kernel: the layer's kernel as numbers: `client.info()["attention"][f"{layer}"]`. None: the
            kernel of `result`, which must be a ScopeResult.

    Returns:
        float32 [num_heads, num_queries, num_keys], CPU. Row i is the query at
        `result.positions("q", layer)[i]`; column j is the key at position j. The columns end with
        the last query. A key that a query does not see has weight 0. If the attention has sinks, a
        row sums to less than 1.

    Raises:
        KeyError: the result has no rows of `q` or of `k` at this layer.
        ScopeError: rows of keys are missing, or the kernel does more than scale, cap, mask and
            bias its scores.
        SpecError: a head is not a whole number or not a head of the layer. Also if `kernel` is None
            and the result has no kernel.
    """
    q, k = (_tensor(result[site, layer]).float() for site in ("q", "k"))
    if kernel is None:
        kernel = _kernel_of(result, layer)
    queries, keys = (_tensor(result.positions(site, layer)) for site in ("q", "k"))
    num_keys = int(queries[-1]) + 1 if len(queries) else 0
    if not torch.equal(keys[:num_keys], torch.arange(num_keys)):
        raise ScopeError(
            f"rows of k are missing at layer {layer}; the last query needs k at all positions "
            f"from 0 to {num_keys - 1}. Read k with tokens='all', and wait for the request."
        )
    check_kernel(kernel, f"layer {layer}")
    num_heads = q.shape[1]
    every = range(num_heads)
    chosen = torch.tensor(
        every if heads is None else numbers_of(
            heads, "heads", every, f"the layer has heads 0 to {num_heads - 1}"
        ),
        dtype=torch.int64,
    )  # fmt: skip
    ahead = torch.arange(num_keys) - queries[:, None]
    seen, window = ahead <= 0, kernel["sliding_window"]
    if window is not None:
        seen &= ahead > -window
    by_head = {
        name: None if kernel[name] is None else torch.tensor(kernel[name])[chosen]
        for name in ("alibi_slopes", "sinks")
    }
    return attention_weights(
        q[:, chosen], k[:num_keys, chosen // (num_heads // k.shape[1])], ahead, seen,
        scale=kernel["scale"], logits_soft_cap=kernel["logits_soft_cap"] or 0.0, **by_head,
    )  # fmt: skip


def check_kernel(kernel: Mapping[str, Any], where: str) -> None:
    """Raise ScopeError if q, k and the kernel's numbers do not determine a pattern."""
    if not kernel["exact"]:
        raise ScopeError(
            f"the attention of {where} does more than scale, cap, mask and bias its scores "
            "(over chunks, or by another rule), so its pattern does not follow from q and k."
        )


def attention_weights(
    q: Tensor,
    k: Tensor,
    ahead: Tensor,
    seen: Tensor,
    *,
    scale: float,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The softmax of cap(scale * q.k) + bias over the keys that a query sees.

    Args:
        q: [num_queries, heads, head_size].
        k: [num_keys, heads, head_size], of the same device and dtype.
        ahead: [num_queries, num_keys]: the key's position minus the query's position.
        seen: bool [num_queries, num_keys].
        logits_soft_cap: cap * tanh(score / cap); 0: no cap.
        alibi_slopes: [heads]; slope * ahead is added to a score.
        sinks: [heads]; one more score in each softmax, without a key.

    Returns:
        [heads, num_queries, num_keys], dtype of `q`; 0 for a key that a query does not see.
    """
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if logits_soft_cap > 0:
        scores = torch.tanh(scores / logits_soft_cap) * logits_soft_cap
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(scores)[:, None, None] * ahead
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.to(scores)[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return weights.masked_fill(~seen, 0.0)


def _kernel_of(result: Rows, layer: int) -> Mapping[str, Any]:
    sites = getattr(result, "sites", None)
    if sites is None:
        raise SpecError(
            "kernel is None, and the rows of an HTTP client have no kernel; give "
            "kernel=client.info()['attention'][f'{layer}']."
        )
    found: Mapping[str, Any] = sites.kernels[layer]
    return found


def _tensor(rows: object) -> Tensor:
    """The rows as a tensor. A read-only array (from HTTP) is copied, because torch warns about
    read-only arrays."""
    if isinstance(rows, np.ndarray) and not rows.flags.writeable:
        rows = rows.copy()
    return torch.as_tensor(rows)
