"""Policies: an operator's code that gets a request's scores and decides about later tokens.

Owns:  the protocols of a plugin (PolicyPlugin, RunningPolicy), the return value of a running policy
       (Decision), and a decision in a result (Decided). No torch, no vLLM.

A plugin is a package with an entry point in the group "vllm_scope.policies" (docs/control.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec


class Start(NamedTuple):
    """A request that begins under a policy.

    Attributes:
        request_id: the caller's id of the request.
        completion: the index of the completion; 0 if the request has one completion.
        num_prompt_tokens: the number of tokens of the prompt, which is also the position of the
            first generated token.
        options: the request's options, which `PolicyPlugin.check` has accepted.
    """

    request_id: str
    completion: int
    num_prompt_tokens: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Decision:
    """The decision of a running policy at one position.

    Attributes:
        scale: maps the name of an `Add` of the request to the new `scale` of this `Add` for later
            tokens. Edits that are not named keep their scale.
        stop: if True, the request ends with the token that was sampled in this position's step.
        flag: a word for the result, of at most 200 characters.
    """

    scale: Mapping[str, float] = field(default_factory=dict)
    stop: bool = False
    flag: str | None = None


class RunningPolicy(Protocol):
    """A policy for one completion of a request. `observe` is called on one thread only."""

    def observe(self, position: int, scores: Mapping[str, float]) -> Decision | None:
        """Return a decision about later tokens, or None.

        The worker calls this method one time for each processed position with scores, in ascending
        order. The decision must depend only on the arguments of this call and of earlier calls.

        Args:
            scores: maps the name of a probe, gate or dose to the value at this position. If a probe
                has an aggregate, the value is the aggregate.
        """


class PolicyPlugin(Protocol):
    """The plugin of a policy. The plugin's entry point names a class with these methods, or a
    function that returns an object with these methods. Each process that loads the policy calls the
    class or the function one time, with the policy's own options as keyword arguments. If the call
    raises an error, the engine does not start."""

    def check(self, options: Mapping[str, Any]) -> None:
        """If a request's options are not valid, raise ValueError with the reason as its text."""

    def start(self, request: Start) -> RunningPolicy: ...


#: Pairs of a position and a mapping of an edit's name to a scale, in ascending order of positions.
#: The scales of a pair apply from the pair's position on.
Changes = tuple[tuple[int, dict[str, float]], ...]


class Decided(msgspec.Struct, frozen=True, array_like=True):
    """A decision in a result.

    Attributes:
        position: the position at which the policy decided.
        acts_from: the first position with the new scales, or None if there are no new scales.
        scale: as in Decision, without the scales that the policy had already set.
        stop, flag: as in Decision.
        error: the reason why the policy does not control this request any more, or None if the
            policy still controls the request.
    """

    position: int
    acts_from: int | None = None
    scale: dict[str, float] = {}
    stop: bool = False
    flag: str | None = None
    error: str | None = None
