"""The weights of a probe, from the layers of a linear model or of a perceptron.

Owns:  ProbeWeights; `of_layers`.
From:  estimators, probe_weights.   To: request.actions.Probe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vllm_scope.errors import SpecError
from vllm_scope.request.nets import AttentionPool, Hidden, Mlp
from vllm_scope.vectors.module import as_vector
from vllm_scope.vectors.probe_files import finite

Floats = NDArray[np.float64]
#: The pair (weight [out, in], bias [out]) of each layer.
Layers = list[tuple[Floats, Floats]]


@dataclass(frozen=True, eq=False)
class ProbeWeights:
    """The weight, the bias and the activation of a probe.

    Attributes:
        weight: a read-only float32 array [width of a row], an `Mlp` or an `AttentionPool`.
        bias: the number that is added to the score. For an `Mlp`, `bias` is 0, because the last
            layer of the `Mlp` has a bias.
        activation: "sigmoid" if the score, with the bias, is known to be the logit of a
            probability. Else None.
    """

    weight: NDArray[np.float32] | Mlp | AttentionPool
    bias: float = 0.0
    activation: Literal["sigmoid"] | None = None

    def __repr__(self) -> str:
        weight = repr(self.weight)
        if isinstance(self.weight, np.ndarray):
            weight = f"{len(self.weight)} numbers"
        return f"<ProbeWeights: {weight}, bias {self.bias:.4g}, activation {self.activation}>"


def of_layers(
    layers: Layers, hidden: Hidden, activation: Literal["sigmoid"] | None = None
) -> ProbeWeights:
    num_scores = layers[-1][0].shape[0]
    if num_scores != 1:
        raise SpecError(
            f"the last layer makes {num_scores} scores; a probe makes one. Use a probe for each."
        )
    if len(layers) > 1:
        return ProbeWeights(Mlp(layers, hidden), activation=activation)
    ((weight, bias),) = layers
    if bias.shape != (1,):
        raise SpecError(f"the bias has shape {bias.shape}; a bias must be one number.")
    return ProbeWeights(as_vector(weight[0], "weight"), finite(bias[0], "bias"), activation)
