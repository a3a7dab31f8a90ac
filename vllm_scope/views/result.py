"""An overview of a result, with the status, the values that arrived, and the scores of each token.

Owns:  `result_picture`.
From:  results.result.   To: a notebook, a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_scope.views.checks import decoder_of
from vllm_scope.views.document import Picture
from vllm_scope.views.parts import Part, cell, grid, text
from vllm_scope.views.strip import token_strip

if TYPE_CHECKING:
    from vllm_scope.results.result import ScopeResult

#: The largest number of strips (one for each probe), and the largest number of tokens in each
#: strip.
MOST_STRIPS, MOST_TOKENS = 4, 512


def result_picture(result: ScopeResult, tokenizer: Any = None) -> Picture:
    """A picture with the status, counts, a table of the values that arrived, and strips of the
    first probes.

    Args:
        tokenizer: an object with `decode`. If None, token ids are shown.

    Raises:
        SpecError: the tokenizer has no `decode`.
    """
    decode = decoder_of(tokenizer)
    facts = f"{result.status}: {result.delivered:,} of {result.expected:,} values arrived"
    facts += f", {result.dropped:,} are missing." if result.dropped else "."
    content = [text(facts)]
    if result.error is not None:
        content.append(text(result.error))
    arrived = [*_rows(result), *_numbers(result)]
    if arrived:
        names, *columns = zip(*arrived, strict=True)
        cells = [list(map(cell, row)) for row in zip(*columns, strict=True)]
        content.append(grid(names, ["kind", "what arrived"], cells, ("name", ""), style="words"))
    return Picture("Result of a request", content + _strips(result, decode))


def _rows(result: ScopeResult) -> list[tuple[str, str, str]]:
    found = []
    for site, layer in result.keys():
        shape = len(result.positions(site, layer)), *result.sites.row_shape(site)
        found.append((f"{site} {layer}", "rows", " by ".join(f"{n:,}" for n in shape)))
    return found


def _numbers(result: ScopeResult) -> list[tuple[str, str, str]]:
    found = []
    for name in result.scores:
        told = f"{len(result.scores.positions(name)):,} positions"
        if name in result.verdicts:
            verdict = result.verdicts[name]
            told += f", verdict {verdict.value:.4g} at position {verdict.position}"
        found.append((name, "scores", told))
    for name, some in result.features.items():
        told = f"{len(some):,} values at {len(some.tokens):,} positions"
        found.append((name, "features", told))
    for name, layers in result.lens.items():
        count = max(map(len, layers.values()), default=0)
        found.append((name, "lens", f"{len(layers)} layers at {count:,} positions"))
    return found


def _strips(result: ScopeResult, decode: Callable[[int], str] | None) -> list[Part]:
    ids, content = result.token_ids[:MOST_TOKENS], []
    tokens = [f"{i} " if decode is None else decode(i) for i in ids]
    for probe in result.probes[:MOST_STRIPS]:
        scores = np.full(len(result.transcript), np.nan, np.float32)
        # If the probe has an aggregate, the threshold and the verdict apply to the aggregate.
        told = "Scores" if probe.aggregate is None else "Aggregates"
        values = result.scores if probe.aggregate is None else result.aggregates
        scores[result.scores.positions(probe.name).numpy()] = values[probe.name].numpy()
        verdict = result.verdicts.get(probe.name)
        is_seen = verdict is not None and verdict.position < len(ids)
        strip = token_strip(
            tokens, scores[: len(ids)], threshold=probe.threshold,
            verdict=verdict if is_seen else None, caption=f"{told} of {probe.name}",
        )  # fmt: skip
        content += strip.parts()
    left = len(result.probes) - MOST_STRIPS, len(result.transcript) - MOST_TOKENS
    if max(left) > 0 and result.probes:
        most = f"{MOST_STRIPS} probes and {MOST_TOKENS} tokens"
        content.append(text(f"At most {most} are shown; `scores` has all scores."))
    return content
