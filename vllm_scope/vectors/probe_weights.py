"""Weights of a probe from other libraries: scikit-learn, torch, safetensors.

Owns:  `from_state_dict`, `from_safetensors`. Callers import `from_sklearn` from probe_weights too.
Runs:  anywhere, with numpy. Does not import torch. Only `from_sklearn` imports scikit-learn.
From:  layers, estimators.   To: request.actions.Probe.

Promise: no pickle is read. A probe with these weights computes the same score as the estimator or
the torch module from which the weights come. If a tensor cannot be part of a probe, an error is
raised.

    found = from_sklearn(make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, labels))
    Probe(found.weight, bias=found.bias, activation=found.activation, layer=5, name="mood")
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vllm_scope.errors import SpecError, checked_word, naming, shown
from vllm_scope.request.actions.base import number
from vllm_scope.request.arrays import Array
from vllm_scope.request.nets import AttentionPool, Hidden
from vllm_scope.vectors.containers import read_bytes, read_safetensors
from vllm_scope.vectors.estimators import from_sklearn as from_sklearn
from vllm_scope.vectors.layers import Floats, Layers, ProbeWeights, of_layers
from vllm_scope.vectors.module import as_vector
from vllm_scope.vectors.probe_files import finite, fold_tensors, probe_path

Kind = Literal["linear", "mlp", "attention"]
KINDS = ("linear", "mlp", "attention")
#: The possible names of the query and the value of an attention probe. The first pair is tried
#: first.
QUERY_AND_VALUE = (("query", "value"), ("q", "v"))
#: Names of the tensors of a scaler before a linear probe.
SCALER = ("mean", "scale")


def from_state_dict(
    state: Mapping[str, object],
    kind: Kind = "linear",
    *,
    hidden: Hidden = "relu",
    names: Sequence[str] | None = None,
) -> ProbeWeights:
    """The weights of a torch module. `activation` is None, because the tensors do not show an
    activation.

    Args:
        state: a module's `state_dict()`, or arrays with the same names. The tensors can have any
            float dtype and device.
        kind: the kind of probe. For "linear", the state has one torch.nn.Linear with one output. It
            can also have `mean` and `scale` of a scaler that comes before the layer. For "mlp", the
            state has the two or three torch.nn.Linear layers of a torch.nn.Sequential. For
            "attention", the state has a query and a value. It can also have `bias`, which is added
            to the score. The query and the value are each a torch.nn.Linear or a parameter,
            [num_heads, width] or [width]. A bias of the query has no effect. If the module scales
            its logits, the caller must multiply the query by the scale.
        hidden: the function between the layers, if `kind` is "mlp".
        names: the names of the layers in order, or the names of the query and the value. `names`
            can be None in three cases: there is only one layer; the layers' names differ only in a
            number, such as `net.0` and `net.2`; or the names are `query` and `value`, or `q` and
            `v`.

    Raises:
        SpecError: a tensor is missing or has a wrong shape, or the state has a tensor that `kind`
            does not use.
    """
    checked_word(kind, KINDS, "kind")
    if not isinstance(state, Mapping):
        raise SpecError(f"state is {shown(state)}; it must be a module's state_dict().")
    found = list(_names_of(state, kind) if names is None else names)
    allowed = {"linear": (1,), "mlp": (2, 3), "attention": (2,)}[kind]
    if len(found) not in allowed:
        raise SpecError(
            f"the layers are {shown(found)}; kind={kind!r} has {' or '.join(map(str, allowed))} "
            f"layers. The state has {_listed(state)}."
        )
    rest = dict(state)
    layers = [_taken(rest, name) for name in found]
    if kind == "attention":
        made = _pool(layers, _numbers(rest.pop("bias"), "bias") if "bias" in rest else np.zeros(1))
    elif kind == "mlp":
        made = of_layers(layers, hidden)
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
    """Read the weights from a .safetensors file with the tensors that `from_state_dict` takes.

    Args:
        path: the file, of at most `containers.MAX_BYTES` bytes.
        kind, hidden, names: the arguments of `from_state_dict`.

    Raises:
        SpecError: the file is too large or malformed, or `from_state_dict` refuses the tensors.
        OSError: the file cannot be read.
    """
    path = probe_path(path)
    tensors, _ = read_safetensors(read_bytes(path))
    with naming(str(path)):
        return from_state_dict(tensors, kind, hidden=hidden, names=names)


def _names_of(state: Mapping[str, object], kind: str) -> Sequence[str]:
    """The names of the layers in order, or the names of the query and the value."""
    if kind == "attention":
        for pair in QUERY_AND_VALUE:
            if all(name in state or f"{name}.weight" in state for name in pair):
                return pair
        raise SpecError(
            f"the state has {_listed(state)}; name the query and the value with "
            "names=(query, value), unless their names are query and value, or q and v."
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


def _taken(rest: dict[str, object], name: str) -> tuple[Floats, Floats]:
    """Remove the weight and the bias of a layer from `rest`, and return them. If the layer has no
    bias, the returned bias is zero."""
    prefix = f"{name}." if name else ""
    key = name if name in rest else f"{prefix}weight"
    if key not in rest:
        raise SpecError(f"the state has no {shown(key)}; it has {_listed(rest)}.")
    weight = _numbers(rest.pop(key), key)
    key = f"{prefix}bias"
    if key in rest:
        return weight, _numbers(rest.pop(key), key)
    return weight, np.zeros(np.atleast_2d(weight).shape[0])


def _numbers(value: object, name: str) -> Floats:
    """The numbers of a tensor as float64. A scalar becomes an array [1]. Raises SpecError if a
    number is not finite in float32."""
    if getattr(value, "shape", None) == ():
        return np.array([number(value, name)])
    return Array.parse(value, name).numpy.astype(np.float64)


def _linear(layer: tuple[Floats, Floats], scaler: dict[str, object]) -> ProbeWeights:
    found = of_layers([(np.atleast_2d(layer[0]), layer[1])], "relu")
    if not scaler:
        return found
    if set(scaler) != set(SCALER):
        raise SpecError(f"the state has {_listed(scaler)}; a scaler has mean and scale.")
    assert isinstance(found.weight, np.ndarray)
    weight, bias = fold_tensors(found.weight, found.bias, scaler)
    return ProbeWeights(as_vector(weight, "weight"), bias)


def _pool(layers: Layers, bias: Floats) -> ProbeWeights:
    # A bias of the query has no effect. It adds the same number to the logits of all positions,
    # which does not change their softmax. The bias of the value is added to the score, because the
    # weights of the softmax sum to 1.
    (query, _), (value, of_value) = layers
    if bias.size != 1 or of_value.shape != np.atleast_2d(value).shape[:1]:
        raise SpecError(
            f"the bias has shape {bias.shape} and the bias of the value has shape "
            f"{of_value.shape}; the bias must be one number, the bias of the value one number for "
            "each head."
        )
    return ProbeWeights(AttentionPool(query, value), finite(of_value.sum() + bias.sum(), "bias"))


def _listed(state: Mapping[str, object]) -> str:
    return shown(sorted(map(str, state)))
