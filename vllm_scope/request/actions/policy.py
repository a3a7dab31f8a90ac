"""The name of an operator's policy. The policy makes decisions about a running request.

Owns:  Policy.
To:    spec (a request has at most one policy), control.policy (RunningPolicy).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_scope.errors import SpecError, shown
from vllm_scope.request.actions.base import checked_name

#: The largest number of characters of a policy's options in JSON.
MAX_OPTIONS = 4096


@dataclass(frozen=True)
class Policy:
    """An operator's policy. The policy gets the request's scores for each token.

    The policy can set the `scale` of a named `Add` for later tokens, and can end or flag the
    request.

    Args:
        name: the name of a policy of the engine (`additional_config["scope"].policies`).
        options: a JSON object. The policy checks the options.

    Raises:
        SpecError: no name, or the options are not a JSON object of at most 4,096 characters.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        checked_name(self.name, "Policy.name")
        if not isinstance(self.options, Mapping):
            raise SpecError(f"Policy.options is {shown(self.options)}; it must be an object.")
        try:
            text = json.dumps(dict(self.options), allow_nan=False, sort_keys=True)
            msgspec.msgpack.encode(self.options)  # refuses whole numbers of more than 64 bits
        except (TypeError, ValueError, OverflowError, RecursionError):
            raise SpecError(
                f"Policy.options is {shown(dict(self.options))}, which JSON cannot hold."
            ) from None
        if len(text) > MAX_OPTIONS:
            raise SpecError(
                f"Policy.options has {len(text):,} characters of JSON; at most {MAX_OPTIONS:,}."
            )
        object.__setattr__(self, "options", json.loads(text))

    @staticmethod
    def from_json(body: object) -> Policy:
        """Parse an object with `name` and optional `options`. Other values raise SpecError."""
        if not isinstance(body, dict) or not {"name"} <= set(body) <= {"name", "options"}:
            raise SpecError(f"policy is {shown(body)}; it has a name, and may have options.")
        try:
            return Policy(**body)
        except SpecError as error:
            raise SpecError(str(error).replace("Policy.", "policy.", 1)) from None

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, **({"options": self.options} if self.options else {})}
