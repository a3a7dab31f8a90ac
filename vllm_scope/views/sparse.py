"""Grids of the likeliest next tokens by position and layer, and of the strongest features by
position.

Owns:  `lens_grid`, `feature_list`.
From:  results.lens and results.features, or a client's answer.   To: a notebook, a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_scope.errors import SpecError
from vllm_scope.views.checks import decoder_of, expect, labels_of, numbers_of, texts_of
from vllm_scope.views.document import Picture
from vllm_scope.views.parts import Part, cell, grid, legend, text

#: By default, a picture shows at most this many positions, and this many features at each position.
MOST_POSITIONS, MOST_FEATURES = 64, 8


def lens_grid(
    found: Mapping[int, Any],
    *,
    tokenizer: Any = None,
    tokens: Sequence[str] | None = None,
    positions: Sequence[int] | None = None,
) -> Picture:
    """A picture of the likeliest next token by position and layer. If the reader chooses a cell,
    the picture lists all tokens that `found` has for the cell's position and layer.

    Args:
        found: the lens's tokens by layer, such as `out.scope.lens["lens"]`.
        tokenizer: such as `llm.get_tokenizer()`. If None, token ids are shown.
        tokens: the text of each token of prompt and answer, from position 0.
        positions: the positions to show. Positions that the lens does not have are left out. If
            None, the first 64 positions of the lens are shown.

    Raises:
        SpecError: `found` is not a dict of tokens by layer, an item of `tokens` is not a text, the
            tokenizer has no `decode`, or `positions` has a wrong type or no position of the lens.
    """
    is_lens = isinstance(found, Mapping) and all(
        hasattr(one, "top") and hasattr(one, "positions") for one in found.values()
    )
    expect(is_lens, "found", found, "a dict of tokens by layer, such as out.scope.lens['lens']")
    known = {layer: set(one.positions.tolist()) for layer, one in found.items()}
    shown, facts = _chosen(set().union(*known.values()), positions)
    texts, decode = texts_of(tokens, "tokens"), decoder_of(tokenizer)

    def text_of(token: int) -> str:
        return f"{token}" if decode is None else repr(decode(token))

    def cell_at(layer: int, position: int) -> Part | None:
        if position not in known[layer]:
            return None
        some = [(text_of(i), math.exp(value)) for i, value in found[layer].top(position)]
        lines = [(f"{name} {share:.3f}", _length(share)) for name, share in some]
        name, share = some[0]
        return cell(name, None if math.isnan(share) else round(share, 3), lines)

    cells = [[cell_at(layer, position) for layer in found] for position in shown]
    names = [_name(position, texts) for position in shown]
    table = grid(
        names, map(str, found), cells, ("position", "layer"),
        "The likeliest next token by position and layer", "words",
    )  # fmt: skip
    title = f"Likeliest tokens at {len(known)} layers"
    return Picture(title, [*facts, legend("0", "1", "its probability", up=True), table])


def feature_list(
    found: Any,
    *,
    tokens: Sequence[str] | None = None,
    labels: Mapping[int, str] | None = None,
    positions: Sequence[int] | None = None,
    strongest: int = MOST_FEATURES,
) -> Picture:
    """A picture of the strongest features of each token, with their values.

    Args:
        found: `SparseFeatures`, such as `out.scope.features["toy"]`.
        tokens: the text of each token of prompt and answer, from position 0.
        labels: short descriptions of features, by the number of the feature.
        positions: the positions to show. Positions that `found` does not have are left out. If
            None, the first 64 positions of `found` are shown.
        strongest: the largest number of features to show for each token.

    Raises:
        SpecError: `found` is not a SparseFeatures, an argument has a wrong type, `positions` has no
            position of `found`, or `strongest` is below 1.
    """
    is_sparse = hasattr(found, "tokens") and hasattr(found, "top")
    expect(is_sparse, "found", found, "SparseFeatures, such as out.scope.features['toy']")
    labels, texts = labels_of(labels), texts_of(tokens, "tokens")
    is_count = isinstance(strongest, int) and strongest >= 1
    expect(is_count, "strongest", strongest, "a whole number, at least 1")
    shown, facts = _chosen(set(found.tokens.tolist()), positions)
    top = [found.top(position)[:strongest] for position in shown]
    largest = max((value for some in top for _, value in some if math.isfinite(value)), default=0)
    width = max(map(len, top), default=0)
    cells: list[list[Part | None]] = []
    for some in top:
        named = [(f"{i} {labels[i]}" if i in labels else f"{i}", value) for i, value in some]
        row = [cell(f"{name}: {value:.3g}", _part(value, largest)) for name, value in named]
        cells.append([*row, *[None] * (width - len(row))])
    names = [_name(position, texts) for position in shown]
    ranks = [f"{rank + 1}" for rank in range(width)]
    table = grid(names, ranks, cells, ("position", "rank"), repr(found), "words")
    scale = legend("0", f"{largest:.3g}", "a feature's value", up=True)
    return Picture("Strongest features", [*facts, scale, table])


def _chosen(there: set[int], asked: Sequence[int] | None) -> tuple[list[int], list[Part]]:
    """The positions to show, and a list of parts. If `asked` is None and there are more than
    MOST_POSITIONS positions, the list has a paragraph that says how many positions are shown.
    Otherwise the list is empty."""
    if asked is not None:
        found = [position for position in numbers_of(asked, "positions") if position in there]
        ends = f"are at positions {min(there)} to {max(there)}" if there else "are at no position"
        if not found:
            raise SpecError(f"positions contains no position with values; the values {ends}.")
        return found, []
    every = sorted(there)
    if len(every) <= MOST_POSITIONS:
        return every, []
    return every[:MOST_POSITIONS], [
        text(
            f"The first {MOST_POSITIONS} of {len(every):,} positions are shown; the argument "
            "`positions` selects others."
        )
    ]


def _name(position: int, texts: Sequence[str]) -> str:
    return f"{position} {texts[position]}" if position < len(texts) else f"{position}"


def _part(value: float, largest: float) -> float | None:
    return None if math.isnan(value) else round(_length(value / (largest or 1)), 3)


def _length(share: float) -> float:
    return 0.0 if math.isnan(share) else min(max(share, 0.0), 1.0)
