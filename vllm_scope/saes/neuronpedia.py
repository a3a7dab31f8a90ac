"""A table of strongest tokens as Neuronpedia's JSON of features.

Owns:  `neuronpedia_features`.
From:  max_activating.   To: a file in JSON; views.feature_page shows the same facts.

Source: Neuronpedia's answer to /api/feature, and SAEDashboard's converter, 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vllm_scope.saes.max_activating import MaxActivating, Strong

#: The text of a token id, such as `lambda i: tokenizer.decode([i])`.
Decode = Callable[[int], str]
#: Digits behind the point of a value.
_DIGITS = 4


def neuronpedia_features(
    found: MaxActivating,
    decode: Decode,
    *,
    model: str,
    source: str,
    features: Sequence[int] | None = None,
    labels: Mapping[int, str] | None = None,
) -> Iterator[dict[str, object]]:
    """The features as plain JSON values, one after another.

    Args:
        decode: the text of a token id.
        model, source: Neuronpedia's names of the model and of the SAE (`modelId`, `layer`).
        features: their numbers; None: all that are active at some token.
        labels: explanations of features, by number.

    Yields:
        `modelId`, `layer`; `index`, a string; `maxActApprox`, the largest value; `frac_nonzero`,
        the share of tokens at which the feature is active; `freq_hist_data_bar_values` and
        `freq_hist_data_bar_heights`, of equal length: the middles of the histogram's bars and how
        many tokens each has; `explanations`, a list of `{"description"}`; and `activations`, the
        strongest tokens: of each `tokens` and `values` (0 where it was not computed), `maxValue`,
        `maxValueTokenIndex` and `minValue` of these values, and `qualifyingTokenIndex`, the token
        for which the context was kept.
    """
    if features is None:
        features = np.flatnonzero(found.num_active).tolist()
    for index in features:
        edges, counts = found.histogram(index)
        num_bars = int(np.flatnonzero(counts).max(initial=-1)) + 1
        middles = (edges[:-1] + edges[1:]) / 2
        top = found.top(index)
        label = (labels or {}).get(index)
        yield {
            "modelId": model, "layer": source, "index": str(index),
            "maxActApprox": _rounded(top[0].value) if top else 0.0,
            "frac_nonzero": float(found.density[index]),
            "freq_hist_data_bar_values": [_rounded(one) for one in middles[:num_bars].tolist()],
            "freq_hist_data_bar_heights": counts[:num_bars].tolist(),
            "explanations": [] if label is None else [{"description": label}],
            "activations": [_activation(one, decode) for one in top],
        }  # fmt: skip


def _activation(one: Strong, decode: Decode) -> dict[str, object]:
    values = np.nan_to_num(one.values)
    best = int(values.argmax())
    return {
        "tokens": [decode(token) for token in one.tokens.tolist()],
        "values": [_rounded(value) for value in values.tolist()],
        "maxValue": _rounded(float(values[best])), "maxValueTokenIndex": best,
        "minValue": _rounded(float(values.min())), "qualifyingTokenIndex": one.at,
    }  # fmt: skip


def _rounded(value: float) -> float:
    return round(value, _DIGITS)
