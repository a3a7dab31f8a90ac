"""Converts a table of strongest tokens to the JSON in which Neuronpedia describes features.

Owns:  `neuronpedia_features`.
From:  max_activating. To: the caller, who can write a JSON file.

Source: Neuronpedia's answer to /api/feature, and SAEDashboard's converter, both as of 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vllm_scope.saes.max_activating import MaxActivating, Strong

#: A function that returns the text of a token id, such as `lambda i: tokenizer.decode([i])`.
Decode = Callable[[int], str]
#: The number of digits after the decimal point in a value of the JSON.
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
    """Yield a description of each feature, as plain JSON values.

    Args:
        decode: a function that returns the text of a token id.
        model, source: Neuronpedia's name of the model (`modelId`), and of the SAE (`layer`).
        features: the features to describe. If None, all features that are active at some token.
        labels: explanations of features, by the index of the feature. They need not cover all
            features.

    Yields:
        One dict for each feature. `modelId` and `layer` are `model` and `source`. `index` is the
        feature's number as a string. `maxActApprox` is the feature's largest value. `frac_nonzero`
        is the share of tokens at which the feature is active. `freq_hist_data_bar_values` has the
        middles of the histogram's bars, up to the last bar with tokens.
        `freq_hist_data_bar_heights` has the number of tokens of each of these bars. `explanations`
        is a list with the feature's explanation, if there is one. `activations` is a list of the
        feature's strongest tokens. Each activation has the `tokens` of the context, and in `values`
        the feature's values (0 if not computed). `maxValue`, `maxValueTokenIndex` and `minValue`
        describe `values`. `qualifyingTokenIndex` is the index in `tokens` of the strongest token
        that the activation stands for.
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
