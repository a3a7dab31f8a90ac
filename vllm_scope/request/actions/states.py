"""The state of a gate: values from a request's earlier tokens.

Owns:  State (Ema, Latch, Hysteresis, Pid), and the JSON of a state.
To:    gates.

s_p is the gate's score at position p: x . v + bias, or a cosine. d is 1 for a gate with
`above=True`, and -1 for a gate with `above=False`. The state begins with the request's first
generated token. Tokens of the prompt do not change the state. The gate's value g at position p is,
in float32:

    Ema         m_p = decay * m_(p-1) + (1 - decay) * s_p; at the first token, m_p = s_p
                g: the formula of the gate's kind, with m_p in place of s_p
    Latch       g = 1 if d * (s_p - threshold) > 0, or if g was 1 at an earlier generated token;
                else g = 0
    Hysteresis  g = 1 if d * (s_p - threshold) > 0; else g = 0 if d * (s_p - low) < 0;
                else g is the value at p-1 (0 at the first token)
    Pid         e_p = d * (s_p - setpoint)
                i_p = clip(i_(p-1) + e_p, -most_sum, most_sum); i_(p-1) = 0 at the first token
                g = clip(kp * e_p + ki * i_p + kd * (e_p - e_(p-1)), 0, 1); at the first token,
                e_(p-1) = e_p

At positions of the prompt, a gate with a state has the same value as a gate without a state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from vllm_scope.errors import SpecError, checked_word, shown
from vllm_scope.request.actions.base import MAX_FLOAT32, number, without
from vllm_scope.request.nets import Ema


@dataclass(frozen=True)
class Latch:
    """The state of a gate that stays open after the gate has opened for the first time."""


@dataclass(frozen=True)
class Hysteresis:
    """The state of a gate that opens above its threshold, and closes only below `low`.

    Args:
        low: a score that is at most the gate's threshold. With `above=False`, the directions are
            reversed: the gate opens below its threshold and closes only above `low`, which is at
            least the threshold.
    """

    low: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", number(self.low, "Hysteresis.low"))


@dataclass(frozen=True)
class Pid:
    """A PID controller: sets the gate's value by the distance of the score from a setpoint.

    The error of a token is its score minus the setpoint, or with `above=False` the setpoint minus
    the score. The gate's value is the sum of three terms, limited to 0 to 1. `kp` multiplies the
    error of this token. `ki` multiplies the sum of the errors of all generated tokens up to this
    token. `kd` multiplies the error minus the error of the previous token.

    Args:
        setpoint: the score at which the error is 0.
        kp, ki, kd: the three factors above.
        most_sum: upper bound of the absolute value of the sum of errors, 0 or more. The default is
            1 / |ki|, so that the sum alone can open the gate fully. If ki is 0, the default is 0.
    """

    setpoint: float
    kp: float
    ki: float = 0.0
    kd: float = 0.0
    most_sum: float | None = None

    def __post_init__(self) -> None:
        for name in ("setpoint", "kp", "ki", "kd"):
            object.__setattr__(self, name, number(getattr(self, name), f"Pid.{name}"))
        if self.most_sum is not None:
            most = number(self.most_sum, "Pid.most_sum")
            if most < 0:
                raise SpecError(f"Pid.most_sum is {most:g}; it must be 0 or more.")
            object.__setattr__(self, "most_sum", most)
        if not (self.kp or self.ki or self.kd):
            raise SpecError("Pid.kp, ki and kd are 0; such a gate never opens.")

    @property
    def bound(self) -> float:
        """`most_sum` as a finite number. If `most_sum` is None, returns the default bound."""
        if self.most_sum is not None:
            return self.most_sum
        return min(1 / abs(self.ki), MAX_FLOAT32) if self.ki else 0.0


State = Ema | Latch | Hysteresis | Pid
#: The class of each state, by the name of the state in JSON.
STATES: dict[str, type[State]] = {cls.__name__.lower(): cls for cls in get_args(State)}


def parse_state(value: object, where: str) -> State | None:
    """Convert `value` or its JSON, such as `{"kind": "latch"}`, to a State. None gives None.

    Raises:
        SpecError: `value` is not a state and not the JSON of a state.
    """
    if value is None or isinstance(value, State):
        return value
    if not isinstance(value, Mapping):
        classes = ", ".join(cls.__name__ for cls in STATES.values())
        raise SpecError(
            f"{where} is {shown(value)}; it must be one of {classes}, in JSON an object with a "
            "kind."
        )
    cls = STATES[checked_word(value.get("kind"), STATES, f"{where}.kind")]
    known = [each.name for each in fields(cls)]
    unknown = sorted(set(value) - {"kind", *known}, key=str)
    if unknown:
        allowed = ", ".join(["kind", *known])
        raise SpecError(f"{where} has {shown(unknown[0])}; the fields are {allowed}.")
    try:
        return cls(**{name: value[name] for name in known if name in value})
    except TypeError:  # an argument is missing
        raise without(cls, value, where) from None
    except SpecError as error:
        raise SpecError(str(error).replace(f"{cls.__name__}.", f"{where}.", 1)) from None


def state_to_json(state: State) -> dict[str, Any]:
    named = {each.name: getattr(state, each.name) for each in fields(state)}
    given = {name: value for name, value in named.items() if value is not None}
    return {"kind": type(state).__name__.lower(), **given}


def check_state(state: State, kind: str, threshold: float, above: bool) -> None:
    """Raises SpecError if a gate of this kind cannot have this state."""
    if isinstance(state, Latch | Hysteresis) and kind == "sigmoid":
        raise SpecError(
            f"Gate.kind is 'sigmoid', and Gate.state is {type(state).__name__}, which needs a "
            "gate that is open or closed; take the kind 'step', 'cosine' or 'cast'."
        )
    sign, side = (1, "at most") if above else (-1, "at least")
    if isinstance(state, Hysteresis) and sign * state.low > sign * threshold:
        raise SpecError(
            f"Gate.state.low is {state.low:g}; with a threshold of {threshold:g} and above="
            f"{above} it must be {side} the threshold."
        )


def hysteresis_low(state: Latch | Hysteresis, above: bool) -> float:
    """The score below which an open gate closes. (With `above=False`, the gate closes above this
    score.) For a Latch, the result is infinite, so that the gate never closes."""
    if isinstance(state, Hysteresis):
        return state.low
    return -math.inf if above else math.inf
