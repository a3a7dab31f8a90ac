"""Weights of a probe from other libraries: scikit-learn, torch, safetensors.

Owns:  ProbeWeights; from_sklearn, from_state_dict, from_safetensors.
Runs:  anywhere. numpy; torch is not imported, and scikit-learn only by from_sklearn.
To:    `weight`, `bias` and `activation` of request.actions.Probe.

Promise: nothing is unpickled. A probe with these weights makes the score that the estimator or the
module makes of the same row. What cannot be a probe is refused: no tensor is left out.

    found = from_sklearn(make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, labels))
    Probe(found.weight, bias=found.bias, activation=found.activation, layer=5, name="mood")
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import number
from vllm_scope.request.arrays import Array
from vllm_scope.request.nets import AttentionPool, Hidden, Mlp
from vllm_scope.vectors.containers import read_bytes, read_safetensors
from vllm_scope.vectors.module import as_vector
from vllm_scope.vectors.probe_files import finite, fold, fold_tensors, probe_path

Kind = Literal["linear", "mlp", "attention"]
KINDS = ("linear", "mlp", "attention")
#: Usual names of an attention probe's query and value.
QUERY_AND_VALUE = (("query", "value"), ("q", "v"))

_Floats = NDArray[np.float64]
#: (weight [out, in], bias [out]) of each layer.
_Layers = list[tuple[_Floats, _Floats]]


@dataclass(frozen=True, eq=False)
class ProbeWeights:
    """What a Probe takes.

    Attributes:
        weight: float32 [width of a row], read-only; or an Mlp, or an AttentionPool.
        bias: added to the score. That of an Mlp is in its last layer.
        activation: "sigmoid" if the score with its bias is the logit of a probability.
    """

    weight: NDArray[np.float32] | Mlp | AttentionPool
    bias: float = 0.0
    activation: Literal["sigmoid"] | None = None


def from_sklearn(estimator: object) -> ProbeWeights:
    """The weights of a fitted estimator of scikit-learn.

    The score is that of `decision_function` (of class `classes_[1]`), or of `predict` if the
    estimator is a regressor. With its activation the score is that class's `predict_proba`.

    Args:
        estimator: LogisticRegression, LinearDiscriminantAnalysis (activation "sigmoid"), LinearSVC,
            RidgeClassifier, Ridge, LinearRegression (none), the `CV` variants of these, or
            MLPClassifier ("sigmoid"), MLPRegressor (none) with at most two hidden layers of relu,
            tanh or logistic; or a Pipeline of StandardScaler and one of these.

    Raises:
        SpecError: another estimator, one that is not fitted, or one with several outputs.
        ImportError: scikit-learn is not installed.
    """
    try:
        import sklearn.preprocessing
    except ImportError:
        raise ImportError(
            "an estimator needs scikit-learn: pip install 'vllm-scope[probes]'."
        ) from None
    *before, last = _steps(estimator)
    layers, hidden, activation = _layers_of(last)
    for scaler in reversed(before):
        if not isinstance(scaler, sklearn.preprocessing.StandardScaler):
            raise SpecError(
                f"the pipeline has {shown(scaler)} before its last step; only a StandardScaler "
                "becomes a part of a probe."
            )
        _check_fitted(scaler)
        layers[0] = _scaled(*layers[0], scaler)
    return _made(layers, hidden, activation)


def from_state_dict(
    state: Mapping[str, object],
    kind: Kind = "linear",
    *,
    hidden: Hidden = "relu",
    names: Sequence[str] | None = None,
) -> ProbeWeights:
    """The weights of a torch module, without an activation: the tensors do not say one.

    Args:
        state: a module's `state_dict()`, or arrays by the same names. Any float dtype and device.
        kind: "linear": one torch.nn.Linear with one output; `mean` and `scale`, if they are there,
            are of a scaler that comes first.
            "mlp": the torch.nn.Linear of a torch.nn.Sequential.
            "attention": query and value, each a torch.nn.Linear or a parameter, [num_heads, width]
            or [width]; `bias`, if it is there, is added to the score. A bias of the query changes
            nothing. A scale of the logits is not known here: multiply the query with it.
        hidden: the function between the layers of an mlp.
        names: of the layers in their order; of the query and the value. None: there is one layer;
            or they have numbers, such as `net.0` and `net.2`; or they are `query` and `value`, or
            `q` and `v`.

    Raises:
        SpecError: a tensor is missing or of a wrong shape, or the state has other tensors too.
    """
    if kind not in KINDS:
        raise SpecError(f"kind is {shown(kind)}; it is one of {', '.join(KINDS)}.")
    if not isinstance(state, Mapping):
        raise SpecError(f"state is {shown(state)}; it is a module's state_dict(), names to tensors.")
    found = list(_names_of(state, kind) if names is None else names)
    least, most = {"linear": (1, 1), "mlp": (2, 3), "attention": (2, 2)}[kind]
    if not least <= len(found) <= most:
        raise SpecError(
            f"the layers are {shown(found)}; kind={kind!r} takes {least}"
            f"{'' if least == most else f' to {most}'}: "
            f"{'query and value' if kind == 'attention' else 'the first one at the row'}."
        )
    rest = dict(state)
    layers = [_taken(rest, name) for name in found]
    made = _pooled(layers, rest) if kind == "attention" else _stacked(layers, rest, kind, hidden)
    if rest:
        raise SpecError(
            f"the state has {shown(sorted(rest))} besides {shown(found)}; kind={kind!r} does not "
            "use these: leave them out if the score does not need them."
        )
    return made


def from_safetensors(
    path: str | Path,
    kind: Kind = "linear",
    *,
    hidden: Hidden = "relu",
    names: Sequence[str] | None = None,
) -> ProbeWeights:
    """The weights in a .safetensors file that has the tensors of `from_state_dict`.

    Args:
        path: of at most `containers.MAX_BYTES`.
        kind, hidden, names: as for `from_state_dict`.

    Raises:
        SpecError: as `from_state_dict`; or the file is too large, or malformed.
        OSError: it cannot be read.
    """
    path = probe_path(path)
    tensors, _ = read_safetensors(read_bytes(path))
    try:
        return from_state_dict(tensors, kind, hidden=hidden, names=names)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


# scikit-learn


def _steps(estimator: object) -> list[object]:
    """The steps of a pipeline, and of pipelines in it; or the estimator alone."""
    from sklearn.pipeline import Pipeline

    if not isinstance(estimator, Pipeline):
        return [estimator]
    steps = [step for _, step in estimator.steps if step not in (None, "passthrough")]
    return [one for step in steps for one in _steps(step)]


def _layers_of(
    estimator: object,
) -> tuple[_Layers, str | None, Literal["sigmoid"] | None]:
    """The layers of an estimator, the function between them, and that of the score."""
    from sklearn import discriminant_analysis, linear_model, neural_network, svm

    if isinstance(estimator, neural_network.MLPClassifier | neural_network.MLPRegressor):
        _check_fitted(estimator)
        layers = [
            (np.asarray(weight, np.float64).T, np.asarray(bias, np.float64))
            for weight, bias in zip(estimator.coefs_, estimator.intercepts_, strict=True)
        ]
        return _perceptron(estimator, layers)
    logits = linear_model.LogisticRegression, discriminant_analysis.LinearDiscriminantAnalysis
    plain = (
        svm.LinearSVC, linear_model.LinearRegression, linear_model.Ridge, linear_model.RidgeCV,
        linear_model.RidgeClassifier, linear_model.RidgeClassifierCV,
    )  # fmt: skip
    # In old releases, the probability of a binary multinomial is the sigmoid of twice the score.
    strange = getattr(estimator, "multi_class", None) == "multinomial"
    if not isinstance(estimator, (*logits, *plain)) or strange:
        names = ", ".join(one.__name__ for one in (*logits, *plain))
        raise SpecError(
            f"the estimator is {shown(estimator)}; a probe is made of {names}, MLPClassifier, "
            "MLPRegressor, or a Pipeline of StandardScaler and one of these."
        )
    _check_fitted(estimator)
    weight, bias = estimator.coef_, np.atleast_1d(estimator.intercept_)
    if hasattr(weight, "toarray"):  # of `sparsify`
        weight = weight.toarray()
    found = np.atleast_2d(np.asarray(weight, np.float64)), np.asarray(bias, np.float64)
    return [found], None, "sigmoid" if isinstance(estimator, logits) else None


def _perceptron(estimator, layers):
    ...


def _check_fitted(estimator: object) -> None:
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(estimator)
    except NotFittedError:
        raise SpecError(f"{shown(estimator)} is not fitted; call its fit first.") from None
