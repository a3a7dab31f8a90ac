"""The action that scores rows on the device.

Owns:  Probe.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import (
    MEMORY,
    Action,
    Module,
    checked_name,
    number,
    vector_or_module,
)
from vllm_scope.request.arrays import Array
from vllm_scope.request.nets import AttentionPool, Mlp, parse_aggregate, shaped_weight
from vllm_scope.request.selectors import Word

ACTIVATIONS = (None, "sigmoid")
#: The names of an operator's monitors begin with this text (engine.monitors).
MONITOR = "monitor/"
PROBE_ACTIONS = ("flag", "stop")


def is_monitor(name: str) -> bool:
    """True if the probe with this name is an operator's monitor, and not a probe of the caller."""
    return name.startswith(MONITOR)


@dataclass(frozen=True)
class Probe(Action):
    """Compute a score from each token's row on the device: `x . weight + bias`, in float32.

    Args:
        weight: an array [width of a row] for one layer, or an array [num_layers, width of a row]
            for several layers. The numbers of all layers are added. The weight can also be an `Mlp`
            or an `AttentionPool`, or a list with one of them for each layer. The weight can also be
            the name of a steering module of the engine that has a vector at this site for each
            layer.
        bias: a number that is added to each score.
        site: any tapped site. A row of `q`, `k`, `v` or `z` contains all heads, one after another.
        layer, layers: two names of one argument, which is the number of a layer, or a list of
            numbers.
        name: the name of the scores in the result.
        tokens: a selector of the tokens.
        to: the destination of the scores, as for `Read`. Not all sinks accept scores. The sink
            "filesystem" does not accept scores. A sink other than memory accepts only scores of one
            layer, without an AttentionPool, an aggregate, a threshold or `after`.
        activation: None, or "sigmoid". The sigmoid is applied after the bias is added.
        aggregate: a rule that computes, at each position, a second value from all scores up to this
            position: "max", "mean", `Ema(decay)` or `RollingMean(window, then="max")`. With None,
            there is no second value.
        threshold: the probe gives a verdict at the first position at which the aggregate is above
            this number. Without an aggregate, the score is compared. Without a threshold, there is
            no verdict.
        action: with "flag", the result has the verdict. With "stop", the verdict also ends the
            request, after the next token. "stop" needs a threshold, and `tokens` must be "all",
            "prompt" or "generated".
        after: None, or the name of another probe of the request. This probe then scores only
            generated tokens, and only after the verdict of the other probe (a cascade).

    Raises:
        SpecError: a wrong type or shape, no name, no layer, a number of weights that differs from
            the number of layers, or the action "stop" without a threshold.
    """

    kind: ClassVar[str] = "probe"
    fields: ClassVar[tuple[str, ...]] = (
        "weight", "bias", "name", "to", "activation", "aggregate", "threshold", "action",
        "after",
    )  # fmt: skip

    weight: Any
    _: KW_ONLY
    bias: float = 0.0
    name: str = ""
    to: str = MEMORY
    activation: Literal["sigmoid"] | None = None
    aggregate: Any = None
    threshold: float | None = None
    action: Literal["flag", "stop"] = "flag"
    after: str | None = None

    def __post_init__(self) -> None:
        checked_name(self.to, "Probe.to")
        self._set(weight=_parsed(self.weight, "Probe.weight"))
        self._set(bias=number(self.bias, "Probe.bias"))
        checked_name(self.name, "Probe.name")
        given = self._given_layers()
        self._place()
        if self.layer_numbers is None:
            raise SpecError(f"Probe.layers is {shown(given)}; name one layer, or a list of them.")
        if not isinstance(self.activation, str | None) or self.activation not in ACTIVATIONS:
            raise SpecError(
                f"Probe.activation is {shown(self.activation)}; it must be 'sigmoid' or None."
            )
        self._set(aggregate=parse_aggregate(self.aggregate, "Probe.aggregate"))
        self._check_weights(len(self.layer_numbers))
        self._check_verdict()
        self._check_stage()
        alone = self.aggregate is None and not self.pools and len(self.layer_numbers) == 1
        if self.to != MEMORY and not alone:
            raise SpecError(
                f"Probe.to is {shown(self.to)}; a sink takes scores of one layer, without an "
                "AttentionPool or an aggregate. Send the scores to memory."
            )

    def _check_verdict(self) -> None:
        if self.action not in PROBE_ACTIONS:
            raise SpecError(f"Probe.action is {shown(self.action)}; it must be 'flag' or 'stop'.")
        if self.threshold is None:
            if self.action != "flag":
                raise SpecError(f"Probe.action is {self.action!r}; give a threshold with it.")
            return
        self._set(threshold=number(self.threshold, "Probe.threshold"))
        if self.to != MEMORY:
            raise SpecError(
                f"Probe.threshold is {self.threshold}, and the scores go to {shown(self.to)}; "
                "a threshold needs scores that go to memory."
            )
        if self.action == "stop" and not self.tokens.uniform:
            raise SpecError(
                f"Probe.tokens is {shown(self.tokens.to_json())}; a probe that stops its request "
                "takes 'all', 'prompt' or 'generated'."
            )

    def _check_stage(self) -> None:
        if self.after is None:
            return
        checked_name(self.after, "Probe.after")
        if self.tokens not in (Word("all"), Word("generated")):
            raise SpecError(
                f"Probe.tokens is {shown(self.tokens.to_json())}, and the probe scores after "
                f"{shown(self.after)}, generated tokens only; take 'all' or 'generated'."
            )
        if self.to != MEMORY:
            raise SpecError(
                f"Probe.to is {shown(self.to)}; scores of a probe with 'after' go to memory."
            )

    def _check_weights(self, num_layers: int) -> None:
        weight = self.weight
        if isinstance(weight, Module):
            return
        found = len(weight) if isinstance(weight, tuple) else _num_weights(weight)
        if found != num_layers:
            raise SpecError(
                f"Probe.weight has {found} weights for {num_layers} layers; give one weight for "
                "each layer."
            )

    @property
    def pools(self) -> bool:
        """True if the weight is an AttentionPool, whose scores also depend on earlier positions."""
        return isinstance(self.weight, tuple) and isinstance(self.weight[0], AttentionPool)

    def weights(self) -> list[Array | Mlp | AttentionPool]:
        """The weights, one for each layer. The weight of the probe must not be a Module."""
        if isinstance(self.weight, tuple):
            return list(self.weight)
        assert isinstance(self.weight, Array)
        return [Array((row.size,), row.tobytes()) for row in self.weight.numpy.reshape(
            -1, self.weight.shape[-1]
        )]  # fmt: skip

    def to_json(self) -> dict[str, object]:
        body = super().to_json()
        if isinstance(self.weight, tuple):
            some = [each.to_json() for each in self.weight]
            body["weight"] = some[0] if len(some) == 1 else some
        if self.action == "flag":
            del body["action"]
        if self.aggregate is not None and not isinstance(self.aggregate, str):
            body["aggregate"] = self.aggregate.to_json()
        return body


def _num_weights(weight: Array) -> int:
    return 1 if len(weight.shape) == 1 else weight.shape[0]


def _parsed(value: object, where: str) -> Array | Module | tuple[Mlp | AttentionPool, ...]:
    one = shaped_weight(value, where)
    if one is not None:
        return (one,)
    if isinstance(value, list | tuple) and len(value) and shaped_weight(value[0], where):
        found = [shaped_weight(each, f"{where}[{i}]") for i, each in enumerate(value)]
        alike = all(type(each) is type(found[0]) for each in found)
        if not alike or len({each.net.num_values for each in found if each is not None}) > 1:
            raise SpecError(
                f"{where} is {shown(value)}; it must be a list of Mlp, or one of AttentionPool "
                "with the same number of heads."
            )
        return tuple(each for each in found if each is not None)
    vector = vector_or_module(value, where)
    if isinstance(vector, Array) and len(vector.shape) > 2:
        raise SpecError(
            f"{where} has shape {vector.shape}; it must be [width of a row], or [num_layers, "
            "width]."
        )
    return vector
