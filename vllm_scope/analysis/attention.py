"""Computes attention patterns from the rows of `q` and `k`.

    attention_pattern(out.scope, layer=3, heads=[0, 5])    # [2, queries, keys], float32

Owns:  `attention_pattern`, and `attention_weights` (the formula).
Runs:  in any process, without an engine.
From:  results.   To: views, analysis.cache, compat.

An attention kernel never stores all weights, so a tap cannot read them. Therefore this file
computes the weights from the inputs of the kernel, `q` and `k` after norms and rotary embedding.
For long prompts, `q` is also smaller than the weights: in each head, the query at position n - 1
has n weights, and its row of `q` has head_size numbers.
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
    """The rows of one completion. ScopeResult and a client's ScopeData implement this protocol."""

    def __getitem__(self, stream: SiteLayer, /) -> Any: ...
    def positions(self, site: str, layer: int | None = None) -> Any: ...


def attention_pattern(
    result: Rows,
    layer: int,
    heads: Iterable[int] | None = None,
    *,
    kernel: Mapping[str, Any] | None = None,
) -> Tensor:
    """The weights with which queries attend to keys, as in Hugging Face's `attentions[layer][0]`.

    The request must have read `k` at all positions up to the last query. It must also have read `q`
    at the positions of the wanted queries. For example, `Read("q", tokens="last"), Read("k")` gives
    the pattern of one query. Rows that were read before the edits of `q` and `k` give the pattern
    without these edits. Rows of a Read with a codec give the pattern of the decoded rows.

    Args:
        result: a ScopeResult, or the `scope` of a client's choice.
        layer: the number of the layer, from 0.
        heads: the wanted heads, in the order of the returned pattern, or None for all heads.
        kernel: the options of the layer's attention kernel, which a client gets from
            `client.info()["attention"][f"{layer}"]`. With None, `result` must be a ScopeResult,
            which has these options.

    Returns:
        float32 [num_heads, num_queries, num_keys] on the CPU. Row i belongs to the query at
        `result.positions("q", layer)[i]`, and column j to the key at position j. The last column
        belongs to the key at the position of the last query. A key to which a query does not attend
        has the weight 0. If the attention has sinks, the sum of a row is less than 1.

    Raises:
        KeyError: the result has no rows of `q` or of `k` at this layer.
        ScopeError: rows of keys are missing, or the kernel does more than scale, cap, mask and
            bias its scores.
        SpecError: a head is not a whole number or not a head of the layer, or `kernel` is None and
            the result has no options of a kernel.
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
    """Raise ScopeError if q, k and the kernel's options are not enough to compute a pattern."""
    if not kernel["exact"]:
        raise ScopeError(
            f"the attention of {where} does more than scale, cap, mask and bias its scores "
            "(for example, it attends in chunks), so its pattern cannot be computed from q and k."
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
    """The softmax of cap(scale * q.k) + bias over the keys to which a query attends.

    Args:
        q: the queries, [num_queries, heads, head_size].
        k: the keys, [num_keys, heads, head_size], on the device and in the dtype of `q`.
        ahead: the key's position minus the query's position, [num_queries, num_keys].
        seen: whether the query attends to the key, as bool [num_queries, num_keys].
        logits_soft_cap: a score becomes cap * tanh(score / cap). With 0, scores are not capped.
        alibi_slopes: [heads]. slope * ahead is added to a score.
        sinks: [heads]. Each softmax has one more score, which belongs to no key.

    Returns:
        The weights, [heads, num_queries, num_keys], in the dtype of `q`. A weight is 0 if the query
        does not attend to the key.
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
            "kernel is None, and only a ScopeResult has the kernel's options; give "
            "kernel=client.info()['attention'][f'{layer}']."
        )
    found: Mapping[str, Any] = sites.kernels[layer]
    return found


def _tensor(rows: object) -> Tensor:
    """Return the rows as a tensor. A read-only array (from HTTP) is copied, because torch warns
    about read-only arrays."""
    if isinstance(rows, np.ndarray) and not rows.flags.writeable:
        rows = rows.copy()
    return torch.as_tensor(rows)
