"""Sends values from a worker to EngineCore, as attributes of a step's output.

Owns:  `is_output`, `carrying`, `carried`, `carries`.
Runs:  `carrying` in the worker that makes an output; `carried` and `carries` in EngineCore.
To:    faults, verdicts; core.outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any


def is_output(output: object) -> bool:
    """True for a step's output, even if it is asynchronous. False for the result of a forward whose
    next tokens are not sampled yet."""
    return hasattr(output, "get_output") or hasattr(output, "sampled_token_ids")


def carrying(output: Any, name: str, find: Callable[[], dict[str, Any]]) -> Any:
    """The output, with the result of `find` as the attribute `name`. `find` returns values by
    request. If the result is empty, the output gets no attribute.

    Args:
        output: the result of `execute_model` or `sample_tokens`.
        find: called by `get_output` if the output is asynchronous, otherwise immediately. Not
            called for the result of a forward whose next tokens are not sampled yet.
    """
    if hasattr(output, "get_output"):
        make = output.get_output
        output.get_output = lambda: carrying(make(), name, find)
        return output
    found = find() if is_output(output) else {}
    if found:
        output = copy(output)  # all steps without tokens share one object of vLLM
        setattr(output, name, found)
        output.scope_carries = True
    return output


def carries(output: object) -> bool:
    """True if an output carries any values."""
    return getattr(output, "scope_carries", False)


def carried(output: object, name: str) -> Mapping[str, Any]:
    """The values, by request, that an output carries in the attribute `name`. Empty without
    values."""
    found = getattr(output, name, None)
    return found if isinstance(found, dict) else {}
