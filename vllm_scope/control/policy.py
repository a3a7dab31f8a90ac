"""Policies: an operator's code that sees a request's scores and decides about its later tokens.

Owns:  the protocols of a plugin (PolicyPlugin, RunningPolicy), what a running policy returns
       (Decision), and a decision as the result shows it (Decided). Imports no torch and no vLLM.

A plugin is a package with an entry point in the group "vllm_scope.policies". docs/control.md has an
example.
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
        completion: the index of the completion, if the request has several (`n`).
        num_prompt_tokens: also the position of the first generated token.
        options: the options that the request gives its policy, after `PolicyPlugin.check` has
            accepted them.
    """

    request_id: str
    completion: int
    num_prompt_tokens: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Decision:
    """What a running policy decides at one position.

    Attributes:
        scale: name of an `Add` of the request -> its `scale` for later tokens, until it is changed
            again. Edits that are not named keep their scale.
        stop: True ends the request; the token that the position's step sampled is its last.
        flag: a word for the result, of at most 200 characters.
    """

    scale: Mapping[str, float] = field(default_factory=dict)
    stop: bool = False
    flag: str | None = None


class RunningPolicy(Protocol):
    """One completion of a request under a policy. `observe` is called on one thread of one
    process."""

    def observe(self, position: int, scores: Mapping[str, float]) -> Decision | None:
        """The decision about later tokens; None for no decision.

        Called once for each processed position that has scores, in ascending order. The decision
        must depend only on the arguments of this call and of earlier calls.

        Args:
            scores: the values at this position, by the names of probes, gates and doses. The value
                of a probe with an aggregate is the aggregate.
        """


class PolicyPlugin(Protocol):
    """The plugin of a policy. Its entry point names a class with these methods, or a function that
    returns an object with them. The class or the function is called once in each process, with the
    policy's own options as keywords. If it raises an error, the engine does not start."""

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError, with the reason as its text, if a request's options are not valid."""

    def start(self, request: Start) -> RunningPolicy: ...


#: Positions, ascending, and the scales that hold from each position on, by the edits' names.
Changes = tuple[tuple[int, dict[str, float]], ...]


class Decided(msgspec.Struct, frozen=True, array_like=True):
    """A decision, as the result has it.

    Attributes:
        position: the position at which the policy decided.
        acts_from: the first position with the new scales; None without new scales.
        scale, stop, flag: as in Decision.
        error: why the policy does not control this request any more; None while it does.
    """

    position: int
    acts_from: int | None = None
    scale: dict[str, float] = {}
    stop: bool = False
    flag: str | None = None
    error: str | None = None
