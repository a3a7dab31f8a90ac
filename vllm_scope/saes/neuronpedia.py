"""Converts a table of strongest tokens to Neuronpedia's JSON of features.

Owns:  `neuronpedia_features`.
From:  max_activating. To: a JSON file of the caller.

Source: Neuronpedia's answer to /api/feature, and SAEDashboard's converter, 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vllm_scope.saes.max_activating import MaxActivating, Strong

#: A token id -> its text, such as `lambda i: tokenizer.decode([i])`.
Decode = Callable[[int], str]
#: Digits of a value after the decimal point.
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
    """Yield each feature as plain JSON values.

    Args:
        decode: returns the text of a token id.
        model, source: Neuronpedia's name of the model (`modelId`), and of the SAE (`layer`).
        features: numbers of the wanted features. None: all features that are active at some token.
        labels: number of a feature -> its explanation.

    Yields:
        One dict for each feature. `modelId`, `layer`; `index`, a string; `maxActApprox`, the
        largest value; `frac_nonzero`, the share of tokens at which the feature is active.
        `freq_hist_data_bar_values`: the middles of the histogram's bars.
        `freq_hist_data_bar_heights`: the number of tokens of each bar. `explanations`: a list of
        `{"description"}`. `activations`: the strongest tokens. Each has the `tokens` and `values`
        of its context (0 where the feature was not computed); `maxValue`, `maxValueTokenIndex` and
        `minValue` of the values; and `qualifyingTokenIndex`, the index of the strong token.
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
