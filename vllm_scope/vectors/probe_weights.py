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
#: Tensors of a scaler that comes before a linear probe.
SCALER = ("mean", "scale")
#: Hidden layers of scikit-learn -> those of an Mlp.
_HIDDEN: dict[str, Hidden] = {"relu": "relu", "tanh": "tanh", "logistic": "tanh"}

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
    *before, last = _steps(estimator) or [estimator]
    layers, hidden, activation = _read(last)
    for scaler in reversed(before):
        if not isinstance(scaler, sklearn.preprocessing.StandardScaler):
            raise SpecError(
                f"the pipeline has a {_kind(scaler)} before its last step; only a StandardScaler "
                "becomes a part of a probe."
            )
        _check_fitted(scaler)
        # A scaler that does not subtract its mean may still have one.
        mean = scaler.mean_ if scaler.with_mean else None
        layers[0] = _scaled(*layers[0], mean, scaler.scale_ if scaler.with_std else None)
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
        raise SpecError(f"state is {shown(state)}; it is a module's state_dict().")
    found = list(_names_of(state, kind) if names is None else names)
    allowed = {"linear": (1,), "mlp": (2, 3), "attention": (2,)}[kind]
    if len(found) not in allowed:
        raise SpecError(
            f"the layers are {shown(found)}; kind={kind!r} has {' or '.join(map(str, allowed))} of "
            f"them. The state has {_listed(state)}."
        )
    rest = dict(state)
    layers = [_taken(rest, name) for name in found]
    if kind == "attention":
        made = _pool(layers, _numbers(rest.pop("bias"), "bias") if "bias" in rest else np.zeros(1))
    elif kind == "mlp":
        made = _made(layers, hidden)
    else:
        made = _linear(layers[0], {name: rest.pop(name) for name in SCALER if name in rest})
    if rest:
        raise SpecError(
            f"the state has {_listed(rest)}, which kind={kind!r} does not use; leave out what the "
            "score does not need."
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


def _made(
    layers: _Layers, hidden: Hidden, activation: Literal["sigmoid"] | None = None
) -> ProbeWeights:
    num_scores = layers[-1][0].shape[0]
    if num_scores != 1:
        raise SpecError(
            f"the last layer makes {num_scores} scores; a probe makes one. Make a probe of each."
        )
    if len(layers) > 1:
        return ProbeWeights(Mlp(layers, hidden), activation=activation)
    ((weight, bias),) = layers
    if bias.shape != (1,):
        raise SpecError(f"the bias has shape {bias.shape} beside one score; it is one number.")
    return ProbeWeights(as_vector(weight[0], "weight"), finite(bias[0], "bias"), activation)


# scikit-learn


def _steps(estimator: object) -> list[object]:
    """The steps of a pipeline, and of pipelines in it; or the estimator alone."""
    from sklearn.pipeline import Pipeline

    if not isinstance(estimator, Pipeline):
        return [estimator]
    steps = [step for _, step in estimator.steps if step not in (None, "passthrough")]
    return [one for step in steps for one in _steps(step)]


def _read(estimator: object) -> tuple[_Layers, Hidden, Literal["sigmoid"] | None]:
    """The layers of an estimator, the function between them, and that of the score."""
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
    if hasattr(weight, "toarray"):  # after `sparsify`
        weight = weight.toarray()
    # An option of old releases. The probability is then the sigmoid of twice the score.
    twice = getattr(estimator, "multi_class", None) == "multinomial"
    found = [(np.atleast_2d(_floats(weight)), _floats(bias))]
    return found, "relu", "sigmoid" if isinstance(estimator, logits) and not twice else None


def _perceptron(
    layers: _Layers, between: str, after: str
) -> tuple[_Layers, Hidden, Literal["sigmoid"] | None]:
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


def _with_tanh(layers: _Layers) -> _Layers:
    """The same layers for tanh between them instead of logistic(z) = (1 + tanh(z / 2)) / 2."""
    found = []
    for i, (weight, bias) in enumerate(layers):
        if i:
            weight, bias = weight / 2, bias + weight.sum(axis=1) / 2
        if i < len(layers) - 1:
            weight, bias = weight / 2, bias / 2
        found.append((weight, bias))
    return found


def _scaled(
    weight: _Floats, bias: _Floats, mean: _Floats | None, scale: _Floats | None
) -> tuple[_Floats, _Floats]:
    """The layer that takes rows before a scaler."""
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
    # Not its repr, which has several lines.
    return type(estimator).__name__


def _floats(value: object) -> _Floats:
    return np.asarray(value, np.float64)


# Tensors by name


def _names_of(state: Mapping[str, object], kind: str) -> Sequence[str]:
    """The layers, in their order; or the query and the value."""
    if kind == "attention":
        for pair in QUERY_AND_VALUE:
            if all(name in state or f"{name}.weight" in state for name in pair):
                return pair
        raise SpecError(
            f"the state has {_listed(state)}; call the query and the value with "
            "names=(query, value), unless they are query and value, or q and v."
        )
    found = [
        key.removesuffix("weight").removesuffix(".")
        for key in state
        if key == "weight" or key.endswith(".weight")
    ]
    if kind == "mlp" and len({re.sub(r"\d+", "#", name) for name in found}) > 1:
        raise SpecError(
            f"the layers are {shown(found)}; give their order with names=[...], unless their names "
            "differ only in a number."
        )
    return sorted(found, key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])


def _taken(rest: dict[str, object], name: str) -> tuple[_Floats, _Floats]:
    """The weight and the bias of a layer, which go out of `rest`. No bias is a bias of zeros."""
    prefix = f"{name}." if name else ""
    key = name if name in rest else f"{prefix}weight"
    if key not in rest:
        raise SpecError(f"the state has no {shown(key)}; it has {_listed(rest)}.")
    weight = _numbers(rest.pop(key), key)
    key = f"{prefix}bias"
    if key in rest:
        return weight, _numbers(rest.pop(key), key)
    return weight, np.zeros(np.atleast_2d(weight).shape[0])


def _numbers(value: object, name: str) -> _Floats:
    """The tensor; [1] if it is one number. Raises SpecError unless it is finite in float32."""
    if getattr(value, "shape", None) == ():
        return np.array([number(value, name)])
    return Array.parse(value, name).numpy.astype(np.float64)


def _linear(layer: tuple[_Floats, _Floats], scaler: dict[str, object]) -> ProbeWeights:
    found = _made([(np.atleast_2d(layer[0]), layer[1])], "relu")
    if not scaler:
        return found
    if set(scaler) != set(SCALER):
        raise SpecError(f"the state has {_listed(scaler)}; a scaler has mean and scale.")
    assert isinstance(found.weight, np.ndarray)
    weight, bias = fold_tensors(found.weight, found.bias, scaler)
    return ProbeWeights(as_vector(weight, "weight"), bias)


def _pool(layers: _Layers, bias: _Floats) -> ProbeWeights:
    # A bias of the query is the same at all positions, which leaves the softmax as it is. The
    # weights of each average are 1 together, so that it has the bias of its value.
    (query, _), (value, of_value) = layers
    if bias.size != 1 or of_value.shape != np.atleast_2d(value).shape[:1]:
        raise SpecError(
            f"the bias has shape {bias.shape} and that of the value {of_value.shape}; they are one "
            "number, and one for each head."
        )
    return ProbeWeights(AttentionPool(query, value), finite(of_value.sum() + bias.sum(), "bias"))


def _listed(state: Mapping[str, object]) -> str:
    return shown(sorted(map(str, state)))
