"""Weights of a probe from a fitted estimator of scikit-learn.

Owns:  `from_sklearn`.
Runs:  anywhere. Only a call of `from_sklearn` imports scikit-learn.
To:    probe_weights, from which callers import `from_sklearn`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from vllm_scope.errors import SpecError
from vllm_scope.request.nets import Hidden
from vllm_scope.vectors.layers import Floats, Layers, ProbeWeights, of_layers
from vllm_scope.vectors.probe_files import fold

#: Maps scikit-learn's activation of hidden layers to the `hidden` of an `Mlp`.
_HIDDEN: dict[str, Hidden] = {"relu": "relu", "tanh": "tanh", "logistic": "tanh"}


def from_sklearn(estimator: object) -> ProbeWeights:
    """The weights of a fitted estimator of scikit-learn.

    If these weights have no activation, the probe's scores equal the estimator's
    `decision_function` for the class `classes_[1]`, or a regressor's `predict`. With the activation
    "sigmoid", the scores equal the estimator's `predict_proba` for the class `classes_[1]`.

    Args:
        estimator: one of the following, or a Pipeline of StandardScaler and one of the following.
            LogisticRegression, LinearDiscriminantAnalysis and MLPClassifier give weights with the
            activation "sigmoid". LinearSVC, RidgeClassifier, Ridge, LinearRegression and
            MLPRegressor give weights without an activation. Variants such as RidgeCV are allowed
            too. An MLP can have at most two hidden layers, with relu, tanh or logistic. A
            LogisticRegression with multi_class="multinomial" gives weights without an activation.

    Raises:
        SpecError: the estimator has another type, is not fitted, or has several outputs.
        ImportError: scikit-learn is not installed.
    """
    try:
        import sklearn.preprocessing
    except ImportError:
        raise ImportError(
            "an estimator needs scikit-learn: pip install 'vllm-scope[probes]'."
        ) from None
    *before, last = _steps(estimator) or [estimator]
    layers, hidden, activation = _read(last)
    for scaler in reversed(before):
        if not isinstance(scaler, sklearn.preprocessing.StandardScaler):
            raise SpecError(
                f"the pipeline has a {_kind(scaler)} before its last step; only a StandardScaler "
                "becomes a part of a probe."
            )
        _check_fitted(scaler)
        # With with_mean=False a scaler does not subtract the mean, but can still have `mean_`.
        mean = scaler.mean_ if scaler.with_mean else None
        layers[0] = _scaled(*layers[0], mean, scaler.scale_ if scaler.with_std else None)
    return of_layers(layers, hidden, activation)


def _steps(estimator: object) -> list[object]:
    """The steps of a pipeline and of the pipelines inside it. Any other estimator is one step."""
    from sklearn.pipeline import Pipeline

    if not isinstance(estimator, Pipeline):
        return [estimator]
    steps = [step for _, step in estimator.steps if step not in (None, "passthrough")]
    return [one for step in steps for one in _steps(step)]


def _read(estimator: object) -> tuple[Layers, Hidden, Literal["sigmoid"] | None]:
    """The layers of an estimator, the function between layers, and the score's activation."""
    from sklearn import discriminant_analysis, linear_model, neural_network, svm

    logits = (linear_model.LogisticRegression, discriminant_analysis.LinearDiscriminantAnalysis)
    linear = (
        *logits, svm.LinearSVC, linear_model.RidgeClassifier, linear_model.RidgeClassifierCV,
        linear_model.LinearRegression, linear_model.Ridge, linear_model.RidgeCV,
    )  # fmt: skip
    perceptrons = (neural_network.MLPClassifier, neural_network.MLPRegressor)
    if not isinstance(estimator, (*linear, *perceptrons)):
        names = ", ".join(one.__name__ for one in (*linear, *perceptrons))
        raise SpecError(
            f"the estimator is a {_kind(estimator)}; a probe is made of {names}, or of a Pipeline "
            "of StandardScaler and one of these."
        )
    _check_fitted(estimator)
    if isinstance(estimator, perceptrons):
        pairs = zip(estimator.coefs_, estimator.intercepts_, strict=True)
        layers = [(_floats(weight).T, _floats(bias)) for weight, bias in pairs]
        return _perceptron(layers, estimator.activation, estimator.out_activation_)
    weight, bias = estimator.coef_, np.atleast_1d(estimator.intercept_)
    if hasattr(weight, "toarray"):  # a sparse matrix, after `sparsify`
        weight = weight.toarray()
    # In old releases of scikit-learn, multi_class can be "multinomial". With "multinomial", the
    # probability is the sigmoid of the doubled score.
    twice = getattr(estimator, "multi_class", None) == "multinomial"
    found = [(np.atleast_2d(_floats(weight)), _floats(bias))]
    return found, "relu", "sigmoid" if isinstance(estimator, logits) and not twice else None


def _perceptron(
    layers: Layers, between: str, after: str
) -> tuple[Layers, Hidden, Literal["sigmoid"] | None]:
    hidden = _HIDDEN.get(between)
    if hidden is None and len(layers) > 1:
        raise SpecError(
            f"the estimator has activation={between!r}; hidden layers of a probe have one of "
            f"{', '.join(_HIDDEN)}."
        )
    if after not in ("identity", "logistic"):
        raise SpecError(
            f"the estimator ends in {after!r}; a probe has one score, and ends in identity or "
            "logistic."
        )
    if between == "logistic":
        layers = _with_tanh(layers)
    return layers, hidden or "relu", "sigmoid" if after == "logistic" else None


def _with_tanh(layers: Layers) -> Layers:
    """Change the layers so that tanh between them gives the same scores as logistic. This is
    possible because logistic(z) = (1 + tanh(z / 2)) / 2."""
    found = []
    for i, (weight, bias) in enumerate(layers):
        if i:
            weight, bias = weight / 2, bias + weight.sum(axis=1) / 2
        if i < len(layers) - 1:
            weight, bias = weight / 2, bias / 2
        found.append((weight, bias))
    return found


def _scaled(
    weight: Floats, bias: Floats, mean: Floats | None, scale: Floats | None
) -> tuple[Floats, Floats]:
    """Fold a scaler into a layer. The new layer takes rows that are not scaled."""
    width = weight.shape[1]
    mean = np.zeros(width) if mean is None else mean
    scale = np.ones(width) if scale is None else scale
    rows = [fold(row, float(b), mean, scale) for row, b in zip(weight, bias, strict=True)]
    return np.stack([row for row, _ in rows]), np.array([b for _, b in rows])


def _check_fitted(estimator: object) -> None:
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(estimator)
    except NotFittedError:
        raise SpecError(f"the {_kind(estimator)} is not fitted; call its fit first.") from None


def _kind(estimator: object) -> str:
    # The result is the type's name, because an estimator's repr has several lines.
    return type(estimator).__name__


def _floats(value: object) -> Floats:
    return np.asarray(value, np.float64)
