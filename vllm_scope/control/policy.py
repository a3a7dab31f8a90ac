"""Policies: an operator's code that sees a request's scores and decides about its later tokens.

Owns:  what a plugin is (PolicyPlugin, RunningPolicy), what it returns (Decision), and a decision as
       the result shows it (Decided). Without torch and vLLM.

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
        request_id: the caller's.
        completion: its index, if the request has several (`n`).
        num_prompt_tokens: its first generated token has this position.
        options: of the request, as `PolicyPlugin.check` has seen them.
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
            again. Edits that are not named keep theirs.
        stop: True ends the request; the token that the position's step sampled is its last.
        flag: a word for the result, of at most 200 characters.
    """

    scale: Mapping[str, float] = field(default_factory=dict)
    stop: bool = False
    flag: str | None = None


class RunningPolicy(Protocol):
    """One request (one completion of it) under a policy. Called on one thread of one process."""

    def observe(self, position: int, scores: Mapping[str, float]) -> Decision | None:
        """Decide about later tokens.

        Called once for each processed position that has scores, in ascending order. It must decide
        by its arguments and those of earlier calls alone.

        Args:
            scores: by name, of the probes, gates and doses that have a value at this position. Of a
                probe with an aggregate: the aggregate.
        """


class PolicyPlugin(Protocol):
    """What an entry point names: a class, or a function that returns such an object. It is called
    once in each process, with the policy's own options as keywords; what it raises ends the
    engine's start."""

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError, with a sentence, for options of a request that it does not take."""

    def start(self, request: Start) -> RunningPolicy: ...


#: First positions, ascending, and the scales that hold from there on, by the edits' names.
Changes = tuple[tuple[int, dict[str, float]], ...]


class Decided(msgspec.Struct, frozen=True, array_like=True):
    """A decision, as the result has it.

    Attributes:
        position: where it was decided.
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
