"""What travels with a step's output from a worker to EngineCore, as an attribute of ours.

Owns:  `is_output`, `carrying`, `carried`, `carries`.
Runs:  `carrying` in the worker, where an output is made; `carried` and `carries` in EngineCore.
To:    faults, verdicts; core.outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any


def is_output(output: object) -> bool:
    """True for a step's output, which may be made later; False for what comes before sampling."""
    return hasattr(output, "get_output") or hasattr(output, "sampled_token_ids")


def carrying(output: Any, name: str, find: Callable[[], dict[str, Any]]) -> Any:
    """The output with what `find` returns, by request, as an attribute; without it if that is
    empty.

    Args:
        output: of `execute_model` or `sample_tokens`. `find` is called when an asynchronous output
            is made, by its `get_output`.
    """
    if hasattr(output, "get_output"):
        make = output.get_output
        output.get_output = lambda: carrying(make(), name, find)
        return output
    found = find() if is_output(output) else {}
    if found:
        output = copy(output)  # vLLM has one object for all steps without tokens
        setattr(output, name, found)
        output.scope_carries = True
    return output


def carries(output: object) -> bool:
    """True if an output carries anything."""
    return getattr(output, "scope_carries", False)


def carried(output: object, name: str) -> Mapping[str, Any]:
    """What an output carries, by request."""
    found = getattr(output, name, None)
    return found if isinstance(found, dict) else {}
