"""A picture of attention patterns, which are the weights with which tokens attend to earlier
tokens.

Owns:  `attention_map`.
From:  a result with rows of q and k, or weights. To: a notebook, a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError, shown
from vllm_scope.views.checks import numbers_of, texts_of
from vllm_scope.views.document import Picture
from vllm_scope.views.parts import Part, cell, choice, colour, grid, legend

if TYPE_CHECKING:
    from vllm_scope.results.result import ScopeResult

#: The largest number of cells of a view. A page with this number of cells has about 10 MB.
MOST_CELLS = 262_144


def attention_map(
    found: ScopeResult | Any,
    layer: int | None = None,
    *,
    heads: Iterable[int] | None = None,
    tokens: Sequence[str] | None = None,
) -> Picture:
    """A picture of the attention patterns of some heads. The reader chooses one head.

    Args:
        found: a result or weights. A result must have the rows of `q` and `k` that
            `vllm_scope.analysis.attention.attention_pattern` needs. The queries of a result are at
            the positions of its rows of `q`. Weights are [num_heads, num_queries, num_keys] on the
            CPU. The queries of weights are at the last num_queries of the num_keys positions.
        layer: a layer of the result. None if `found` is weights.
        heads: the heads to show. If None, all heads are shown.
        tokens: the text of each token of the prompt and the answer, from position 0.

    Raises:
        KeyError: the result has no rows of q and k of this layer.
        ScopeError: rows are missing, or the pattern cannot be computed from q and k.
        SpecError: `layer` is None for a result, the weights are not numbers or have another shape,
            a head does not exist, a token is not a text, or there are too many cells.
    """
    of_result = hasattr(found, "keys") and hasattr(found, "positions")
    if of_result and layer is None:
        raise SpecError("layer is None; name a layer whose q and k the result has.")
    given = None if of_result else _weights(found)
    num_heads, queries = _shape_of(found, layer) if given is None else _last(given)
    num_keys = queries[-1] + 1 if queries else 0
    every, texts = range(num_heads), texts_of(tokens, "tokens")
    chosen = numbers_of(
        every if heads is None else heads, "heads", every, f"the layer has heads 0 to {every[-1]}"
    )
    if len(chosen) * len(queries) * num_keys > MOST_CELLS:
        raise SpecError(
            f"{len(chosen)} heads of {len(queries):,} queries and {num_keys:,} keys are more than "
            f"{MOST_CELLS:,} cells; name fewer heads, or fewer queries."
        )
    weights = _pattern(found, layer, chosen) if given is None else given[chosen]
    names = [f"{i} {texts[i]}" if i < len(texts) else f"{i}" for i in range(num_keys)]
    title = "Attention" if layer is None else f"Attention at layer {layer}"
    each = [
        (f"{head}", [_head(of_head, names, queries, f"{title}, head {head}")])
        for head, of_head in zip(chosen, weights, strict=True)
    ]
    scale = legend("0", "1", "the weight of a key", up=True)
    return Picture(title, [scale, choice("head", each)])


def _head(
    weights: NDArray[np.float32], names: list[str], queries: Sequence[int], caption: str
) -> Part:
    cells = [
        [
            cell(f"{weight:.3f}", colour(max(weight, 0), 0, 1)) if key <= query else None
            for key, weight in enumerate(row)
        ]
        for query, row in zip(queries, weights.tolist(), strict=True)
    ]
    return grid([names[i] for i in queries], names, cells, ("query", "key"), caption, "tight")


def _shape_of(result: Any, layer: int | None) -> tuple[int, list[int]]:
    """Returns the number of heads, and the positions of the queries."""
    return result["q", layer].shape[1], result.positions("q", layer).tolist()


def _last(weights: NDArray[np.float32]) -> tuple[int, Sequence[int]]:
    num_heads, num_queries, num_keys = weights.shape
    return num_heads, range(num_keys - num_queries, num_keys)


def _pattern(result: Any, layer: Any, heads: list[int]) -> NDArray[np.float32]:
    from vllm_scope.analysis.attention import attention_pattern

    found: NDArray[np.float32] = attention_pattern(result, layer, heads).numpy()
    return found


def _weights(found: Any) -> NDArray[np.float32]:
    try:
        weights = np.asarray(found, np.float32)
    except (TypeError, ValueError, RuntimeError):  # e.g. a ragged list or a GPU's tensor
        raise SpecError(
            f"found is {shown(found)}; it must be a result with q and k, or weights on the CPU."
        ) from None
    if weights.ndim != 3 or 0 in weights.shape or weights.shape[1] > weights.shape[2]:
        raise SpecError(
            f"weights have the shape {list(weights.shape)}; it must be [heads, queries, keys], "
            "and there cannot be more queries than keys."
        )
    return weights
