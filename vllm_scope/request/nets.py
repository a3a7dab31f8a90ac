"""The functions that a probe computes from one row, and the aggregates of scores over a request.

Owns:  Mlp and AttentionPool (weights that a caller gives), Net (a weight of any kind, as layers),
       Ema and RollingMean (aggregates), and the JSON of these classes.
Runs:  in every process, with numpy and without torch.
To:    actions.probing, resolve, worker.probe_bank (computes nets), batch.readout (aggregates).

A net makes one or more numbers from a row x (`.` is the dot product):

    linear           x . weight                              1 number
    Mlp              W2 f(W1 x + b1) + b2, or three layers   1 number
    AttentionPool    query_h . x and value_h . x             2 numbers for each head h

A probe of several layers of the model has one net for each layer. All nets of a probe make the same
count of numbers. The first numbers of all nets are added, then the second numbers, and so on. The
score is computed from these sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from vllm_scope.errors import SpecError, checked_count, checked_word, naming, shown
from vllm_scope.request.arrays import Array
from vllm_scope.request.selectors import as_numbers

#: The function between the layers of an Mlp.
Hidden = Literal["relu", "gelu", "silu", "tanh"]
HIDDEN: tuple[str, ...] = get_args(Hidden)
MAX_HIDDEN_LAYERS = 2
#: The longest window of a RollingMean.
MAX_WINDOW = 1 << 16


@dataclass(frozen=True)
class Net:
    """The computation that a probe makes on one row.

    Attributes:
        layers: (weight [out, in], bias [out] or None) of each layer of the net. The input of the
            first layer is the row.
        hidden: the name of the function between the layers. None if there is only one layer.
    """

    layers: tuple[tuple[Array, Array | None], ...]
    hidden: str | None = None

    @property
    def width(self) -> int:
        """The number of elements of a row."""
        return self.layers[0][0].shape[1]

    @property
    def num_values(self) -> int:
        return self.layers[-1][0].shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(len(part.data) for layer in self.layers for part in layer if part is not None)

    @cached_property
    def digest(self) -> bytes:
        found = hashlib.blake2b(repr(self.hidden).encode(), digest_size=16)
        for weight, bias in self.layers:
            found.update(weight.digest + (b"-" if bias is None else bias.digest))
        return found.digest()


@dataclass(frozen=True)
class Mlp:
    """A probe's weight that is a perceptron with one or two hidden layers.

    Args:
        layers: (weight [out, in], bias [out]) of each layer, in the form of torch.nn.Linear. The
            first layer's input is a row. The last layer's output is one number.
        hidden: the function between the layers: relu, gelu (exact), silu or tanh.

    Raises:
        SpecError: a wrong type, a number that is not finite, an unknown function, shapes that do
            not fit together, or a number of layers other than two or three.
    """

    layers: Any
    hidden: Hidden = "relu"

    def __post_init__(self) -> None:
        where = "Mlp.layers"
        if not isinstance(self.layers, list | tuple):
            raise SpecError(
                f"{where} is {shown(self.layers)}; it must be a list of (weight, bias)."
            )
        if not 2 <= len(self.layers) <= MAX_HIDDEN_LAYERS + 1:
            raise SpecError(
                f"{where} has {len(self.layers)} items; it must have 2 or "
                f"{MAX_HIDDEN_LAYERS + 1}, for one or two hidden layers. A linear probe takes a "
                "plain weight."
            )
        found: list[tuple[Array, Array]] = []
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, list | tuple) or len(layer) != 2:
                raise SpecError(f"{where}[{i}] is {shown(layer)}; it must be (weight, bias).")
            weight = Array.parse(layer[0], f"{where}[{i}] weight")
            bias = Array.parse(layer[1], f"{where}[{i}] bias")
            takes = found[-1][0].shape[0] if found else None
            if len(weight.shape) != 2 or (takes is not None and weight.shape[1] != takes):
                raise SpecError(
                    f"{where}[{i}] has a weight of shape {weight.shape}; it must be "
                    f"[out, {'width of a row' if takes is None else takes}]."
                )
            if bias.shape != weight.shape[:1]:
                raise SpecError(
                    f"{where}[{i}] has a bias of shape {bias.shape} and a weight of shape "
                    f"{weight.shape}; the bias must be [{weight.shape[0]}]."
                )
            found.append((weight, bias))
        if found[-1][0].shape[0] != 1:
            raise SpecError(
                f"{where}[{len(found) - 1}] makes {found[-1][0].shape[0]} numbers; the last layer "
                "must make one, the score."
            )
        checked_word(self.hidden, HIDDEN, "Mlp.hidden")
        object.__setattr__(self, "layers", tuple(found))

    @property
    def net(self) -> Net:
        return Net(self.layers, self.hidden)

    def to_json(self) -> dict[str, object]:
        layers = [[weight.to_json(), bias.to_json()] for weight, bias in self.layers]
        return {"mlp": layers, "hidden": self.hidden}


@dataclass(frozen=True)
class AttentionPool:
    """A probe's weight that attends over the positions of a request.

    For each head, the probe computes a weighted average of `x . value` over the positions that the
    probe has scored, up to the current position. The weights of the average are the softmax of
    `x . query` over the same positions. The score is the sum of the averages of all heads.

    Args:
        query, value: arrays [num_heads, width of a row], or [width of a row] for one head. A scale
            such as `1 / sqrt(width)` must be multiplied into the query.

    Raises:
        SpecError: the two shapes differ, or a shape has more than two dimensions.
    """

    query: Any
    value: Any

    def __post_init__(self) -> None:
        for name in ("query", "value"):
            found = Array.parse(getattr(self, name), f"AttentionPool.{name}")
            if len(found.shape) == 1:
                found = Array((1, *found.shape), found.data)
            object.__setattr__(self, name, found)
        if len(self.query.shape) != 2 or self.query.shape != self.value.shape:
            raise SpecError(
                f"AttentionPool has a query of shape {self.query.shape} and a value of shape "
                f"{self.value.shape}; both must be [num_heads, width of a row]."
            )

    @property
    def net(self) -> Net:
        num_heads, width = self.query.shape
        both = Array((2 * num_heads, width), self.query.data + self.value.data)
        return Net(((both, None),))

    def to_json(self) -> dict[str, object]:
        return {"attention": {"query": self.query.to_json(), "value": self.value.to_json()}}


def net_of(weight: Array | Mlp | AttentionPool) -> Net:
    """The computation of a probe's weight at one layer. An Array must have the shape
    [width of a row]."""
    if isinstance(weight, Array):
        return Net(((Array((1, *weight.shape), weight.data), None),))
    return weight.net


def shaped_weight(value: object, where: str) -> Mlp | AttentionPool | None:
    """Convert `value` or its JSON to an Mlp or AttentionPool. Returns None for any other value.

    Raises:
        SpecError: the JSON of an Mlp or an AttentionPool is malformed.
    """
    if isinstance(value, Mlp | AttentionPool):
        return value
    if not isinstance(value, Mapping) or not {"mlp", "attention"} & set(value):
        return None
    with naming(where):
        if set(value) <= {"mlp", "hidden"}:
            return Mlp(value["mlp"], value.get("hidden", "relu"))
        pool = value.get("attention") if set(value) == {"attention"} else None
        if isinstance(pool, Mapping) and set(pool) == {"query", "value"}:
            return AttentionPool(pool["query"], pool["value"])
    raise SpecError(
        f"{where} is {shown(value)}; it must be {{mlp: [[weight, bias], ...], hidden}} or "
        "{attention: {query, value}}."
    )


# Aggregates


@dataclass(frozen=True)
class Ema:
    """The exponential moving average of the scores: `a = decay * a + (1 - decay) * score`.

    The average begins with the first score.

    Args:
        decay: a number from 0 to below 1.
    """

    decay: float

    def __post_init__(self) -> None:
        decay = as_numbers(self.decay)
        sane = isinstance(decay, int | float) and not isinstance(decay, bool)
        if not sane or not 0 <= decay < 1:
            raise SpecError(
                f"Ema.decay is {shown(self.decay)}; it must be a number from 0 to below 1."
            )
        object.__setattr__(self, "decay", float(decay))

    def to_json(self) -> dict[str, object]:
        return {"ema": self.decay}


@dataclass(frozen=True)
class RollingMean:
    """The mean of the last `window` scores. With fewer scores, the mean of all scores.

    Args:
        window: the number of scores, 1 or more.
        then: with "max", the aggregate is the largest mean of any full window so far. Before the
            first full window, the aggregate is the mean of all scores.
    """

    window: int
    then: Literal["max"] | None = None

    def __post_init__(self) -> None:
        window = checked_count(as_numbers(self.window), MAX_WINDOW, "RollingMean.window")
        object.__setattr__(self, "window", window)
        if self.then not in (None, "max"):
            raise SpecError(f"RollingMean.then is {shown(self.then)}; it must be None or 'max'.")

    def to_json(self) -> dict[str, object]:
        return {"rolling_mean": self.window} | ({"then": self.then} if self.then else {})


AGGREGATES = ("max", "mean")
Aggregate = Literal["max", "mean"] | Ema | RollingMean


def parse_aggregate(value: object, where: str) -> Aggregate | None:
    """Convert `value` or its JSON to an aggregate. None gives None.

    Raises:
        SpecError: `value` is not an aggregate and not the JSON of an aggregate.
    """
    if isinstance(value, str | None | Ema | RollingMean):  # `match` would fail for an array
        match value:
            case None | Ema() | RollingMean() | "max" | "mean":
                return value
    if isinstance(value, Mapping):
        with naming(where):
            if set(value) == {"ema"}:
                return Ema(value["ema"])
            if "rolling_mean" in value and set(value) <= {"rolling_mean", "then"}:
                return RollingMean(value["rolling_mean"], value.get("then"))
    raise SpecError(
        f"{where} is {shown(value)}; it must be 'max', 'mean', Ema(decay) or RollingMean(window), "
        "in JSON {ema: decay} or {rolling_mean: window, then: 'max'}."
    )
