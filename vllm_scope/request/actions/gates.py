"""Conditions on an edit. A condition is computed from rows of the same forward.

Owns:  Gate, and the JSON of a gate.
To:    edits (an edit can have a gate), resolve.

The value g of a gate is from 0 to 1. The edit's change of the row is multiplied by g. Let x be the
row at the gate's `Place`, v the gate's vector, and s = x . v + bias. Then g is:

    step      1 if s > threshold, else 0
    sigmoid   1 / (1 + exp(-sharpness * (s - threshold)))
    cosine    1 if c > threshold, else 0; c is the cosine between x and v
    cast      as cosine, but c is the cosine between x and tanh((x . d) d), where d = v / ||v||

`above=False` reverses the comparison: `threshold - s` takes the place of `s - threshold`. If the
gate has a `state`, g also depends on earlier generated tokens. states.py has the formulas of a gate
with a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

from vllm_scope.errors import SpecError, checked_flag, shown
from vllm_scope.request.actions.base import MEMORY, checked_name, number
from vllm_scope.request.actions.probing import Probe
from vllm_scope.request.actions.states import Pid, check_state, parse_state, state_to_json
from vllm_scope.request.arrays import Array
from vllm_scope.request.selectors import Selector, Word
from vllm_scope.request.sites import STREAM_SITES, canonical_site, parse_layers

Kind = Literal["step", "sigmoid", "cosine", "cast"]
_COSINES = ("cosine", "cast")


@dataclass(frozen=True)
class Gate:
    """A condition on an edit, computed for each token from the model's own rows.

    Args:
        vector: a direction, [hidden_size], or a linear `Probe` of one layer. The gate takes the
            probe's weight, bias, site, layer and threshold, and nothing else.
        layer, site: the `Place` whose row the gate gets, before the edits of this site. The `Place`
            must be on the residual stream, and must not come after the `Place` of the edit.
        threshold: the number with which `x . vector + bias`, or the cosine, is compared. If None,
            it becomes the threshold of the probe. Without a probe's threshold, it becomes 0.
        kind: "step", "sigmoid", "cosine", or "cast" (conditional activation steering). For "cast",
            the cosine is between the row and the tanh of the row's projection on the vector.
        sharpness: the slope of "sigmoid", above 0. Other kinds have no sharpness.
        bias: a number that is added to the score. "cosine" and "cast" have no bias.
        above: if False, the edit applies where the score is below the threshold.
        state: None, or an `Ema`, `Latch`, `Hysteresis` or `Pid`. With a state, the gate's value
            also depends on earlier generated tokens, and the gate's `Place` must come before the
            edit's `Place`.
        name: a name under which the result has the gate's value at each token. Without a name, the
            values are not delivered.

    Raises:
        SpecError: a wrong type or shape, a vector of zeros, a number that is not finite, or an
            option that the kind or the probe does not allow.
    """

    vector: Any
    layer: int | None = None
    _: KW_ONLY
    site: str = "resid_post"
    threshold: float | None = None
    kind: Kind = "step"
    sharpness: float = 1.0
    bias: float = 0.0
    above: bool = True
    state: Any = None
    name: str | None = None
    #: The layer of the gate, as a tuple of one number.
    layers: tuple[int, ...] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given: dict[str, Any] = {}
        if isinstance(self.vector, Probe):
            if self.layer is not None or self.site != "resid_post" or self.bias:
                raise SpecError(
                    "Gate.vector is a probe, and Gate names a layer, a site or a bias; the gate "
                    "uses the probe's layer, site and bias. Leave out the layer, site and bias of "
                    "the gate, or give the probe's weight in place of the probe."
                )
            given = _of_probe(self.vector, self.kind, self.threshold)
            # `_tokens_of_probe` is not a field, because a gate from JSON has no probe.
            self._set(_tokens_of_probe=self.vector.tokens)
        else:
            given["vector"] = Array.parse(self.vector, "Gate.vector")
            given["site"] = canonical_site(self.site, "Gate.site")
            given["threshold"] = 0.0 if self.threshold is None else self.threshold
        self._set(**given)
        shape = self.vector.shape
        if len(shape) != 1:
            raise SpecError(f"Gate.vector has shape {shape}; it must be [hidden_size].")
        if self.site not in STREAM_SITES:
            raise SpecError(
                f"Gate.site is {shown(self.site)}; a gate reads {', '.join(STREAM_SITES)}."
            )
        found = parse_layers(self.layer, self.site, "Gate.layer")
        if found is None or not isinstance(self.layer, int | np.integer | None):
            raise SpecError(f"Gate.layer is {shown(self.layer)}; a gate reads one layer.")
        self._set(layer=found[0], layers=found)
        self._check_numbers()
        if not self.vector.numpy.any():
            raise SpecError("Gate.vector is zero; a gate needs a direction.")

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        if self.kind not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise SpecError(f"Gate.kind is {shown(self.kind)}; it must be one of {kinds}.")
        for name in ("threshold", "sharpness", "bias"):
            self._set(**{name: number(getattr(self, name), f"Gate.{name}")})
        if not np.float32(self.sharpness) > 0:
            raise SpecError(f"Gate.sharpness is {self.sharpness:g}; it must be above 0 in float32.")
        if self.sharpness != 1 and self.kind != "sigmoid":
            raise SpecError(
                f"Gate.sharpness is {self.sharpness:g}, and Gate.kind is {self.kind!r}, which has "
                "no slope; name kind 'sigmoid', or leave the sharpness out."
            )
        if self.bias and self.kind in _COSINES:
            raise SpecError(f"Gate.bias is {self.bias:g}; a cosine takes none.")
        checked_flag(self.above, "Gate.above")
        self._set(state=parse_state(self.state, "Gate.state"))
        if self.state is not None:
            assert self.threshold is not None
            check_state(self.state, self.kind, self.threshold, self.above)
        if self.name is not None:
            checked_name(self.name, "Gate.name")

    @staticmethod
    def parse(value: object, where: str) -> Gate | None:
        """Convert `value` or its JSON to a Gate. None gives None.

        Raises:
            SpecError: `value` is not a Gate and not the JSON of a Gate.
        """
        if value is None or isinstance(value, Gate):
            return value
        if not isinstance(value, Mapping):
            raise SpecError(f"{where} is {shown(value)}; it must be a Gate, in JSON an object.")
        known = [each.name for each in fields(Gate) if each.init]
        unknown = sorted(set(value) - set(known), key=str)
        if unknown:
            raise SpecError(f"{where} has {shown(unknown[0])}; the fields are {', '.join(known)}.")
        if "vector" not in value:
            raise SpecError(f"{where} has no vector.")
        try:
            return Gate(**value)
        except SpecError as error:
            raise SpecError(str(error).replace("Gate.", f"{where}.", 1)) from None

    def check_tokens(self, tokens: Selector, kind: str) -> None:
        """Raises SpecError if the edit's tokens do not fit the gate's options, or the tokens of the
        gate's probe.

        Args:
            tokens: the edit's tokens.
            kind: the name of the edit's class.
        """
        of_probe: Selector = getattr(self, "_tokens_of_probe", Word("all"))
        if of_probe not in (Word("all"), tokens):
            raise SpecError(
                f"{kind}.gate is of a probe with tokens={shown(of_probe.to_json())}, and {kind}."
                f"tokens is {shown(tokens.to_json())}; a gate is computed for the tokens of its "
                "edit. Give both the same tokens, or the probe tokens='all'."
            )
        if isinstance(self.state, Pid) and tokens == Word("generated"):
            for name, unset in (("threshold", 0.0), ("sharpness", 1.0)):
                value = getattr(self, name)
                if value != unset:
                    raise SpecError(
                        f"{kind}.gate.{name} is {value:g}, and the gate has a Pid, which decides "
                        "every generated token by its setpoint and its gains; name those, and "
                        f"give {name}={unset:g}."
                    )

    def to_json(self) -> dict[str, object]:
        body: dict[str, object] = {"vector": self.vector.to_json(), "layer": self.layer}
        for each in fields(self):
            value = getattr(self, each.name)
            default = 0.0 if each.name == "threshold" else each.default
            if each.init and each.name not in body and value != default:
                body[each.name] = state_to_json(value) if each.name == "state" else value
        return body


def _of_probe(probe: Probe, kind: object, threshold: object) -> dict[str, Any]:
    """The fields that a gate takes from a probe.

    Args:
        kind, threshold: the gate's own arguments.

    Raises:
        SpecError: the probe has an option that a gate cannot have.
    """
    weight = probe.weight
    plain = isinstance(weight, Array) and len(weight.shape) == 1 and probe.activation is None
    if not plain or probe.layer_numbers is None:
        raise SpecError(
            "Gate.vector is a probe that is not linear, or of several layers, or with a sigmoid; "
            "a gate takes a linear probe of one layer, and has a sigmoid of its own."
        )
    _check_alone(probe)
    if threshold is None and probe.threshold is not None and kind in _COSINES:
        raise SpecError(
            f"Gate.vector is a probe with the threshold {probe.threshold:g}, which is for its "
            f"score, and Gate.kind is {kind!r}; give Gate.threshold, which is for the cosine."
        )
    if threshold is None:
        threshold = 0.0 if probe.threshold is None else probe.threshold
    return {
        "vector": weight, "site": probe.site, "layer": probe.layer_numbers[0], "bias": probe.bias,
        "threshold": threshold,
    }  # fmt: skip


def _check_alone(probe: Probe) -> None:
    """Raises SpecError if a probe does more than compute a score for each token, which is all that
    a gate can use."""
    if probe.aggregate is not None:
        raise SpecError(
            f"Gate.vector is a probe with the aggregate {shown(probe.aggregate)}; a gate takes a "
            "probe without an aggregate. Give Gate.state, such as Ema, to use earlier scores too."
        )
    refused = {
        "action": probe.action if probe.action != "flag" else None,
        "after": probe.after,
        "to": probe.to if probe.to != MEMORY else None,
    }
    for name, value in refused.items():
        if value is not None:
            raise SpecError(
                f"Gate.vector is a probe with {name}={value!r}, which a gate cannot do; leave it "
                "out of the gate's probe, and send the probe as another action."
            )
